"""The Python stacks that a rank writes on request.

A rank's faulthandler answers a signal of its own by writing the stack of its main thread into a pipe. That works while
the rank waits in C or holds the interpreter lock, and does not touch the handlers that user code has installed.

Another signal makes it write the stacks of all threads. It reads them without the interpreter lock: a thread that runs
Python meanwhile may take away the frames that are read, and then the rank dies of SIGSEGV. So it is only used on
request.
"""

from __future__ import annotations

import faulthandler
import re
import signal
from collections.abc import Sequence

from mlaunch.base.frames import RUNPY, is_bottom, mentions_bottom

# Counted from the end: the C library keeps the first real-time signals for itself.
STACK_SIGNAL = signal.SIGRTMAX - 1  # real-time signals, which programs hardly ever use
ALL_STACKS_SIGNAL = signal.SIGRTMAX - 2
STACKS_TIMEOUT = 0.3  # seconds for all ranks together
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


def is_whole(text: str) -> bool:
    """True if the main thread's stack is complete; faulthandler writes it last.

    faulthandler writes a line in pieces, so only a line with its end counts. Text before the head is the end of an
    earlier stack.
    """
    _, head, lines = text[: text.rfind("\n") + 1].rpartition(_HEAD)
    return bool(head) and (mentions_bottom(lines) or lines.endswith(f"\n{_CUT}\n"))


def text_of(frames: Sequence[tuple[str, str, str]]) -> str:
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
