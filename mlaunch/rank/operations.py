"""Our own watch of the operations that this rank begins in its process groups, and of what its threads wait for.

    ProcessGroup.allreduce, ... --counted, noted as begun--> Work --noted as awaited--> Work.wait

torch numbers operations, too, but gloo's numbers count messages, other backends number nothing, and none says which
operation a thread waits for. C++ begins collectives that do not pass here (DistributedDataParallel's), so where a
backend numbers its collectives, its number counts, less what is known to be no collective.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

from mlaunch.base.frames import RUNPY, is_bottom
from mlaunch.protocol.messages.launch_messages import ANY, Frames, GroupNumbers, Operations, RankWait

if TYPE_CHECKING:
    import torch.distributed as dist

# By torch's internal names, those of the functions that users call.
_COLLECTIVES = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce_coalesced", "broadcast": "broadcast",
    "reduce": "reduce", "allgather": "all_gather", "_allgather_base": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced", "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "all_gather_single": "all_gather_single", "all_gather_single_coalesced": "all_gather_single", "gather": "gather",
    "scatter": "scatter", "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_single", "reduce_scatter_single_coalesced": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor", "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single", "all_to_all_single": "all_to_all_single", "barrier": "barrier",
}  # fmt: skip
_MESSAGES = {"send": "send", "recv": "recv", "recv_anysource": "recv"}
_MEETINGS = {"_new_process_group_helper", "init_process_group", "_new_group_with_tag"}
_C10D = "distributed_c10d.py"
_FEW = 1024  # operations whose end nobody has waited for, before dead ones are dropped
_DEEPEST = 100  # frames, as faulthandler shows


class _Tally:
    """What was begun with one backend of a group. ``sent``, ``received``: how many messages, by rank in the group."""

    __slots__ = ("begun", "held", "latest", "messages", "received", "sent", "skipped")

    def __init__(self) -> None:
        self.begun = 0  # collectives
        self.latest = ""  # the last one
        self.messages = 0
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.skipped = 0  # what its backend has counted for collectives and messages beyond one for each
        self.held: int | None = None  # the number, while the backend's own runs ahead within one collective


class _Group:
    """The numbers of a group; most have one backend. ``by_device``: else."""

    __slots__ = ("by_device", "known", "numbers")

    def __init__(self, group: Any) -> None:
        self.known = weakref.ref(group)
        self.by_device: dict[str, _Tally] = {}
        self.numbers = _tally_of_backend(group) or _Tally()
        if len(parts := _backends(group)) > 1:
            for _, devices in parts:
                self.by_device |= dict.fromkeys(devices, _Tally())

    def of(self, args: tuple[Any, ...]) -> _Tally:
        return self.numbers if not self.by_device else self.by_device.get(_device_of(args), self.numbers)


# (name, numbers, number of the collective, peer in the group, tag); not the group, which it would keep
_Begun = tuple[str, _Tally, int, "int | None", int]

_groups: dict[int, _Group] = {}  # by id, since a lookup in a WeakKeyDictionary takes as long as all the rest
_begins: dict[int, _Begun] = {}  # by thread, what it is about to begin
_awaits: dict[int, Any] = {}  # by thread, the work for whose end it waits
_works: dict[int, tuple[weakref.ref[Any], _Begun]] = {}  # by id
_messages = 0
_most = _FEW
_is_watched = False


def watch() -> None:
    """Begins to watch, in this process and its forks."""
    global _is_watched  # noqa: PLW0603 - a fact about this process
    if _is_watched:
        return
    from torch._C._distributed_c10d import Backend, ProcessGroup, Work

    _is_watched = True
    # Where all of torch's functions pass; who holds a group's backend calls that.
    for kind in (ProcessGroup, Backend):
        for name, words in _COLLECTIVES.items():
            _replace(kind, name, _collective, words)
        for name, words in _MESSAGES.items():
            _replace(kind, name, _message, words)
        _replace(kind, "monitored_barrier", _monitored, "monitored_barrier")
    _replace(Work, "wait", _waiting, "wait")


def _replace(kind: Any, name: str, watched: Callable[..., Callable[..., Any]], words: str) -> None:
    if (begin := vars(kind).get(name)) is not None:
        setattr(kind, name, _named(watched(begin, words), name, begin))


def _named(function: Any, name: str, like: Any) -> Any:
    """Names a function as stacks show it."""
    code: CodeType = function.__code__.replace(co_name=name)
    named = FunctionType(code, function.__globals__, name, None, function.__closure__)
    named.__doc__, named.__qualname__ = like.__doc__, getattr(like, "__qualname__", name)
    return named


def _of_group(group: Any, args: tuple[Any, ...]) -> _Tally:
    found = _groups.get(id(group))
    if found is None or found.known() is not group:
        found = _groups[id(group)] = _Group(group)
    return found.of(args)


def _tally_of_backend(backend: Any) -> _Tally | None:
    """Returns what is counted of the group to which a backend belongs, if it is one."""
    from torch.distributed.distributed_c10d import _world

    for group in list(_world.pg_map) if not hasattr(backend, "_device_types") else ():
        for known, devices in _backends(group):
            if known is backend:
                _of_group(group, ())
                return _groups[id(group)].by_device.get(devices[0], _groups[id(group)].numbers)
    return None


def _collective(begin: Callable[..., Any], words: str) -> Callable[..., Any]:
    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        numbers = _of_group(self, args)
        numbers.begun = number = numbers.begun + 1
        numbers.latest = words
        here, begun = threading.get_ident(), (words, numbers, number, None, 0)
        _begins[here] = begun
        try:
            work = begin(self, *args, **kwargs)
        except BaseException:
            numbers.begun -= 1
            raise
        finally:
            _begins.pop(here, None)
        _note(work, begun)
        return work

    return collective


def _message(begin: Callable[..., Any], words: str) -> Callable[..., Any]:
    has_peer, sends = begin.__name__ != "recv_anysource", words == "send"

    def message(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        numbers = _of_group(self, args)
        peer, tag = _of_message(args, kwargs, has_peer=has_peer)
        counts = numbers.sent if sends else numbers.received
        global _messages  # noqa: PLW0603 - a fact about this process
        _messages += 1
        number = numbers.messages = numbers.messages + 1
        counts[peer] = counts.get(peer, 0) + 1
        here, begun = threading.get_ident(), (words, numbers, number, peer, tag)
        _begins[here] = begun
        try:
            work = begin(self, *args, **kwargs)
        except BaseException:
            numbers.messages -= 1
            counts[peer] -= 1
            raise
        finally:
            _begins.pop(here, None)
        _note(work, begun)
        return work

    return message


def _of_message(args: tuple[Any, ...], kwargs: dict[str, Any], *, has_peer: bool) -> tuple[int, int]:
    """Returns peer and tag of (tensors, peer, tag), or (tensors, tag)."""
    peer = args[1] if has_peer and len(args) > 1 else kwargs.get("dstRank", kwargs.get("srcRank", ANY))
    rest = args[1 + has_peer :]
    tag = rest[0] if rest else kwargs.get("tag", 0)
    return (peer if isinstance(peer, int) else ANY), (tag if isinstance(tag, int) else 0)


def _monitored(begin: Callable[..., Any], words: str) -> Callable[..., Any]:
    def monitored(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # gloo makes it of messages, another number of them on each rank, in which its own number runs ahead.
        numbers = _of_group(self, ())
        before, numbers.begun = _raw(self), numbers.begun + 1
        at = numbers.begun if before is None else before - numbers.messages - numbers.skipped + 1
        here = threading.get_ident()
        numbers.held, _begins[here] = at, (words, numbers, numbers.begun, None, 0)
        try:
            return begin(self, *args, **kwargs)
        finally:
            after = _raw(self)
            if before is not None and after is not None:
                numbers.skipped += after - before - 1
            numbers.held = None
            _begins.pop(here, None)

    return monitored


def _waiting(wait: Callable[..., Any], _words: str) -> Callable[..., Any]:
    def waiting(work: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        here = threading.get_ident()
        _awaits[here] = work
        try:
            done = wait(work, *args, **kwargs)
        finally:
            _awaits.pop(here, None)
        _works.pop(id(work), None)
        return done

    return waiting


def _note(work: Any, begun: _Begun) -> None:
    """Notes which work stands for what was begun. An id is another's once its work is gone, hence the reference."""
    global _most  # noqa: PLW0603 - grows with what is really pending
    if work is None:
        return
    _works[id(work)] = weakref.ref(work), begun
    if len(_works) > _most:
        for key, (known, _) in list(_works.items()):
            if known() is None:
                _works.pop(key, None)
        for key, group in list(_groups.items()):
            if group.known() is None:
                _groups.pop(key, None)
        _most = max(_FEW, 2 * len(_works))


