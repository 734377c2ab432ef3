"""The children of the fork server: agents for launches, also prepared ones, counts of devices, trial imports."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from mlaunch.base import linux, own_files
from mlaunch.base.fds import OwnedFds, close_all
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.own_process import name_process
from mlaunch.base.text import first_bytes
from mlaunch.protocol import payload
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import TEXT_LIMIT, Channel
from mlaunch.protocol.messages import AgentsEnd, AgentStarted, Reaped, Refused
from mlaunch.protocol.server_messages import (
    COUNT_TIMEOUT,
    CountingSays,
    DeviceCount,
    LaunchFds,
    LikeFds,
    RestingAgentHears,
    RestingAgentSays,
    ServeNext,
)
from mlaunch.rank import device

_MOST_LAUNCHES = 200  # of one agent, which grows by 16 KB with each
AGENT_TIMEOUT = 60.0  # seconds beyond the grace period for an agent to end its ranks and what they left
_STOPPED_TIMEOUT = 1.0  # seconds between checks of an agent that does not end


@dataclass
class Child:
    """An agent or a count of devices, which answer on a channel whose last record is ours; or a trial import.

    ``link``: to an agent that may serve one launch after another. The channel is its latest launch's.
    """

    pid: int
    pidfd: int
    channel: AgentsEnd | None
    is_agent: bool = False
    link: Channel[RestingAgentSays, RestingAgentHears] | None = None
    rests: bool = False  # between two launches, or after its last
    launches: int = 0
    directory: str = ""  # that it removes at its end, unless it is killed

    @property
    def is_trial(self) -> bool:
        """True if this child tries an import."""
        return self.channel is None

    def fds(self) -> list[int]:
        """Return the descriptors, which no other process may have."""
        channels = [channel for channel in (self.channel, self.link) if channel is not None]
        return [self.pidfd, *(channel.fileno() for channel in channels)]

    def hears_free(self) -> bool:
        """Note that an agent is free; False if it has ended instead."""
        if self.link is None:
            return False
        try:
            self.link.receive()
        except EOFError:
            self.dismiss()
            return False
        self.rests = True
        return True

    def serves(self, launch: ServeNext, fds: Sequence[int]) -> bool:
        """Ask a resting agent to serve one more launch; False if it cannot."""
        # By its main thread's state: waitid reports a stop only when the last thread has stopped, the store's too, and
        # a launch given to a stopped agent would wait.
        if not self.rests or self.link is None or self._is_stopped():
            return False
        try:
            self.link.send(launch, fds)
        except OSError:  # it has been killed
            return False
        self.rests = False
        return True

    def begin(self, channel: AgentsEnd) -> None:
        """Take the channel of a launch that an agent now serves, and announce the agent to the launcher."""
        if self.channel is not None:
            self.channel.close()
        self.channel = channel
        self.launches += 1
        # With a pidfd: by the pid, the launcher could kill another process that has the number since.
        channel.try_send(AgentStarted(self.pid), [self.pidfd])

    def dismiss(self) -> None:
        """Make an agent end: at once if it rests, else after its launch."""
        if self.link is None:
            return
        self.link.close()
        self.link = None
        self.end_stopped()

    def end_stopped(self) -> None:
        """Kill an agent that was told to leave, but is stopped and so would stay."""
        # Its launch is over, so nothing is lost; stopped, it would never see the end of its channel.
        if self.rests and self.link is None and self._is_stopped():
            os.kill(self.pid, signal.SIGKILL)

    def _is_stopped(self) -> bool:
        return linux.is_stopped(self.pid)

    def say_last(self, code: int) -> None:
        """Send its exit code as the last record, and close its channels."""
        if self.channel is not None:
            self.channel.try_send(Reaped(code))
        self.hang_up()

    def hang_up(self) -> None:
        """Close its channels."""
        if self.channel is not None:
            self.channel.close()
        self.dismiss()

    def reap(self) -> int:
        """Reap the child, which has ended; return its status, as os.waitpid does."""
        _, status = os.waitpid(self.pid, 0)
        # Not in the agent, which may have been killed.
        if self.directory:
            own_files.remove_directory(self.directory)
        return status

    def wait_for_agent(self, until: float) -> None:
        """Wait until an agent has ended; wake one that is stopped, and kill it after ``until``."""
        number = signal.SIGCONT  # it ends its launch, and cleans up
        while not linux.wait_readable([self.pidfd], _STOPPED_TIMEOUT):
            late = time.monotonic() > until
            if late or self._is_stopped():
                os.kill(self.pid, signal.SIGKILL if late else number)
                number = signal.SIGKILL
        self.reap()


class Children:
    """All present children of a fork server."""

    def __init__(self) -> None:
        self._by_pidfd: dict[int, Child] = {}
        self.longest_grace = 0.0  # seconds, of the launches

    def __bool__(self) -> bool:
        return bool(self._by_pidfd)

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._by_pidfd.values()))

    def add(self, child: Child) -> None:
        self._by_pidfd[child.pidfd] = child

    def fds(self) -> set[int]:
        """Return the descriptors of all."""
        return {fd for child in self for fd in child.fds()}

    def sources(self) -> list[int]:
        """Return descriptors that can be read when a child has ended, or is free."""
        links = [child.link.fileno() for child in self if child.link is not None and not child.rests]
        return [*self._by_pidfd, *links]

    def remove(self, child: Child) -> None:
        del self._by_pidfd[child.pidfd]

    def ended(self, ready: Collection[int]) -> list[Child]:
        """Return those that have ended; the caller reaps and removes each."""
        return [child for pidfd, child in self._by_pidfd.items() if pidfd in ready]

    def hear_free(self, ready: Collection[int]) -> list[Child]:
        """Return the agents that have become free. At most one of them rests; the others are dismissed."""
        free = []
        for child in self:
            if not child.rests and child.link is not None and child.link.fileno() in ready:
                another = self.resting
                if child.hears_free():
                    free.append(child)
                    if another is not None or child.launches >= _MOST_LAUNCHES:
                        child.dismiss()
        return free

    @property
    def busy(self) -> bool:
        """True if any has something to do."""
        return any(not child.rests for child in self)

    @property
    def resting(self) -> Child | None:
        """The agent that can serve a launch at once."""
        return next((child for child in self if child.rests and child.link is not None), None)

    def dismiss(self) -> None:
        """Make the resting agent end."""
        if (child := self.resting) is not None:
            child.dismiss()

    def outlive_caller(self) -> None:
        """Wait for the agents of a caller that is gone; they see the ends of their channels, once ours are closed."""
        for child in self:
            child.hang_up()
        until = time.monotonic() + self.longest_grace + AGENT_TIMEOUT
        for agent in [child for child in self if child.is_agent]:
            agent.wait_for_agent(until)


# Agents


@frozen_record
class Launch:
    """A launch that is to begin.

    ``call``: the call, if this process has it in memory. ``more``, ``directory``: see StartLaunch.
    ``held``: see the agent's Order.
    """

    fds: LaunchFds
    call: Call | None = None
    more: bool = False
    directory: str = ""
    held: tuple[int, ...] = ()

    @property
    def next(self) -> tuple[ServeNext, list[int]]:
        """The record of this launch for a resting agent, and its descriptors."""
        return ServeNext(self.fds.call is None), [*self.fds.there, *self.held]


def begin_launch(launch: Launch, children: Children, owned: Callable[[], OwnedFds]) -> None:
    """Begin a launch; keep only the socket of its descriptors. ``owned``: descriptors that its agent must not have."""
    # An agent that was told to leave while it was stopped (SIGSTOP) has not left.
    for child in children:
        child.end_stopped()
    # A new agent costs a third of a rank: its fork, 1,500 page faults, its end. So calls in a row share one: calls of
    # two ranks took 1.45 of the bare fork without this, and 1.24 with it.
    rested = children.resting if launch.more else None
    if rested is None:
        _begin_in_new_agent(launch, children, owned)
    elif rested.serves(*launch.next):
        rested.begin(Channel.adopt(launch.fds.socket))
    else:
        rested.dismiss()
        _begin_in_new_agent(launch, children, owned)


def _begin_in_new_agent(launch: Launch, children: Children, owned: Callable[[], OwnedFds]) -> None:
    from mlaunch.agent import main

    parent = os.getpid()
    link: Channel[RestingAgentSays, RestingAgentHears] | None
    link, agents_link = Channel.pair() if launch.more else (None, None)
    pid = fork(launch.fds.socket)
    if pid == 0:
        # Called in the child: so it returns all that the fork has, even if it was opened meanwhile.
        foreign = owned()
        if link is not None:
            foreign.add(link.fileno())
        main.run_agent(
            main.Order(launch.fds, launch.call, launch.held),
            main.Home(parent, foreign, agents_link),
        )
    if agents_link is not None:
        agents_link.close()
    if pid is not None:
        child = Child(pid, os.pidfd_open(pid), None, is_agent=True, link=link, directory=launch.directory)
        children.add(child)
        # The pidfd first: a pid alone could be another process's by the time that the launcher uses it.
        child.begin(Channel.adopt(launch.fds.socket))
    elif link is not None:
        link.close()


def fork(channel_fd: int) -> int | None:
    """Fork as os.fork; None if the system refuses, which is reported on the channel: other launches continue."""
    try:
        return os.fork()
    # EAGAIN or ENOMEM: a limit of processes or memory, which may be over at the next launch.
    except OSError as error:
        from mlaunch.agent import machine_limits

        channel: AgentsEnd = Channel.adopt(channel_fd)
        channel.try_send(Refused(f"its agent could not be forked: {machine_limits.why_no_fork(error)}"))
        channel.try_send(Reaped(1))
        channel.close()
        return None


class NextLaunch:
    """The launch to prepare: like the last, over a socket of the launcher's. Owns the descriptors that it gets."""

    def __init__(self) -> None:
        self._like: LikeFds | None = None  # the last launch, or one that was announced
        self._socket = -1
        self.soon = False  # True: even while others run

    @property
    def wanted(self) -> bool:
        """True if there is one to prepare: the launcher has neither dropped it since, nor ended."""
        if self._socket >= 0 and linux.wait_readable([self._socket], 0.0):  # at its end: nothing comes before the call
            self.drop()
        return self._socket >= 0

    def fds(self) -> list[int]:
        """Return the descriptors, which no other process may have."""
        return [*(self._like or ()), *([self._socket] if self._socket >= 0 else [])]

    def remember(self, like: LikeFds) -> None:
        """Remember the last launch, or one that is announced, as the model of the next."""
        self.forget()
        self._like = like

    def want(self, socket: int, *, soon: bool = False) -> None:
        """Take the socket of the launch that is to be prepared; close it if none can be."""
        # The launcher has one prepared launch at a time; the end of the socket tells it that the last is gone.
        self.drop()
        self.soon = soon
        if self._like is not None:
            self._socket = socket
        else:
            os.close(socket)

    def take(self) -> LaunchFds:
        """Return the descriptors that the launch begins with; only the socket is given away."""
        if self._like is None:
            raise AssertionError("no launch is to be prepared")
        socket, self._socket = self._socket, -1
        return LaunchFds(self._like.spec, None, socket, self._like.stdout, self._like.stderr)

    def drop(self) -> None:
        """Prepare none after all; the launcher sees the socket's end."""
        if self._socket >= 0:
            os.close(self._socket)
        self._socket = -1

    def forget(self) -> None:
        """Close everything."""
        self.drop()
        close_all(self._like or ())
        self._like = None


