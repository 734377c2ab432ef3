"""A machine of a launch, in the caller: the stream to its member, and what the member has said about itself."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from mlaunch import _version
from mlaunch.base import linux
from mlaunch.base.exceptions import LaunchError
from mlaunch.base.text import printable
from mlaunch.engines.caller.placement import Ends
from mlaunch.engines.wire.frame_stream import FrameStream
from mlaunch.engines.wire.member_messages import (
    MARK,
    AskOffer,
    Listen,
    MemberAnswer,
    Offer,
    Reach,
    Reports,
    Rows,
    versions,
)
from mlaunch.protocol.board import Board
from mlaunch.protocol.messages import AgentSays, RankAnswered, RankGone, RankStarted

if TYPE_CHECKING:
    from mlaunch.engines.wire.member_streams import CallersStream

_TAIL = 20  # lines of its standard error that are kept
_READ = 65536
_KEPT = 4096  # bytes of such a line
_SENDING = 6  # times as long may a machine be silent that is still being sent something
_WORDS = 3  # lines of its standard error that are shown
_NAME, _LINE = 255, 1000  # bytes of a name, and of a line, that are shown


class Machine:
    """A machine; it owns its descriptors. ``number``: among the machines of the engine.

    ``place``, ``rank_start`` and ``prepared`` are set for each launch.
    """

    def __init__(self, number: int, ends: Ends) -> None:
        self.number = number
        self.stream: CallersStream = FrameStream(ends.stdout, ends.stdin, ends.secret)
        self.stderr = ends.stderr
        self.writes_here = ends.stderr >= 0  # otherwise one program writes for all, to that of the first machine
        self.host, self.pid = "", 0  # its member's
        self.prepared: Offer | None = None
        self.asked = 0  # how many questions
        self.answer: MemberAnswer | None = None  # to the last question
        self.place = 0  # among the machines of the launch
        self.rank_start = 0
        self.shift = 0.0  # seconds by which its clock is behind this machine's
        self.lost = False
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._line = b""
        if self.stderr >= 0:
            os.set_blocking(self.stderr, False)

    @property
    def given(self) -> Offer:
        """The machine's offer to the launch, once it has come."""
        if self.prepared is None:
            raise RuntimeError(f"host {self.host} was not asked what it can give")
        return self.prepared

    @property
    def ranks(self) -> range:
        """Its global ranks."""
        return range(self.rank_start, self.rank_start + self.given.local_world_size)

    def ask(self, question: AskOffer | Listen | Reach) -> None:
        """Send a question. Its answer has the same number."""
        self.asked, self.answer = self.asked + 1, None
        self.stream.send(dataclasses.replace(question, number=self.asked))

    def greet(self) -> bool:
        """Read the member's first line, if it is there.

        Raises:
            EOFError: The member has ended without that line.
            LaunchError: The member's versions differ from this process's.
        """
        hello: dict[str, Any] = {}
        while "host" not in hello:
            line = self.stream.skip_to(MARK)
            if line is None:
                return False
            with contextlib.suppress(ValueError):  # not a member's: a shell's error, perhaps
                hello = dict(json.loads(line))
        self.host, pid = printable(str(hello["host"]), _NAME), hello.get("pid")
        self.pid = pid if isinstance(pid, int) else 0
        for what, ours in versions().items():
            self._compare(
                what, printable(str(hello.get(what, "")), _NAME), ours, parts=None if what == "mlaunch" else 2
            )
        return True

    def is_silent(self, seconds: float) -> bool:
        """True if nothing has come for ``seconds``, not even data that is not read yet.

        A machine that is still being sent something (large arguments over a slow network) has longer.
        """
        patience = seconds * (_SENDING if self.stream.unsent else 1)
        quiet = time.monotonic() >= self.stream.heard_at + patience
        return quiet and not linux.wait_readable([self.stream.incoming], 0.0)

    def _compare(self, what: str, theirs: str, ours: str, *, parts: int | None) -> None:
        known = theirs and ours  # if torch is not installed, its import will fail with that message
        if known and theirs.split(".")[:parts] != ours.split(".")[:parts]:
            raise LaunchError(
                f"host {self.host} has {what} {theirs}, and this process has {what} {ours}: functions and values "
                f"cannot be sent between them; use the same on both (the engine's option python= chooses the "
                f"interpreter there)"
            )

    def hear_stderr(self) -> bool:
        """Read and keep the machine's standard error; False once it is closed."""
        try:
            data = os.read(self.stderr, _READ)
        except BlockingIOError:
            return True
        *lines, line = (self._line + data).split(b"\n")
        self._line = line[-_KEPT:]
        self._tail += [shown(line[-_KEPT:]).rstrip() for line in lines]
        if data:
            return True
        self._tail += [shown(self._line)] if self._line else []
        os.close(self.stderr)
        self.stderr = -1
        return False

    def shifted(self, record: AgentSays) -> AgentSays:
        """Return its agent's record with times of this machine's clock, and with the host where a rank has started."""
        if isinstance(record, RankStarted):
            return dataclasses.replace(record, at=record.at + self.shift, host=self.host)
        if isinstance(record, RankAnswered | RankGone):
            return dataclasses.replace(record, at=record.at + self.shift)
        return record

    def note_on(self, board: Board, record: Rows | Reports) -> None:
        """Copy news of its board to the board of all ranks."""
        if isinstance(record, Rows):
            for rank, row in zip(self.ranks, record.rows, strict=True):
                board.take_row(rank, row, self.shift)
        else:
            for rank, found in zip(self.ranks, record.found, strict=True):
                for data in found:
                    board.ring(rank).add(data)

    def last_words(self) -> str:
        """Return the last lines of its standard error."""
        while self.stderr >= 0 and self._more():
            pass
        return "\n".join(line for line in [*self._tail, shown(self._line)] if line.strip())

    def _more(self) -> bool:
        before = len(self._tail), self._line
        return self.hear_stderr() and (len(self._tail), self._line) != before

    def close(self) -> None:
        """Close the descriptors. May be called again."""
        self.stream.close()
        stderr, self.stderr = self.stderr, -1
        if stderr >= 0:
            os.close(stderr)


def advice(python: str, fate: str, words: str) -> list[str]:
    """Return hints about a member that ended before it had started, by its standard error; [] if none fit."""
    if "No module named" in words and "mlaunch" in words:
        install = shlex.join([python, "-m", "pip", "install", f"mlaunch=={_version.__version__}"])
        return [f"mlaunch must be installed there: {install}"]
    if fate.startswith("ssh to ") and fate.endswith("code 255"):  # ssh's own exit code
        host = fate.split()[2]
        if not words:  # if ssh itself fails, it prints why
            return [f"mlaunch was probably killed on {host}, by somebody, or because there was no memory left"]
        return [f"ssh must reach {host} without a question: try `ssh -o BatchMode=yes {host} true` here"]
    return []


def last_lines(words: str) -> list[str]:
    """Return the last lines, and mlaunch's own last line, which is more useful than what an engine prints later."""
    lines = words.splitlines()
    ours = [number for number, line in enumerate(lines) if line.startswith("mlaunch: ")][-1:]
    before = [lines[number] for number in ours if number < len(lines) - _WORDS]
    return [*before, *lines[len(before) - _WORDS :]]


def shown(line: bytes) -> str:
    """Return a line of another program's output, made safe for a terminal."""
    return printable(line.decode(errors="replace").rstrip(), _LINE)
