"""The choice of each rank's CPUs. Nothing here binds a process, so tests can run it on any machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from mlaunch.base import own_process
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.text import name_ranks, ranges
from mlaunch.numa.rank.topology import Topology
from mlaunch.numa.wire import NumaOrder, PciDevice


@frozen_record
class Binding:
    """The CPUs of a rank. ``why_not``: why it is not bound; then there are none."""

    cpus: frozenset[int] = frozenset()
    nodes: tuple[int, ...] = ()  # of its CPUs, that of its device first; none if the system does not say
    why_not: str = ""

    def __str__(self) -> str:
        return ", ".join([*([nodes_in_words(self.nodes)] if self.nodes else []), cpus_in_words(self.cpus)])


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
                             f"here; allowed: those of {cpus_in_words(allowed)}, which this process may use "
                             f"(taskset, a cpuset and schedulers say so)")  # fmt: skip


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


def lines(order: NumaOrder, all_of_them: Sequence[Binding], first_rank: int) -> Mapping[int, str]:
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
