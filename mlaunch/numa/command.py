"""The findings of ``mlaunch doctor`` about NUMA nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from mlaunch.numa.caller import ROOT, devices_of
from mlaunch.numa.rank import Topology, bindings, cpus_in_words, nodes_in_words, seats_of
from mlaunch.numa.wire import NumaOrder, PciDevice


def findings(root: str = ROOT) -> Iterator[tuple[bool, str]]:
    """Yield whether a finding is good, and its text: what ``numa="node"`` would do here."""
    topology = Topology(root, os.sched_getaffinity(0))
    if not topology.nodes:
        yield False, "this system does not say which CPUs are near which device, so numa= binds nothing"
        return
    if len(topology.nodes) == 1:
        yield True, f"one node with {cpus_in_words(topology.allowed)}: every CPU is near every device"
        return
    nodes = [f"{nodes_in_words([node])} has {cpus_in_words(cpus)}" for node, cpus in topology.nodes.items() if cpus]
    yield True, "; ".join(nodes)
    yield from _of_devices(topology, devices_of(root))


def _of_devices(topology: Topology, devices: Sequence[PciDevice]) -> Iterator[tuple[bool, str]]:
    kinds = {device.runtime for device in devices}
    if not kinds:
        yield True, "numa='node' would divide these nodes among ranks on CPUs"
    for kind in sorted(kinds):
        count = len(seats_of(0, devices, kind, os.environ, None).pool or ())
        seats = seats_of(count, devices, kind, os.environ, None)
        for number, binding in enumerate(bindings(NumaOrder("node", None, ""), seats, topology)):
            if binding.why_not:
                yield False, f"numa='node' would not bind the rank of {kind}:{number}: {binding.why_not}"
            else:
                yield True, f"numa='node' would bind the rank of {kind}:{number} to {binding}"
