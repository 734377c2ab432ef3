"""The machines of a call, from the request for them until they are given back: questions, ends, heartbeats."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlaunch import _version
from mlaunch.base import linux
from mlaunch.base.exceptions import LaunchError, LaunchTimeout
from mlaunch.base.text import printable
from mlaunch.caller import interrupts
from mlaunch.engines.caller.placement import Ends, Placement, wait_for
from mlaunch.engines.wire import (
    MARK,
    AskOffer,
    CallersStream,
    Heartbeat,
    Listen,
    MemberAnswer,
    NoOffer,
    Offer,
    Reach,
    Reports,
    Rows,
    command_of,
    versions,
)
from mlaunch.engines.wire.frame_stream import FrameStream, NoiseError
from mlaunch.protocol.board import Board
from mlaunch.protocol.messages import AgentSays, RankAnswered, RankGone, RankStarted

MemberQuestion = AskOffer | Listen | Reach
_LAST_WORDS_TIMEOUT = 2.0  # seconds to read what a member that has ended wrote
_TAIL = 20  # lines of a machine's standard error that are kept
_READ = 65536
_KEPT = 4096  # bytes of such a line
_SENDING = 6  # times as long may a machine be silent that is still being sent something
_WORDS = 3  # lines of a machine's standard error that are shown
_NAME, _LINE = 255, 1000  # bytes of a name, and of a line, that are shown
BEATS = 5  # heartbeats in the time after which a machine leaves, at least
_LONGEST = 10.0  # seconds between two: they also show that a machine does not answer


class Machine:
    """A machine of a launch: the stream to its member, and what the member has said about itself.

    It owns its descriptors. ``number``: among the machines of the engine. ``place``, ``rank_start`` and ``offered``
    are set for each launch.
    """

    def __init__(self, number: int, ends: Ends) -> None:
        self.number = number
        self.stream: CallersStream = FrameStream(ends.stdout, ends.stdin, ends.secret)
        self.stderr = ends.stderr
        self.writes_here = ends.stderr >= 0  # otherwise one program writes for all, to that of the first machine
        self.host, self.pid = "", 0  # its member's
        self.offered: Offer | None = None
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
    def offer(self) -> Offer:
        """The machine's offer to the launch, once it has come."""
        if self.offered is None:
            raise RuntimeError(f"host {self.host} was not asked what it can give")
        return self.offered

    @property
    def ranks(self) -> range:
        """Its global ranks."""
        return range(self.rank_start, self.rank_start + self.offer.local_world_size)

    def ask(self, question: MemberQuestion) -> None:
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
        self._tail += [printable_line(line[-_KEPT:]).rstrip() for line in lines]
        if data:
            return True
        self._tail += [printable_line(self._line)] if self._line else []
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
        return "\n".join(line for line in [*self._tail, printable_line(self._line)] if line.strip())

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


def printable_line(line: bytes) -> str:
    """Return a line of another program's output, made safe for a terminal."""
    return printable(line.decode(errors="replace").rstrip(), _LINE)


