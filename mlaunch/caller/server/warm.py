"""The one warm fork server of this process."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping

from mlaunch.base.fds import in_forks
from mlaunch.caller.server.fork_server import ForkServer
from mlaunch.caller.server.prepared_launch import preparation
from mlaunch.caller.server.start_server import Interpreter, start_interpreter
from mlaunch.core import load
from mlaunch.protocol.settings import import_variables, with_import_variables_of

# Preloaded, since every rank imports the user's module, which imports mlaunch.
_PREPARED = ("mlaunch.caller.launcher",)


class WarmServer:
    """The warm server: started when it is first needed, and again if it died, was stopped or has other settings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._settings: tuple[dict[str, str], tuple[str, ...]] | None = None
        self.preload: tuple[str, ...] = ()  # modules that it imports in addition to torch
        self._retired: list[ForkServer] = []

    @property
    def started(self) -> bool:
        """True if a server was started."""
        return self._server is not None

    def get(self, environ: Mapping[str, str]) -> ForkServer:
        """Return the server for calls with these variables."""
        settings = import_variables(environ), self.preload
        with self._lock:
            if self._retired:
                self._close_retired()
            if self._server is not None:
                # A stopped server is replaced like a dead one: no call should hang until it is continued. The same goes
                # for one whose libraries were loaded under other variables, at the cost of one import of torch.
                if self._server.alive() and self._settings == settings:
                    return self._server
                preparation.drop()  # a prepared launch would keep the server from ending
                # Not closed: other threads' launches may still run there.
                self._server.retire()
                self._retired.append(self._server)
            like = Interpreter(preload=(*_PREPARED, *self.preload))
            # Later calls use the same server, so only variables of env= that require another server count.
            environ = with_import_variables_of(os.environ, environ)
            self._server = load.server_at_hand(environ, like) or start_interpreter(environ, like)
            self._settings = settings
            return self._server

    def _close_retired(self) -> None:
        for server in self._retired:
            server.retire()  # not possible during its import
        for server in [server for server in self._retired if server.ended()]:
            server.close()
            self._retired.remove(server)

    def close(self) -> None:
        """End the server and those that it has replaced, with all that still runs there."""
        preparation.drop()
        for server in [*self._retired, *([self._server] if self._server else [])]:
            server.close()
        self._server, self._retired = None, []

    def forget(self) -> None:
        """Forget the servers. Called in a fork of this process, which must not use its parent's server."""
        self._lock = threading.Lock()  # a thread of the parent may have held the old one
        self._server, self._retired = None, []


warm_server = WarmServer()
atexit.register(warm_server.close)
in_forks(warm_server.forget)
