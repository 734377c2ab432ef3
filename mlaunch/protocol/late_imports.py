"""Notes in shared memory on what ranks had to import, so that their fork server can import it for the next ranks.

They cover modules of torch that are first used long after its import, modules of mlaunch that modules of the user may
import, and all of Python's own library. For other packages, only their users know whether they may be imported before a
fork.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import itertools
import mmap
import os
import sys

from mlaunch.features import with_hook

# Modules that torch imports when they are first used. The first optimizer and the first DistributedDataParallel of a
# process import torch._dynamo, which takes a second in each rank.
_TORCHS = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint")
# Modules that the import of a user's module needs, for example by "from mlaunch import Ranks": 80 modules in each rank.
# A call of 2 ranks took 60 ms with them instead of 26.
_OURS = (
    "mlaunch.comm", "mlaunch.compat.rank.megengine", "mlaunch.ranks.caller.ranks", "mlaunch.sweeps.caller.run_future",
    "mlaunch.sweeps.caller.sweep", "mlaunch.caller.warm_up"
)  # fmt: skip
# Modules of features in ranks, and the module that makes their parts there.
_PARTS = ("mlaunch.core.load", *(f"mlaunch.{one.name}.rank" for one in with_hook("rank.part")))
NAMES = (*_TORCHS, *_OURS, *_PARTS)
_INDEX = {name: index for index, name in enumerate(NAMES)}
_SIZE = 4096  # bytes of names
# Modules that do something for people at a prompt when they are imported.
_NEVER = {"antigravity", "this", "readline", "rlcompleter", "idlelib", "turtledemo", "turtle", "tkinter", "test"}
_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")

# Shared memory and no message: a rank notes it after its answer, when no process listens to it any more.
_noted = mmap.mmap(-1, len(NAMES))  # a fork writes to the same memory
_standard = mmap.mmap(-1, _SIZE)  # names of Python's own modules, with commas


class _Own:
    """The state of this process. ``before``: how many modules it has from its fork server, or has noted."""

    before = 0
    looked = 0  # how many modules there were when this process last looked
    told = -1  # an eventfd


_own = _Own()


def listen() -> int:
    """Return a descriptor that can be read once a fork of this process has imported something in ``NAMES``."""
    if _own.told < 0:
        _own.told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    return _own.told


def hear() -> None:
    """Clear the event of that descriptor."""
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(_own.told)


def tell() -> None:
    """Notify the process that listens."""
    with contextlib.suppress(OSError):
        # Code that closes all descriptors is common, and the number may now belong to a file of the user's.
        if os.readlink(f"/proc/self/fd/{_own.told}") == "anon_inode:[eventfd]":
            os.eventfd_write(_own.told, 1)


def begin() -> None:
    """Count the modules that are imported now as the fork server's."""
    _own.before = len(sys.modules)


def note_begun(name: str, path: str, *, leads: bool) -> bool:
    """Note a module when its import begins, because the call may not survive it; True if it is in ``NAMES``."""
    if name in _INDEX:
        _noted[_INDEX[name]] = 1
        return True
    if leads and path.startswith(_LIBRARY) and _is_standard(name):
        _note_standard([name])
    return False


def note(*, leads: bool) -> None:
    """Note what this process has imported. Only a rank that ``leads`` notes Python's own modules, for all ranks."""
    if len(sys.modules) == _own.looked:  # as after most calls on ranks that stay
        return
    _own.looked = len(sys.modules)
    for index, name in enumerate(NAMES):
        if name in sys.modules:
            _noted[index] = 1
    if leads and len(sys.modules) > _own.before:
        new = itertools.islice(list(sys.modules), _own.before, None)
        _own.before = len(sys.modules)
        _note_standard([name for name in new if _is_standard(name)])


def _note_standard(names: list[str]) -> None:
    text = ",".join(dict.fromkeys([*_standard_names(), *names])).encode()
    if names and len(text) < _SIZE:
        _standard[:] = text.ljust(_SIZE, b"\0")  # if two ranks write at once, one of them wins


def _is_standard(name: str) -> bool:
    """True if it is a module of Python's library; a user's file may have such a name."""
    top = name.partition(".")[0]
    if top not in sys.stdlib_module_names or top in _NEVER or top.startswith("_"):
        return False
    return _is_of_the_library(getattr(sys.modules.get(name), "__spec__", None))


def _is_of_the_library(spec: importlib.machinery.ModuleSpec | None) -> bool:
    origin = getattr(spec, "origin", None) or ""
    return origin in {"built-in", "frozen"} or (origin.startswith(_LIBRARY) and "-packages" not in origin)


def _standard_names() -> list[str]:
    text = _standard[:].partition(b"\0")[0].decode(errors="ignore")
    return [name for name in text.split(",") if name.partition(".")[0] in sys.stdlib_module_names]


def missing() -> list[str]:
    """Return the modules of torch and mlaunch that a fork has noted and this process has not imported."""
    return [name for index, name in enumerate(NAMES) if _noted[index] and name not in sys.modules]


def missing_standard() -> list[str]:
    """Return the modules of Python's library that a fork has noted and this process has not imported."""
    return [name for name in _standard_names() if name not in sys.modules]


def import_module(name: str) -> None:
    """Import a missing module; do nothing if a name of Python's library would lead to another file here."""
    if name in NAMES or _is_of_the_library(importlib.util.find_spec(name)):
        __import__(name)