# Counts of the accelerators in an environment


def begin_count(environ_fd: int, answer_fd: int, *, named: bool) -> Child | None:
    """Begin to count; return the process that does, None if the system refuses one. Owns the descriptors."""
    parent = os.getpid()
    pid = fork(answer_fd)
    if pid == 0:
        _count_devices(environ_fd, answer_fd, parent, named=named)
    os.close(environ_fd)
    return None if pid is None else Child(pid, os.pidfd_open(pid), Channel.adopt(answer_fd))


def _count_devices(environ_fd: int, answer_fd: int, parent: int, *, named: bool) -> NoReturn:
    """Answer on the channel and end: counting may wake a driver, after which no fork could use it."""
    try:
        linux.die_with(parent)
        name_process("device count")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(COUNT_TIMEOUT)  # nobody waits for longer
        # The caller's variables: those that hide devices may have changed since the server started.
        os.environ.clear()
        os.environ.update(payload.read(environ_fd))
        count = _count()
        answer = DeviceCount(count, names=_names(count) if named else ())
    except BaseException as error:  # whatever a driver may raise
        answer = DeviceCount(0, first_bytes(f"{type(error).__name__}: {error}", TEXT_LIMIT))
    try:
        channel: Channel[NoReturn, CountingSays] = Channel.adopt(answer_fd)
        channel.try_send(answer)
    finally:
        os._exit(0)


def _count() -> int:
    import torch

    # Called in either case: a name of an instance that does not exist must not count.
    return torch.accelerator.device_count() and (len(_instances()) or torch.accelerator.device_count())


def _instances() -> list[str]:
    return device.instances(os.environ) if device.runtime_of(device.accelerator()) == "cuda" else []


def _names(count: int) -> tuple[str, ...]:
    """Return names of the visible devices that are equal in all processes of this machine.

    Numbers are not: CUDA begins with the fastest, nvidia-smi goes by place, and variables hide some. UUIDs are.
    """
    import torch

    if instances := _instances():
        return tuple(instances)
    kind = device.accelerator() or ""
    # For other kinds torch has no UUID.
    if kind == "cuda" and count and hasattr(torch.cuda.get_device_properties(0), "uuid"):
        return tuple(f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(count))
    runtime = device.runtime_of(kind) or kind
    return tuple(f"{kind}:{device.visible(runtime, [number], os.environ)}" for number in range(count))
