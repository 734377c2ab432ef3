"""How objects travel by value that neither pickle nor cloudpickle can send: one table, and two rules.

They stand at the top of scripts and notebooks. Elsewhere they are known by the name that they have in their module.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import inspect
import io
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, cast

import cloudpickle.cloudpickle

from mlaunch.protocol.importable import is_importable

# The body of a class looks names up by these, which find a global, too; cloudpickle looks for globals alone.
_LOADS = {"LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_CLASSDEREF"}
_OF_BODIES = {"__name__", "__qualname__", "__module__"}  # which each body reads, or sets
_find_globals = getattr(cloudpickle.cloudpickle, "_extract_code_globals", None)
_CACHED = type(functools.lru_cache(len))
Reduced = str | tuple[Any, ...]


def of_function(function: types.FunctionType) -> Reduced | None:
    """Reduces what ``torch.compile`` made of a function: to that, compiled anew. None for any other function."""
    original = function.__dict__.get("_torchdynamo_orig_callable")
    if original is None:
        return None
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    closure = {name: cell.cell_contents for name, cell in cells}
    links = list(_chain(closure.get("callback")))
    if not links:  # torch.compiler.disable's
        return None
    fullgraph = getattr(closure.get("self"), "fullgraph", type(links[1]).__name__ == "ConvertFrameAssert")
    # What torch.compile returns is a closure over locks of dynamo's. Ranks compile at their first call, as they would
    # have.
    return _compile_again, (original, {**_backend(links[-1]), "dynamic": links[-1].dynamic, "fullgraph": fullgraph})


def look_into_class_bodies(code: types.CodeType) -> None:
    """Lets cloudpickle send what the bodies of classes refer to that a function with this code makes."""
    wanted = dict.fromkeys(name for body in _bodies(code) for name in _names(body))
    if wanted and _find_globals is not None:
        _find_globals(code).update(wanted)  # which it keeps, and takes when it pickles the function


def _bodies(code: types.CodeType) -> Iterator[types.CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            if not inner.co_flags & inspect.CO_OPTIMIZED:
                yield inner
            yield from _bodies(inner)


def _names(body: types.CodeType) -> Iterator[str]:
    found = (step.argval for step in dis.get_instructions(body) if step.opname in _LOADS)
    return (name for name in found if name not in _OF_BODIES)


def _chain(callback: Any) -> Iterator[Any]:
    """Yields what dynamo has wrapped around a backend, and that at the end."""
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
    """Tells whether a type has a say in how its objects are pickled."""
    plain: Any = object
    return kind.__reduce__ is not plain.__reduce__ or kind.__reduce_ex__ is not plain.__reduce_ex__


def of_name(found: object, reduced: Reduced) -> Reduced:
    """Returns how an object travels that reduces to its name: by that if the ranks can import it, else by value."""
    module = getattr(found, "__module__", None)
    if not isinstance(reduced, str) or not isinstance(module, str):
        return reduced
    if _is_known(module) and "<locals>" not in reduced:
        return reduced
    state = getattr(found, "__getstate__", lambda: getattr(found, "__dict__", None))()  # Python 3.10 lacks object's
    return (cast(Any, copyreg).__newobj__, (type(found),), state)  # as for an object without a __reduce__


def _is_known(module: str) -> bool:
    """Tells whether ranks can import it, and are to."""
    by_value = cloudpickle.cloudpickle.list_registry_pickle_by_value()
    return module not in {"__main__", "__mp_main__"} and module not in by_value and is_importable(module)


def _reduce_cached(function: Any) -> Reduced:
    """Reduces functools.lru_cache and cache, which cloudpickle takes for importable even in ``__main__``."""
    if _is_known(function.__module__) and "<locals>" not in function.__qualname__:
        return str(function.__qualname__)
    return _cache_again, (function.__wrapped__, function.cache_parameters())


def _cache_again(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_parameter(parameter: Any) -> Reduced:
    """Reduces ``ParamSpec`` and ``TypeVarTuple``, as cloudpickle does ``TypeVar``."""
    if _is_known(parameter.__module__):
        return str(parameter.__name__)
    return type(parameter), (parameter.__name__,)


def _reduce_script(function: Any) -> Reduced:
    """Reduces what ``torch.jit.script`` made of a function to that, and what ``trace`` made to its own code."""
    original = getattr(function, "_torchdynamo_inline", None)
    return _script_again, (original if _is_scripted(original, function) else None, function.save_to_buffer())


def _is_scripted(original: Any, function: Any) -> bool:
    import torch

    try:
        return torch.jit.script(original) is function  # it is asked for what it has made
    except Exception:  # there is no telling what cannot be compiled raises
        return False


def _script_again(original: Any, compiled: bytes) -> Any:
    import torch

    if original is not None:
        try:
            return torch.jit.script(original)
        except OSError:  # its file is not on this machine
            pass
    return torch.jit.load(io.BytesIO(compiled))  # type: ignore[no-untyped-call]


def _reduce_text_file(file: io.TextIOWrapper) -> Reduced:
    """Refuses an open file, of which cloudpickle would make a StringIO of its content, without a name."""
    if file in {sys.stdout, sys.stderr}:
        return cast(Reduced, cloudpickle.cloudpickle._file_reduce(file))  # type: ignore[attr-defined]
    # A StringIO would take writes in the rank that nobody sees.
    raise TypeError("cannot pickle an open file")


def table() -> dict[type, Callable[[Any], Reduced]]:
    """Returns the reducers by type; torch's only where it is loaded, without which there is no such object."""
    found: dict[type, Callable[[Any], Reduced]] = {_CACHED: _reduce_cached, typing.ParamSpec: _reduce_parameter}
    found[io.TextIOWrapper] = _reduce_text_file
    if hasattr(typing, "TypeVarTuple"):
        found[typing.TypeVarTuple] = _reduce_parameter
    torch = sys.modules.get("torch")
    if torch is not None:
        found[torch.jit.ScriptFunction] = _reduce_script
    return found
