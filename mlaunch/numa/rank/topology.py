"""A machine's NUMA nodes, sockets, cores and caches, from /sys, without the CPUs that this process may not use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from mlaunch.base import own_process

_NODES, _CPUS = "sys/devices/system/node", "sys/devices/system/cpu"


class Topology:
    """The topology of a machine for a process with the affinity mask ``allowed``. ``root``: where its /sys is.

    Attributes:
        nodes: The CPUs of each node, in the order of nodes; some nodes have none.
    """

    def __init__(self, root: str, allowed: Collection[int]) -> None:
        self._root, self.allowed = Path(root), frozenset(allowed)
        self._read: dict[str, str] = {}  # there are many files, and ranks need the same ones
        self.nodes = {node: self._list(f"{_NODES}/node{node}/cpulist") & self.allowed for node in self._online()}

    def node_of(self, address: str) -> int:
        """Return the node of a PCI device; -1 if the system does not say."""
        try:
            node = int(self._text(f"sys/bus/pci/devices/{address}/numa_node"))
        except (OSError, ValueError):
            return -1
        # Firmware of machines with one node often says -1.
        return node if node in self.nodes else min(self.nodes, default=-1) if len(self.nodes) == 1 else -1

    def nodes_with(self, cpus: Collection[int]) -> tuple[int, ...]:
        """Return the nodes that have some of these CPUs."""
        return tuple(node for node, its in self.nodes.items() if not its.isdisjoint(cpus))

    def with_memory(self, nodes: Sequence[int]) -> list[int]:
        """Return the nodes, in order, whose memory this process may use, as far as the system says."""
        found = set(nodes)
        with contextlib.suppress(OSError):
            found &= self._list(f"{_NODES}/has_memory")
        with contextlib.suppress(OSError):
            for line in self._text("proc/self/status").splitlines():
                name, _, value = line.partition(":")
                if name == "Mems_allowed_list":
                    found &= own_process.cpus_of_list(value)
        return [node for node in nodes if node in found]

    def sockets_of(self, nodes: Collection[int]) -> frozenset[int]:
        """Return all CPUs of the sockets that these nodes belong to."""
        sockets = {node: self._socket(min(cpus)) for node, cpus in self.nodes.items() if cpus}
        inside = {sockets[node] for node in nodes if node in sockets}
        return frozenset(cpu for node, socket in sockets.items() if socket in inside for cpu in self.nodes[node])

    def cores(self, cpus: Collection[int]) -> list[frozenset[int]]:
        """Return these CPUs grouped by physical core, in the order of each core's lowest CPU."""
        return _grouped(cpus, self._siblings)

    def complexes(self, cpus: Collection[int]) -> list[frozenset[int]]:
        """Return these CPUs grouped by the last cache that they share, the largest group first."""
        return sorted(_grouped(cpus, self._sharing), key=lambda group: -len(group))

    def _online(self) -> list[int]:
        try:
            return sorted(self._list(f"{_NODES}/online"))
        except OSError:  # a container without /sys, a kernel without NUMA
            return []

    def _socket(self, cpu: int) -> int:
        return int(self._text(f"{_CPUS}/cpu{cpu}/topology/physical_package_id"))

    def _siblings(self, cpu: int) -> frozenset[int]:
        return self._list(f"{_CPUS}/cpu{cpu}/topology/thread_siblings_list")

    def _sharing(self, cpu: int) -> frozenset[int]:
        """Return the CPUs with which a CPU shares its last cache, with itself."""
        level, sharing = -1, frozenset({cpu})
        for path in (self._root / _CPUS / f"cpu{cpu}/cache").glob("index[0-9]*"):
            cache = f"{_CPUS}/cpu{cpu}/cache/{path.name}"
            here = int(self._text(f"{cache}/level"))
            if here > level and self._text(f"{cache}/type").strip() in {"Unified", "Data"}:
                level, sharing = here, self._list(f"{cache}/shared_cpu_list")
        return sharing

    def _list(self, path: str) -> frozenset[int]:
        return own_process.cpus_of_list(self._text(path))

    def _text(self, path: str) -> str:
        if path not in self._read:
            self._read[path] = (self._root / path).read_text(encoding="utf-8", errors="replace")
        return self._read[path]


def _grouped(cpus: Collection[int], beside: Callable[[int], frozenset[int]]) -> list[frozenset[int]]:
    """Return the CPUs in groups. ``beside``: returns all CPUs of a group; groups are in the order of their lowest."""
    groups, left = [], set(cpus)
    while left:
        first = min(left)
        all_of_them = beside(first) | {first}
        groups.append((min(all_of_them), frozenset(all_of_them & left)))
        left -= all_of_them
    return [group for _, group in sorted(groups, key=lambda known: known[0])]
