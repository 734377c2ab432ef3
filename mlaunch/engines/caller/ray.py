"""Machines of a Ray cluster, through ray core."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from mlaunch.base import linux
from mlaunch.base.exceptions import LaunchError
from mlaunch.caller.options.option_values import Name
from mlaunch.engines.caller.engine import Amounts, Engine
from mlaunch.engines.caller.machines import BEATS
from mlaunch.engines.caller.placement import Ends, Placement

_READ = 1 << 18  # bytes per call of an actor
_WORDS = 300  # characters of Ray's text of an error


class Ray(Engine):
    """Nodes of a Ray cluster: a bundle on each, with an actor that runs the member.

    Call from inside the cluster: on its head, or on a node. Needs the extra ``ray``.

    Args:
        address: The cluster's address, as ``ray.init`` takes it. A cluster to which this process is connected already
            is used.
        resources: The resources of each bundle: ``{"CPU": 8, "GPU": 4}``. None: one CPU.
        python: The interpreter on the nodes; None: the path of this one.
    """

    def __init__(
        self, *, address: str = "auto", resources: Mapping[str, float] | None = None, python: str | None = None
    ) -> None:
        super().__init__(python)
        Name().check("address", address)
        Amounts().check("resources", resources)
        self._address = address
        self._resources = dict(resources or {"CPU": 1})

    def place(self, machines: int | None, command: Sequence[str]) -> Placement:
        try:
            import ray
        except ImportError as error:
            raise LaunchError("the engine Ray needs ray: pip install 'mlaunch[ray]'") from error
        if not ray.is_initialized():
            try:
                # Ray would print into the caller's output, and set up logging for the whole process.
                ray.init(address=self._address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, RuntimeError) as error:
                raise LaunchError(
                    f"no Ray cluster answers at address={self._address!r} ({error}); this process belongs inside the "
                    f"cluster: start one with `ray start --head`, or give its address="
                ) from error
        return _InBundles(self._resources, machines or 1, command, self.heartbeat_timeout)

    def __repr__(self) -> str:
        return f"Ray({self._resources})"


class Pump:
    """The actor: it runs a member, and passes on its bytes. Each of its methods runs in a thread of its own.

    ``heartbeat_timeout``: seconds without a sign of life from the caller after which the member ends; once the member
    has received something, it counts them itself. None: no limit.
    """

    def __init__(self, command: Sequence[str], heartbeat_timeout: float | None = None) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        self._heartbeat_timeout = heartbeat_timeout
        self._sign, self._begun = threading.Event(), False
        if heartbeat_timeout is not None:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._begun:
            if not self._sign.wait(self._heartbeat_timeout):
                self._process.kill()
                return
            self._sign.clear()

    def renew(self) -> None:
        """Note a sign of life from the caller."""
        self._sign.set()

    def write(self, data: bytes) -> None:
        """Write the caller's data to the member; b"": close its standard input."""
        self._begun = True
        self._sign.set()
        stream = self._process.stdin
        if stream is None or stream.closed:
            return
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError):
            while view:
                view = view[stream.write(view) :]
        if not data:
            stream.close()

    def read(self, stream: str) -> bytes:
        """Return the next bytes that the member has written to "stdout" or "stderr"; b"" at the end."""
        data: bytes = os.read(getattr(self._process, stream).fileno(), _READ)
        return data

    def exitcode(self) -> int:
        """Wait for the member's end; return its exit code."""
        return self._process.wait()


class _InBundles(Placement):
    def __init__(
        self, resources: Mapping[str, float], machines: int, command: Sequence[str], heartbeat_timeout: float | None
    ) -> None:
        from ray.util.placement_group import placement_group

        self.sizes: Sequence[int | None] = [None] * machines
        self._resources = dict(resources)
        self._command = list(command)
        self._heartbeat_timeout = heartbeat_timeout
        # At most one bundle on a node: two members on one would take each other's devices.
        self._group = placement_group([dict(resources)] * machines, strategy="STRICT_SPREAD")
        self._ready = self._group.ready()
        self._fates: dict[int, str] = {}

    def state(self) -> str:
        import ray

        found, _ = ray.wait([self._ready], timeout=0)
        if found:
            return ""
        return f"Ray has no {len(self.sizes)} nodes with {self._resources} each free"

    def start(self, machine: int) -> Ends:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=machine)
        others = {name: amount for name, amount in self._resources.items() if name not in {"CPU", "GPU"}}
        actor = (
            ray.remote(Pump)
            .options(
                scheduling_strategy=place,
                num_cpus=self._resources.get("CPU", 0),
                num_gpus=self._resources.get("GPU", 0),
                resources=others,
                # One call each of write, of read for both streams, and of renew may block at the same time.
                max_concurrency=4,
            )
            .remote(self._command, self._heartbeat_timeout)
        )
        return self._ends(machine, actor)

    def _ends(self, machine: int, actor: Any) -> Ends:
        """Return sockets of this process whose bytes the actor's calls carry."""
        pairs = [socket.socketpair() for _ in range(3)]
        ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        threads = [
            threading.Thread(target=self._write, args=(actor, theirs[0]), daemon=True),
            threading.Thread(target=self._read, args=(machine, actor, "stdout", theirs[1]), daemon=True),
            threading.Thread(target=self._read, args=(machine, actor, "stderr", theirs[2]), daemon=True),
        ]
        for thread in threads:
            thread.start()
        return Ends(*(end.detach() for end in ours))

    def _write(self, actor: Any, end: socket.socket) -> None:
        import ray

        with end, contextlib.suppress(Exception):  # the actor is gone, which the next read reports
            timeout = self._heartbeat_timeout
            while timeout is not None and not linux.wait_readable([end.fileno()], timeout / BEATS):
                # Until the member itself counts the seconds: an actor does not learn that its owner is cut off.
                ray.get(actor.renew.remote())
            while True:
                data = end.recv(_READ)
                ray.get(actor.write.remote(data))
                if not data:
                    return

    def _read(self, machine: int, actor: Any, stream: str, end: socket.socket) -> None:
        import ray

        with end:
            try:
                while data := ray.get(actor.read.remote(stream)):
                    end.sendall(data)
            except OSError:  # nobody reads it any more
                pass
            except Exception as error:  # Ray's: its actor or its node is gone
                words = " ".join(str(error).split())
                self._fates.setdefault(machine, f"{type(error).__name__}: {words[:_WORDS]}")

    def fate(self, machine: int) -> str:
        return self._fates.get(machine, "")

    def cancel(self) -> None:
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(Exception):  # the cluster is gone
            remove_placement_group(self._group)  # kills the actors in it
