"""Answers to those who ask a running launch what it is doing, or to end (``mlaunch ps``, ``stacks``, ``stop``), and to
its launcher.

Where ranks are comes from their control threads, and only of those that do not tell in time from signals: Python 3.11
and 3.12 read a stack that is not there yet when a signal comes as C code enters the interpreter, and the rank dies.

    nobody asks --why, stacks--> places are asked --all have told-------------------> answered
                                        |                                                ^
                                 some have not in time --signals--> stacks are awaited --+
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.agent.activity import activity, asleep, resident
from mlaunch.agent.debug_visit import DebugVisit
from mlaunch.agent.entered import EnteredRequests
from mlaunch.agent.questions import Questions
from mlaunch.agent.rank_process import RankProcess
from mlaunch.agent.supervision.stack_requests import StackRequests, held_children, state_of
from mlaunch.protocol import registry
from mlaunch.protocol.board import Board
from mlaunch.protocol.messages.debug_messages import HoldDeadline
from mlaunch.protocol.messages.launch_messages import Operations, Phase
from mlaunch.protocol.messages.prepared_messages import Details, with_details
from mlaunch.protocol.messages.status_messages import TellStatus
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.protocol.stack_dump import STACKS_TIMEOUT, STATES, main_frames, text_of
from mlaunch.protocol.visitors import (
    ALL_STACKS,
    ATTACH,
    DEBUG,
    PULSE,
    STACKS,
    STATUS,
    WATCH,
    WHY,
    Reception,
    answer,
    tell_launcher,
)

if TYPE_CHECKING:
    from mlaunch.protocol.messages.channels import AgentHears, AgentsEnd

_Tell = Callable[[Mapping[str, Any]], None]
_PLACES_TIMEOUT = 0.5  # seconds for ranks to tell where they are, before a signal asks those that have not
_LISTEN_DELAY = 0.05  # seconds: nobody looks at a launch that is over by then, and it is spared the work


class Inspection:
    """What one launch tells of itself. ``clock`` gives monotonic seconds."""

    def __init__(
        self, spec: LaunchSpec, ranks: Sequence[RankProcess], board: Board, clock: Callable[[], float]
    ) -> None:
        self._spec = spec
        self._ranks = ranks
        self._board = board
        self._clock = clock
        self._start = clock()
        self._reception = Reception(spec.context.environ, registry.name_of(spec.launch_id, spec.rank_start))
        self.facts: Callable[[], Mapping[str, object]] = dict  # of features, by their names
        self._visit = DebugVisit(lambda: self._spec)
        self._curious: list[tuple[_Tell, bytes]] = []  # those who wait for what ranks tell, with their word
        self._entered: EnteredRequests | None = None  # once somebody has asked why
        self._signal_at: float | None = None  # when those are asked by signals that have not told where they are
        self._answer_at: float | None = None  # when they get what there is
        self._listen_at: float | None = self._start + _LISTEN_DELAY

    @property
    def due(self) -> float | None:
        """When ``serve`` is to be called though nobody has come; None: it need not."""
        return min((at for at in (self._answer_at, self._signal_at, self._listen_at) if at is not None), default=None)

    @property
    def stopped_by(self) -> int | None:
        """The process that has asked the launch to end; None: none has.

        On one machine of an engine's, whose caller would have to be asked, a stop is an end.
        """
        cluster = self._spec.cluster
        if self._reception.stopped_by is None and cluster is not None and cluster.by_engine:
            return self._reception.asked_by
        return self._reception.stopped_by

    @property
    def stopped_with(self) -> str:
        """The command of who has asked the launch to end."""
        return "mlaunch debug" if self._visit.pid == self._reception.stopped_by else "mlaunch stop"

    @property
    def hold(self) -> HoldDeadline | None:
        """What who debugs makes of the call's deadline; None: nobody has."""
        return self._visit.hold

    def take_request(self) -> tuple[str, int] | None:
        """Returns what a command has asked a feature to do, and its process, once; None: none has."""
        return self._reception.take_request()

    def end_request(self) -> None:
        """Tells who asked for it that the call has stopped, where the ranks stay."""
        self._reception.let_stoppers_go()

    def fds(self) -> list[int]:
        return [*self._reception.fds(), *self._visit.fds()]

    def serve(self, ready: Collection[int], requests: StackRequests, questions: Questions, launcher: AgentsEnd) -> None:
        self._visit.serve(ready, questions, launcher)
        for visitor, word in self._reception.take(ready):
            tell: _Tell | None = functools.partial(answer, visitor)
            if word == DEBUG or word.startswith(ATTACH):
                tell = self._visit.take(visitor, word, questions)
            if tell is not None:
                self._hear(tell, word, requests, questions)
        self._visit.serve(set(), questions, launcher)
        if self._signal_at is not None and (self._clock() >= self._signal_at or not self._silent()):
            self._signal_at = None
            self._signal(self._silent(), requests)
        waits = self._signal_at is not None or requests or (self._entered is not None and self._entered.pending)
        if self._answer_at is not None and (not waits or self._clock() >= self._answer_at):
            for tell, word in self._curious:
                tell(self._status(word))
            self._curious, self._answer_at = [], None
        if self._listen_at is not None and self._clock() >= self._listen_at:
            self._listen_at = None
            self._reception.open()

    def learn(self, details: Details) -> None:
        """Takes in what call a prepared launch has got."""
        self._spec, self._start = with_details(self._spec, details), self._clock()

    def close(self) -> None:
        self._visit.close()
        self._reception.close()

    def obey(
        self, record: AgentHears | None, launcher: AgentsEnd, requests: StackRequests, questions: Questions
    ) -> bool:
        """Tells the launcher what it asks for; False if the record is about something else."""
        if isinstance(record, TellStatus):
            self._hear(functools.partial(tell_launcher, launcher, record.number), record.word, requests, questions)
        return isinstance(record, TellStatus)

    def _hear(self, tell: _Tell, word: bytes, requests: StackRequests, questions: Questions) -> None:
        if word == STATUS:
            tell(self._status(word))
            return
        self._entered = self._entered or EnteredRequests(questions)
        if word == ALL_STACKS:
            self._signal([rank for rank in self._ranks if rank.alive], requests, all_threads=True)
        elif not self._curious or not self._entered.with_places:  # else they get what others have asked for
            # By their control threads. A signal killed ranks that were importing, once in some thousand times
            # (SIGSEGV); only those that have not answered by _signal_at get one.
            self._entered.ask(place=word != PULSE)
            self._answer_at = self._clock() + STACKS_TIMEOUT
        if word in {WHY, STACKS, DEBUG} and self._signal_at is None:
            self._signal_at = self._clock() + _PLACES_TIMEOUT
            self._answer_at = self._signal_at + STACKS_TIMEOUT
        self._curious.append((tell, word))

    def _silent(self) -> list[RankProcess]:
        """Returns the ranks that have not told where they are."""
        told = {} if self._entered is None else self._entered.places
        return [rank for rank in self._ranks if rank.alive and rank.rank not in told]

    def _signal(self, ranks: Collection[RankProcess], requests: StackRequests, *, all_threads: bool = False) -> None:
        """Asks these by a signal."""
        for rank in ranks:
            requests.ask(rank, self._board[rank.local_rank], all_threads=all_threads)
        if ranks:
            self._answer_at = self._clock() + STACKS_TIMEOUT

    def _status(self, word: bytes) -> dict[str, Any]:
        spec = self._spec
        return {
            "id": spec.launch_id,
            "function": spec.name,
            "age": round(self._clock() - self._start, 3),
            "caller": spec.context.caller,
            "agent": os.getpid(),
            "cwd": spec.context.cwd,
            "argv": list(spec.context.argv),
            "source": spec.context.source,
            "given": spec.context.given,
            "call": self._call(),
            "world_size": spec.world_size,
            "restart_count": spec.restart_count,
            "features": self.facts(),
            "ranks": [self._of_rank(rank, word) for rank in self._ranks],
        }

    def _call(self) -> str | None:
        """Names what runs on ranks that stay; None: nothing does, or the ranks end with the function."""
        rests = all(self._board[rank.local_rank] is Phase.IDLE for rank in self._ranks)
        return None if rests or not self._spec.stays else self._board.name or None

    def _of_rank(self, rank: RankProcess, word: bytes) -> dict[str, Any]:
        phase = self._board[rank.local_rank]
        status: dict[str, Any] = {
            "rank": rank.rank,
            "pid": rank.pid,
            "device": self._spec.device(rank.local_rank) or "-",
            "place": self._board.place(rank.local_rank) or None,
            "state": _state(rank, phase),
        }
        if word != STATUS:
            status["marks"] = self._marks(rank, phase)
        if word == WATCH:
            status |= self._watched(rank)
        if word not in {STATUS, PULSE, WATCH}:
            told = None if self._entered is None or word == ALL_STACKS else self._entered.places.get(rank.rank)
            frames = main_frames(rank.stacks) if told is None else told
            status["stacks"] = (rank.stacks if told is None else text_of(told)) if rank.alive else ""
            status["frames"] = frames if rank.alive else []
            entered = None if self._entered is None else self._entered.told.get(rank.rank)
            status["entered"] = None if entered is None else dataclasses.asdict(entered)
            status["children"] = held_children(rank.pid) if rank.alive else []
            status["activity"] = activity(rank.pid) if rank.alive else {}
            status["asleep"] = asleep(rank.pid) if rank.alive else ""
        return status

    def _watched(self, rank: RankProcess) -> dict[str, Any]:
        """Says where it is and what it uses.

        ``seconds``: from the loop's beginning to its latest turn; ``still``: since then.
        """
        loop, places = self._board.loop(rank.local_rank), {} if self._entered is None else self._entered.places
        used = activity(rank.pid) if rank.alive else {}
        return {
            "frames": places.get(rank.rank, []) if rank.alive else [],
            "loop": {"number": loop.number, "done": loop.done, "total": loop.total, "seconds": loop.at - loop.start,
                     "still": self._clock() - loop.at, "description": loop.description},
            "cpu": used.get("threads", 0.0) + used.get("children", 0.0),
            "memory": resident(rank.pid) if rank.alive else 0,
        }  # fmt: skip

    def _marks(self, rank: RankProcess, phase: Phase) -> list[Any]:
        """Says how far it is: phase, loop, turns, operations; None for what it has not told."""
        loop = self._board.loop(rank.local_rank)
        told = None if self._entered is None else self._entered.told.get(rank.rank)
        turns = None if self._entered is None else self._entered.turns.get(rank.rank)
        entered = None if told is None else _begun(told)
        return [phase.value, loop.number, loop.done, turns, entered]


def _begun(operations: Operations) -> int:
    """Returns how many collectives and messages that is."""
    messages = (count for group in operations.groups for _, count in (*group.sent, *group.received))
    return sum(group.number for group in operations.groups) + sum(messages)


def _state(rank: RankProcess, phase: Phase) -> str:
    if rank.gone:
        return f"ended (it {rank.answer.value})" if rank.answer else "ended"
    if rank.answer is not None:
        return f"{phase.value} (it {rank.answer.value})"
    if rank.stopped:
        return "being stopped"
    held = STATES.get(state_of(rank.pid))
    return f"{phase.value} ({held})" if held else phase.value