class PlacedMachines:
    """The machines of a launch, which another object may hold. Asks them questions, and finds out why one has ended.

    ``n_gpus``: ranks on each, if a call does not say it; ``heartbeat_timeout``: the engine's.
    """

    def __init__(self, n_gpus: int | None, heartbeat_timeout: float | None) -> None:
        self.n_gpus, self.heartbeat_timeout = n_gpus, heartbeat_timeout
        self.placement: Placement | None = None
        self.meets_at = ""  # the address of the first machine that all others reach, once they have tried
        self.machines: list[Machine] = []

    @property
    def hosts(self) -> list[str]:
        """The names of the machines, in the order of their ranks; [] before they are there, and after."""
        return [machine.host for machine in self.machines]

    def open(self, timeout: float, tell: Callable[[str], None] = lambda _: None) -> None:
        """Wait until the machines are there; see ``Machines``."""

    def renew(self) -> None:
        """If a machine is lost, and others can be had, make the next ``open`` get them."""

    def preempted(self) -> bool:
        """True if the engine has preempted the machines, or is about to, and would give others."""
        return False

    def kill(self) -> None:
        """End all that runs on the machines."""
        for machine in self.machines:
            machine.lost = True
            machine.stream.hang_up()

    def close(self) -> None:
        """Give the machines back, if they are this launch's own."""

    def ask_offers(self, order: AskOffer, timeout: float) -> None:
        """Ask all machines what they can give to a launch. They must answer within ``timeout`` seconds.

        Raises:
            LaunchError: A machine cannot give what is asked for, or has ended.
        """
        for machine in self.machines:
            machine.offered = None
        self.ask(self.machines, order, timeout)
        start = 0
        for place, machine in enumerate(self.machines):
            machine.place, machine.rank_start = place, start
            start += len(machine.ranks)

    def ask(self, machines: Sequence[Machine], question: MemberQuestion, timeout: float) -> list[Any]:
        """Return the machines' answers, due within ``timeout`` seconds. LaunchError as for ``ask_offers``."""
        for machine in machines:
            asked = self._for(machine, question) if isinstance(question, AskOffer) else question
            machine.ask(asked)
        waiting, until = list(machines), time.monotonic() + timeout
        while waiting:
            for machine in waiting:
                self._hear(machine)  # data that came with its first line is not signalled again
            waiting = [machine for machine in waiting if machine.answer is None]
            if waiting:
                self.wait(waiting, until, timeout)
        return [machine.answer for machine in machines]

    def _for(self, machine: Machine, order: AskOffer) -> AskOffer:
        size = self.placement.sizes[machine.number] if self.placement is not None else None
        given = size or order.options.get("n_gpus") or self.n_gpus
        return replace(order, options={**order.options, "n_gpus": given})

    def _hear(self, machine: Machine) -> None:
        try:
            found = machine.stream.receive()
        except NoiseError as error:
            machine.lost = True
            raise noise_error(machine, error) from None
        except EOFError:
            machine.lost = True
            fate, words = self.end_of(machine)
            wrote = "".join(f"\n  it wrote: {line}" for line in last_lines(words))
            raise LaunchError(f"host {machine.host} was lost: {fate or 'its member has ended'}{wrote}") from None
        for record, _ in found:
            if not isinstance(record, MemberAnswer) or record.number != machine.asked:
                continue  # a late answer, for a call that was given up
            if isinstance(record, NoOffer):
                raise LaunchError(f"host {machine.host} cannot take part: {record.text}")
            if isinstance(record, Offer):
                machine.offered = record
                machine.shift = time.monotonic() - record.clock
            machine.answer = record

    def end_of(self, machine: Machine) -> tuple[str, str]:
        """Return why a member has ended, in the engine's words, and what the member wrote last."""
        # srun and ssh print the reason only after the stream has ended.
        until = time.monotonic() + _LAST_WORDS_TIMEOUT
        fate = self.placement.fate(machine.number) if self.placement is not None else ""
        writer = next((one for one in (machine, *self.machines) if one.writes_here), machine)
        while writer.stderr >= 0 and time.monotonic() < until:
            interrupts.wait_readable([writer.stderr], until - time.monotonic())
            writer.hear_stderr()
        return fate, writer.last_words()

    def wait(self, machines: Sequence[Machine], until: float, timeout: float) -> None:
        """Wait until a machine has sent something, or until the time ``until``; read their standard error meanwhile.

        ``timeout``: seconds, for the error's text.
        """
        errors = {machine.stderr: machine for machine in machines if machine.stderr >= 0}
        fds = [*(machine.stream.fileno() for machine in machines), *errors]
        left = until - time.monotonic()  # checked here: a member that prints without end can always be read
        ready = interrupts.wait_readable(fds, left) if left > 0 else []
        if not ready:
            for machine in machines:
                machine.lost = True  # for later calls, too
            names = ", ".join(machine.host or f"machine {machine.number}" for machine in machines)
            words = "\n".join(word for machine in machines if (word := machine.last_words()))
            raise LaunchTimeout(
                f"mlaunch has not answered on {names} within join_timeout={timeout:g} s; is it slow to start there, or "
                f"does something ask for input?" + (words and f" It wrote:\n{words}")
            )
        for fd in ready:
            if fd in errors:
                errors[fd].hear_stderr()


def noise_error(machine: Machine, error: NoiseError) -> LaunchError:
    """Return the error for a machine that has sent something that is not from mlaunch."""
    who = f"host {machine.host}" if machine.host else f"machine {machine.number}"
    return LaunchError(f"{who} {error}{error.hint}")


