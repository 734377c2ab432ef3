"""A rank that binds itself to its CPUs, and its memory to their nodes, by system calls (few machines have numactl)."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator, Mapping

from mlaunch.base import linux
from mlaunch.base.exceptions import misuse
from mlaunch.core.parts import RankPart
from mlaunch.numa.rank.binding import Binding, Seats, bindings, cpus_in_words, lines, threads_of
from mlaunch.numa.rank.seats import seats_of
from mlaunch.numa.rank.topology import Topology
from mlaunch.numa.wire import NumaOrder
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.rank.setup import device

_PREFERRED, _BIND, _PREFERRED_MANY = 1, 2, 5  # linux/mempolicy.h
_THREADS = "OMP_NUM_THREADS"


class BoundRank(RankPart):
    """A rank of a launch with ``numa=``."""

    def __init__(self, order: NumaOrder) -> None:
        self._order = order
        self._lines: list[str] = []  # printed once the rank has its streams

    def begin(self, spec: LaunchSpec, local_rank: int) -> Mapping[str, str]:
        """Bind this process. ValueError for lists of CPUs that this machine does not have."""
        if self._order.allowed:  # the fork server may be older than the caller's mask
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._order.allowed)
        topology = Topology(self._order.root, os.sched_getaffinity(0))
        try:
            found = bindings(self._order, _seats(self._order, spec), topology)
        except ValueError as error:
            raise misuse(error) from None
        if line := lines(self._order, found, spec.rank_start).get(local_rank):
            self._lines.append(line)
        own = found[local_rank]
        if not own.cpus:
            return {}
        os.sched_setaffinity(0, own.cpus)
        self.decides = ("affinity",)
        memory = self._bind_memory(own, topology)
        self.place = f"{own}{memory}"
        return {_THREADS: str(threads_of(local_rank, found))}

    @contextlib.contextmanager
    def around_call(self) -> Iterator[None]:
        """Print once, before the function runs, which ranks are not bound."""
        said, self._lines = self._lines, []
        for line in said:
            print(f"mlaunch: {line}", file=sys.stderr, flush=True)
        yield

    def _bind_memory(self, own: Binding, topology: Topology) -> str:
        """Bind this process's memory. Return the text about it for ``place``."""
        wanted = self._order.memory
        if wanted is None:
            return ""
        nodes = topology.with_memory(own.nodes)
        try:
            if nodes:
                _set_policy(wanted, nodes)
                return f", memory {'bound' if wanted == 'bind' else 'preferred'}"
            why_not = f"there is none beside {cpus_in_words(own.cpus)} that this process may use"
        except OSError as error:
            advice = "; a container needs CAP_SYS_NICE for it" if error.errno == errno.EPERM else ""
            why_not = f"the kernel refuses set_mempolicy ({error.strerror}){advice}"
        self._lines.append(f"{self._order.asked}: memory comes from any node: {why_not}")
        return ""


def part(section: NumaOrder, _rank: int) -> BoundRank:
    """Make a rank's part."""
    return BoundRank(section)


def _seats(order: NumaOrder, spec: LaunchSpec) -> Seats:
    """Return the devices of this machine's ranks."""
    ranks, environ = spec.local_world_size, spec.context.environ
    if order.lists:
        return Seats(ranks)
    of_script = spec.target is not None
    runtime = device.runtime_of("cuda" if of_script else spec.devices.type) or "cuda"
    own = None if of_script else spec.devices.visible or ",".join(map(str, range(ranks)))
    return seats_of(ranks, order.devices, runtime, environ, own)


def _set_policy(wanted: str, nodes: list[int]) -> None:
    if wanted == "bind":
        linux.set_memory_policy(_BIND, nodes)
    elif len(nodes) == 1:
        linux.set_memory_policy(_PREFERRED, nodes)
    else:
        try:
            linux.set_memory_policy(_PREFERRED_MANY, nodes)
        except OSError:  # before Linux 5.15, which can prefer only one node
            linux.set_memory_policy(_PREFERRED, nodes[:1])
