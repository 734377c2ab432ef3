"""The visitor who comes to a running launch with a debugger (``mlaunch debug``): one at a time, on a kept connection.

While that is open, limits of collectives that begin are lifted in all ranks here, and neither the deadline counts nor a
stall. Each rank that is to stop gets a connection of its own, on which it talks with the visitor past the agent.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from mlaunch.agent.questions import Questions
from mlaunch.protocol import visitors
from mlaunch.protocol.messages.control_messages import Attach, HoldLimits
from mlaunch.protocol.messages.debug_messages import HoldDeadline, Visited
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.protocol.visitors import ATTACH, DEBUG

if TYPE_CHECKING:
    from mlaunch.protocol.messages.channels import AgentsEnd

_Tell = Callable[[Mapping[str, Any]], None]


class DebugVisit:
    """Of one launch. ``hold``: what the visitor makes of the call's deadline; None: nobody has come. ``pid``: the last
    one's; 0: there was none."""

    def __init__(self, launch: Callable[[], LaunchSpec]) -> None:
        self._launch = launch
        self._visitor: socket.socket | None = None
        self.pid = 0
        self._untold: list[Visited] = []
        self.hold: HoldDeadline | None = None

    def fds(self) -> list[int]:
        """Returns what is to be watched."""
        return [] if self._visitor is None else [self._visitor.fileno()]

    def take(self, visitor: socket.socket, word: bytes, questions: Questions) -> _Tell | None:
        """Takes in who has come, and the connection. Returns what tells him how the launch stands, if that is asked."""
        refused = self._refusal(word, questions)
        if refused:
            visitors.answer(visitor, {"refused": refused})
        elif word == DEBUG:
            self._begin(visitor, questions)
            return self._tell
        else:
            rank = int(word.removeprefix(ATTACH))
            # The connection itself goes to the rank: what is said there never passes this process, which keeps
            # supervising.
            questions.tell(rank, Attach(rank, f"rank {rank} of {self._launch().call.name}"), [visitor.fileno()])
            visitor.close()
        return None

    def serve(self, ready: Collection[int], questions: Questions, launcher: AgentsEnd) -> None:
        """Takes in that the visitor is gone, and tells the launcher of it."""
        if self._visitor is not None and self._visitor.fileno() in ready:
            self._end(questions)
        for record in self._untold:
            launcher.try_send(record)
        self._untold.clear()

    def close(self) -> None:
        """Lets go of the visitor."""
        if self._visitor is not None:
            self._visitor.close()
            self._visitor = None

    def _refusal(self, word: bytes, questions: Questions) -> str:
        """Says why not; "" if he may."""
        spec = self._launch()
        if spec.debug:
            return f"{spec.call.name} was called with debug=: its ranks' debugger is where that was"
        if word == DEBUG:
            return "" if self._visitor is None else f"{spec.call.name} is debugged already, by process {self.pid}"
        rank = int(word.removeprefix(ATTACH))
        known = self._visitor is not None and rank in questions.ranks()
        return (
            ""
            if known
            else f"rank {rank} of {spec.call.name} cannot be asked: it has ended, or runs no Python any more"
        )

    def _begin(self, visitor: socket.socket, questions: Questions) -> None:
        self._visitor, self.pid = visitor, visitors.pid_of(visitor)
        self._change(questions, held=True)

    def _end(self, questions: Questions) -> None:
        self.close()
        # By the end of a connection, so that a visitor who is killed holds no deadline either.
        self._change(questions, held=False)

    def _change(self, questions: Questions, *, held: bool) -> None:
        self.hold = HoldDeadline(held)
        # Not told at once: whoever serves this has the channel to the launcher only then.
        self._untold.append(Visited(held, self.pid))
        for rank in questions.ranks():
            questions.tell(rank, HoldLimits(held))

    def _tell(self, status: Mapping[str, Any]) -> None:
        if self._visitor is not None:
            with contextlib.suppress(OSError):  # he is gone
                visitors.send(self._visitor, {**status, "timeout": self._launch().timeout, "alone": self._is_alone()})

    def _is_alone(self) -> bool:
        """Tells whether all ranks are here."""
        spec = self._launch()
        return spec.local_world_size == spec.world_size
