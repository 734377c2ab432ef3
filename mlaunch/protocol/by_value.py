"""Classes and functions that go by value: which ones, how they come back to their caller, and their source text."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import linecache
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any, NamedTuple

# Modules that a rank cannot import though they are in sys.modules here, so their definitions go by value. They were
# loaded from a file's path, or their directory has left sys.path since, or another module of that name is found first.


class _Answer(NamedTuple):
    module: types.ModuleType | None
    importable: bool


_answers: dict[str, _Answer] = {}
_search_path: list[str] = []  # the search path for which the answers hold


def is_importable(name: str) -> bool:
    """True if importing this name finds the module that is loaded, or if that cannot be decided."""
    if _search_path != sys.path:
        _answers.clear()
        _search_path[:] = sys.path
    module = sys.modules.get(name)
    answer = _answers.get(name)
    if answer is None or answer.module is not module:
        # Checked once for each module: it takes 9 to 30 us, and may be asked for every object of a value.
        answer = _answers[name] = _Answer(module, _is_found_again(name, getattr(module, "__spec__", None)))
    return answer.importable


def _is_found_again(name: str, spec: ModuleSpec | None) -> bool:
    # Whether other loaders would find the module again is unknown. Then it goes by name, as pickle sends it anyway.
    if spec is None or type(spec.loader) is not SourceFileLoader:
        return True
    parent = name.rpartition(".")[0]
    if not parent:
        return _is_found(name, None, spec)
    path = getattr(sys.modules.get(parent), "__path__", None)
    return path is not None and is_importable(parent) and _is_found(name, list(path), spec)


def _is_found(name: str, path: list[str] | None, spec: ModuleSpec) -> bool:
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # a user's finder; a file that is gone
            found = finder.find_spec(name, path)
            if found is not None:
                return found.origin == spec.origin or os.path.samefile(found.origin or "", spec.origin or "")
    return False


# Numbers, by which a definition goes back to the caller as its own original. A name is not enough: it may now mean
# another class there (a cell was run again), or nothing (a local class; a script that a profiler runs, which is not the
# __main__ of its process).

_numbers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_by_number: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_made: weakref.WeakSet[Any] = weakref.WeakSet()  # made here from what was sent
# What this rank's call has brought, so that its caller has it. What only an earlier call brought may be gone there.
_of_call: weakref.WeakSet[Any] = weakref.WeakSet()
kinds: set[type] = set()  # of all that was sent
_count = itertools.count()
# A number belongs to one process: a value from another launch must not be taken for one of this process.
_process = os.urandom(16).hex()


class receiving:
    """A block that notes what a rank's call brings."""

    active = False

    def __enter__(self) -> None:
        _of_call.clear()
        receiving.active = True

    def __exit__(self, *_: object) -> None:
        receiving.active = False


def number(original: Any) -> str:
    """Return the number of an object that is sent by value; it keeps the number for good."""
    known = _numbers.get(original)
    return _remember(original, f"{_process}/{os.getpid()}/{next(_count)}") if known is None else known


def take(number: str, make: Callable[..., Any], *args: Any) -> Any:
    """Return an object that was sent by value, to be filled; in the process that sent it, the original.

    Called by unpickling.
    """
    known = _by_number.get(number)
    if known is not None and known not in _made:
        # This process has sent it: isinstance() would not take two copies of one class for the same.
        return known
    # A class is made once, even if it comes with each call: its metaclass and its bases see it being made.
    made = known if isinstance(known, type) else make(*args)
    _remember(made, number)
    _made.add(made)
    kinds.add(type(made))
    if receiving.active:
        _of_call.add(made)
    return made


def take_once(number: str, make: Callable[..., Any], *args: Any) -> Any:
    """Return an object that is known by its identity: the one that came before, if there is one."""
    known = _by_number.get(number)
    if known is None:
        return take(number, make, *args)
    if receiving.active:
        _of_call.add(known)
    return known


def can_be_known(found: Any) -> bool:
    """True if an object that is neither class nor function can have a number."""
    kind: Any = type(found)
    plain: Any = object
    has_weak_references = kind.__weakrefoffset__ != 0  # it is negative if the interpreter keeps them (3.12)
    return kind.__hash__ is plain.__hash__ and kind.__eq__ is plain.__eq__ and has_weak_references


def fill(taken: Any, content: tuple[Callable[[Any, Any], None], Any, Source | None]) -> None:
    """Give an object its content if it was made here.

    The original is left alone: its content may have changed since.
    """
    fill_in, state, source = content
    if taken in _made:
        fill_in(taken, state)
        if source is not None:
            take_source(source)


def of_main(function: Any) -> list[Any]:
    """Number and return the classes and functions of the script or notebook that defines this function."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    if names.get("__name__") != "__main__":
        return []
    found = [value for value in names.values() if isinstance(value, type | types.FunctionType)]
    found = [value for value in found if value.__module__ == "__main__"]
    for value in found:
        number(value)
    return found


def inherit(originals: Iterable[Any]) -> None:
    """Note, in a fork, which originals it shares with the caller."""
    _of_call.update(originals)


def any_came() -> bool:
    """True if there is anything here that must not go by name."""
    return bool(_numbers)


def reduce(found: Any) -> tuple[Any, ...] | None:
    """Return what pickles a class or function as the caller's own; None if the caller may not have it."""
    if found not in _of_call:
        return None
    return _find, (_numbers[found], found.__module__, getattr(found, "__qualname__", ""))


def reduce_or_refuse(found: Any) -> tuple[Any, ...] | None:
    """Return what ``reduce`` does; PicklingError if the caller may have another object by this name.

    None if it did not come from a caller.
    """
    if found in _numbers and found not in _of_call:
        raise pickle.PicklingError(found)
    return reduce(found)


def _find(number: str, module: str, qualname: str) -> Any:
    """Return the original. In a process that did not send it, as with ``gather``, return what has its name here."""
    original = _by_number.get(number)
    if original is None:
        original = importlib.import_module(module)
        for name in qualname.split("."):
            original = getattr(original, name)
    return original


def _remember(original: Any, number: str) -> str:
    _numbers[original] = number
    _by_number[number] = original
    return number


# Source text that no file holds, such as a notebook's cells. It is sent with the code that was compiled from it: for
# inspect.getsource, and with it torch.jit.script and triton.jit, which ask linecache.

Source = tuple[str, str]  # a file name without a file, and its text
_MOST_SOURCES = 1_000  # texts that are kept: of older cells a traceback has no lines
_sources: dict[str, None] = {}  # names, the latest last


def source_of(code: types.CodeType, told: set[str]) -> Source | None:
    """Return the source of code that no file holds, and add its name to ``told``.

    None if there is none, or if it is in ``told`` already.
    """
    file = code.co_filename
    entry = linecache.cache.get(file)
    if entry is None or len(entry) != 4 or entry[1] is not None or file in told:  # with a time, it is read from a file
        return None
    told.add(file)
    return file, "".join(entry[2])


def take_source(source: Source) -> None:
    """Make the source known in this process."""
    file, text = source
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    note_source(file)


def note_source(file: str) -> None:
    """Note that a source was made known, and forget the oldest: ranks that stay run cells for days."""
    _sources.pop(file, None)
    _sources[file] = None
    if len(_sources) > _MOST_SOURCES:
        oldest = next(iter(_sources))
        del _sources[oldest]
        linecache.cache.pop(oldest, None)
