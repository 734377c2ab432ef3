"""The stacks of a running launch's ranks, for people: ``run.stacks()``, ``mlaunch stacks``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlaunch.base.frames import without_machinery
from mlaunch.base.text import name_some_ranks, shown
from mlaunch.caller.report.failure_text import in_words, without_import


class StacksOfRanks(dict[int, str]):
    """The Python stack of each rank's main thread, the innermost call last; its state if that is unknown.

    Printed, and in a notebook, ranks at the same place share an entry, as in ``mlaunch stacks``.

    Attributes:
        states: What each rank does: "running", "joining the process group", "its machine is lost".
        frames: (file, line, function) of each rank's calls, the innermost first.
    """

    def __init__(self, ranks: Iterable[Mapping[str, Any]] = ()) -> None:
        found = list(ranks)
        super().__init__({rank["rank"]: _stack(rank) for rank in found})
        self.states: dict[int, str] = {rank["rank"]: rank["state"] for rank in found}
        self.frames: dict[int, list[tuple[str, int, str]]] = {
            rank["rank"]: [(file, int(line) if str(line).isdigit() else 0, name) for file, line, name in rank["frames"]]
            for rank in found
        }
        self._text = grouped(found) or "no rank runs"

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


def _stack(rank: Mapping[str, Any]) -> str:
    return "\n".join(_lines(rank["frames"])) or rank["state"]


def _lines(frames: Iterable[tuple[str, str, str]]) -> list[str]:
    return [f'File "{file}", line {line}, in {name}' for file, line, name in reversed([*frames])]


def grouped(ranks: Iterable[Mapping[str, Any]]) -> str:
    """Return the stacks of ranks, once for those at the same place."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for rank in shown([*ranks]):
        frames = tuple(tuple(frame) for frame in rank["frames"])
        where = f", {words}" if (words := in_words(frames)) else ""
        innermost = tuple(without_machinery(without_import(frames)))
        groups.setdefault((rank["state"], where, innermost), []).append(rank["rank"])
    blocks = []
    for (state, where, frames), members in sorted(groups.items(), key=lambda group: min(group[1])):
        stack = [f"    {line}" for line in _lines(frames)]
        blocks.append("\n".join([f"  {name_some_ranks(members)}: {state}{where}", *stack]))
    return "\n".join(blocks)
