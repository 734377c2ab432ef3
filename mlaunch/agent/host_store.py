"""The store of a launch on one machine, which its agent hosts."""

from __future__ import annotations

import socket

from mlaunch.rendezvous.local_store import LocalStore

_hosted: list[LocalStore] = []


def host(listener: socket.socket) -> None:
    """Hosts a store on ``listener`` in this process, which forks nothing until it lets go of it.

    The ranks can already connect, since the socket listens, and have work to do until they need it. In a launch over
    several machines the gate's process has the store, since machines join before ranks are forked.
    """
    _hosted.append(LocalStore(listener.dup()))


def let_go() -> None:
    """Ends the store and its thread, so that this process may fork again."""
    while _hosted:
        _hosted.pop().close()
