"""The agent's handle on its machine's link, the process that talks with the launch's other machines."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

from mlaunch.base import linux, rlimits
from mlaunch.base.process_name import name_process
from mlaunch.machines.gate.membership import Join
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.spec import Rendezvous

if TYPE_CHECKING:
    from mlaunch.machines.wire.link_messages import LinkHears, LinkSays


class Link:
    """A forked process that ends with this one, and a channel to it.

    ``listener``: where it listens for this machine's ranks.
    """

    def __init__(
        self, cluster: Rendezvous, join: Join, listener: socket.socket, close_in_child: Iterable[int] = ()
    ) -> None:
        self.channel: Channel[LinkSays, LinkHears]
        self.channel, theirs = Channel.pair()
        parent = os.getpid()
        # A process beside the agent: heartbeats go on while that is busy with its ranks, and it has no event loop.
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
        rlimits.allow_files()
        from mlaunch.machines.link.link_process import LinkProcess
        from mlaunch.rendezvous import event_loop

        event_loop.run(LinkProcess(cluster, join, agent).run(listener))
    except BaseException:  # an error of ours: the text must not be lost
        traceback.print_exc()
    finally:
        os._exit(1)
