"""``mlaunch debug``: debug ranks of a launch that another process has made, over the launch's own socket."""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.base import linux
from mlaunch.base.text import in_two_units, name_ranks
from mlaunch.caller import interrupts, running_launches
from mlaunch.debug.caller import asking
from mlaunch.debug.caller.prompts import StoppedRanks, question, view_of
from mlaunch.debug.wire import COME, NAME, QUIT, stop_word
from mlaunch.protocol import registry
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.registry import VISIT

if TYPE_CHECKING:
    from mlaunch.debug.wire import DebuggersEnd

_ANSWER_TIMEOUT = 5.0  # seconds for an agent to answer a visitor
_MOMENT = 1.0  # seconds in which a rank that runs Python stops


class LaunchParts:
    """The parts of a launch on this machine, each with an agent; mostly one.

    ``names``: in the registry. While this is open, limits in the ranks are lifted.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._open: list[socket.socket] = []
        self._of_rank: dict[int, str] = {}
        self.told: list[Mapping[str, Any]] = []  # each agent's answer
        try:
            for name in names:
                self._enter(name)
        except BaseException:
            self.close()
            raise

    def _enter(self, name: str) -> None:
        connection = running_launches.connect(name)
        self._open.append(connection)
        terms = registry.ask(connection, _saying(COME), _ANSWER_TIMEOUT)
        with running_launches.connect(name) as another:  # the first is the visit, and stays open
            told = registry.ask(another, question(), _ANSWER_TIMEOUT)
        if terms is None or told is None:
            raise LookupError(f"the launch {name} has ended, or does not answer")
        if "refused" in terms:
            raise LookupError(terms["refused"])
        self._of_rank |= {rank["rank"]: name for rank in told["ranks"]}
        self.told.append({**terms, "ranks": told["ranks"]})

    def attach(self, rank: int) -> DebuggersEnd:
        """Return a channel to a rank, and stop it at its next line."""
        connection = running_launches.connect(self._of_rank[rank])
        connection.send(_saying(stop_word(rank)))
        return Channel.adopt(connection.detach())

    def end(self) -> list[str]:
        """End the launch, and wait for that; return the reasons of parts that refuse."""
        with contextlib.ExitStack() as stack:
            names = dict.fromkeys(self._of_rank.values())
            found = [stack.enter_context(running_launches.connect(name)) for name in names]
            answers = [registry.ask(connection, _saying(QUIT), None) for connection in found]
        return [answer["refused"] for answer in answers if answer is not None]

    def close(self) -> None:
        """Leave: limits are as before."""
        for connection in self._open:
            connection.close()
        self._open.clear()


class AttachedRanks:
    """The ranks that this process debugs. ``write`` shows a text."""

    def __init__(self, launch_id: str, name: str, parts: LaunchParts, write: Callable[[str], None]) -> None:
        self._launch_id = launch_id
        self._name = name
        self._parts = parts
        self._write = write
        self._stopped = StoppedRanks(name, write, self._tell_who)
        self._prompts = self._stopped.prompts
        self._begun = time.monotonic()
        self._late_at: float | None = None  # when to name the ranks that have not stopped
        self._awaited: set[int] = set()  # ranks that have not stopped yet

    def attach(self, ranks: Sequence[int]) -> None:
        """Ask these ranks to stop."""
        for rank in ranks:
            self._stopped.channels[rank] = self._parts.attach(rank)
        self._awaited = set(ranks)
        self._late_at = self._begun + _MOMENT
        told = [rank for part in self._parts.told for rank in part["ranks"]]
        limit = self._parts.told[0]["timeout"]
        self._write(f"{name_ranks(list(ranks))} of {self._name} to stop at the next line of Python; {_HOW}\n")
        self._write("".join(_waits(rank, limit) for rank in told))
        if not self._parts.told[0]["alone"]:
            self._write(_ELSEWHERE)

    def run(self) -> None:
        """Talk with ranks until they are gone. KeyboardInterrupt: the user leaves, and the ranks continue."""
        while self._stopped.channels:
            self._take(interrupts.wait_readable(self._fds(), self._timeout()))
            if self._prompts.quit is not None:
                self._end()
                return
            if self._late_at is not None and time.monotonic() >= self._late_at:
                self._late_at = None
                self._tell_late()
            while (found := self._prompts.next()) is not None:
                self._ask(*found)

    def close(self) -> None:
        """Close the channels: the ranks continue."""
        self._stopped.close()

    def _fds(self) -> list[int]:
        return [channel.fileno() for channel in self._stopped.channels.values()]

    def _timeout(self) -> float | None:
        late = None if self._late_at is None else max(0.0, self._late_at - time.monotonic())
        return min((due for due in (late, self._prompts.timeout()) if due is not None), default=None)

    def _take(self, ready: Sequence[int]) -> None:
        for rank, channel in list(self._stopped.channels.items()):
            if channel.fileno() in ready and not self._stopped.hear(rank):
                self._stopped.channels.pop(rank).close()
        self._awaited -= self._prompts.stopped().keys()
        self._awaited &= self._stopped.channels.keys()

    def _ask(self, rank: int, prompt: str) -> None:
        with contextlib.suppress(asking.WithdrawnError):
            self._stopped.obey(asking.ask(prompt, functools.partial(self._drive, rank)), rank)

    def _drive(self, rank: int, over: int) -> bool:
        """Take what ranks send until ``over`` can be read; False if the rank no longer waits for an answer."""
        while over not in (ready := linux.wait_readable([*self._fds(), over], None)):
            self._take(ready)
            if rank not in self._prompts.stopped():
                return False
        return True

    def _end(self) -> None:
        self._write("".join(f"{refused}\n" for refused in self._parts.end()) or "ended\n")

    def _status(self) -> list[Mapping[str, Any]]:
        """Ask what all ranks do."""
        return [rank for launch in running_launches.ask(question(), self._launch_id) for rank in launch["ranks"]]

    def _tell_who(self) -> None:
        self._stopped.tell_who(self._status())

    def _tell_late(self) -> None:
        """Print what the ranks do that have not stopped, as they run no Python."""
        for rank in self._status() if self._awaited else []:
            if rank["rank"] in self._awaited:
                since = in_two_units(time.monotonic() - self._begun)
                doing = view_of(rank).doing
                self._write(f"rank {rank['rank']} has run no line of yours for {since}: {doing}. {_ARMED}\n")


def _saying(word: str) -> bytes:
    return VISIT + f"{NAME} {word}".encode()


_ARMED = "It stops at the next one; Ctrl-C leaves it"
_HOW = (
    "limits of collectives that begin from now on do not count meanwhile, nor does the deadline. Ctrl-C and detach "
    "leave, and the ranks continue; q ends the launch"
)
_ELSEWHERE = "ranks on other machines cannot be debugged from here: there, limits and the deadline count\n"


def _waits(rank: Mapping[str, Any], limit: float | None) -> str:
    """Return until when a rank waits that is in a collective; "" for others."""
    view = view_of(rank)
    if not view.operation or limit is None:
        return ""
    at = time.strftime("%H:%M:%S", time.localtime(time.time() + limit))
    return (
        f"rank {view.rank} waits already, {view.doing}: this operation keeps its limit, and fails {limit:g} s "
        f"after it began, at {at} at the latest\n"
    )
