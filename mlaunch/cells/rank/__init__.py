"""A notebook's cells in this rank: they run in a ``__main__`` that stays from cell to cell.

The names that they leave there are pulled to the notebook, pushed from there, listed, or completed.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import functools
import inspect
import keyword
import os
import resource
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.base.frames import is_library
from mlaunch.cells.wire import Bundle, CellAnswer, NamesOfRank
from mlaunch.protocol import by_value, this_rank
from mlaunch.rank.safe_inspection import (
    MISSING,
    in_classes,
    is_a,
    is_just,
    mro,
    names_of_class,
    own_names,
    registries,
    size,
    type_name,
)
from mlaunch.ranks.rank.kept import uninterrupted

if TYPE_CHECKING:
    from mlaunch.cells.rank.shell import CellShell

main = types.ModuleType("__main__")  # the cells'
_RICH = {"_repr_html_": "text/html", "_repr_svg_": "image/svg+xml", "_repr_markdown_": "text/markdown"}


def run_cell(
    source: str, file: str, place: tuple[int, int], targets: Sequence[int] | None, rich: bool
) -> CellAnswer | None:
    """Run a cell here; return None on ranks that are not its targets.

    Args:
        source: Its text.
        file: Its name in tracebacks.
        place: The cell's number, and how many lines of it are above the text.
        targets: The ranks on which the cell runs. None: all.
        rich: All targets answer with all forms of what they show, not only the first target.
    """
    here = rank()
    first = 0 if targets is None else min(targets)
    if targets is not None and here not in targets:
        return None
    with main_of_cells():
        try:
            # Rank 0 has a pipe to the notebook, which shows at once what it displays.
            answer = _cell_shell().run(source, file, *place, collects=rich or here == first != 0)
        except SystemExit as leaving:
            # It would end this rank, and with it all that the cells have made.
            said = "" if leaving.code is None else repr(leaving.code)
            raised = RuntimeError(f"the cell called sys.exit({said}); ranks end with %ranks --close")
            raise raised.with_traceback(_of_user(leaving.__traceback__)) from None
    # Each rank has made all forms, since that may take a collective; those of one rank are enough to show.
    return answer if rich or here == first else _in_short(answer)


def _of_user(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the library's frames at its end, such as those of IPython's ``exit``."""
    last, following = None, trace
    while following is not None:
        last = last if is_library(following.tb_frame.f_code.co_filename) else following
        following = following.tb_next
    if last is not None:
        last.tb_next = None
    return trace


def rank() -> int:
    """Return this rank's number; 0 in a process that is not a rank."""
    return 0 if this_rank.this_rank is None else this_rank.this_rank.rank


@functools.cache
@uninterrupted
def _cell_shell() -> PlainShell | CellShell:
    """Return the shell that runs cells here: IPython's, if it is installed."""
    try:
        from mlaunch.cells.rank.shell import open_shell
    except ModuleNotFoundError as error:
        # IPython is there, but lacks a package: an error to show.
        if (error.name or "").partition(".")[0] not in {"IPython", "traitlets"}:
            raise
        return PlainShell(main)
    return open_shell(main)


@contextlib.contextmanager
def main_of_cells() -> Iterator[types.ModuleType]:
    """Make the cells' namespace ``__main__`` meanwhile.

    Values are sent back without it, so that they are pickled by value: the notebook has none of its classes.
    """
    before = sys.modules.get("__main__")
    sys.modules["__main__"] = main
    try:
        yield main
    finally:
        if before is not None:
            sys.modules["__main__"] = before


def open_shell_early() -> None:
    """Open the shell, before the first cell."""
    with main_of_cells():
        _cell_shell()


def _in_short(answer: CellAnswer) -> CellAnswer:
    return CellAnswer(answer.last and answer.last.plain(), (), answer.without_ipython)


