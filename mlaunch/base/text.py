"""Sizes, durations, ranks and signals in words for people, and texts that are cut to fit."""

from __future__ import annotations

import re
import signal
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

Told = TypeVar("Told")

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_SHOWN = 20  # runs of ranks
_END_OF_LINE = 500  # characters
_ESCAPE = "\x1b"
_COMMANDS = "\x1b\\[[0-9;:]*m"  # colours and their like
_GAP = "\n[...]\n"


def in_bytes(size: float) -> str:
    """Return "12 KiB", "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"


def in_seconds(seconds: float) -> str:
    """Return "850 ms", "12.3 s"."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def on_a_clock(seconds: float) -> str:
    """Return "0:07", "1:02:03"."""
    minutes, rest = divmod(int(seconds), _MINUTE)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def in_two_units(seconds: float) -> str:
    """Return "12 s", "3 min 4 s", "2 h 5 min", "3 d 4 h"."""
    whole = int(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def with_article(noun: str) -> str:
    """Return a noun with its article, chosen by its first letter: "a list", "an int", "an _io.TextIOWrapper"."""
    return f"an {noun}" if noun.lstrip("_")[:1].lower() in {*"aeio"} else f"a {noun}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0-2, 4"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks, ', ')}"


def name_some_ranks(ranks: Sequence[int]) -> str:
    """Return what ``name_ranks`` does; of very many ranks, the first ones and the number of the others."""
    runs = _runs(ranks)
    shown = sum(map(len, runs[:_SHOWN]))
    more = f" and {len(ranks) - shown} more" if len(runs) > _SHOWN else ""
    return name_ranks(list(chain(*runs[:_SHOWN]))) + more


def without_middle(text: str, limit: int) -> str:
    """Return the text; if it is longer than ``limit``, its beginning (a fifth of that), its size, and its very end."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 5]} ... [{len(text):,} characters in all] ... {text[-(limit // 20) :]}"


def ranges(ranks: Iterable[int], between: str) -> str:
    """Return "0-2, 4", with the separator ``between``."""
    return between.join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in _runs(ranks))


def _runs(ranks: Iterable[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return runs


def first_bytes(text: str, limit: int) -> str:
    """Cut a text so that its UTF-8 has at most ``limit`` bytes; keep the beginning."""
    return text.encode(errors="replace")[:limit].decode(errors="ignore")


def last_bytes(text: str, limit: int) -> str:
    """Cut a text so that its UTF-8 has at most ``limit`` bytes; keep the end."""
    return text.encode(errors="replace")[-limit:].decode(errors="ignore")


def both_ends(text: str, limit: int) -> str:
    """Cut a text so that its UTF-8 has at most ``limit`` bytes; keep its first and last lines, and end of long ones.

    The first lines of a traceback say where it went wrong, and the last says why, which may be a line of 100 kB.
    """
    lines = "\n".join(map(_ends_of_line, text.split("\n"))).encode(errors="replace")
    if len(lines) <= limit:
        return lines.decode()
    half = max(limit - len(_GAP), 0) // 2
    whole = lines.decode()
    beginning, end = first_bytes(whole, half), last_bytes(whole, half) if half else ""
    return (beginning.rpartition("\n")[0] or beginning) + _GAP + (end.partition("\n")[2] or end)


def _ends_of_line(line: str) -> str:
    left = len(line) - 2 * _END_OF_LINE
    return f"{line[:_END_OF_LINE]} [{left:,} characters] {line[-_END_OF_LINE:]}" if left > 0 else line


def shown(told: Told) -> Told:
    """Return data of ranks for people: in each text, control characters are written as escapes.

    A name, a directory or a message may have "\\x1b[2J", the end of a line, or signs that turn the direction of
    writing.

    Args:
        told: A text, or lists and dictionaries of anything. What is no text stays as it is.
    """
    if isinstance(told, str):
        return told if told.isprintable() else "".join(map(_letter, told))  # type: ignore[return-value]
    if isinstance(told, Mapping):
        return {key: shown(value) for key, value in told.items()}  # type: ignore[return-value]
    if isinstance(told, list | tuple):
        return type(told)(map(shown, told))
    return told


def without_escapes(text: str) -> str:
    """Return a text of several lines for a file: without colours, other control characters written as escapes."""
    if _ESCAPE not in text:
        return text
    return "".join(letter if letter in "\n\t" else _letter(letter) for letter in re.sub(_COMMANDS, "", text))


def _letter(letter: str) -> str:
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode()


def columns(text: str) -> int:
    """Return the columns of a terminal that a ``shown`` text takes: two for wide letters, none for accents."""
    return sum(map(_columns_of, text)) if not text.isascii() else len(text)


def _columns_of(letter: str) -> int:
    if unicodedata.category(letter) in {"Mn", "Me"}:
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def filled(text: str, width: int, *, left: bool = True) -> str:
    """Return the text with spaces after it, or before it, so that it takes that many columns."""
    spaces = " " * (width - columns(text))
    return text + spaces if left else spaces + text


def printable(text: str, limit: int, *, last: bool = False, lines: bool = False) -> str:
    """Return a foreign text for a terminal: cut, with control characters written as escapes, "\\x1b".

    Args:
        limit: Bytes of UTF-8 to keep.
        last: Keep the end, and not the beginning.
        lines: The text may have several lines.
    """
    text = (last_bytes if last else first_bytes)(text, limit)
    if text.isprintable():
        return text
    clean = "\n".join(map(shown, text.split("\n"))) if lines else shown(text)
    return (last_bytes if last else first_bytes)(clean, limit)


# Signals, by name

_REASONS = {  # why one cannot ask a run to stop
    signal.SIGKILL: "no process can handle it",
    signal.SIGSTOP: "no process can handle it",
    signal.SIGINT: "Ctrl-C ends a call at once, always",
    signal.SIGCHLD: "it announces the end of any child",
}
# A handler in Python runs after the faulting instruction, which faults again, for ever.
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


def signals_of(given: str, text: str) -> tuple[int, ...]:
    """Return the signals that ``text`` names. ValueError, beginning with ``given``, for one that cannot ask."""
    found = []
    for part in text.split(","):
        name = part.strip().upper()
        known = getattr(signal.Signals, name if name.startswith("SIG") else f"SIG{name}", None)
        if known is None:
            raise ValueError(f"{given}: {part.strip()!r} is no signal; allowed: names with commas, such as 'TERM,USR1'")
        why = "it announces a fault" if known in _FAULTS else _REASONS.get(known)
        if why is not None:
            raise ValueError(f"{given}: {name} cannot ask a run to stop: {why}; allowed: others, such as 'TERM,USR1'")
        found.append(int(known))
    return tuple(dict.fromkeys(found))


def signal_name(number: int) -> str:
    """Return a signal's name as people write it: "TERM"."""
    return signal.Signals(number).name.removeprefix("SIG")
