"""The process between an IDE and its rank: debugpy's adapter, at ports that serve this user's processes alone.

The adapter that ``debugpy.listen`` starts runs the code of whoever connects, and every user of the machine can.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from mlaunch.base import linux
from mlaunch.base.process_name import name_process
from mlaunch.rendezvous.address import LOOPBACK
from mlaunch.rendezvous.peer_user import PeerUser

_TIMEOUT = 60.0  # seconds until it listens
_CODE = """
import json, sys
given = json.load(sys.stdin)
sys.path[:] = given["path"]
from mlaunch.debug.rank.ide_adapter import main
main(given["token"], given["name"])
"""


def start_adapter(name: str) -> tuple[int, int, str]:
    """Start an adapter; return its port for IDEs, that for this process, and the token that the latter asks for.

    ``name``: of the rank. OSError: it did not start; stderr says why.
    """
    token = secrets.token_hex()
    given = json.dumps({"path": sys.path, "token": token, "name": name})
    # Over a pipe: command lines are open to all users.
    code, given_bytes = [sys.executable, "-c", _CODE], given.encode()
    try:
        done = subprocess.run(code, input=given_bytes, stdout=subprocess.PIPE, check=False, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise OSError(f"debugpy's adapter for {name} did not start within {_TIMEOUT:.0f} s") from None
    if done.returncode:
        raise OSError(f"debugpy's adapter for {name} ended with status {done.returncode}")
    for_ides, for_rank = json.loads(done.stdout)
    return for_ides, for_rank, token


def main(token: str, name: str) -> None:
    """Be the adapter, away from the rank that has started it, until that has ended and IDEs have heard so."""
    names = ("adapter", "adapter.clients", "adapter.servers", "adapter.sessions", "common.sockets")
    adapter, clients, servers, sessions, sockets = (_imported(f"debugpy.{name}") for name in names)
    if os.fork() > 0:
        os._exit(0)  # the rank waits for this one's end, and has no child of whom it does not know
    os.setsid()  # a Ctrl-C is the rank's
    name_process(f"debugpy for {name}")
    adapter.access_token = token  # which who says that he is the rank has to show
    servers.listener = sockets.serve("Server", guarded(servers.Connection), LOOPBACK, 0)
    clients.listener = sockets.serve("Client", guarded(clients.Client), LOOPBACK, 0)
    print(json.dumps([listener.getsockname()[1] for listener in (clients.listener, servers.listener)]), flush=True)
    linux.leave_standard_streams()
    servers.wait_until_disconnected()
    sessions.wait_until_ended()


def _imported(name: str) -> Any:
    return importlib.import_module(name)  # an extra


def guarded(take: Callable[[socket.socket], object]) -> Callable[[socket.socket], None]:
    """Return what takes connections of this user's processes, and closes those of others."""
    users = PeerUser()

    def take_ours(end: socket.socket) -> None:
        if users.is_ours(end):
            take(end)
        else:
            end.close()

    return take_ours
