"""The debugger's part in the agent: pass channels on to ranks, hold the deadline, take visitors.

There is one visitor (``mlaunch debug``) at a time, on a connection that stays open. Meanwhile limits of collectives
that begin are lifted in all ranks here, and neither the deadline nor a stall counts. Each rank that is to stop gets a
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
from mlaunch.protocol import failures, registry

if TYPE_CHECKING:
    from mlaunch.agent.scene import Scene


class DebugVisits(AgentPart):
    """The feature's part of one launch."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._visitor: socket.socket | None = None
        self._pid = 0  # the visitor's
        self._leaving: list[socket.socket] = []  # visitors that have ended the launch and wait for its end

    def hear(self, word: object, _call: int, *fds: int) -> None:
        if isinstance(word, HoldDeadline):
            self._scene.hold_deadline(held=word.held)
        elif isinstance(word, OpenPrompt):
            self._scene.tell(word.rank, word, fds)

    def welcome(self, visitor: socket.socket, word: str) -> None:
        rank, refused = rank_of(word), self._refusal(word)
        if refused:
            registry.answer(visitor, {"refused": refused})
        elif word == COME:
            self._begin(visitor)
        elif rank is not None:
            # The connection itself goes to the rank, so that this process need not pass lines on.
            who = f"rank {rank} of {self._scene.spec.call.name}"
            self._scene.tell(rank, OpenPrompt(rank, who, at_once=True), [visitor.fileno()])
            visitor.close()
        else:
            self._leaving.append(visitor)
            self._scene.fail(failures.from_stop(registry.pid_of(visitor), "mlaunch debug"), whole=True)

    def fds(self) -> list[int]:
        return [] if self._visitor is None else [self._visitor.fileno()]

    def take_steps(self) -> None:
        if self._visitor is None:
            return
        # By the end of the connection: a visitor that is killed does not hold the deadline.
        if linux.wait_readable(self.fds(), 0.0):
            self._visitor.close()
            self._visitor = None
            self._change(held=False)
        else:
            self._scene.hold_deadline(held=True)  # also of the next call, on ranks that stay

    def close(self) -> None:
        for visitor in self._leaving + ([] if self._visitor is None else [self._visitor]):
            visitor.close()

    def _refusal(self, word: str) -> str:
        """Return why a visitor is refused; "" if it is not."""
        name, rank = self._scene.spec.call.name, rank_of(word)
        if has_prompts(self._scene.sections):
            return f"{name} was called with debug=: its ranks' prompts are where that call was made"
        if word == COME:
            return "" if self._visitor is None else f"{name} is debugged already, by process {self._pid}"
        if word == QUIT or (self._visitor is not None and rank in self._scene.known()):
            return ""
        return f"rank {rank} of {name} cannot be asked: it has ended, or no longer runs Python"

    def _begin(self, visitor: socket.socket) -> None:
        self._visitor, self._pid = visitor, registry.pid_of(visitor)
        self._change(held=True)
        spec = self._scene.spec
        with contextlib.suppress(OSError):  # the visitor is gone
            alone = spec.local_world_size == spec.world_size
            registry.send(visitor, {"timeout": spec.timeout, "alone": alone})

    def _change(self, *, held: bool) -> None:
        self._scene.hold_deadline(held=held)
        self._scene.say(Visited(held, self._pid))
        for rank in self._scene.known():
            self._scene.tell(rank, HoldLimits(held))


def part(scene: Scene) -> DebugVisits:
    """Return the part of a launch that is debugged."""
    return DebugVisits(scene)