def _device_of(args: tuple[Any, ...]) -> str:
    found: Any = args[0] if args else None
    while isinstance(found, (list, tuple)) and found:
        found = found[0]
    return getattr(getattr(found, "device", None), "type", "")


# What of it is told. All of this is called by the control thread, while the others go on.


def begun_messages() -> int:
    """Returns how many messages this rank has begun to send or receive, in all groups that there ever were."""
    return _messages


def _backends(group: Any) -> list[tuple[Any, list[str]]]:
    """Returns the backends of a group, and which devices each serves."""
    found: list[tuple[Any, list[str]]] = []
    for device in getattr(group, "_device_types", ()):
        backend = group._get_backend(device)
        devices = next((kinds for known, kinds in found if known is backend), None)
        if devices is None:
            found.append((backend, [device.type]))
        else:
            devices.append(device.type)
    return found


def _raw(of: Any) -> int | None:
    """Returns the number of a group or backend, as torch counts; None if it counts nothing."""
    try:
        return int(of._get_sequence_number_for_group())
    except RuntimeError:
        return None


def numbers_of(name: str, group: Any) -> Iterator[tuple[str, int | None, _Tally]]:
    """Yields a name for each backend of a group, the number of collectives that it has begun, and what we have counted.

    The number is None where the backend counts nothing: what C++ has begun is not known there.
    """
    held = _groups.get(id(group))
    of_group = held if held is not None and held.known() is group else None
    for backend, devices in _backends(group):
        device = "cpu" if "cpu" in devices else devices[0]
        numbers = _Tally() if of_group is None else of_group.by_device.get(devices[0], of_group.numbers)
        number, counts_messages = _raw(backend), backend._get_backend_name() == "gloo"
        if numbers.held is not None:
            number = numbers.held
        elif number is not None:
            number -= numbers.skipped + (numbers.messages if counts_messages else 0)
        yield f"{name} {device}", number, numbers


