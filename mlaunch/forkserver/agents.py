"""Agents for launches: the one that rests, or a new one; and the launch that is to be prepared next."""

from __future__ import annotations

import os
from collections.abc import Callable

from mlaunch.base import linux
from mlaunch.base.fds import OwnedFds, close_all
from mlaunch.base.frozen_record import frozen_record
from mlaunch.forkserver.children import Child, Children
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import AgentsEnd, Reaped, Refused
from mlaunch.protocol.server_messages import LaunchFds, LikeFds, RestingAgentHears, RestingAgentSays, ServeNext


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


def begin(launch: Launch, children: Children, owned: Callable[[], OwnedFds]) -> None:
    """Begin a launch; keep only the socket of its descriptors. ``owned``: descriptors that its agent must not have."""
    # An agent that was told to leave while it was stopped (SIGSTOP) has not left.
    for child in children:
        child.end_stopped()
    # A new agent costs a third of a rank: its fork, 1,500 page faults, its end. So calls in a row share one: calls of
    # two ranks took 1.45 of the bare fork without this, and 1.24 with it.
    rested = children.resting if launch.more else None
    if rested is None:
        _begin_anew(launch, children, owned)
    elif rested.serves(*launch.next):
        rested.begin(Channel.adopt(launch.fds.socket))
    else:
        rested.dismiss()
        _begin_anew(launch, children, owned)


def _begin_anew(launch: Launch, children: Children, owned: Callable[[], OwnedFds]) -> None:
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
        from mlaunch.agent import capacity

        channel: AgentsEnd = Channel.adopt(channel_fd)
        channel.try_send(Refused(f"its agent could not be forked: {capacity.why_no_fork(error)}"))
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
