"""The agent's handle on its machine's link, the process that talks to the other machines of the launch."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

from mlaunch.base import linux
from mlaunch.base.own_process import allow_files, name_process
from mlaunch.machines.gate.membership import Join
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.spec import Rendezvous

if TYPE_CHECKING:
    from mlaunch.machines.wire.link_messages import LinkHears, LinkSays


class Link:
    """The link, a forked process that ends with this one, and a channel to it.

    ``listener``: the socket where the link accepts connections of this machine's ranks.
    """

    def __init__(
        self, cluster: Rendezvous, join: Join, listener: socket.socket, close_in_child: Iterable[int] = ()
    ) -> None:
        self.channel: Channel[LinkSays, LinkHears]
        self.channel, theirs = Channel.pair()
        parent = os.getpid()
        # A process beside the agent: heartbeats continue while the agent, which has no event loop, is busy with ranks.
        self.pid = os.fork()
        if self.pid == 0:
            self.channel.close()
            _run(cluster, join, theirs, listener, parent, close_in_child)
        theirs.close()


def _run(
    cluster: Rendezvous,
    join: Join,
    agent: Channel[LinkHears, LinkSays],
    listener: socket.socket,
    parent: int,
    close: Iterable[int],
) -> NoReturn:
    try:
        linux.die_with(parent)
        name_process("link")
        for fd in close:
            os.close(fd)
        allow_files()
        from mlaunch.machines.link.link_process import LinkProcess
        from mlaunch.rendezvous import event_loop

        event_loop.run(LinkProcess(cluster, join, agent).run(listener))
    except BaseException:  # a bug in mlaunch: its traceback must not be lost
        traceback.print_exc()
    finally:
        os._exit(1)
