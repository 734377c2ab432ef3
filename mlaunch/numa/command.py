"""``--numa-binding`` and ``--numa-memory`` of ``mlaunch run``, and what ``mlaunch doctor`` says of nodes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import Any

from mlaunch.caller.options.launch_options import about
from mlaunch.cli.checks import UsageError
from mlaunch.numa.caller.machine_devices import devices_of
from mlaunch.numa.caller.order import ROOT
from mlaunch.numa.rank.binding import bindings, cpus_in_words, nodes_in_words
from mlaunch.numa.rank.seats import seats_of
from mlaunch.numa.rank.topology import Topology
from mlaunch.numa.wire import MODES, NumaOrder, PciDevice

GROUP = "how many ranks, and where"
_FLAGS = {"numa": "--numa-binding", "numa_memory": "--numa-memory"}
_MEMORY = ("preferred", "bind")


def add(flags: Any, group: Any) -> None:
    """Add the flags to a group of the parser's."""
    flags.flag(group, "--numa-binding", metavar="MODE", help="bind each rank to CPUs near its device: node, socket, "
               "exclusive or core-complex; or CPUs by local rank, '0-7;8-15'")  # fmt: skip
    group.add_argument(
        "--numa-memory",
        metavar="HOW",
        help="take the memory of each rank from the nodes of its CPUs: preferred or bind",
    )


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the flags ask for; UsageError for what they cannot mean."""
    mode, memory = args.numa_binding, args.numa_memory
    try:
        about("numa").allowed.check("numa", mode)
    except ValueError:
        words = f"{', '.join(MODES)}, or CPUs of each local rank such as '0-7;8-15'"
        raise UsageError(f"--numa-binding {mode}: allowed: {words}") from None
    if memory not in {None, *_MEMORY}:
        raise UsageError(f"--numa-memory {memory}: allowed: {', '.join(_MEMORY)}")
    if memory is not None and mode is None:
        raise UsageError(f"--numa-memory {memory} without --numa-binding: memory goes with the CPUs that a rank is "
                         f"bound to; give --numa-binding node, or another of its values, too")  # fmt: skip
    return {"numa": mode, "numa_memory": memory}


def findings(root: str = ROOT) -> Iterator[tuple[bool, str]]:
    """Yield what ``mlaunch doctor`` says, and whether that is as it should be: what ``numa="node"`` would do here."""
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
