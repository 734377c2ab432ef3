"""The agent's answers to questions about what its ranks do, from ``mlaunch why``, ``stacks``, and its own caller.

Ranks' control threads tell where they are; signals are only for those that do not answer in time: Python 3.11 and 3.12
read a stack that is not there yet when a signal comes as C code enters the interpreter, and the rank dies.

    nobody asks --why, stacks--> places are asked --all have told-------------------> answered
                                        |                                                ^
                                 some have not in time --signals--> stacks are awaited --+
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from mlaunch.agent.rank_process import RankProcess, state_of
from mlaunch.base.frames import STACKS_TIMEOUT, STATES, main_frames, stack_text
from mlaunch.core.parts import AgentPart
from mlaunch.insight.wire import ALL_STACKS, PULSE, STACKS, WATCH, WHY
from mlaunch.protocol.messages import Operations

if TYPE_CHECKING:
    from mlaunch.agent.scene import Scene


_Tell = Callable[[Mapping[str, Any]], None]
_PLACES_TIMEOUT = 0.5  # seconds for ranks to answer, before the others get a signal


class Inspector(AgentPart):
    """The answers of one launch's agent."""

    until_the_end = True  # ranks that do not end are asked about, too

    def __init__(self, scene: Scene) -> None:
        self._scene, self._board, self._clock = scene, scene.board, scene.clock
        self._curious: list[tuple[_Tell, bytes]] = []  # waiting questions, with their words
        self._entered = scene.entered()
        self._signal_at: float | None = None  # the time to signal ranks that have not answered
        self._answer_at: float | None = None  # the time to answer with what is known

    def due(self) -> list[float]:
        return [at for at in (self._answer_at, self._signal_at) if at is not None]

    def asked(self, word: bytes, tell: _Tell) -> None:
        if word == ALL_STACKS:
            self._signal([rank for rank in self._scene.ranks if rank.alive], all_threads=True)
        elif not self._curious or not self._entered.with_places:  # otherwise they get the answer to an earlier question
            # By their control threads. A signal killed ranks that were importing, once in some thousand times
            # (SIGSEGV); only those that have not answered by _signal_at get one.
            self._entered.ask(place=word != PULSE)
            self._answer_at = self._clock() + STACKS_TIMEOUT
        if word in {WHY, STACKS} and self._signal_at is None:
            self._signal_at = self._clock() + _PLACES_TIMEOUT
            self._answer_at = self._signal_at + STACKS_TIMEOUT
        self._curious.append((tell, word))

    def take_steps(self) -> None:
        if self._signal_at is not None and (self._clock() >= self._signal_at or not self._silent()):
            self._signal_at = None
            self._signal(self._silent())
        waits = self._signal_at is not None or self._scene.stacks or self._entered.pending
        if self._answer_at is not None and (not waits or self._clock() >= self._answer_at):
            for tell, word in self._curious:
                tell(self._status(word))
            self._curious, self._answer_at = [], None

    def _silent(self) -> list[RankProcess]:
        """Return the ranks that have not answered."""
        return [rank for rank in self._scene.ranks if rank.alive and rank.rank not in self._entered.places]

    def _signal(self, ranks: Collection[RankProcess], *, all_threads: bool = False) -> None:
        """Ask these ranks by a signal."""
        for rank in ranks:
            self._scene.stacks.ask(rank, self._board[rank.local_rank], all_threads=all_threads)
        if ranks:
            self._answer_at = self._clock() + STACKS_TIMEOUT

    def _status(self, word: bytes) -> dict[str, Any]:
        status = self._scene.status()
        told = zip(status["ranks"], self._scene.ranks, strict=True)
        return {**status, "ranks": [{**known, **self._of_rank(rank, word)} for known, rank in told]}

    def _of_rank(self, rank: RankProcess, word: bytes) -> dict[str, Any]:
        status: dict[str, Any] = {"marks": self._marks(rank)}
        if word == WATCH:
            status |= self._watched(rank)
        elif word != PULSE:
            told = None if word == ALL_STACKS else self._entered.places.get(rank.rank)
            frames = main_frames(rank.stacks) if told is None else told
            status["stacks"] = (rank.stacks if told is None else stack_text(told)) if rank.alive else ""
            status["frames"] = frames if rank.alive else []
            entered = self._entered.told.get(rank.rank)
            status["entered"] = None if entered is None else dataclasses.asdict(entered)
            status["children"] = held_children(rank.pid) if rank.alive else []
            status["activity"] = activity(rank.pid) if rank.alive else {}
            status["asleep"] = asleep(rank.pid) if rank.alive else ""
        return status

    def _watched(self, rank: RankProcess) -> dict[str, Any]:
        """Return the rank's place and resources.

        ``seconds``: from the loop's beginning to its latest turn; ``still``: since then.
        """
        loop = self._board.loop(rank.local_rank)
        used = activity(rank.pid) if rank.alive else {}
        return {
            "frames": self._entered.places.get(rank.rank, []) if rank.alive else [],
            "loop": {"number": loop.number, "done": loop.done, "total": loop.total, "seconds": loop.at - loop.start,
                     "still": self._clock() - loop.at, "description": loop.description},
            "cpu": used.get("threads", 0.0) + used.get("children", 0.0),
            "memory": resident(rank.pid) if rank.alive else 0,
        }  # fmt: skip

    def _marks(self, rank: RankProcess) -> list[Any]:
        """Return the rank's progress: phase, loop, turns, operations; None for unknown ones."""
        loop, told = self._board.loop(rank.local_rank), self._entered.told.get(rank.rank)
        phase, turns = self._board[rank.local_rank], self._entered.turns.get(rank.rank)
        return [phase.value, loop.number, loop.done, turns, None if told is None else _begun(told)]


