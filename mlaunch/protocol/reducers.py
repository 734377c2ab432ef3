"""How to send objects by value that pickle and cloudpickle cannot send, or do not rebuild like the original.

They are defined at the top of scripts and notebooks; from other modules, they go by name. A class that went by value
has to behave as if the rank had imported it.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import dis
import functools
import inspect
import io
import operator
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import cloudpickle.cloudpickle

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.by_value import is_importable

_OLDEST = (3, 0)  # the minimum in setup.cfg, which only pip reads
if tuple(int(part) for part in cloudpickle.__version__.split(".")[:2]) < _OLDEST:
    raise ImportError(
        f"cloudpickle {cloudpickle.__version__} is too old for mlaunch, which needs {'.'.join(map(str, _OLDEST))} or "
        f"later: pip install -U cloudpickle"
    )

# The body of a class looks up names by these opcodes, which find globals, too; cloudpickle knows only the opcodes for
# globals.
_LOADS = {"LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_CLASSDEREF"}
_OF_BODIES = {"__name__", "__qualname__", "__module__"}  # that each body reads or sets
Reduced = str | tuple[Any, ...]
_MAKE_CLASS = getattr(cloudpickle.cloudpickle, "_make_skeleton_class", None)
_MAKE_ENUM = getattr(cloudpickle.cloudpickle, "_make_skeleton_enum", None)
_track = getattr(cloudpickle.cloudpickle, "_lookup_class_or_track", lambda _, made: made)
_find_globals = getattr(cloudpickle.cloudpickle, "_extract_code_globals", None)
_CACHED = type(functools.lru_cache(len))
_DISPATCHER = cast(Any, functools.singledispatch(len)).__code__
_OF_DISPATCHER = {"registry", "dispatch", "register", "_clear_cache", "__wrapped__"}
_CODE = (
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_nlocals", "co_stacksize", "co_flags", "co_code"),
    *("co_consts", "co_names", "co_varnames", "co_filename", "co_name", "co_qualname", "co_firstlineno"),
    *("co_linetable", "co_exceptiontable", "co_freevars", "co_cellvars"),
)  # as its constructor takes them
# Marks of dataclasses, which are compared by identity: otherwise each field of a class that was sent has a default
# (cloudpickle#424).
_MARKS: dict[type, Callable[[Any], Reduced]] = {
    type(vars(dataclasses)[name]): functools.partial(lambda name, _: name, name)
    for name in ("MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY")
    if name in vars(dataclasses)
}
_of_code = operator.attrgetter(*(name for name in _CODE if hasattr(types.CodeType, name)))  # Python 3.10 lacks two


def of_function(function: types.FunctionType) -> Reduced | None:
    """Reduce what ``torch.compile`` or ``functools.singledispatch`` made of a function to that function.

    None if it is another kind of function.
    """
    if function.__code__ is _DISPATCHER:
        return _reduce_dispatcher(function)
    original = function.__dict__.get("_torchdynamo_orig_callable")
    if original is None:
        return None
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    closure = {name: cell.cell_contents for name, cell in cells}
    links = list(_chain(closure.get("callback")))
    if not links:  # from torch.compiler.disable
        return None
    fullgraph = getattr(closure.get("self"), "fullgraph", type(links[1]).__name__ == "ConvertFrameAssert")
    # torch.compile returns a closure over locks of dynamo's. Ranks compile at their first call, as they would anyway.
    return _compile_again, (original, {**_backend(links[-1]), "dynamic": links[-1].dynamic, "fullgraph": fullgraph})


def look_into_class_bodies(code: types.CodeType) -> None:
    """Make cloudpickle send what is referred to by the bodies of classes that a function with this code defines."""
    wanted = dict.fromkeys(name for body in _bodies(code) for name in _names(body))
    if wanted and _find_globals is not None:
        _find_globals(code).update(wanted)  # cloudpickle keeps this, and uses it when it pickles the function


def _bodies(code: types.CodeType) -> Iterator[types.CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            if not inner.co_flags & inspect.CO_OPTIMIZED:
                yield inner
            yield from _bodies(inner)


def _names(body: types.CodeType) -> Iterator[str]:
    found = (step.argval for step in dis.get_instructions(body) if step.opname in _LOADS)
    return (name for name in found if name not in _OF_BODIES)


def _reduce_dispatcher(function: Any) -> Reduced | None:
    """Reduce singledispatch's closure, whose cache has weak references in it; None if the rank can import it."""
    if cloudpickle.cloudpickle._should_pickle_by_reference(function):  # type: ignore[attr-defined]
        return None
    others = {name: value for name, value in vars(function).items() if name not in _OF_DISPATCHER}
    state = dict(function.registry), others
    return functools.singledispatch, (function.__wrapped__,), state, None, None, _register_again