class Machines(PlacedMachines):
    """Machines that an engine gives.

    ``place``: the engine's method; ``python``: the interpreter there; ``wanted``: how many machines, None: the
    engine's own number; ``n_gpus``: ranks on each, if a call does not say it; ``heartbeat_timeout``: the engine's.
    """

    def __init__(
        self,
        place: Callable[[int | None, Sequence[str]], Placement],
        python: str,
        wanted: int | None,
        n_gpus: int | None,
        heartbeat_timeout: float | None,
    ) -> None:
        super().__init__(n_gpus, heartbeat_timeout)
        self._place, self._python, self._wanted = place, python, wanted
        self._heartbeats: Heartbeats | None = None
        self._leaving = False  # the machines are being given back

    def open(self, timeout: float, tell: Callable[[str], None] = lambda _: None) -> None:
        """Wait until the machines are there, if they are not yet, however long a queue takes.

        ``timeout``: seconds in which all members must then start. ``tell``: gets what the machines wait for, when
        that changes.

        Raises:
            LaunchError: The machines do not come, or mlaunch cannot run there.
        """
        self.renew()
        if self.machines:
            return
        # Before the request: an exit during the wait for a queue must give the job back, too.
        atexit.register(self.close)
        try:
            self._open(timeout, tell)
        except BaseException:
            self._give_back()
            raise

    def _open(self, timeout: float, tell: Callable[[str], None]) -> None:
        # The caller sends no heartbeat before all members are there.
        patience = None if self.heartbeat_timeout is None else self.heartbeat_timeout + timeout
        self.placement = placement = self._place(self._wanted, command_of(self._python, patience))
        wait_for(placement, timeout, tell)
        self._start_members(placement, timeout)

    def _start_members(self, placement: Placement, timeout: float) -> None:
        size = len(placement.sizes)
        waiting, until = list[Machine](), time.monotonic() + timeout
        while waiting or len(self.machines) < size:
            while len(self.machines) < size and len(waiting) < (placement.at_once or size):
                number = len(self.machines)
                self.machines.append(Machine(number, placement.start(number)))
                waiting.append(self.machines[-1])
            self.wait(waiting, until, timeout)
            waiting = [machine for machine in waiting if not self._greeted(machine)]
        if self.heartbeat_timeout is not None:
            record = Heartbeat(self.heartbeat_timeout, tuple(placement.farewell))
            self._heartbeats = Heartbeats([machine.stream for machine in self.machines], record)

    def _greeted(self, machine: Machine) -> bool:
        try:
            return machine.greet()
        except EOFError:
            raise LaunchError(self._why_not(machine)) from None
        except NoiseError as error:
            raise noise_error(machine, error) from None

    def _why_not(self, machine: Machine) -> str:
        """Return in words why a member did not start."""
        fate, words = self.end_of(machine)
        name = machine.host or f"machine {machine.number}"
        lines = [f"mlaunch did not start on {name}" + (f": {fate}" if fate else "")]
        lines += [f"  {line}" for line in words.splitlines()]
        return "\n".join([*lines, *advice(self._python, fate, words)])

    def renew(self) -> None:
        """Give the machines back if one of them is lost; ``open`` then gets others."""
        if self._leaving or any(machine.lost for machine in self.machines):
            self._give_back()

    def preempted(self) -> bool:
        """True if the engine has preempted the machines, or is about to, and would give others."""
        return self.placement is not None and self.placement.preempted()

    def kill(self) -> None:
        """End all that runs on the machines."""
        if self.placement is not None:
            self.placement.cancel()
        self.placement = None

    def close(self) -> None:
        """Give the machines back. May be called again, also after an interrupt; ``open`` then gets others."""
        self._give_back()

    def _give_back(self) -> None:
        """Give the machines back, and forget each only afterwards: after an interrupt, ``close`` must still find it."""
        self._leaving = True
        if self._heartbeats is not None:
            self._heartbeats.close()
        for machine in self.machines:
            machine.close()
        if self.placement is not None:
            self.placement.cancel()
        self.machines, self.placement, self._heartbeats, self.meets_at = [], None, None, ""
        self._leaving = False
        atexit.unregister(self.close)


class Heartbeats:
    """A thread of the caller that sends heartbeats to machines, since those that receive none leave.

    When a caller ends, or is killed, its streams end. If its machine loses power or its network, they do not: no packet
    comes then, for hours unless somebody sends one. The streams must outlive the thread.
    """

    def __init__(self, streams: Sequence[CallersStream], heartbeat: Heartbeat) -> None:
        self._streams = streams
        self._heartbeat = heartbeat
        self._closed = threading.Event()
        # A thread: between calls nobody in this process reads from the machines, or writes to them.
        self._thread = threading.Thread(target=self._run, name="mlaunch-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            for stream in self._streams:
                if stream.unsent:  # otherwise data on its way shows that the caller lives
                    stream.flush()
                else:
                    stream.send(self._heartbeat)
            if self._closed.wait(interval(self._heartbeat.timeout)):
                return

    def close(self) -> None:
        """End the thread. May also be called in a fork, which has no such thread."""
        self._closed.set()
        self._thread.join()


def interval(heartbeat_timeout: float) -> float:
    """Return the seconds from one heartbeat to the next."""
    return min(heartbeat_timeout / BEATS, _LONGEST)


def say(text: str) -> None:
    """Print a message, such as what a call waits for."""
    print(f"mlaunch: {text}", file=sys.stderr, flush=True)
