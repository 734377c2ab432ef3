"""The process at the other end of a connected socket of the Unix family, which the kernel noted as they met."""

from __future__ import annotations

import os
import socket
import struct

_FORM = struct.Struct("3i")  # struct ucred: pid, uid, gid


def peer_process(connection: socket.socket) -> tuple[int, int]:
    """Returns the pid and the user of the process that connected, or that listened."""
    pid, user, _ = _FORM.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _FORM.size))
    return pid, user


def is_this_user(connection: socket.socket) -> bool:
    """Tells whether that process belongs to the user of this one."""
    return peer_process(connection)[1] == os.geteuid()
