"""The store of a launch on one machine, which its agent hosts."""

from __future__ import annotations

import socket

from mlaunch.rendezvous import name_lookup
from mlaunch.rendezvous.tcp_store import serve

# Its destructor would wait for its thread, and the end of the process takes it anyway.
_until_let_go: list[object] = []


def host(listener: socket.socket) -> None:
    """Hosts a store on ``listener`` in this process, which forks nothing until it lets go of it.

    The ranks can already connect, since the socket listens, and have work to do until they need it. In a launch over
    several machines the gate's process has the store, since machines join before ranks are forked.
    """
    name_lookup.look_up_in_files_only()  # this process knows nobody but by address
    _until_let_go.append(serve(listener.dup()))


def let_go() -> None:
    """Ends the store and its thread, so that this process may fork again and its forks look names up as others do."""
    _until_let_go.clear()
    name_lookup.look_up_as_chosen()