def told(groups: dict[str, dist.ProcessGroup], made: int) -> Operations:
    """Says what this rank has begun in these groups, by name, and what its threads wait for.

    ``made``: how many groups torch has made.
    """
    import torch.distributed as dist

    rows, parts = [], {}
    for name, group in groups.items():
        members = tuple(dist.get_process_group_ranks(group))
        for part, known, numbers in numbers_of(name, group):
            number = numbers.begun if known is None else known
            parts[id(numbers)] = part, number, members
            sent, received = (
                tuple((members[peer] if peer >= 0 else peer, count) for peer, count in sorted(counts.items()))
                for counts in (dict(numbers.sent), dict(numbers.received))
            )
            # Else C++ has begun some, of which nobody knows what they are.
            latest = numbers.latest if number == numbers.begun else ""
            rows.append(GroupNumbers(part, members, number, latest, sent, received))
    return Operations(tuple(rows), tuple(_waits(parts)), made)


def _waits(parts: dict[int, tuple[str, int, tuple[int, ...]]]) -> Iterator[RankWait]:
    main, frames = threading.main_thread().ident, sys._current_frames()
    awaited = [(thread, *_works.get(id(work), (None, None))) for thread, work in list(_awaits.items())]
    open_now = [*list(_begins.items()), *((thread, begun) for thread, _, begun in awaited)]
    seen = set()
    for thread, begun in open_now:
        if thread in frames:
            seen.add(thread)
            yield _wait(begun, parts, _thread_name(thread, main), _place(frames[thread], thread == main))
    for thread, frame in frames.items():
        meeting = _meeting(frame) if thread not in seen else None
        if meeting is not None:
            name, members, operation = meeting
            place = _place(frame, thread == main)
            yield RankWait(_thread_name(thread, main), operation, name, 0, None, 0, members, place)


def _wait(
    begun: _Begun | None, parts: dict[int, tuple[str, int, tuple[int, ...]]], thread: str, at: Frames
) -> RankWait:
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
    """Returns (file, line, name) of another thread's frames, innermost first; the main thread's are told elsewhere."""
    frames: list[tuple[str, str, str]] = []
    while not is_main and frame is not None and not is_bottom(frame.f_code.co_filename) and len(frames) < _DEEPEST:
        if frame.f_code.co_filename != RUNPY:
            frames.append((frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
        frame = frame.f_back
    return tuple(frames)


def _meeting(frame: FrameType | None) -> tuple[str, tuple[int, ...], str] | None:
    """Returns name and members of the group that a thread is about to make, and in what; None: it makes none."""
    depth, found = 0, None
    while frame is not None and depth < _DEEPEST:
        if frame.f_code.co_name in _MEETINGS and frame.f_code.co_filename.endswith(_C10D):
            values = frame.f_locals
            if frame.f_code.co_name == "init_process_group":
                return "", (), "init_process_group"
            members = values.get("global_ranks_in_group", values.get("ranks")) or ()
            found = found or (str(values.get("group_name", "")), tuple(members), "new_group")
        frame, depth = frame.f_back, depth + 1
    return found
