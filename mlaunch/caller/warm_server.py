"""The one warm fork server of this process, and the launch that it prepares for the next call."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Mapping

from mlaunch.base import linux
from mlaunch.base.fds import close_all, in_forks
from mlaunch.base.frozen_record import frozen_record
from mlaunch.caller.fork_server import ForkServer, Interpreter, start_interpreter
from mlaunch.core import load
from mlaunch.features import served_apart
from mlaunch.protocol import registry
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import AgentFailed, AgentsEnd, AgentStarted, LaunchersEnd, RanksStarting
from mlaunch.protocol.settings import import_variables, with_import_variables_of
from mlaunch.protocol.spec import LaunchSpec, shape_of

_DEATH_TIMEOUT = 5.0  # seconds for a killed agent to end
_RANKS_PER_CORE, _FEW_RANKS = 2, 8  # ranks are prepared up to the larger of these two limits
_PRELOADED = ("mlaunch.caller.launcher",)  # every rank imports the user's module, which imports mlaunch
_VARIABLE = "MLAUNCH_PREPARE"  # "0": prepare nothing
_Streams = tuple[tuple[int, int] | None, ...]


@frozen_record
class _Prepared:
    server: ForkServer
    shape: LaunchSpec
    streams: _Streams  # the files of descriptors 1 and 2
    channel: LaunchersEnd


class Preparation:
    """The prepared launch: at most one, with the shape of the last launch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: _Prepared | None = None

    def take(self, server: ForkServer, spec: LaunchSpec) -> LaunchersEnd | None:
        """Return the channel to the agent of a prepared launch that can serve this one; drop any other."""
        with self._lock:
            found, self._next = self._next, None
        if found is None:
            return None
        # Facts that may differ (name, deadline, seed, arguments) are not in the shape: they come with the call.
        alike = (found.server, found.shape, found.streams) == (server, shape_of(spec), _streams())
        if alike and _is_there(found.channel):
            return found.channel
        _drop(found)
        return None

    def expect(self, server: ForkServer, spec: LaunchSpec) -> AgentsEnd | None:
        """Return the server's end of the channel of the next launch to prepare; None: prepare none."""
        alone = spec.cluster is None and spec.target is None and spec.port == 0 and spec.restarts.count == 0
        small = spec.local_world_size <= max(_FEW_RANKS, _RANKS_PER_CORE * len(os.sched_getaffinity(0)))
        if not (alone and small and not served_apart(spec.sections)) or os.environ.get(_VARIABLE) == "0":
            return None
        if linux.memory_is_short():
            return None
        ours: LaunchersEnd
        ours, theirs = Channel.pair()
        with self._lock:
            before, self._next = self._next, _Prepared(server, shape_of(spec), _streams(), ours)
        if before is not None:
            _drop(before)
        return theirs

    def drop(self) -> None:
        """Drop the prepared launch, without waiting for its end."""
        with self._lock:
            found, self._next = self._next, None
        if found is not None:
            _drop(found)

    def forget(self) -> None:
        """Forget the prepared launch. Called in a fork of this process, which must not use it."""
        self._lock = threading.Lock()  # a thread of the parent may have held the old one
        if self._next is not None:
            self._next.channel.close()
        self._next = None


def _is_there(channel: LaunchersEnd) -> bool:
    """True if the launch's agent was forked and is not stopped. An agent that has ended since closes its channel.

    The agent's first record may come before the fork server's record that it was forked.
    """
    if not channel.intact() or not linux.wait_readable([channel.fileno()], 0.0):
        return False
    with contextlib.suppress(OSError, EOFError):
        record = channel.peek()
        return not isinstance(record, AgentFailed) and not _is_of_stopped(record)
    return False


def _drop(found: _Prepared) -> None:
    """Close the channel, at which the launch ends by itself; kill it if it is stopped, as it would not end."""
    with contextlib.closing(found.channel), contextlib.suppress(OSError, EOFError):
        if not found.channel.intact() or not linux.wait_readable([found.channel.fileno()], 0.0):
            return
        if _is_of_stopped(found.channel.peek()):
            _kill(found)


def _is_of_stopped(first: object) -> bool:
    """True if the agent is stopped whose launch has brought this record first."""
    return isinstance(first, AgentStarted | RanksStarting) and linux.is_stopped(first.pid)


def _kill(found: _Prepared) -> None:
    """Kill the agent, with which its ranks die, and remove its entry in the registry."""
    launch_id, agent = "", -1
    while linux.wait_readable([found.channel.fileno()], 0.0):
        record, fds = found.channel.receive()
        if isinstance(record, AgentStarted):
            agent = fds.pop()
            signal.pidfd_send_signal(agent, signal.SIGKILL)
        elif isinstance(record, RanksStarting):
            launch_id = record.launch_id
        close_all(fds)
    if agent >= 0:
        linux.wait_readable([agent], _DEATH_TIMEOUT)  # the socket of a living agent is not removed
        os.close(agent)
    registry.remove(found.shape.context.environ, launch_id)


def _streams() -> _Streams:
    return tuple(linux.identity(fd) for fd in (1, 2))


preparation = Preparation()
in_forks(preparation.forget)


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
            like = Interpreter(preload=(*_PRELOADED, *self.preload))
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
