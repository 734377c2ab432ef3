"""Gives a launch its agent: the one that rests, or a new one."""

from __future__ import annotations

import os
from collections.abc import Callable

from mlaunch.base.fds import OwnedFds
from mlaunch.base.frozen_record import frozen_record
from mlaunch.forkserver.children import Child, Children
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import AgentsEnd, Reaped, Refused
from mlaunch.protocol.server_messages import LaunchFds, RestingAgentHears, RestingAgentSays, ServeNext


@frozen_record
class Launch:
    """One that is to begin.

    ``call``: what it runs, if this process has it in memory. ``more``, ``directory``: see StartLaunch.
    ``held``: see the agent's Order.
    """

    fds: LaunchFds
    call: Call | None = None
    more: bool = False
    directory: str = ""
    held: tuple[int, ...] = ()

    @property
    def next(self) -> tuple[ServeNext, list[int]]:
        """What an agent that rests is told of it."""
        return ServeNext(self.fds.call is None), [*self.fds.there, *self.held]


def begin(launch: Launch, children: Children, owned: Callable[[], OwnedFds]) -> None:
    """Begins a launch; of its descriptors the socket stays here. ``owned``: what is none of its agent's business."""
    # Each launch looks after what the ones before have left: an agent that was told to leave while it was stopped.
    for child in children:
        child.end_stopped()
    # A new agent costs a third of what a rank does: its fork, 1,500 page faults, its end. So calls in a row share
    # one: two ranks in a row took 1.45 of the bare fork without, and 1.24 with it.
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
        # Asked for in the child: what is open there is what the fork has, whatever was opened meanwhile.
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
    """Forks as os.fork; None if the system refuses, which is said on the channel: other launches go on."""
    try:
        return os.fork()
    # EAGAIN or ENOMEM: a limit of processes, or of memory, which may be gone by the next launch.
    except OSError as error:
        from mlaunch.agent import capacity

        channel: AgentsEnd = Channel.adopt(channel_fd)
        channel.try_send(Refused(f"its agent could not be forked: {capacity.why_no_fork(error)}"))
        channel.try_send(Reaped(1))
        channel.close()
        return None