class PlainShell:
    """A runner of cells without IPython, where that is not installed: Python only, without magics."""

    def __init__(self, module: types.ModuleType) -> None:
        self._names = vars(module)

    def run(self, source: str, file: str, _number: int, lines_above: int, /, *, collects: bool = False) -> CellAnswer:  # noqa: ARG002
        """Run a cell; raise what the cell raises."""
        source = "\n" * lines_above + source
        # Before it is compiled, so that a syntax error shows the line.
        by_value.take_source((file, source))
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        body = compile(source, file, "exec", flags, dont_inherit=True).body
        # As in a notebook: the value of a last expression is shown, unless a semicolon follows it.
        last = body.pop() if body and isinstance(body[-1], ast.Expr) and not source.rstrip().endswith(";") else None
        self._evaluate(ast.Module(body, []), file, "exec")
        value = self._evaluate(ast.Expression(last.value), file, "eval") if isinstance(last, ast.Expr) else None
        if value is not None:
            self._names["_"] = value
        return CellAnswer(None if value is None else _bundle(value), (), without_ipython=True)

    def _evaluate(self, tree: ast.Module | ast.Expression, file: str, mode: str) -> Any:
        code = compile(tree, file, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        found = eval(code, self._names)
        return asyncio.run(found) if code.co_flags & inspect.CO_COROUTINE else found


def _bundle(value: object) -> Bundle:
    data = {"text/plain": repr(value)}
    for name, mime in _RICH.items():
        make = None if isinstance(value, type) else getattr(value, name, None)
        if callable(make) and (found := make()) is not None:
            data[mime] = found
    return Bundle(data, {}, {})


# The names of cells

_NO_VALUES = (types.ModuleType, types.FunctionType, type)  # what cells import or define
_IPYTHONS = frozenset({"In", "Out", "exit", "quit", "get_ipython", "open"})  # names


def pull(names: Sequence[str], targets: Sequence[int] | None) -> dict[str, Any] | None:
    """Return the values of these names that are here; None on a rank that is not a target."""
    if targets is not None and rank() not in targets:
        return None
    found = vars(main)
    return {name: found[name] for name in names if name in found}


def push(values: Mapping[str, Any], targets: Sequence[int] | None) -> None:
    """Set names on the targets."""
    if targets is None or rank() in targets:
        vars(main).update(values)


def describe_names() -> NamesOfRank:
    """Return the names of this rank, and its memory."""
    import torch

    values = {name: value for name, value in list(vars(main).items()) if is_value(name, value)}
    names = {name: _type_and_size(value) for name, value in values.items() if not name.startswith("_")}
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    cuda: Any = torch.cuda  # untyped in part
    # Only if cells have used CUDA: to ask would initialize it, which takes hundreds of MB of the device.
    on_device = cuda.memory_allocated() if cuda.is_initialized() else 0
    return NamesOfRank(os.getpid(), resident, on_device, names)


def is_value(name: object, value: object) -> bool:
    """True for a cell's own value: not IPython's names, and no imports or definitions, which take no memory."""
    return type(name) is str and name not in _IPYTHONS and not any(is_a(value, kind) for kind in _NO_VALUES)


def _type_and_size(value: object) -> tuple[str, int]:
    """Return the type and the bytes of a value; "?" and 0 if they are unknown."""
    try:
        return type_name(value), size(value)
    except Exception:  # some fields in C raise
        return "?", 0


# Completion, without running user code: one rank answers while the others do nothing, so a property or a ``__dir__``
# that communicates would wait for ever. IPython's own completer, however guarded, calls ``__dir__`` and
# ``__getattribute__``, and does not find the parts of a ``torch.nn.Module``.


class UnknownError(Exception):
    """The object does not exist, or finding it would run user code."""


def find_names(kind: str, source: str, prefix: str, asked: int) -> list[str] | None:
    """Return the names with a prefix, sorted; None on all ranks but the one that is asked.

    Args:
        kind: "names" that a cell can use, "values" that cells have left, "attributes" or "keys" of an object.
        source: The object, as ``model.layers[0]``.
        prefix: How they begin. Names with an underscore are found only if this has one.
        asked: The rank.
    """
    if rank() != asked:
        return None
    try:
        found = _FINDERS[kind](source)
    except (UnknownError, SyntaxError, ValueError, RecursionError):
        return []
    hidden = "" if prefix.startswith("__") or kind == "keys" else "__" if prefix.startswith("_") else "_"
    fits = (name for name in found if type(name) is str and name.startswith(prefix))
    return sorted({name for name in fits if not hidden or not name.startswith(hidden)})


def _all_names(_: str) -> Iterable[str]:
    return [*(vars(main).keys() - {"In", "Out"}), *vars(builtins), *keyword.kwlist]


def _values(_: str) -> Iterable[str]:
    return [name for name, value in list(vars(main).items()) if is_value(name, value)]


def _attributes(source: str) -> Iterable[str]:
    value = _value(ast.parse(source, mode="eval").body)
    if _has_names_of_library(value):
        return dir(value)
    classes = mro(value if is_a(value, type) else type(value))
    found = {name for one in classes for name in names_of_class(one)} | own_names(value).keys()
    # The parts of a Sequential are "0", "1", ..., which cannot follow a dot.
    return (name for name in found.union(*registries(value)) if type(name) is str and name.isidentifier())


def _keys(source: str) -> Iterable[str]:
    value = _value(ast.parse(source, mode="eval").body)
    if not is_a(value, dict):
        raise UnknownError
    return dict.keys(value)


_FINDERS: dict[str, Callable[[str], Iterable[str]]] = {
    "names": _all_names,
    "values": _values,
    "attributes": _attributes,
    "keys": _keys,
}


def _value(node: ast.expr) -> Any:
    """Return the value of an expression, if it can be looked up."""
    match node:
        case ast.Name(name):
            found = vars(main).get(name, vars(builtins).get(name, MISSING))
            if found is MISSING:
                raise UnknownError
            return found
        case ast.Attribute(inner, name):
            return _attribute(_value(inner), name)
        case ast.Subscript(inner, key):
            try:
                return _item(_value(inner), ast.literal_eval(key))
            except (LookupError, TypeError):
                raise UnknownError from None
    raise UnknownError


def _attribute(value: Any, name: str) -> Any:
    for own in (own_names(value), *registries(value)):
        if name in own:
            return own[name]
    found = in_classes(mro(value if is_a(value, type) else type(value)), name)
    if found is MISSING:
        raise UnknownError
    if is_a(found, types.FunctionType):
        return found
    is_slot = is_just(found, types.MemberDescriptorType)
    if is_slot or (is_just(found, types.GetSetDescriptorType) and _is_plain_tensor(value)):
        return found.__get__(value)
    if any("__get__" in names_of_class(one) for one in mro(type(found))):  # a property, and the like
        raise UnknownError
    return found


def _item(value: Any, key: Any) -> Any:
    """Look up an item. LookupError, TypeError: there is none."""
    for kind in (list, tuple):
        if is_a(value, kind):
            return kind.__getitem__(value, key)
    if is_a(value, dict):
        found = dict.get(value, key, MISSING)
    elif _is_container_of_torch(type(value)):
        modules = own_names(value)["_modules"]
        found = list(modules.values())[key] if type(key) is int else modules[key]
    else:
        found = MISSING
    if found is MISSING:
        raise UnknownError
    return found


def _has_names_of_library(value: Any) -> bool:
    """True if a library's own ``__dir__`` knows more: lazy modules, and columns of pandas' frames."""
    kind = type(value)
    if not is_a(value, types.ModuleType):
        module = in_classes((kind,), "__module__")
        return is_just(module, str) and module.startswith("pandas.")
    names = own_names(value)
    file = names.get("__file__")
    return (kind is not types.ModuleType or "__dir__" in names) and is_just(file, str) and is_library(str(file))


def _is_plain_tensor(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and is_just(value, torch.Tensor, torch.nn.Parameter)


def _is_container_of_torch(kind: type) -> bool:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    item = in_classes(mro(kind), "__getitem__")
    containers = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
    return any(item is names_of_class(one)["__getitem__"] for one in containers)
