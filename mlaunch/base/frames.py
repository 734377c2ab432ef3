"""Stacks: whose code a frame is (mlaunch's, a library's, the user's), and the stacks that a rank writes on request."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from collections.abc import Iterable, Sequence

from mlaunch.features import FEATURES, with_hook

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# What runs a function, and what it calls on the way there. Other modules of mlaunch run *above* user code.
_BOTTOM = tuple(os.path.join(_PACKAGE, "rank", f"{name}.py") for name in ("main", "base", "function"))
_BOTTOM += tuple(os.path.join(_PACKAGE, feature.name, path) for feature in FEATURES for path in feature.runs)
_PROMPTS = tuple(os.path.join(_PACKAGE, feature.name, "rank", "") for feature in with_hook("rank.at_breakpoint"))
_LIBRARIES = (os.path.dirname(os.__file__) + os.sep, f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_RANKS_OWN = tuple(os.path.join(_PACKAGE, name, "") for name in ("rank", "protocol"))
_RANKS_OWN += tuple(os.path.join(_PACKAGE, feature.name, "") for feature in FEATURES if feature.runs)
_RANKS_OWN += tuple(os.path.join(_PACKAGE, feature.name, path) for feature in FEATURES for path in feature.around)
_CONTROL = os.path.join(_PACKAGE, "rank", "control.py")  # of a rank's thread that answers its agent
RUNPY = "<frozen runpy>"
_WITHOUT_FILE = ("<string>", "<attrs generated")  # python -c, and what dataclasses and others write


def is_ours(file: str) -> bool:
    """True if the file belongs to this package."""
    return file.startswith(_PACKAGE)


def is_ranks_own(file: str) -> bool:
    """True if the file has what a rank does before and after the user's function, such as to wait for a call."""
    return file.startswith(_RANKS_OWN)


def is_prompt(file: str) -> bool:
    """True if the file belongs to the code that runs a debugger's prompt in a rank."""
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
    """Return the index of the user's innermost frame in a stack, innermost first; None if there is none.

    A frame without a file counts as generated code, and is skipped, if a frame with a file has called it.
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
    """Return (file, line, name) of frames without those of Python's import system and of the rank around the function.

    If there are no others, return all.
    """
    return [frame for frame in frames if not (is_import(frame[0]) or is_ranks_own(frame[0]))] or frames


def module_of(file: str) -> str:
    """Return the name of a file's module: from its path below the directory of libraries, or else its own name."""
    path = next((file.partition(part)[2] for part in (*_LIBRARIES[1:], _LIBRARIES[0]) if part in file), "")
    stem = (path or os.path.basename(file)).removesuffix(".py").removesuffix(f"{os.sep}__init__")
    return stem.replace(os.sep, ".")


# The stacks that a rank writes on request. Its faulthandler answers a signal of its own by writing the stack of its
# main thread into a pipe. That works while the rank waits in C or holds the interpreter lock, and does not touch the
# handlers that user code has installed. Another signal makes it write the stacks of all threads. It reads them without
# the interpreter lock: a thread that runs Python meanwhile may take away the frames that are read, and then the rank
# dies of SIGSEGV. So it is only used on request.

# Counted from the end: the C library keeps the first real-time signals for itself.
STACK_SIGNAL = signal.SIGRTMAX - 1  # real-time signals, which programs hardly ever use
ALL_STACKS_SIGNAL = signal.SIGRTMAX - 2
STACKS_TIMEOUT = 0.3  # seconds for all ranks together
STARVED_TIMEOUT = 2.0  # seconds, if there is one that waits for a CPU
STATES = {"T": "it was stopped by a signal", "t": "a debugger holds it", "D": "it waits in the kernel"}
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\S+) in (?P<name>.*)$')
_HEAD = "(most recent call first):"
_CUT = "  ..."  # written below its hundredth frame
_ESCAPE = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U00(?:0[0-9a-f]|10)[0-9a-f]{4})")


def answer_requests(fd: int) -> None:
    """Make this rank's faulthandler answer the signals from now on, by writing into ``fd``.

    ``fd`` must not block: then a full pipe costs the end of a stack, not the rank. Only the main thread may call this.
    """
    for number, all_threads in ((STACK_SIGNAL, False), (ALL_STACKS_SIGNAL, True)):
        faulthandler.unregister(number)  # otherwise what it is chained to would not change
        signal.signal(number, signal.SIG_IGN)
        # Only a chained handler restores errno: otherwise a failed system call of the user's that the signal interrupts
        # raises OSError(0, 'Error'). A second signal is not held back meanwhile, so the process that asks must not send
        # one.
        faulthandler.register(number, file=fd, all_threads=all_threads, chain=True)


def in_letters(text: str) -> str:
    """Return faulthandler's text, which is ASCII, with the names of files and functions as they are.

    Escapes that cannot be printed stay, for example the end of a line or bytes that are no text (PEP 383).
    """
    # Needed to find mlaunch's own frames below a directory like "Jörg", too.
    return _ESCAPE.sub(_letter, text)


def _letter(escape: re.Match[str]) -> str:
    letter = chr(int(escape[0][2:], 16))
    return letter if letter.isprintable() else escape[0]


def is_whole_stack(text: str) -> bool:
    """True if the main thread's stack is complete; faulthandler writes it last.

    faulthandler writes a line in pieces, so only a line with its end counts. Text before the head is the end of an
    earlier stack.
    """
    _, head, lines = text[: text.rfind("\n") + 1].rpartition(_HEAD)
    return bool(head) and (mentions_bottom(lines) or lines.endswith(f"\n{_CUT}\n"))


def stack_text(frames: Sequence[tuple[str, str, str]]) -> str:
    """Return (file, line, name) of frames, innermost first, in faulthandler's format."""
    rows = (f'  File "{file}", line {line} in {name}\n' for file, line, name in frames)
    return "".join((f"Stack {_HEAD}\n", *rows))


def main_frames(text: str) -> list[tuple[str, str, str]]:
    """Return (file, line, name) of the main thread's frames above the launcher's, innermost first."""
    frames: list[tuple[str, str, str]] = []
    for row in text[: text.rfind("\n") + 1].splitlines():  # the last line may be incomplete
        match = _FRAME.match(row)
        if row == _CUT:
            continue
        if match is None:
            frames = []  # a new thread begins
        elif is_bottom(match["file"]):
            return frames
        elif match["file"] == RUNPY:
            continue
        else:
            frames.append((match["file"], match["line"], match["name"]))
    return frames
