"""Says which rank the others wait for, from what each has entered and where it is. Pure functions on tables.

    rank r waits in group g at number n  ->  each member of g whose number is lower

Who waits for nobody is why the others wait. A circle is two groups entered in crossed order. Where all are at the same
number, nobody is to blame: they are in different operations, or the device or the network is slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.text import name_some_ranks

# By name of the group: its members, and the number of the latest operation that the rank has entered.
Entered = Mapping[str, tuple[tuple[int, ...], int]]
DEFAULT = "0"  # torch's name of the default group
_MEETINGS = {"init_process_group", "init_rpc"}  # where ranks meet before they have a group


@frozen_record
class RankView:
    """A rank as ``mlaunch why`` sees it.

    Attributes:
        rank: Global rank.
        doing: For people: "in all_reduce at train.py:21".
        operation: The collective that it is in; "": none.
        waits: It is somewhere inside torch, where it may wait for the others.
        entered: None if its control thread has not answered, or it is gone.
        returned: From its function: it will enter nothing more.
    """

    rank: int
    doing: str
    operation: str = ""
    waits: bool = False
    entered: Entered | None = None
    returned: bool = False


@frozen_record
class _Wait:
    """``rank`` waits for ``other``, which has entered ``number`` operations of the group."""

    rank: int
    other: int
    group: str
    number: int | None  # None: not known


def why(views: Sequence[RankView]) -> str:
    """Returns the sentence that says who holds up whom."""
    known = {view.rank: view for view in views}
    waits = _waits(known)
    to_blame = {wait.other for wait in waits} - {wait.rank for wait in waits}
    if to_blame:
        return "; ".join(_blame(rank, [wait for wait in waits if wait.other == rank], known) for rank in
                         sorted(to_blame)[:4])  # fmt: skip
    if waits:
        return _crossed(waits, known)
    inside = [view for view in views if view.operation]
    if not inside or len(inside) < len(views):
        return "no rank waits for another one in a collective"
    elsewhere = {other for view in views for members, _ in (view.entered or {}).values() for other in members}
    return _at_one_number(inside, sorted(elsewhere - known.keys()))


def _waits(known: Mapping[int, RankView]) -> list[_Wait]:
    found = []
    for view in known.values():
        for group, (members, number) in (view.entered or {}).items() if view.waits else ():
            for other in members:
                if other in known and other != view.rank and (there := _number(known[other], group)) is not None:
                    found += [_Wait(view.rank, other, group, there)] if there < number else []
                elif other in known and other != view.rank and view.operation:
                    found.append(_Wait(view.rank, other, group, None))
    return found


def _number(view: RankView, group: str) -> int | None:
    return None if view.entered is None else view.entered.get(group, ((), 0))[1]


def _blame(rank: int, waits: Sequence[_Wait], known: Mapping[int, RankView]) -> str:
    group, lowest = waits[0].group, waits[0].number
    waiting = sorted({wait.rank for wait in waits if wait.group == group})
    first = known[waiting[0]]
    verb = "wait" if len(waiting) > 1 else "waits"
    behind = f"{name_some_ranks(waiting)} {verb} for it, {first.doing}"
    if known[rank].returned:
        return f"rank {rank} has returned ({behind})"
    doing = f"rank {rank} {'was' if known[rank].entered is None else 'is'} {known[rank].doing}"
    if lowest is None:
        return f"rank {rank} does not answer ({behind}); {doing}"
    same = _number(first, group) == lowest + 1 and first.operation
    what = f"{first.operation if same else 'operation'} #{lowest + 1} of {_named(group, first)}"
    return f"rank {rank} has not entered {what} ({behind}); {doing}"


def _named(group: str, view: RankView) -> str:
    if group.partition(" ")[0] == DEFAULT:
        return "the default group"
    members = (view.entered or {}).get(group, ((), 0))[0]
    return f"the group of {name_some_ranks(members)}"


def _crossed(waits: Sequence[_Wait], known: Mapping[int, RankView]) -> str:
    told: dict[int, str] = {}
    awaited = {wait.other for wait in waits}
    names = {wait.group: _named(wait.group, known[wait.rank]) for wait in waits}
    for wait in waits:
        if wait.rank in awaited:  # else nobody is held up by it
            group = names[wait.group]
            if list(names.values()).count(group) > 1:
                group += f" that torch calls {wait.group.partition(' ')[0]!r}"
            where = f"rank {wait.rank} waits for rank {wait.other} in {group}, {known[wait.rank].doing}"
            told.setdefault(wait.rank, where)
    ranks = "; ".join(list(told.values())[:4])
    return f"ranks wait for each other, as they have entered groups in crossed order: {ranks}"


def _at_one_number(views: Sequence[RankView], elsewhere: Sequence[int]) -> str:
    """Says it of ranks none of which is behind another. ``elsewhere``: those whose agents were not asked."""
    operations: dict[str, list[RankView]] = {}
    for view in views:
        operations.setdefault(view.operation, []).append(view)
    if len(operations) > 1:
        told = [f"{name_some_ranks([view.rank for view in those])} {'are' if len(those) > 1 else 'is'} {those[0].doing}"
                for those in operations.values()]  # fmt: skip
        return f"the ranks are in different operations that stand for the same one: {'; '.join(told)}"
    if elsewhere:
        return (
            f"the ranks here are in {views[0].operation}, and none is behind; ask for {name_some_ranks(elsewhere)} on "
            f"their machines"
        )
    if views[0].operation in _MEETINGS:
        return (
            f"all ranks are in {views[0].operation}, where they wait for each other at a store: is it hosted at the "
            f"address that they were given?"
        )
    return (
        f"all ranks are in {views[0].operation}, and none is behind: the device or the network is slow or stuck, or "
        f"much is sent"
    )