part = Inspector


def _begun(operations: Operations) -> int:
    """Return the number of collectives and messages."""
    messages = (count for group in operations.groups for _, count in (*group.sent, *group.received))
    return sum(group.number for group in operations.groups) + sum(messages)


def held_children(pid: int) -> list[str]:
    """Return the children of a rank that something holds up, such as a data loader's worker."""
    states = [(child, state_of(child)) for child in children_of(pid)]
    return [f"(pid {child}): {STATES[state]}{file_of(child)}" for child, state in states if state in STATES]


# The activity of a process and its children, from the kernel's counts: a process works if they change.

_PAGE = os.sysconf("SC_PAGE_SIZE")  # bytes
_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds
# Numbers of x86_64; unknown elsewhere.
_CALLS = {"0": "reading", "17": "reading", "19": "reading", "1": "writing", "18": "writing", "20": "writing",
          "74": "flushing", "75": "flushing"}  # fmt: skip
_OWN, _WAITED_FOR = slice(11, 13), slice(13, 15)  # times in user and kernel mode, behind the name in /proc/PID/stat


def activity(pid: int) -> dict[str, float]:
    """Return seconds, bytes and counts since the process began.

    ``switches``: how often its main thread has begun to wait, as it does for each packet of a socket; ``main``: seconds
    that it has run, or waited for a CPU; ``threads``: that all its threads have run; ``children``: that its descendants
    have run, including those that are gone; ``bytes``: read and written by all of them.
    """
    below = _descendants(pid)
    own = _times(pid)
    return {
        "switches": _switches(pid),
        "main": _scheduled(pid),
        "threads": sum(own[:2]),
        "children": sum(own[2:]) + sum(sum(_times(child)) for child in below),
        "bytes": sum(map(_bytes, [pid, *below])),
    }


def resident(pid: int) -> int:
    """Return the bytes of physical memory that a process holds, with shared memory; 0 if it is gone."""
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def asleep(pid: int) -> str:
    """Return the place in the kernel where the main thread sleeps, "asleep" if unknown; "" if it runs."""
    state = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1]
    if state != ["S"]:
        return ""
    place = _read(f"/proc/{pid}/wchan")
    return "asleep" if place in {"", "0"} else place


def children_of(pid: int) -> list[int]:
    """Return the children of all its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _read(f"/proc/{pid}/task/{task}/children").split())
    return found


def file_of(pid: int) -> str:
    """Return the file that a process waits for in the kernel: ", reading /data/shard-7"; "" if unknown."""
    number, *arguments = _read(f"/proc/{pid}/syscall").split() or [""]
    doing = _CALLS.get(number) if os.uname().machine == "x86_64" else None
    with contextlib.suppress(OSError, IndexError):
        return f", {doing} {os.readlink(f'/proc/{pid}/fd/{int(arguments[0], 16)}')}" if doing else ""
    return ""


def _descendants(pid: int) -> list[int]:
    found = children_of(pid)
    for child in found:  # which grows meanwhile
        found += children_of(child)
    return found


def _switches(pid: int) -> int:
    rows = dict(row.split(":", 1) for row in _read(f"/proc/{pid}/task/{pid}/status").splitlines())
    return int(rows.get("voluntary_ctxt_switches", 0))


def _scheduled(pid: int) -> float:
    ran, waited, *_ = map(int, _read(f"/proc/{pid}/task/{pid}/schedstat").split() or ("0", "0"))
    # Waiting for a CPU counts as work: otherwise, on a busy machine, a computing rank would seem to do nothing.
    return (ran + waited) / 1e9


def _times(pid: int) -> list[float]:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return [int(ticks) * _TICK for ticks in (*fields[_OWN], *fields[_WAITED_FOR])] or [0.0] * 4


def _bytes(pid: int) -> int:
    rows = dict(row.split(": ") for row in _read(f"/proc/{pid}/io").splitlines())
    return int(rows.get("rchar", 0)) + int(rows.get("wchar", 0))


def _read(path: str) -> str:
    """Return the file's content; "" if the process is gone, or another user's."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""