def _register_again(function: Any, state: tuple[dict[type, Any], dict[str, Any]]) -> None:
    registry, others = state
    for kind, implementation in registry.items():
        function.register(kind, implementation)
    vars(function).update(others)


def _chain(callback: Any) -> Iterator[Any]:
    """Yield what dynamo has wrapped around a backend, and then the backend."""
    while callback is not None:
        yield callback
        callback = getattr(callback, "_torchdynamo_orig_backend", getattr(callback, "_torchdynamo_orig_callable", None))


def _backend(wrapped: Any) -> dict[str, Any]:
    if hasattr(wrapped, "config"):  # inductor's; the options of its mode are among them
        return {"options": wrapped.config or None}
    return {"backend": wrapped.compiler_fn, **wrapped.kwargs}


def _compile_again(original: Any, options: dict[str, Any]) -> Any:
    import torch

    return torch.compile(original, **options)


def is_own(kind: Any) -> bool:
    """True if a type decides how its objects are pickled."""
    plain: Any = object
    return kind.__reduce__ is not plain.__reduce__ or kind.__reduce_ex__ is not plain.__reduce_ex__


def of_name(found: object, reduced: Reduced) -> Reduced:
    """Return how to send an object that reduces to its name: by name if the ranks can import it, else by value."""
    module = getattr(found, "__module__", None)
    if not isinstance(reduced, str) or not isinstance(module, str):
        return reduced
    if is_known(module) and "<locals>" not in reduced:
        return reduced
    state = getattr(found, "__getstate__", lambda: getattr(found, "__dict__", None))()  # Python 3.10 has none in object
    return (cast(Any, copyreg).__newobj__, (type(found),), state)  # as for an object without a __reduce__


def is_known(module: str) -> bool:
    """True if ranks can import the module, and should."""
    by_value = cloudpickle.cloudpickle.list_registry_pickle_by_value()
    return module not in {"__main__", "__mp_main__"} and module not in by_value and is_importable(module)


def _reduce_cached(function: Any) -> Reduced:
    """Reduce functools.lru_cache and cache, which cloudpickle takes for importable even in ``__main__``."""
    if is_known(function.__module__) and "<locals>" not in function.__qualname__:
        return str(function.__qualname__)
    return _cache_again, (function.__wrapped__, function.cache_parameters())


