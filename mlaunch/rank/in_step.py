"""The operations that this rank has entered in each process group, and whether it is in step with the other ranks.

A rank that comes back from a call early leaves the others in an operation that it never entered. From then on every
operation would meet another one's partner. torch numbers the operations of each group, on each rank: where the numbers
of all members agree, everybody has entered what the others have. It counts the groups, too, and names the next one by
that, so a rank that was called back while it made one would wait for the others under another name.

Messages are another matter. Equal numbers of sends do not say who has received them: one that is left over would be
taken for the next. So a call that fails after it has begun to send or receive leaves its ranks out of step.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from mlaunch.base.frames import RUNPY, is_bottom
from mlaunch.protocol.messages import ANY, Frames, GroupNumbers, Operations, RankWait
from mlaunch.torch_parts import process_groups
from mlaunch.torch_parts.operations import AllNumbers, Begun, begun_messages, meeting, numbers_of, open_now

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# By group and backend: its members, and the operations since the call began; None where that cannot be known.
Numbers = Mapping[str, tuple[tuple[int, ...], int | None]]
# Among them, as if these were the names of some, and all ranks their members:
GROUPS = "groups"  # those of the whole world that were begun
MESSAGES = "messages"  # None once one was begun
_DEEPEST = 100  # frames, as faulthandler shows


class _Beginning(NamedTuple):
    """The numbers of this rank as a call began."""

    call: int = 0  # its number
    numbers: Mapping[str, int | None] = MappingProxyType({})
    messages: int | None = 0  # that were begun; None: they are not counted


@dataclass
class _Present:
    """The present call. ``beginning`` is replaced as a whole, since the control thread reads it."""

    beginning: _Beginning = field(default_factory=_Beginning)


_present = _Present()
_all_numbers = AllNumbers()


def begin_call(call: int) -> None:
    """Note the numbers of this rank as a call begins."""
    numbers = _all_numbers.read()
    numbers[GROUPS] = process_groups.made()
    _present.beginning = _Beginning(call, numbers, begun_messages())


def since_the_call(call: int | None = None) -> Numbers:
    """Return what this rank has entered since the call began.

    ``call``: the number of the call; a rank that has not come to it yet has entered nothing. None: the present one.
    """
    import torch.distributed as dist

    # Read once: the main thread may begin the next call meanwhile.
    beginning = _present.beginning
    found: dict[str, tuple[tuple[int, ...], int | None]] = {}
    if call not in {None, beginning.call}:
        return found
    for name, group in process_groups.by_name().items():
        members = tuple(dist.get_process_group_ranks(group))
        parts = [(part, now) for part, now, _ in numbers_of(name, group)]
        for part, now in parts or [(name, None)]:
            found[part] = members, None if now is None else now - (beginning.numbers.get(part) or 0)
    if dist.is_initialized():  # the user may have destroyed all groups
        everyone = tuple(range(dist.get_world_size()))
        made, messages = process_groups.made(), begun_messages()
        found[GROUPS] = everyone, None if made is None else made - (beginning.numbers.get(GROUPS) or 0)
        is_known = messages is not None and beginning.messages is not None
        found[MESSAGES] = everyone, 0 if is_known and messages == beginning.messages else None
    return found


def entered() -> Operations:
    """Return what this rank has begun in each group, and what its threads wait for."""
    return _operations(process_groups.by_name(), process_groups.made() or 0)


def agree(told: Sequence[Numbers]) -> bool:
    """True if all ranks, in the order of ``told``, know the same groups, and stand at the same number in each."""
    names = {name for numbers in told for name in numbers}
    return all(_same(name, told) for name in names)


def _same(name: str, told: Sequence[Numbers]) -> bool:
    """True if its members, and only they, know this group with equal numbers; a single member is always in step."""
    found = {rank: numbers[name] for rank, numbers in enumerate(told) if name in numbers}
    members, number = next(iter(found.values()))
    alike = sorted(members) == sorted(found) and len(set(found.values())) == 1
    return alike and (number is not None or len(members) == 1)


def is_lost(told: Mapping[int, Numbers], back: Collection[int]) -> bool:
    """True if a rank has entered an operation that one which is ``back`` from the call will never enter.

    ``told``: by global rank; some may be missing.
    """
    return any(
        rank != other and number is not None and _is_behind(told[rank], name, number)
        for rank in told.keys() & set(back)
        for other, numbers in told.items()
        for name, (members, number) in numbers.items()
        if rank in members
    )


def _is_behind(numbers: Numbers, name: str, number: int) -> bool:
    """True if a rank has come less far in a group than one that is at ``number``."""
    _, reached = numbers.get(name, ((), 0))
    return reached is not None and reached < number


def meet(bound: torch.device | None) -> None:
    """Enter one small operation in each group, after which none before it is pending. Collective."""
    import torch
    import torch.distributed as dist

    places = {"cpu": torch.device("cpu"), **({bound.type: bound} if bound is not None else {})}
    for group in process_groups.everyone():
        for kind in {device.type for device in process_groups.devices_of(group)} & places.keys():
            dist.all_reduce(torch.zeros(1, device=places[kind]), group=group)
    if bound is not None and bound.type != "cpu":
        torch.accelerator.synchronize(bound)


# For mlaunch why, and for reports


def _operations(known: Mapping[str, dist.ProcessGroup], made: int) -> Operations:
    """Return what this rank has begun in these groups, by name, and what its threads wait for.

    ``made``: how many groups torch has made.
    """
    import torch.distributed as dist

    rows, parts = [], {}
    for name, group in known.items():
        members, pending = tuple(dist.get_process_group_ranks(group)), _pending(name, group)
        for part, counted, numbers in numbers_of(name, group):
            number = numbers.begun if counted is None else counted
            parts[id(numbers)] = part, number, members
            sent, received = (
                tuple((members[peer] if peer >= 0 else peer, count) for peer, count in sorted(counts.items()))
                for counts in (dict(numbers.sent), dict(numbers.received))
            )
            # Otherwise C++ has begun some, of unknown kinds.
            latest = numbers.latest if number == numbers.begun else ""
            left = pending.get(part.rpartition(" ")[2])
            done = None if left is None else max(0, number - left)
            rows.append(GroupNumbers(part, members, number, latest, sent, received, done))
    return Operations(tuple(rows), tuple(_waits(parts)), made)


def _pending(name: str, group: dist.ProcessGroup) -> dict[str, int]:
    """Return how many collectives of a group its devices have not done; on CPUs, threads wait for those."""
    if {device.type for device in process_groups.devices_of(group)} <= {"cpu"}:
        return {}
    return process_groups.pending_of(name, group)


def _waits(parts: dict[int, tuple[str, int, tuple[int, ...]]]) -> Iterator[RankWait]:
    main, frames = threading.main_thread().ident, sys._current_frames()
    seen = set()
    for thread, begun in open_now():
        if thread in frames:
            seen.add(thread)
            yield _wait(begun, parts, _thread_name(thread, main), _place(frames[thread], thread == main))
    for thread, frame in frames.items():
        begins = meeting(frame) if thread not in seen else None
        if begins is not None:
            name, members, operation = begins
            place = _place(frame, thread == main)
            yield RankWait(_thread_name(thread, main), operation, name, 0, None, 0, members, place)


def _wait(begun: Begun | None, parts: dict[int, tuple[str, int, tuple[int, ...]]], thread: str, at: Frames) -> RankWait:
    if begun is None or id(begun[1]) not in parts:
        return RankWait(thread, "", "", 0, None, 0, (), at)  # of an operation that C++ has begun
    words, numbers, number, peer, tag = begun
    part, reached, members = parts[id(numbers)]
    if peer is not None:
        return RankWait(thread, words, part, 0, members[peer] if 0 <= peer < len(members) else ANY, tag, members, at)
    if numbers.held is None:
        number += reached - numbers.begun
    else:
        number = numbers.held
    return RankWait(thread, words, part, number, None, 0, members, at)


def _thread_name(thread: int, main: int | None) -> str:
    if thread == main:
        return ""
    known = threading._active.get(thread)  # type: ignore[attr-defined]
    return str(known.name) if known is not None else "a thread"


def _place(frame: FrameType | None, is_main: bool) -> Frames:
    """Return the frames of a thread other than the main one, which answers ``TellPlace``."""
    return () if is_main else tuple(user_frames(frame))


def user_frames(frame: FrameType | None) -> list[tuple[str, str, str]]:
    """Return (file, line, name) of the frames above the launcher's, innermost first."""
    frames: list[tuple[str, str, str]] = []
    while frame is not None and not is_bottom(frame.f_code.co_filename) and len(frames) < _DEEPEST:
        if frame.f_code.co_filename != RUNPY:
            frames.append((frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
        frame = frame.f_back
    return frames
