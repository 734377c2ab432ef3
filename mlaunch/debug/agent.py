"""A debugger's part in the agent: it passes channels on to ranks, holds the deadline, and takes visitors.

Of those (``mlaunch debug``) there is one at a time, on a connection that stays open. Meanwhile limits of collectives
that begin are lifted in all ranks here, and neither the deadline counts nor a stall. Each rank that is to stop gets a
connection of its own, on which it talks with the visitor past the agent.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from mlaunch.base import linux
from mlaunch.core.parts import AgentPart
from mlaunch.debug.wire import (
    COME,
    QUIT,
    HoldDeadline,
    HoldLimits,
    OpenPrompt,
    Visited,
    has_prompts,
    rank_of,
)
from mlaunch.protocol import failures, visitors

if TYPE_CHECKING:
    from mlaunch.agent.scene import Scene


class DebugVisits(AgentPart):
    """Of one launch."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._visitor: socket.socket | None = None
        self._pid = 0  # the visitor's
        self._leaving: list[socket.socket] = []  # those who have ended the launch: they wait for its end

    def hear(self, word: object, _call: int, *fds: int) -> None:
        if isinstance(word, HoldDeadline):
            self._scene.hold_deadline(held=word.held)
        elif isinstance(word, OpenPrompt):
            self._scene.tell(word.rank, word, fds)

    def welcome(self, visitor: socket.socket, word: str) -> None:
        rank, refused = rank_of(word), self._refusal(word)
        if refused:
            visitors.answer(visitor, {"refused": refused})
        elif word == COME:
            self._begin(visitor)
        elif rank is not None:
            # The connection itself goes to the rank: what is said there never passes this process, which keeps
            # supervising.
            who = f"rank {rank} of {self._scene.spec.call.name}"
            self._scene.tell(rank, OpenPrompt(rank, who, at_once=True), [visitor.fileno()])
            visitor.close()
        else:
            self._leaving.append(visitor)
            self._scene.fail(failures.from_stop(visitors.pid_of(visitor), "mlaunch debug"), whole=True)

    def fds(self) -> list[int]:
        return [] if self._visitor is None else [self._visitor.fileno()]

    def take_steps(self) -> None:
        if self._visitor is None:
            return
        # By the end of a connection, so that a visitor who is killed holds no deadline either.
        if linux.wait_readable(self.fds(), 0.0):
            self._visitor.close()
            self._visitor = None
            self._change(held=False)
        else:
            self._scene.hold_deadline(held=True)  # that of another call, too, on ranks that stay

    def close(self) -> None:
        for visitor in self._leaving + ([] if self._visitor is None else [self._visitor]):
            visitor.close()

    def _refusal(self, word: str) -> str:
        """Return why not; "" if the visitor may."""
        name, rank = self._scene.spec.call.name, rank_of(word)
        if has_prompts(self._scene.sections):
            return f"{name} was called with debug=: its ranks' debugger is where that was"
        if word == COME:
            return "" if self._visitor is None else f"{name} is debugged already, by process {self._pid}"
        if word == QUIT or (self._visitor is not None and rank in self._scene.known()):
            return ""
        return f"rank {rank} of {name} cannot be asked: it has ended, or runs no Python any more"

    def _begin(self, visitor: socket.socket) -> None:
        self._visitor, self._pid = visitor, visitors.pid_of(visitor)
        self._change(held=True)
        spec = self._scene.spec
        with contextlib.suppress(OSError):  # the visitor is gone
            alone = spec.local_world_size == spec.world_size
            visitors.send(visitor, {"timeout": spec.timeout, "alone": alone})

    def _change(self, *, held: bool) -> None:
        self._scene.hold_deadline(held=held)
        self._scene.say(Visited(held, self._pid))
        for rank in self._scene.known():
            self._scene.tell(rank, HoldLimits(held))


def part(scene: Scene) -> DebugVisits:
    """Return what a launch has that is debugged."""
    return DebugVisits(scene)
