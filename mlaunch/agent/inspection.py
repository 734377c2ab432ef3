"""Answers to those who ask a running launch how it is, or to end (``mlaunch ps``, ``stop``), and to its launcher.

A feature answers what ranks do, and why they wait (``AgentPart.asked``).
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.agent.rank_process import RankProcess, state_of
from mlaunch.base.deadline import NEVER
from mlaunch.base.frames import STATES
from mlaunch.protocol import registry
from mlaunch.protocol.board import Board
from mlaunch.protocol.messages import AgentHears, AgentsEnd, Phase, Question
from mlaunch.protocol.registry import STATUS, Reception, answer, tell_launcher
from mlaunch.protocol.spec import Details, LaunchSpec, with_details

if TYPE_CHECKING:
    from mlaunch.core.parts import TellLooker

_LISTEN_DELAY = 0.05  # seconds: a shorter launch is spared the work


class Inspection:
    """The answers of one launch. ``clock`` gives monotonic seconds."""

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
        self.ask: Callable[[bytes, TellLooker], None]  # a feature, what this does not tell
        self.due = self._start + _LISTEN_DELAY  # when ``serve`` begins to listen; ``NEVER``: it does

    @property
    def stopped_by(self) -> int | None:
        """The process that has asked the launch to end; None: none has.

        On one machine of an engine's, whose caller would have to be asked, a stop is an end.
        """
        cluster = self._spec.cluster
        if self._reception.stopped_by is None and cluster is not None and cluster.by_engine:
            return self._reception.asked_by
        return self._reception.stopped_by

    def launch(self) -> LaunchSpec:
        """Return the launch, as far as it is known."""
        return self._spec

    def take_guests(self) -> list[tuple[socket.socket, str, str]]:
        """Return the new visitors that stay with a feature: the connection, the feature and a word for it."""
        return self._reception.take_guests()

    def take_request(self) -> tuple[str, int] | None:
        """Return the request of a command to a feature, once: the feature, the command's pid; None if there is none."""
        return self._reception.take_request()

    def end_request(self) -> None:
        """Tell the processes that asked for a stop that the call is over. Called if the ranks stay."""
        self._reception.let_stoppers_go()

    def fds(self) -> list[int]:
        return self._reception.fds()

    def serve(self, ready: Collection[int]) -> bool:
        """Answer visitors; return True if one has come or has said something."""
        has_come = not set(ready).isdisjoint(self._reception.fds())
        if has_come:
            for visitor, word in self._reception.take(ready):
                self._answer(word, functools.partial(answer, visitor))
        if self._clock() >= self.due:
            self.due = NEVER
            self._reception.open()
        return has_come

    def learn(self, details: Details) -> None:
        """Describe a prepared launch by its call from now on."""
        self._spec, self._start = with_details(self._spec, details), self._clock()

    def close(self) -> None:
        self._reception.close()

    def obey(self, record: AgentHears | None, launcher: AgentsEnd) -> bool:
        """Answer the launcher; False if the record is about something else."""
        if isinstance(record, Question) and isinstance(record.about, bytes):
            self._answer(record.about, functools.partial(tell_launcher, launcher, record.number))
        return isinstance(record, Question)

    def _answer(self, word: bytes, tell: TellLooker) -> None:
        if word == STATUS:
            tell(self.status())
        else:
            self.ask(word, tell)

    def status(self) -> dict[str, Any]:
        """Return what ``mlaunch ps`` shows."""
        spec = self._spec
        return {
            "id": spec.launch_id,
            "function": spec.call.name,
            "age": round(self._clock() - self._start, 3),
            "caller": spec.context.caller,
            "agent": os.getpid(),
            "cwd": spec.context.cwd,
            "argv": list(spec.context.argv),
            "source": spec.context.source,
            "given": spec.context.given,
            "call": self._call(),
            "world_size": spec.world_size,
            "restart_count": spec.restarts.count,
            "features": self.facts(),
            "ranks": [self._of_rank(rank) for rank in self._ranks],
        }

    def _call(self) -> str | None:
        """Return the name of what runs on ranks that stay; None: nothing does, or the ranks end with the function."""
        rests = all(self._board[rank.local_rank] is Phase.IDLE for rank in self._ranks)
        return None if rests or not self._spec.stays else self._board.name or None

    def _of_rank(self, rank: RankProcess) -> dict[str, Any]:
        phase = self._board[rank.local_rank]
        return {
            "rank": rank.rank,
            "pid": rank.pid,
            "device": self._spec.device(rank.local_rank) or "-",
            "place": self._board.place(rank.local_rank) or None,
            "state": _state(rank, phase),
        }


def _state(rank: RankProcess, phase: Phase) -> str:
    if rank.gone:
        return f"ended (it {rank.answer.value})" if rank.answer else "ended"
    if rank.answer is not None:
        return f"{phase.value} (it {rank.answer.value})"
    if rank.stopped:
        return "being stopped"
    held = STATES.get(state_of(rank.pid))
    return f"{phase.value} ({held})" if held else phase.value
