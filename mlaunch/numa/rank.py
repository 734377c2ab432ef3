"""A rank that binds itself to its CPUs, and its memory to their nodes, by system calls (few machines have numactl).

    the devices of the ranks (``Seats``), the CPUs near them (``Topology``) -> each rank's CPUs (``Binding``)

Everything below ``BoundRank`` only chooses, and reads files below a directory, so tests can run it on any machine.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from mlaunch.base import linux, own_process
from mlaunch.base.exceptions import misuse
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.text import name_ranks, ranges
from mlaunch.core.parts import RankPart
from mlaunch.numa.wire import NumaOrder, PciDevice
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.rank.device import runtime_of

_PREFERRED, _BIND, _PREFERRED_MANY = 1, 2, 5  # linux/mempolicy.h
_THREADS = "OMP_NUM_THREADS"
_SHOWS = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}
_BELOW = "ROCR_VISIBLE_DEVICES"  # makes devices visible to HIP, which counts those from 0
_ORDER = "CUDA_DEVICE_ORDER"
_INSTANCE = "MIG-"
_NODES, _CPUS = "sys/devices/system/node", "sys/devices/system/cpu"


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
        if line := unbound_lines(self._order, found, spec.rank_start).get(local_rank):
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
            why_not = f"this process may not use the memory beside {cpus_in_words(own.cpus)}"
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
    runtime = runtime_of("cuda" if of_script else spec.devices.type) or "cuda"
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


# The devices of the ranks


@frozen_record
class Seats:
    """The facts about the devices of a machine's ranks on which bindings depend.

    Attributes:
        ranks: The number of ranks on this machine.
        pool: The devices among which a node's cores are divided: all that the launch's caller sees. None: the ranks run
            on CPUs.
        places: By local rank, the index of its device in ``pool``; None: not known.
        why_not: The reason if no device is known.
    """

    ranks: int
    pool: Sequence[PciDevice] | None = None
    places: Sequence[int | None] = ()
    why_not: str = ""


@frozen_record
class _Named:
    """A device with its name in such a variable. A device with several MIG instances has several names."""

    name: str
    device: PciDevice


def seats_of(
    ranks: int, devices: Sequence[PciDevice], runtime: str, environ: Mapping[str, str], own: str | None
) -> Seats:
    """Return the devices of the ranks.

    Args:
        ranks: The number of ranks on this machine.
        devices: The machine's devices.
        runtime: "cuda", "rocm", "cpu", or another one, about which nothing is known here.
        environ: The caller's variables.
        own: The launch's devices as the machine names them, separated by commas; None: local rank i has device i of
            those that ``environ`` makes visible.
    """
    if runtime == "cpu":
        return Seats(ranks)
    there = [device for device in devices if device.runtime == runtime]
    if not there:
        lacks = f"this system does not say where its {runtime} devices are"
        return Seats(ranks) if own is None else Seats(ranks, why_not=lacks)
    below = _picked(there, environ.get(_BELOW) if runtime == "rocm" else None)
    shown = next((environ[name] for name in _SHOWS[runtime] if name in environ), None)
    pool = _picked([one.device for one in below], shown)
    theirs = pool if own is None else _picked([one.device for one in below], own)
    if own is None and not pool:
        return Seats(ranks)
    if lacks := _unordered(there, [*pool, *theirs], runtime, environ):
        return Seats(ranks, why_not=lacks)
    if any(_found(one, pool) is None for one in theirs):  # the caller makes other devices visible than its launch has
        pool = theirs
    places = [_found(theirs[rank], pool) if rank < len(theirs) else None for rank in range(ranks)]
    return Seats(ranks, [one.device for one in pool], places)


def _picked(devices: Sequence[PciDevice], shown: str | None) -> list[_Named]:
    """Return the devices that a variable makes visible: all without it, and as in CUDA none after an unknown name."""
    if shown is None:
        return [_Named(str(number), device) for number, device in enumerate(devices)]
    found = []
    for name in (part.strip() for part in shown.split(",")):
        device = _named(name, devices)
        if device is None:
            break
        found.append(_Named(name, device))
    return found


def _named(name: str, devices: Sequence[PciDevice]) -> PciDevice | None:
    if name.isdecimal():
        return devices[int(name)] if int(name) < len(devices) else None
    if not name:
        return None
    if name.startswith(f"{_INSTANCE}GPU-"):  # in older drivers: the device's UUID, and the instance's numbers
        name = name.removeprefix(_INSTANCE).partition("/")[0]
    # A UUID may be shortened if it still names one device.
    there = [device for device in devices if any(known.startswith(name) for known in device.names)]
    return there[0] if len(there) == 1 else None


def _found(one: _Named, pool: Sequence[_Named]) -> int | None:
    """Return the index of a device in ``pool``: of a MIG instance by its name, else of the device itself."""
    names = [other.name for other in pool]
    if one.name in names and one.name.startswith(_INSTANCE):
        return names.index(one.name)
    return next((place for place, other in enumerate(pool) if other.device is one.device), None)


def _unordered(
    there: Sequence[PciDevice], used: Sequence[_Named], runtime: str, environ: Mapping[str, str]
) -> str:  # fmt: skip
    """Return why the order of devices is unknown; "" if it is known. Only CUDA knows the fastest, which is first."""
    by_speed = runtime == "cuda" and environ.get(_ORDER) != "PCI_BUS_ID" and len({one.model for one in there}) > 1
    if by_speed and any(one.name.isdecimal() for one in used):
        return f"this machine's devices are of several models, which CUDA numbers by speed; set {_ORDER}=PCI_BUS_ID"
    return ""


# The choice of CPUs


@frozen_record
class Binding:
    """The CPUs of a rank. ``why_not``: why it is not bound; then there are none."""

    cpus: frozenset[int] = frozenset()
    nodes: tuple[int, ...] = ()  # of its CPUs, that of its device first; none if the system does not say
    why_not: str = ""

    def __str__(self) -> str:
        return ", ".join([*([nodes_in_words(self.nodes)] if self.nodes else []), cpus_in_words(self.cpus)])


def bindings(order: NumaOrder, seats: Seats, topology: Topology) -> list[Binding]:
    """Return the binding of each local rank. ValueError for lists of CPUs that this machine does not have."""
    if order.lists:
        check_lists(order, seats.ranks, topology.allowed)
        wanted = [own_process.cpus_of_list(text) for text in order.lists[: seats.ranks]]
        return [Binding(cpus, topology.nodes_with(cpus)) for cpus in wanted]
    if not topology.nodes or seats.why_not:
        lacks = seats.why_not or "this system does not say which CPUs are near (no /sys/devices/system/node)"
        return [Binding(why_not=lacks)] * seats.ranks
    if seats.pool is None:
        near: Sequence[tuple[int, ...]] = _shares(seats.ranks, [node for node, cpus in topology.nodes.items() if cpus])
        places: Sequence[int | None] = range(seats.ranks)
    else:
        near, places = [(topology.node_of(device.address),) for device in seats.pool], seats.places
    return [_near(order.mode, place, near, seats, topology) for place in places]


def check_lists(order: NumaOrder, ranks: int, allowed: Collection[int]) -> None:
    """Raise ValueError if there are fewer lists of CPUs than ranks, or one has a CPU that this process may not use."""
    if not order.lists:
        return
    if len(order.lists) < ranks:
        raise ValueError(f"{order.asked}: {len(order.lists)} list(s) of CPUs for {ranks} ranks on this machine; "
                         f"allowed: one for each, with semicolons between them")  # fmt: skip
    for local_rank, text in enumerate(order.lists[:ranks]):
        if beyond := own_process.cpus_of_list(text) - set(allowed):
            raise ValueError(f"{order.asked}: {cpus_in_words(beyond)}, for local rank {local_rank}, cannot be used "
                             f"here; allowed: those of {cpus_in_words(allowed)}, which taskset, a cpuset or a "
                             f"scheduler has left to this process")  # fmt: skip


def cpus_in_words(cpus: Collection[int]) -> str:
    """Return "CPUs 0-7, 16"."""
    return f"CPU{'s' if len(cpus) != 1 else ''} {ranges(sorted(cpus), ',')}"


def nodes_in_words(nodes: Collection[int]) -> str:
    """Return "node 1", or "nodes 0-1"."""
    return f"node{'s' if len(nodes) != 1 else ''} {ranges(sorted(nodes), ',')}"


def threads_of(local_rank: int, all_of_them: Sequence[Binding]) -> int:
    """Return how many threads a rank has room for on its CPUs, to which other ranks may be bound, too."""
    users: dict[int, int] = {}
    for binding in all_of_them:
        for cpu in binding.cpus:
            users[cpu] = users.get(cpu, 0) + 1
    # In whole numbers: three thirds as floats may be less than one.
    shares: dict[int, int] = {}
    for cpu in all_of_them[local_rank].cpus:
        shares[users[cpu]] = shares.get(users[cpu], 0) + 1
    return max(1, sum(count // among for among, count in shares.items()))


def unbound_lines(order: NumaOrder, all_of_them: Sequence[Binding], first_rank: int) -> Mapping[int, str]:
    """Return the lines about ranks that are not bound, by the local rank that prints each."""
    told: dict[str, list[int]] = {}
    for local_rank, binding in enumerate(all_of_them):
        if binding.why_not:
            told.setdefault(binding.why_not, []).append(local_rank)
    return {
        ranks[0]: f"{order.asked}: {name_ranks([first_rank + rank for rank in ranks])} "
                  f"{'are' if len(ranks) > 1 else 'is'} not bound: {why}"
        for why, ranks in told.items()
    }  # fmt: skip


def _shares(ranks: int, nodes: Sequence[int]) -> list[tuple[int, ...]]:
    """Divide nodes among ranks: several nodes for each rank, or several ranks on a node, both in order."""
    if ranks >= len(nodes):
        return [(nodes[rank * len(nodes) // ranks],) for rank in range(ranks)]
    ends = [rank * len(nodes) // ranks for rank in range(ranks + 1)]
    return [tuple(nodes[start:end]) for start, end in itertools.pairwise(ends)]


@frozen_record
class _Share:
    """The CPUs of some nodes, and a rank's or device's place among those near them."""

    topology: Topology
    cpus: frozenset[int]
    nodes: tuple[int, ...]
    index: int
    count: int


def _near(
    mode: str, place: int | None, near: Sequence[tuple[int, ...]], seats: Seats, topology: Topology
) -> Binding:  # fmt: skip
    if place is None:
        return Binding(why_not=f"its device is not among the {len(near)} that are visible")
    nodes = near[place]
    if -1 in nodes:
        device = seats.pool[place].address if seats.pool else "its device"
        return Binding(why_not=f"this system does not say on which node {device} is")
    cpus = frozenset().union(*(topology.nodes[node] for node in nodes))
    if not cpus:
        return Binding(why_not=f"{nodes_in_words(nodes)}, where its device is, has no CPU that this process may use")
    beside = [other for other, those in enumerate(near) if those == nodes]
    share = _Share(topology, cpus, nodes, beside.index(place), len(beside))
    try:
        cpus = _CHOOSE[mode](share)
    except (OSError, ValueError) as error:
        return Binding(why_not=f"this system does not say how its CPUs are arranged ({error})")
    if not cpus:
        cores_there = len(topology.cores(share.cpus))
        return Binding(why_not=f"{nodes_in_words(nodes)} has {cores_there} core(s) for the {share.count} that share it")
    others = [node for node in topology.nodes_with(cpus) if node not in nodes]
    return Binding(cpus, (*nodes, *others))


# All as in torch.numa, which torchrun's --numa-binding uses.


def _node(share: _Share) -> frozenset[int]:
    return share.cpus


def _socket(share: _Share) -> frozenset[int]:
    return share.topology.sockets_of(share.nodes)


def _exclusive(share: _Share) -> frozenset[int]:
    """Divide the cores evenly; the first shares get one more. No CPUs if there are too few cores."""
    there = share.topology.cores(share.cpus)
    each, more = divmod(len(there), share.count)
    start = share.index * each + min(share.index, more)
    return frozenset().union(*there[start : start + each + (share.index < more)]) if each else frozenset()


def _core_complex(share: _Share) -> frozenset[int]:
    there = share.topology.complexes(share.cpus)
    return there[share.index % len(there)]


_CHOOSE: Mapping[str, Callable[[_Share], frozenset[int]]] = {
    "node": _node,
    "socket": _socket,
    "exclusive": _exclusive,
    "core-complex": _core_complex,
}


# What the system says


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
