"""The rank that the others wait for, from what each has entered and where it is. Pure functions on tables.

    rank r waits in group g for collective number n  ->  each member of g whose number is lower
    rank r receives from rank s, or sends to it      ->  s, if it has not sent, or received, as many
    rank r makes a group                             ->  each member that has not begun to make it

A rank that others wait for, and that waits for none, is the cause. If all of these wait themselves, there is a circle,
or they have all entered an operation that does not end: they are in different ones, their tags differ, or the device or
the network is slow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field

from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.text import name_some_ranks
from mlaunch.protocol.messages import ANY

# By name of the group: its members, and the number of the latest collective that the rank has entered.
Entered = Mapping[str, tuple[tuple[int, ...], int]]
Messages = Mapping[str, Mapping[int, int]]  # by name of the group and by rank: their number
DEFAULT = "0"  # torch's name of the default group
NEW_GROUP, INIT = "new_group", "init_process_group"
_MEETINGS = {INIT, "init_rpc"}  # ranks meet in these before they have a group
_OF_ANYTHING = {"", "wait", "wait_tensor", "synchronize"}  # these wait for the end of some collective
_MOST = 4  # ranks, or groups of them, in a sentence


@frozen_record
class WaitView:
    """A wait of a rank.

    Attributes:
        operation: The name that users call; "": unknown, inside torch or C code.
        doing: For people: "in all_reduce at train.py:21".
        group: Its name; "": unknown.
        number: The collective's number in the group.
        peer: Of a message: the other rank, or ``ANY``; None: it is no message.
        tag: Of a message.
        members: Of the group.
        is_known: False: all that is known is that the rank is ahead of others and sleeps.
    """

    operation: str
    doing: str
    group: str = ""
    number: int = 0
    peer: int | None = None
    tag: int = 0
    members: tuple[int, ...] = ()
    is_known: bool = True


@frozen_record
class RankView:
    """A rank, for ``mlaunch why``.

    Attributes:
        rank: Global rank.
        doing: For people: "in all_reduce at train.py:21".
        operation: The collective that its main thread is in; "": none.
        waits: Its waits.
        is_free: True if its main thread is in none of these; None: it is, if it is ahead of another rank.
        entered: None if its control thread has not answered, or it is gone.
        latest: By name of the group, the operation of that number.
        completed: By name of the group, the number of operations that its device has done, if known.
        sent: The numbers of messages; and ``received``.
        made: The number of groups that it has made.
        returned: True: it has returned from its function, and will enter nothing more.
    """

    rank: int
    doing: str
    operation: str = ""
    waits: tuple[WaitView, ...] = ()
    is_free: bool | None = True
    entered: Entered | None = None
    latest: Mapping[str, str] = field(default_factory=dict)
    completed: Mapping[str, int] = field(default_factory=dict)
    sent: Messages = field(default_factory=dict)
    received: Messages = field(default_factory=dict)
    made: int = 0
    returned: bool = False


@frozen_record
class _Edge:
    """``rank`` waits for ``other``, which has entered ``number`` collectives of the group."""

    rank: int
    other: int
    wait: WaitView
    group: str
    number: int | None  # None: unknown, or it is no collective


Known = Mapping[int, RankView]


def why(views: Sequence[RankView]) -> str:
    """Return the sentence about who holds up whom."""
    known = {view.rank: view for view in views}
    said, is_sure = _sentence(known)
    if is_sure:
        return said
    # In a circle, a rank that only seems to wait is more likely to be its cause.
    return _sentence({rank: _surely(view) for rank, view in known.items()})[0]


def waited_for(views: Sequence[RankView]) -> list[int]:
    """Return the ranks that others wait for, and that wait for none; [] if ranks wait for each other."""
    return sorted(_roots(*_ways({view.rank: view for view in views})))


def _surely(view: RankView) -> RankView:
    waits = tuple(wait for wait in view.waits if wait.is_known)
    return dataclasses.replace(view, waits=waits, is_free=view.is_free or not waits)


def _sentence(known: Known) -> tuple[str, bool]:
    """Return the sentence; and False if it names a circle in which a rank only seems to wait."""
    edges, known = _ways(known)
    ahead = {edge.rank for edge in edges}
    told = _blame(_roots(edges, known), edges, known)
    circle = [] if told else _circle(edges)
    if circle:
        return _crossed(circle, edges, known), all(edge.wait.is_known for edge in circle)
    told = told or _complete(ahead, edges, known)
    return "; ".join(told[:_MOST]) or _nobody(known), True


def _ways(known: Known) -> tuple[list[_Edge], dict[int, RankView]]:
    """Return who waits for whom, and the ranks with ``is_free`` decided."""
    edges = [edge for view in known.values() for wait in view.waits for edge in _edges(view, wait, known)]
    ahead = {edge.rank for edge in edges}
    return edges, {
        rank: view if view.is_free is not None else dataclasses.replace(view, is_free=rank not in ahead)
        for rank, view in known.items()
    }


def _roots(edges: Sequence[_Edge], known: Known) -> set[int]:
    """Return the ranks that others wait for, and that wait for none."""
    return {edge.other for edge in edges if known[edge.other].is_free}


def _nobody(known: Known) -> str:
    apart = {wait.peer for view in known.values() for wait in view.waits if wait.peer not in {None, ANY, *known}}
    if apart:
        others = name_some_ranks([rank for rank in apart if rank is not None])
        return f"no rank waits for one that was asked; ask for {others} on their machines"
    return "no rank waits for another one in a collective or for a message"


# Who waits for whom


def _edges(view: RankView, wait: WaitView, known: Known) -> list[_Edge]:
    others = [known[rank] for rank in sorted(known) if rank != view.rank]
    if wait.peer is not None:
        return [_Edge(view.rank, other.rank, wait, wait.group, None) for other in others
                if _lacks(view, wait, other, known)]  # fmt: skip
    if wait.operation in _MEETINGS or wait.operation == NEW_GROUP:
        return [_Edge(view.rank, other.rank, wait, wait.group, None) for other in others if _is_missing(wait, other)]
    numbers = {wait.group: wait.number} if wait.group else {name: at for name, (_, at) in (view.entered or {}).items()}
    found = []
    for group, number in numbers.items():
        members = wait.members or (view.entered or {}).get(group, ((), 0))[0]
        for other in others:
            there = _number(other, group)
            is_behind = there < number if there is not None else bool(wait.operation)
            if other.rank in members and is_behind:
                found.append(_Edge(view.rank, other.rank, wait, group, there))
    return found


def _number(view: RankView, group: str) -> int | None:
    return None if view.entered is None else view.entered.get(group, ((), 0))[1]


def _lacks(view: RankView, wait: WaitView, other: RankView, known: Known) -> bool:
    """True if a message waits for this rank to send or to receive it."""
    group, ours = wait.group, (view.sent if wait.operation == "send" else view.received).get(wait.group, {})
    if wait.peer == ANY:
        sent = sum(one.sent.get(group, {}).get(view.rank, 0) for one in known.values())
        return other.rank in wait.members and sent < sum(ours.values())
    if wait.peer != other.rank:
        return False
    theirs = (other.received if wait.operation == "send" else other.sent).get(group, {})
    # A message that was received from anybody may be this one.
    return theirs.get(view.rank, 0) + theirs.get(ANY, 0) < ours.get(other.rank, 0)


def _is_missing(wait: WaitView, other: RankView) -> bool:
    """True if this rank has not begun to make the group."""
    meets = any(one.operation == wait.operation and wait.group in {one.group, ""} for one in other.waits)
    if meets or (wait.members and other.rank not in wait.members):
        return False
    if wait.operation == NEW_GROUP and wait.group.isdigit():
        return other.entered is None or other.made <= int(wait.group)
    names = {name.partition(" ")[0] for name in other.entered or {}}
    return wait.group not in names if wait.operation == NEW_GROUP else not names


# Ranks that others wait for, and that wait for none


def _blame(roots: Collection[int], edges: Sequence[_Edge], known: Known) -> list[str]:
    """Return for each what it has not done, for whom, and what it does; equal ranks share a text."""
    anybody = {edge.rank for edge in edges if edge.wait.peer == ANY}
    told: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(roots):
        direct = [edge for edge in edges if edge.other == rank]
        # A message says more than a collective.
        first = min(direct, key=lambda edge: (edge.wait.peer == ANY, edge.wait.peer is None, edge.rank))
        if first.wait.peer == ANY and not _is_last(first, edges, known):
            continue
        told.setdefault((_what(first, known), _behind(first, edges, known)), []).append(rank)
    said = [_of_roots(what, behind, ranks, known) for (what, behind), ranks in told.items()]
    return said or [_from_anybody(rank, edges, known) for rank in sorted(anybody) if roots]


def _is_last(edge: _Edge, edges: Sequence[_Edge], known: Known) -> bool:
    """True if only one rank could send the message that another receives from anybody."""
    return [one.other for one in edges if one.rank == edge.rank and known[one.other].is_free] == [edge.other]


def _of_roots(what: str, behind: str, ranks: Sequence[int], known: Known) -> str:
    verb = "have" if len(ranks) > 1 else "has"
    if what == "returned":
        return f"{name_some_ranks(ranks)} {verb} returned ({behind})"
    done = f"{verb} not {what}" if what else f"{'do' if len(ranks) > 1 else 'does'} not answer"
    behind = behind.replace(" it, ", " them, ", 1) if len(ranks) > 1 else behind
    return f"{name_some_ranks(ranks)} {done} ({behind}); {_places(ranks, known)}"


def _what(edge: _Edge, known: Known) -> str:
    """Return what a rank has not done: "entered all_reduce #3 of the default group"; "": it does not answer."""
    other, wait, view = known[edge.other], edge.wait, known[edge.rank]
    if other.returned or other.entered is None:
        return "returned" if other.returned else ""
    if wait.peer is not None:
        return f"begun to receive from rank {edge.rank}" if wait.operation == "send" else f"sent to rank {edge.rank}"
    if edge.number is None:
        return f"entered {wait.operation}{f' for {name_some_ranks(wait.members)}' if wait.members else ''}"
    at = wait.number or _number(view, edge.group)
    name = view.latest.get(edge.group, "") if wait.operation in _OF_ANYTHING else wait.operation
    name = name if name and at == edge.number + 1 else "operation"
    return f"entered {name} #{edge.number + 1} of {_named(edge.group, view)}"


def _behind(edge: _Edge, edges: Sequence[_Edge], known: Known) -> str:
    """Return who waits for this rank, and who waits for those."""
    direct = sorted((one for one in edges if one.other == edge.other), key=lambda one: one.rank)
    alike = [one for one in direct if _what(one, known) == _what(edge, known)]
    waiting, first = sorted({one.rank for one in alike}), alike[0]
    verb = "wait for" if first.wait.is_known else "be ahead of"
    rest = [_of_one(one, _names([one], known)) for one in direct if one.rank not in waiting][:_MOST]
    through = _through([*dict.fromkeys(one.rank for one in direct)], edges)
    return "; ".join([f"{_do(waiting, verb)} it, {first.wait.doing}", *rest, *through])


def _do(ranks: Sequence[int], verb: str) -> str:
    """Return "ranks 0, 2 wait for", "rank 0 is ahead of"."""
    many = len(ranks) > 1
    verb, _, rest = verb.partition(" ")
    irregular = {"be": ("is", "are"), "have": ("has", "have")}
    verb = irregular.get(verb, (f"{verb}s", verb))[many]
    return f"{name_some_ranks(ranks)} {verb} {rest}"


def _through(waiting: Collection[int], edges: Sequence[_Edge]) -> list[str]:
    """Return who waits for these ranks, who waits for those, and so on."""
    told: dict[tuple[str, str], list[int]] = {}
    reached, found = set(waiting), list(waiting)
    while found:
        rank = found.pop(0)
        for edge in edges:
            if edge.other == rank and edge.rank not in reached:
                reached.add(edge.rank)
                found.append(edge.rank)
                other = "any rank" if edge.wait.peer == ANY else f"rank {rank}"
                told.setdefault((other, edge.wait.doing), []).append(edge.rank)
    return [f"{_do(ranks, 'wait for')} {other}, {doing}" for (other, doing), ranks in list(told.items())[:_MOST]]


def _from_anybody(rank: int, edges: Sequence[_Edge], known: Known) -> str:
    ways = [edge for edge in edges if edge.rank == rank and edge.wait.peer == ANY]
    free = sorted({edge.other for edge in ways if known[edge.other].is_free})
    behind = "; ".join([f"it waits for one of any rank, {ways[0].wait.doing}", *_through([rank], edges)])
    return f"no rank has sent to rank {rank} ({behind}); {_places(free, known)}"


def _places(ranks: Sequence[int], known: Known) -> str:
    """Return "rank 1 is in next at train.py:18"; ranks at one place share a text."""
    told: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        view = known[rank]
        verb = ("was", "were") if view.entered is None else ("is", "are")
        told.setdefault((verb[0], view.doing), []).append(rank)
    plural = {"was": "were", "is": "are"}
    found = list(told.items())
    said = [f"{name_some_ranks(those)} {verb if len(those) == 1 else plural[verb]} {doing}" for (verb, doing), those in
            found[:_MOST]]  # fmt: skip
    return "; ".join([*said, *([f"and {len(found) - _MOST} more places"] if len(found) > _MOST else [])])


def _named(group: str, view: RankView) -> str:
    if group.partition(" ")[0] == DEFAULT:
        return "the default group"
    members = (view.entered or {}).get(group, ((), 0))[0]
    return f"the group of {name_some_ranks(members)}"


# Circles


def _circle(edges: Sequence[_Edge]) -> list[_Edge]:
    """Return the shortest circle of waits; [] if there is none."""
    found: list[_Edge] = []
    for start in sorted({edge.rank for edge in edges}):
        ways: dict[int, list[_Edge]] = {start: []}
        queue = [start]
        while queue:
            rank = queue.pop(0)
            for edge in edges:
                if edge.rank == rank and edge.other == start and (not found or len(ways[rank]) + 1 < len(found)):
                    found = [*ways[rank], edge]
                if edge.rank == rank and edge.other not in ways:
                    ways[edge.other] = [*ways[rank], edge]
                    queue.append(edge.other)
    return found


def _crossed(circle: Sequence[_Edge], edges: Sequence[_Edge], known: Known) -> str:
    names = _names(circle, known)
    collectives = all(edge.wait.peer is None and edge.number is not None for edge in circle)
    reason = ", as they have entered groups in crossed order" if collectives and len(names) > 1 else ""
    told = [_of_one(edge, names) for edge in circle]
    more = [f"and {len(told) - 2 * _MOST} more"] if len(told) > 2 * _MOST else []
    through = _through([edge.rank for edge in circle], edges)
    return f"ranks wait for each other{reason}: {'; '.join([*told[: 2 * _MOST], *more, *through])}"


def _names(edges: Sequence[_Edge], known: Known) -> dict[str, str]:
    return {edge.group: _named(edge.group, known[edge.rank]) for edge in edges if edge.number is not None}


def _of_one(edge: _Edge, names: Mapping[str, str]) -> str:
    who = f"rank {edge.rank} waits for"
    if edge.wait.peer is not None:
        other = "any rank" if edge.wait.peer == ANY else f"rank {edge.other}"
        what = f"{other} to receive" if edge.wait.operation == "send" else f"a message of {other}"
        return f"{who} {what}, {edge.wait.doing}"
    if edge.number is None:
        return f"{who} rank {edge.other}, {edge.wait.doing}"
    group = names[edge.group]
    if list(names.values()).count(group) > 1:
        group += f" that torch calls {edge.group.partition(' ')[0]!r}"
    return f"{who} rank {edge.other} in {group}, {edge.wait.doing}"


# Ranks that have all entered an operation that does not end


def _complete(waiting: Collection[int], edges: Sequence[_Edge], known: Known) -> list[str]:
    """Return texts about waits in which no rank is behind."""
    found: dict[tuple[str, int], list[tuple[RankView, WaitView]]] = {}
    told = []
    for view in known.values():
        for wait in view.waits if view.rank not in waiting else ():
            if wait.peer is not None:
                told += [_unmatched(view, wait, known)] if wait.peer in known else []
            elif wait.operation:
                found.setdefault((wait.group, wait.number), []).append((view, wait))
    ended = [_at_one_number(those, known) for those in found.values()]
    through = _through({view.rank for those in found.values() for view, _ in those}, edges)
    return [*dict.fromkeys([*ended, *told]), *through]


def _unmatched(view: RankView, wait: WaitView, known: Known) -> str:
    """Return the text about a message that the other rank has begun to send, or to receive, too."""
    other = known[wait.peer or 0]
    verb, does = ("sends to", "receives") if wait.operation == "send" else ("receives from", "sends")
    theirs = [one for one in other.waits if one.peer == view.rank and one.operation != wait.operation]
    if theirs and theirs[0].tag != wait.tag:
        first, second = sorted([(view, wait), (other, theirs[0])], key=lambda one: one[0].rank)
        pairs = [f"rank {one.rank} {'sends' if way.operation == 'send' else 'receives'} with tag {way.tag}, {way.doing}"
                 for one, way in (first, second)]  # fmt: skip
        return f"two ranks have different tags for what one sends and the other receives: {'; '.join(pairs)}"
    return (
        f"rank {view.rank} {verb} rank {other.rank}, {wait.doing}, which {does} as many messages: their tags or sizes "
        f"differ, or the network is slow or stuck; rank {other.rank} is {other.doing}"
    )


def _at_one_number(those: Sequence[tuple[RankView, WaitView]], known: Known) -> str:
    """Return the text about ranks that wait in the same operation, which all have entered."""
    wait, ranks = those[0][1], [view.rank for view, _ in those]
    operations: dict[str, list[tuple[RankView, WaitView]]] = {}
    for view, one in those:
        operations.setdefault(one.operation, []).append((view, one))
    gone = {view.rank: latest for view in known.values() if view.rank not in ranks and wait.group
            and _number(view, wait.group) == wait.number
            and (latest := view.latest.get(wait.group, "")) not in {"", wait.operation}}  # fmt: skip
    if len(operations) > 1 or gone:
        told = [
            f"{name_some_ranks([view.rank for view, _ in some])} {'are' if len(some) > 1 else 'is'} {some[0][1].doing}"
            for some in operations.values()
        ]
        told += [f"rank {rank} has begun {latest}, and is {known[rank].doing}" for rank, latest in gone.items()]
        return f"the ranks are in different operations that stand for the same one: {'; '.join(told[:_MOST])}"
    members = wait.members or {rank for view in known.values() for those_, _ in (view.entered or {}).values()
                               for rank in those_}  # fmt: skip
    who = f"{name_some_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'}"
    if elsewhere := sorted({*members} - known.keys()):
        who = "the ranks here are" if len(ranks) == len(known) else who
        return f"{who} in {wait.operation}, and none is behind; ask for {name_some_ranks(elsewhere)} on their machines"
    who = "all ranks are" if len(ranks) == len(known) else who
    if wait.operation in _MEETINGS:
        return (
            f"{who} in {wait.operation}, where they wait for each other at a store: is it hosted at the address that "
            f"they were given?"
        )
    slow = "the device or the network is slow or stuck, or much is sent"
    return f"{who} in {wait.operation}, and none is behind: {'; '.join([slow, *_by_devices(wait.group, known)])}"


def _by_devices(group: str, known: Known) -> list[str]:
    """Return how far the devices are in what all ranks have entered, the last first. ``group`` "": of all groups."""
    told = []
    for name in [group] if group else sorted({name for view in known.values() for name in view.completed}):
        views = [view for view in known.values() if name in view.completed]
        begun = max((_number(view, name) or 0 for view in views), default=0)
        ranks: dict[int, list[int]] = {}
        for view in views:
            ranks.setdefault(view.completed[name], []).append(view.rank)
        if ranks and min(ranks) < begun:
            done = [f"{_do(those, 'have completed')} {count} on the device" for count, those in sorted(ranks.items())]
            told.append(f"of {begun} operations of {_named(name, views[0])}, {', '.join(done[:_MOST])}")
    return told
