"""Answers to those who ask a running launch what it is doing (``mlaunch ps``, ``mlaunch stacks``).

A visitor sends one word and receives a memfd with one JSON object. Nothing that a visitor does, or fails to do, holds
up the launch; stacks come from signals to the ranks, which go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Collection, Sequence
from typing import Any

from mlaunch.agent.ranks import RankProcess
from mlaunch.agent.stack_requests import StackRequests, state_of
from mlaunch.protocol import registry
from mlaunch.protocol.board import Board
from mlaunch.protocol.messages import Phase
from mlaunch.protocol.prepared import Details, with_details
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.protocol.stack_dump import STACKS_TIMEOUT, STATES, main_frames

STATUS, STACKS, ALL_STACKS = b"status", b"stacks", b"all stacks"
_WORD_LIMIT = 64
_LISTEN_DELAY = 0.05  # seconds: nobody looks at a launch that is over by then, and it is spared the work


class Inspection:
    """The listening end of one launch. ``clock`` gives monotonic seconds."""

    def __init__(
        self,
        spec: LaunchSpec,
        ranks: Sequence[RankProcess],
        board: Board,
        clock: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._ranks = ranks
        self._board = board
        self._clock = clock
        self._start = clock()
        self._visitors: dict[int, socket.socket] = {}
        self._curious: list[socket.socket] = []  # those who wait for stacks
        self._answer_at: float | None = None  # when they get what there is
        self._listen_at: float | None = self._start + _LISTEN_DELAY
        self._listener: socket.socket | None = None

    @property
    def due(self) -> float | None:
        """When ``serve`` is to be called though nobody has come; None: it need not."""
        return min((at for at in (self._answer_at, self._listen_at) if at is not None), default=None)

    def fds(self) -> list[int]:
        listener = [] if self._listener is None else [self._listener.fileno()]
        return [*listener, *self._visitors]

    def serve(self, ready: Collection[int], requests: StackRequests) -> None:
        for fd in self._visitors.keys() & set(ready):
            self._hear(self._visitors.pop(fd), requests)
        if self._listener is not None and self._listener.fileno() in ready:  # last: who comes may get a ready number
            self._welcome(self._listener)
        if self._answer_at is not None and (not requests or self._clock() >= self._answer_at):
            for visitor in self._curious:
                self._answer(visitor, self._status(with_stacks=True))
            self._curious, self._answer_at = [], None
        if self._listen_at is not None and self._clock() >= self._listen_at:
            self._listen()

    def _listen(self) -> None:
        self._listen_at = None
        with contextlib.suppress(OSError):  # a full disk, a directory that is not ours: a launch needs no visitors
            self._listener = registry.listen(self._spec.context.environ, self._spec.launch_id)

    def learn(self, details: Details) -> None:
        """Takes in what call a prepared launch has got."""
        self._spec, self._start = with_details(self._spec, details), self._clock()

    def close(self) -> None:
        if self._listener is not None:
            registry.remove(self._spec.context.environ, self._spec.launch_id)

    def _welcome(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            visitor, _ = listener.accept()
            self._visitors[visitor.fileno()] = visitor

    def _hear(self, visitor: socket.socket, requests: StackRequests) -> None:
        try:
            word = visitor.recv(_WORD_LIMIT)
        except OSError:
            word = b""
        if word == STATUS:
            self._answer(visitor, self._status(with_stacks=False))
        elif word in {STACKS, ALL_STACKS}:
            for rank in self._ranks:
                if rank.alive:
                    requests.ask(rank, self._board[rank.local_rank], all_threads=word == ALL_STACKS)
            self._curious.append(visitor)
            self._answer_at = self._clock() + STACKS_TIMEOUT
        else:
            visitor.close()

    def _answer(self, visitor: socket.socket, status: dict[str, Any]) -> None:
        with contextlib.suppress(OSError), visitor:
            memfd = os.memfd_create("mlaunch-status", os.MFD_CLOEXEC)
            with open(memfd, "w") as file:
                json.dump(status, file)
                file.flush()
                socket.send_fds(visitor, [b"."], [memfd])

    def _status(self, *, with_stacks: bool) -> dict[str, Any]:
        spec = self._spec
        return {
            "id": spec.launch_id,
            "function": spec.name,
            "age": round(self._clock() - self._start, 3),
            "caller": spec.context.caller,
            "agent": os.getpid(),
            "cwd": spec.context.cwd,
            "argv": list(spec.context.argv),
            "world_size": spec.world_size,
            "restart_count": spec.restart_count,
            "ranks": [self._of_rank(rank, with_stacks=with_stacks) for rank in self._ranks],
        }

    def _of_rank(self, rank: RankProcess, *, with_stacks: bool) -> dict[str, Any]:
        phase = self._board[rank.local_rank]
        status: dict[str, Any] = {
            "rank": rank.rank,
            "pid": rank.pid,
            "device": self._spec.device(rank.local_rank) or "-",
            "state": _state(rank, phase),
        }
        if with_stacks:
            status["stacks"] = rank.stacks if rank.alive else ""
            status["frames"] = main_frames(rank.stacks) if rank.alive else []
        return status


def _state(rank: RankProcess, phase: Phase) -> str:
    if rank.gone:
        return f"ended (it {rank.answer.value})" if rank.answer else "ended"
    if rank.answer is not None:
        return f"{phase.value} (it {rank.answer.value})"
    if rank.stopped:
        return "being stopped"
    held = STATES.get(state_of(rank.pid))
    return f"{phase.value} ({held})" if held else phase.value
