"""The owner of a stack frame's code: mlaunch, a library, or the user."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from mlaunch.features import FEATURES, with_hook

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# What runs a function, and what it calls on the way there. Other modules of ours run *above* user code.
_BOTTOM = tuple(os.path.join(_PACKAGE, "rank", f"{name}.py") for name in ("main", "base", "function"))
_BOTTOM += tuple(os.path.join(_PACKAGE, feature.name, path) for feature in FEATURES for path in feature.runs)
_PROMPTS = tuple(os.path.join(_PACKAGE, feature.name, "rank", "") for feature in with_hook("rank.at_breakpoint"))
_LIBRARIES = (os.path.dirname(os.__file__) + os.sep, f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_RANKS_OWN = tuple(os.path.join(_PACKAGE, name, "") for name in ("rank", "protocol"))
_RANKS_OWN += tuple(os.path.join(_PACKAGE, feature.name, "") for feature in FEATURES if feature.runs)
_CONTROL = os.path.join(_PACKAGE, "rank", "control.py")  # of a rank's thread that answers its agent
RUNPY = "<frozen runpy>"
_WITHOUT_FILE = (
    "<string>",
    "<attrs generated",
)  # python -c, and what dataclasses and others write


def is_ours(file: str) -> bool:
    """True if the file belongs to this package."""
    return file.startswith(_PACKAGE)


def is_ranks_own(file: str) -> bool:
    """True if the file has what a rank does before and after the user's function, such as to wait for a call."""
    return file.startswith(_RANKS_OWN)


def is_prompt(file: str) -> bool:
    """True if the file is of what runs a debugger's prompt in a rank."""
    return file.startswith(_PROMPTS)


def is_bottom(file: str) -> bool:
    """True if the file is the bottom of a rank's stack: everything below it is the launcher's."""
    return file.startswith(_BOTTOM)


def mentions_bottom(text: str) -> bool:
    """True if a written stack has come to its bottom."""
    return any(file in text for file in _BOTTOM)


def is_control_thread(lines: Iterable[str]) -> bool:
    """True if this is the written stack of the thread in which a rank answers its agent."""
    return any(_CONTROL in line for line in lines)


def is_library(file: str) -> bool:
    """True if the file belongs to Python, to an installed package or to this one, even if installed in place."""
    return is_ours(file) or any(part in file for part in _LIBRARIES) or file.startswith("<frozen")


def innermost_users(files: Sequence[str]) -> int | None:
    """Return which frame of a stack, innermost first, is the first of the user's; None if none is.

    One without a file is taken for generated, and passed over, where a frame with a file has called it.
    """
    without = [file.startswith(_WITHOUT_FILE) for file in files]
    for i, file in enumerate(files):
        called_by = files[i + 1] if i + 1 < len(files) else ""
        generated = without[i] and called_by and not without[i + 1] and not is_ours(called_by)
        if not generated and not is_library(file):
            return i
    return None


def is_import(file: str) -> bool:
    """True if the file is of Python's import system."""
    return file.startswith("<frozen importlib")


def without_machinery(frames: Sequence[tuple[str, str, str]]) -> Sequence[tuple[str, str, str]]:
    """Return the (file, line, name) of frames that somebody has written, less what is between: imports have many.

    That is Python's import system, and what a rank does around the user's function. Alone it is all there is to tell.
    """
    return [frame for frame in frames if not (is_import(frame[0]) or is_ranks_own(frame[0]))] or frames


def module_of(file: str) -> str:
    """Return the module that a file holds, by the path below where libraries are; elsewhere by its own name."""
    path = next((file.partition(part)[2] for part in (*_LIBRARIES[1:], _LIBRARIES[0]) if part in file), "")
    stem = (path or os.path.basename(file)).removesuffix(".py").removesuffix(f"{os.sep}__init__")
    return stem.replace(os.sep, ".")
