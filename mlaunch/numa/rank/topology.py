"""What /sys says of a machine's NUMA nodes, sockets, cores and caches, less the CPUs that this process may not use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path

from mlaunch.base import cores

_NODES, _CPUS = "sys/devices/system/node", "sys/devices/system/cpu"


class Topology:
    """A machine as a process with the mask ``allowed`` sees it. ``root``: where its /sys is.

    Attributes:
        nodes: The CPUs of each node, in the nodes' order; some have none.
    """

    def __init__(self, root: str, allowed: Collection[int]) -> None:
        self._root, self.allowed = Path(root), frozenset(allowed)
        self.nodes = {node: self._list(f"{_NODES}/node{node}/cpulist") & self.allowed for node in self._online()}

    def node_of(self, address: str) -> int:
        """Return the node of a PCI device; -1 where the system does not say."""
        try:
            node = int(self._text(f"sys/bus/pci/devices/{address}/numa_node"))
        except (OSError, ValueError):
            return -1
        # Firmware of machines with one node often says -1: there is nowhere else.
        return node if node in self.nodes else min(self.nodes, default=-1) if len(self.nodes) == 1 else -1

    def nodes_with(self, cpus: Collection[int]) -> tuple[int, ...]:
        """Return the nodes that have some of these CPUs."""
        return tuple(node for node, its in self.nodes.items() if not its.isdisjoint(cpus))

    def with_memory(self, nodes: Sequence[int]) -> list[int]:
        """Return those of the nodes that have memory which a cpuset allows, as far as the system says; in order."""
        found = set(nodes)
        with contextlib.suppress(OSError):
            found &= self._list(f"{_NODES}/has_memory")
        with contextlib.suppress(OSError):
            for line in self._text("proc/self/status").splitlines():
                name, _, value = line.partition(":")
                if name == "Mems_allowed_list":
                    found &= cores.of_list(value)
        return [node for node in nodes if node in found]

    def sockets_of(self, nodes: Collection[int]) -> frozenset[int]:
        """Return all CPUs of the sockets in which these nodes are."""
        inside = {self._socket(cpu) for node in nodes for cpu in self.nodes[node]}
        return frozenset(cpu for its in self.nodes.values() for cpu in its if self._socket(cpu) in inside)

    def cores(self, cpus: Collection[int]) -> list[frozenset[int]]:
        """Return these CPUs as physical cores, by their lowest number."""
        return _grouped(cpus, lambda cpu: min(self._siblings(cpu)))

    def complexes(self, cpus: Collection[int]) -> list[frozenset[int]]:
        """Return these CPUs by the last cache that they share, the largest group first."""
        return sorted(_grouped(cpus, lambda cpu: min(self._sharing(cpu))), key=lambda group: -len(group))

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
        """Return the CPUs with which one shares its last cache."""
        level, sharing = -1, frozenset({cpu})
        for cache in (self._root / _CPUS / f"cpu{cpu}/cache").glob("index[0-9]*"):
            here = int((cache / "level").read_text(encoding="ascii"))
            of_data = (cache / "type").read_text(encoding="ascii").strip() in {"Unified", "Data"}
            if of_data and here > level:
                level, sharing = here, cores.of_list((cache / "shared_cpu_list").read_text(encoding="ascii"))
        return sharing

    def _list(self, path: str) -> frozenset[int]:
        return cores.of_list(self._text(path))

    def _text(self, path: str) -> str:
        return (self._root / path).read_text(encoding="utf-8", errors="replace")


def _grouped(cpus: Collection[int], key: Callable[[int], Hashable]) -> list[frozenset[int]]:
    groups: dict[Hashable, set[int]] = {}
    for cpu in sorted(cpus):
        groups.setdefault(key(cpu), set()).add(cpu)
    return [frozenset(group) for group in groups.values()]