def _cache_again(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def reduce_property(found: Any) -> Reduced:
    """Reduce cached_property and its subclasses, which have a lock before Python 3.12 (cloudpickle#438)."""
    return _property_again, (type(found),), {name: value for name, value in vars(found).items() if name != "lock"}


def _property_again(kind: Any) -> Any:
    made = kind.__new__(kind)
    if sys.version_info < (3, 12):
        made.lock = threading.RLock()
    return made


def _reduce_weak_cache(cache: Any) -> Reduced:
    """Reduce a dictionary with weak references; the rank keeps an entry while something there holds it, as here."""
    return type(cache), (), None, None, iter(list(cache.items()))


def _reduce_view(view: memoryview) -> Reduced:
    """Reduce a memoryview, which cloudpickle would turn into bytes."""
    data = view.tobytes()
    return _view_again, (data if view.readonly else bytearray(data), view.format, view.shape)


def _view_again(data: bytes | bytearray, form: str, shape: tuple[int, ...]) -> memoryview:
    flat = memoryview(data)
    return flat.cast(form, shape) if data else flat.cast(form)  # type: ignore[call-overload, no-any-return]


def _reduce_parameter(parameter: Any) -> Reduced:
    """Reduce ``ParamSpec`` and ``TypeVarTuple``, as cloudpickle does ``TypeVar``."""
    if is_known(parameter.__module__):
        return str(parameter.__name__)
    return type(parameter), (parameter.__name__,)


def _reduce_script(function: Any) -> Reduced:
    """Reduce the result of ``torch.jit.script`` to its function, and the result of ``trace`` to its own code."""
    original = getattr(function, "_torchdynamo_inline", None)
    return _script_again, (original if _is_scripted(original, function) else None, function.save_to_buffer())


def _is_scripted(original: Any, function: Any) -> bool:
    import torch

    try:
        return torch.jit.script(original) is function  # it is asked about its own result
    except Exception:  # code that cannot be compiled may raise anything
        return False


def _script_again(original: Any, compiled: bytes) -> Any:
    import torch

    if original is not None:
        try:
            return torch.jit.script(original)
        except OSError:  # its file is not on this machine
            pass
    return torch.jit.load(io.BytesIO(compiled))  # type: ignore[no-untyped-call]


def _reduce_code(code: types.CodeType) -> Reduced:
    """Reduce code with the name of its file, which cloudpickle drops from 3.1.3 on (cloudpickle#560)."""
    return types.CodeType, _of_code(code)


def _reduce_text_file(file: io.TextIOWrapper) -> Reduced:
    """Refuse an open file, which cloudpickle would turn into a StringIO of its content, without a name."""
    if file in {sys.stdout, sys.stderr}:
        return cast(Reduced, cloudpickle.cloudpickle._file_reduce(file))  # type: ignore[attr-defined]
    # In the rank, a StringIO would take writes that nobody sees.
    raise TypeError("cannot pickle an open file")


def table() -> dict[type, Callable[[Any], Reduced]]:
    """Return the reducers by type. Those for torch need torch to be loaded; without it there are no such objects."""
    found: dict[type, Callable[[Any], Reduced]] = {_CACHED: _reduce_cached, typing.ParamSpec: _reduce_parameter}
    found[io.TextIOWrapper] = _reduce_text_file
    found[types.CodeType] = _reduce_code
    found[memoryview] = _reduce_view
    found |= _MARKS
    found |= dict.fromkeys((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), _reduce_weak_cache)
    if hasattr(typing, "TypeVarTuple"):
        found[typing.TypeVarTuple] = _reduce_parameter
    torch = sys.modules.get("torch")
    if torch is not None:
        found[torch.jit.ScriptFunction] = _reduce_script
    return found


# Classes


class _ClassPlan(NamedTuple):
    """How to make a class. ``maker``: the part of its metaclass that a rank imports.

    ``silent``: bases whose ``__init_subclass__`` does not run; ``tracker``: the ID by which cloudpickle knows the
    class.
    """

    metaclass: Any
    maker: Any
    name: str
    bases: tuple[Any, ...]
    namespace: dict[str, Any]
    silent: list[type]
    tracker: str


def of_class(kind: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return how to send a class by value, from cloudpickle's way, so that it is rebuilt like the original.

    What its metaclass and the hooks of its bases did when it was defined is in their own state, if they go by value
    themselves. So they do not run again: the keywords of the class statement are gone (cloudpickle#527), and a registry
    would see the class twice. Those that a rank imports do run, because their registry there belongs to the rank.

    Raises:
        TypeError: A hook that would run needs keywords.
    """
    make, args, (content, _), _, _, _ = reduced
    content = content | _overrides(kind)
    if make is _MAKE_ENUM:
        return _make_enum, (*args[:3], _members(kind), *args[4:6]), _enum_content(kind, content), None, None, _fill_enum
    if make is not _MAKE_CLASS:  # by another version of cloudpickle
        return reduced
    metaclass, name, bases, namespace, tracker, _ = args
    maker = next(parent for parent in metaclass.__mro__ if not _goes_by_value(parent))
    hooks = [parent for parent in kind.__mro__[1:] if "__init_subclass__" in vars(parent)]
    silent = [parent for parent in hooks if _goes_by_value(parent)]
    imported = next(parent for parent in hooks if parent not in silent)
    _refuse_keywords(kind, maker.__new__, 4, f"metaclass {maker.__qualname__}")
    _refuse_keywords(kind, imported.__init_subclass__, 1, f"{imported.__qualname__}.__init_subclass__")
    # typing's own metaclasses want what the class statement had: TypedDict, not dict.
    bases = kind.__bases__ if maker is type else bases
    plan = _ClassPlan(metaclass, maker, name, bases, namespace | _body(kind), silent, tracker)
    return _make_class, (plan,), content, None, None, _fill_class


def _goes_by_value(kind: type) -> bool:
    return not cloudpickle.cloudpickle._should_pickle_by_reference(kind)  # type: ignore[attr-defined]


def _refuse_keywords(kind: type, hook: Any, given: int, what: str) -> None:
    """Raise TypeError if a hook needs more than the ``given`` arguments that each class statement gives it."""
    function = getattr(hook, "__func__", hook)
    if type(function) is not types.FunctionType:
        return
    # Written by hand: inspect.signature takes a millisecond, and this runs for each class of a call.
    code, optional = function.__code__, len(function.__defaults__ or ())
    names = code.co_varnames[given : code.co_argcount - optional]
    names += code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    wanted = [name for name in names if name not in (function.__kwdefaults__ or {})]
    if wanted:
        raise TypeError(
            f"class {kind.__qualname__} was defined with {', '.join(wanted)}= for {what}, which a class does not keep: "
            f"define it in a module that ranks can import"
        )


def _body(kind: type) -> dict[str, Any]:
    """Return what a class must have from the start, as ``__slots__``, which cannot be added later (cloudpickle#311)."""
    body = {name: vars(kind)[name] for name in ("__slots__", "__orig_bases__") if name in vars(kind)}
    if "<locals>" not in kind.__qualname__:  # plain pickle refuses these, and finds the others
        body["__qualname__"] = kind.__qualname__
    slots = body.get("__slots__", ())
    if iter(slots) is slots:  # it was an iterator, which is used up
        body["__slots__"] = tuple(name for name, value in vars(kind).items() if inspect.ismemberdescriptor(value))
    return body


def _overrides(kind: type) -> dict[str, Any]:
    """Return attributes that are the same object in a base, which cloudpickle leaves out (cloudpickle#584)."""
    own = {name: value for name, value in vars(kind).items() if name not in {"__dict__", "__weakref__", "__module__"}}
    bases = [vars(base) for base in kind.__bases__]
    return {name: value for name, value in own.items() if any(name in base and base[name] is value for base in bases)}


def _make_class(plan: _ClassPlan) -> type:
    """Return a class without its attributes, because they may refer to it."""
    bases = types.resolve_bases(plan.bases)
    body = plan.maker.__prepare__(plan.name, bases)
    body.update(plan.namespace)
    with contextlib.ExitStack() as stack:
        for base in plan.silent:
            stack.enter_context(_silence(base))
        if plan.maker is plan.metaclass:
            made = plan.metaclass(plan.name, bases, body)
        else:
            made = plan.maker.__new__(plan.metaclass, plan.name, bases, body)
            plan.maker.__init__(made, plan.name, bases, body)
    return cast(type, _track(plan.tracker, made))


@contextlib.contextmanager
def _silence(base: Any) -> Iterator[None]:
    """Skip a base's ``__init_subclass__`` in this thread, for the length of a block."""
    hook, thread = vars(base).get("__init_subclass__"), threading.get_ident()
    if hook is None:  # the base has no attributes yet
        yield
        return

    def pass_on(cls: Any, /, **keywords: Any) -> Any:
        if threading.get_ident() != thread:
            return hook.__get__(None, cls)(**keywords)
        return super(base, cls).__init_subclass__()

    type.__setattr__(base, "__init_subclass__", classmethod(pass_on))
    try:
        yield
    finally:
        type.__setattr__(base, "__init_subclass__", hook)
        thread = -1  # for other code that still has it


def _fill_class(made: Any, content: dict[str, Any]) -> None:
    """Give a class its attributes, past its metaclass, which has already acted on the original."""
    # Setting __module__ deletes the line (Python 3.13).
    last = {name: content.pop(name) for name in ("__firstlineno__",) if name in content}
    registered = content.pop("_abc_impl", ())
    for name, value in (content | last).items():
        type.__setattr__(made, name, value)
    for kind in registered:
        made.register(kind)


# Enums: cloudpickle leaves out aliases and flags of several bits (cloudpickle#558), and what __new__ or __init__ of the
# class gave its members.


@frozen_record
class _EnumMember:
    """The content of an enum's member: its value, and the arguments for the type that it also is."""

    value: Any
    args: tuple[Any, ...]


def _members(kind: Any) -> dict[str, _EnumMember]:
    own = kind._member_type_
    fresh = getattr(own, "__getnewargs__", None)  # as int and str have it

    def args(member: Any) -> tuple[Any, ...]:
        if own is object or own.__new__ is object.__new__:
            return ()
        return cast("tuple[Any, ...]", (member._value_,) if fresh is None else fresh(member))

    return {name: _EnumMember(member._value_, args(member)) for name, member in kind.__members__.items()}


def _enum_content(kind: Any, content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    members = {name: vars(member) for name, member in kind.__members__.items() if member.name == name}
    return {name: value for name, value in content.items() if name not in kind.__members__}, members


def _make_enum(
    bases: tuple[Any, ...], name: str, qualname: str, members: dict[str, Any], module: str, tracker: str
) -> type:
    metaclass: Any = type(bases[-1])
    body = metaclass.__prepare__(name, bases)
    for key, value in {"__new__": _new_member, "__init__": _leave, "__module__": module, **members}.items():
        body[key] = value
    made = metaclass.__new__(metaclass, name, bases, body)
    made.__qualname__ = qualname
    return cast(type, _track(tracker, made))


def _new_member(cls: Any, made_of: Any) -> Any:
    if isinstance(made_of, tuple):  # for an enum of tuples
        [made_of] = made_of
    member = cls._member_type_.__new__(cls, *made_of.args)
    member._value_ = made_of.value
    return member


def _leave(self: Any, *_: Any) -> None:
    """Do nothing, in place of the ``__init__`` of an enum."""


def _fill_enum(made: Any, state: tuple[dict[str, Any], dict[str, dict[str, Any]]]) -> None:
    content, members = state
    _fill_class(made, content)
    for name in {"__init__", "__new_member__"} & (vars(made).keys() - content.keys()):
        type.__delattr__(made, name)
    for name, attributes in members.items():
        vars(made.__members__[name]).update(attributes)
