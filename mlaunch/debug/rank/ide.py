"""A rank that waits until an IDE is attached to it, by debugpy, and then runs its function.

With ``debug="debugpy"`` it prints where to attach. If debugpy debugs the caller and follows its children, the rank
connects to that IDE.

Between an IDE and its rank is a process, debugpy's adapter, at ports that serve only this user's processes: the adapter
that ``debugpy.listen`` starts runs the code of anybody who connects, and every user of the machine can.
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
from mlaunch.base.own_process import name_process
from mlaunch.rendezvous.address import LOOPBACK
from mlaunch.rendezvous.peer_user import PeerUser

_TIMEOUT = 60.0  # seconds until the adapter listens
_CODE = """
import json, sys
given = json.load(sys.stdin)
sys.path[:] = given["path"]
from mlaunch.debug.rank.ide import main
main(given["token"], given["name"])
"""


class FollowedSession:
    """Connects to the IDE that debugs the caller. ``address``: as ``DebugTerms.way``; ``who``: "rank 1 of f()"."""

    def __init__(self, address: str, who: str) -> None:
        self._at = json.loads(address)
        self._who = who
        self._attached = False

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the function, with the IDE attached."""
        if not self._attached:
            self._attached = True
            self._attach()
        return function(*args, **kwargs)

    def _attach(self) -> None:
        at = self._at
        sys.path.append(at["path"])
        try:
            import debugpy.server.api  # type: ignore[import-not-found, unused-ignore]  # the caller's
        finally:
            sys.path.remove(at["path"])
        import pydevd  # type: ignore[import-not-found, unused-ignore]  # debugpy's own

        pydevd.SetupHolder.setup = None  # a fork of the caller has the caller's
        print(f"{self._who} is process {os.getpid()}, which the IDE calls Subprocess {os.getpid()}", flush=True)
        try:
            # As a fork of the caller does: debugpy.connect() does not pass the first token on. Processes that the rank
            # starts are not followed: nobody would attach to a data loader's workers.
            pydevd.settrace(
                at["host"],
                port=at["port"],
                suspend=False,
                patch_multiprocessing=False,
                access_token=at["server_token"],
                client_access_token=at["client_token"],
                ppid=at["parent"],
            )
        except Exception as error:  # the IDE was closed; debugpy may raise anything then
            print(f"{self._who} runs without the IDE that debugs its caller: {error!r}", file=sys.stderr, flush=True)
            return
        debugpy.wait_for_client()
        sys.breakpointhook = debugpy.breakpoint


class IdeSession:
    """Waits for an IDE. ``who``: "rank 1 of train()". Made before debugpy is imported."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._pid = os.getpid()

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Print how to attach, wait for that, and run the function; ``breakpoint()`` stops in the IDE."""
        import debugpy  # type: ignore[import-not-found, unused-ignore]  # an extra; it imports much

        # Otherwise it would attach to each process that the rank starts, data loaders too.
        debugpy.configure(subProcess=False)
        for_ides, for_rank, token = start_adapter(self._who)
        print(f"{self._who} waits for an IDE. Its entry in launch.json: {self._entry(for_ides)}", flush=True)
        debugpy.connect((LOOPBACK, for_rank), access_token=token)
        debugpy.wait_for_client()
        sys.breakpointhook = debugpy.breakpoint
        return function(*args, **kwargs)

    def _entry(self, port: int) -> str:
        at = {"host": LOOPBACK, "port": port}
        entry = {"name": self._who, "type": "debugpy", "request": "attach", "connect": at, "justMyCode": False}
        return json.dumps(entry)


def is_followed(debug: str) -> bool:
    """True if the launch's way is the address of an IDE that debugs the caller."""
    return debug.startswith("{")


def is_awaited(debug: str, rank: int) -> bool:
    """True if a rank waits for an IDE. ``debug``: the launch's way, "debugpy" for all, "debugpy:0,2" for some."""
    name, _, ranks = debug.partition(":")
    return name == "debugpy" and (not ranks or str(rank) in ranks.split(","))


# The adapter


def start_adapter(name: str) -> tuple[int, int, str]:
    """Start an adapter; return its port for IDEs, its port for this process, and the token for the latter.

    ``name``: the rank's. OSError: it did not start; stderr says why.
    """
    token = secrets.token_hex()
    given = json.dumps({"path": sys.path, "token": token, "name": name})
    # Over a pipe: all users can read command lines.
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
    """Be the adapter, detached from the rank that has started it, until the rank has ended and IDEs know it."""
    names = ("adapter", "adapter.clients", "adapter.servers", "adapter.sessions", "common.sockets")
    adapter, clients, servers, sessions, sockets = (_imported(f"debugpy.{name}") for name in names)
    if os.fork() > 0:
        os._exit(0)  # the rank waits for this process, and so gets no child that it does not know
    os.setsid()  # Ctrl-C is for the rank
    name_process(f"debugpy for {name}")
    adapter.access_token = token  # the rank's, to prove itself
    servers.listener = sockets.serve("Server", guarded(servers.Connection), LOOPBACK, 0)
    clients.listener = sockets.serve("Client", guarded(clients.Client), LOOPBACK, 0)
    print(json.dumps([listener.getsockname()[1] for listener in (clients.listener, servers.listener)]), flush=True)
    linux.leave_standard_streams()
    servers.wait_until_disconnected()
    sessions.wait_until_ended()


def _imported(name: str) -> Any:
    return importlib.import_module(name)  # an extra


def guarded(take: Callable[[socket.socket], object]) -> Callable[[socket.socket], None]:
    """Return a function that takes connections of this user's processes, and closes those of others."""
    users = PeerUser()

    def take_ours(end: socket.socket) -> None:
        if users.is_ours(end):
            take(end)
        else:
            end.close()

    return take_ours
