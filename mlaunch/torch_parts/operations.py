"""mlaunch's watch of the operations that this rank begins in its process groups, and for which its threads wait.

    ProcessGroup.allreduce, ... --counted, noted as begun--> Work --noted as awaited--> Work.wait

torch numbers operations, too, but gloo's numbers count messages, other backends number nothing, and none tells which
operation a thread waits for. C++ begins collectives that are not seen here (DistributedDataParallel's), so if a
backend numbers its collectives, its number is used, less the operations that are known not to be collectives.

The methods that mlaunch replaces are internal to torch. If a torch lacks those that matter, nothing is watched: then it
is not known whether a message was begun, or which operation a thread waits for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

from mlaunch.torch_parts import process_groups

ANY = -1  # instead of a rank: any sender

# By torch's internal names, the names of the functions that users call.
COLLECTIVES = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce_coalesced", "broadcast": "broadcast",
    "reduce": "reduce", "allgather": "all_gather", "_allgather_base": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced", "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "all_gather_single": "all_gather_single", "all_gather_single_coalesced": "all_gather_single", "gather": "gather",
    "gather_single": "gather_single", "gather_into_tensor": "gather_into_tensor",
    "scatter": "scatter", "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_single", "reduce_scatter_single_coalesced": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor", "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single", "all_to_all_single": "all_to_all_single", "barrier": "barrier",
}  # fmt: skip
_VITAL = ("allreduce", "send", "recv")  # a torch without these has other names for its methods
_MESSAGES = {"send": "send", "recv": "recv", "recv_anysource": "recv"}
_MEETINGS = {"_new_process_group_helper", "init_process_group", "_new_group_with_tag"}
_C10D = "distributed_c10d.py"
_FEW = 1024  # operations that nobody has waited for, before dead ones are dropped
_DEEPEST = 100  # frames, as faulthandler shows


class Tally:
    """The operations begun with one backend of a group. ``sent``, ``received``: numbers of messages, by rank in it."""

    __slots__ = ("begun", "held", "latest", "messages", "received", "sent", "skipped")

    def __init__(self) -> None:
        self.begun = 0  # collectives
        self.latest = ""  # the last one
        self.messages = 0
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.skipped = 0  # what its backend has counted beyond one for each collective and message
        self.held: int | None = None  # the number, while the backend's own runs ahead during one collective


class _Group:
    """The numbers of a group. Most groups have one backend; ``by_device``: those of groups with several."""

    __slots__ = ("by_device", "known", "numbers")

    def __init__(self, group: Any) -> None:
        self.known = weakref.ref(group)
        self.by_device: dict[str, Tally] = {}
        self.numbers = _tally_of_backend(group) or Tally()
        if len(parts := process_groups.backends(group)) > 1:
            for _, devices in parts:
                self.by_device |= dict.fromkeys(devices, Tally())

    def of(self, args: tuple[Any, ...]) -> Tally:
        return self.numbers if not self.by_device else self.by_device.get(device_of(args), self.numbers)


# (name, numbers, number of the collective, peer in the group, tag); not the group, which this would keep alive
Begun = tuple[str, Tally, int, "int | None", int]

_groups: dict[int, _Group] = {}  # by id: a lookup in a WeakKeyDictionary takes as long as everything else
_begins: dict[int, Begun] = {}  # by thread, the operation that it is about to begin
_awaits: dict[int, Any] = {}  # by thread, the work for whose end it waits
_works: dict[int, tuple[weakref.ref[Any], Begun]] = {}  # by id
_messages = 0
_most = _FEW
is_watched = False


def watch() -> None:
    """Begin to watch, in this process and its forks, if this torch has the methods for that."""
    global is_watched  # noqa: PLW0603 - a fact about this process
    if is_watched or lacks():
        return
    is_watched = True
    backend, process_group, work = _kinds()
    # All of torch's functions call these; code that holds a group's backend calls the backend.
    for kind in (process_group, backend):
        for name, words in COLLECTIVES.items():
            replace(kind, name, _collective, words)
        for name, words in _MESSAGES.items():
            replace(kind, name, _message, words)
        replace(kind, "monitored_barrier", _monitored, "monitored_barrier")
    replace(work, "wait", _waiting, "wait")


def _kinds() -> tuple[Any, Any, Any]:
    from torch._C import _distributed_c10d as c10d

    return tuple(getattr(c10d, name, object) for name in ("Backend", "ProcessGroup", "Work"))  # type: ignore[return-value]


def lacks() -> str:
    """Return what this torch lacks, and the consequence; "" if it has all that matters."""
    if is_watched:
        return ""
    _, process_group, work = _kinds()
    gone = [f"ProcessGroup.{name}" for name in _VITAL if not hasattr(process_group, name)]
    gone += [] if hasattr(work, "wait") else ["Work.wait"]
    if not gone:
        return ""
    return (
        f"{', '.join(gone)}: nobody knows which operation a rank waits for: mlaunch why has only stacks, and ranks "
        f"that stay are ended by a call that fails"
    )


def replace(kind: Any, name: str, watched: Callable[..., Callable[..., Any]], words: str) -> None:
    """Replace a method of torch's, if it exists, by ``watched`` of it. Stacks show it under its own name."""
    if (begin := vars(kind).get(name)) is not None:
        setattr(kind, name, _named(watched(begin, words), name, begin))


def _named(function: Any, name: str, like: Any) -> Any:
    """Give a function the name under which stacks show it."""
    code: CodeType = function.__code__.replace(co_name=name)
    named = FunctionType(code, function.__globals__, name, None, function.__closure__)
    named.__doc__, named.__qualname__ = like.__doc__, getattr(like, "__qualname__", name)
    return named


def _of_group(group: Any, args: tuple[Any, ...]) -> Tally:
    found = _groups.get(id(group))
    if found is None or found.known() is not group:
        found = _groups[id(group)] = _Group(group)
    return found.of(args)


def _tally_of_backend(backend: Any) -> Tally | None:
    """Return the tally of the group to which a backend belongs; None if this is a group, or belongs to none."""
    for group in process_groups.everyone() if not process_groups.is_group(backend) else ():
        for known, devices in process_groups.backends(group):
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
    """Return peer and tag of (tensors, peer, tag), or (tensors, tag)."""
    peer = args[1] if has_peer and len(args) > 1 else kwargs.get("dstRank", kwargs.get("srcRank", ANY))
    rest = args[1 + has_peer :]
    tag = rest[0] if rest else kwargs.get("tag", 0)
    return (peer if isinstance(peer, int) else ANY), (tag if isinstance(tag, int) else 0)


def _monitored(begin: Callable[..., Any], words: str) -> Callable[..., Any]:
    def monitored(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # gloo builds it from messages, a different number on each rank, so its own number runs ahead meanwhile.
        numbers = _of_group(self, ())
        before, numbers.begun = process_groups.number_of(self), numbers.begun + 1
        at = numbers.begun if before is None else before - numbers.messages - numbers.skipped + 1
        here = threading.get_ident()
        numbers.held, _begins[here] = at, (words, numbers, numbers.begun, None, 0)
        try:
            return begin(self, *args, **kwargs)
        finally:
            after = process_groups.number_of(self)
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


def _note(work: Any, begun: Begun) -> None:
    """Note the work of an operation that was begun, with a reference: another work may get its id once it is gone."""
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


def device_of(args: tuple[Any, ...]) -> str:
    """Return the kind of device of an operation's first tensor; "" if there is none."""
    found: Any = args[0] if args else None
    while isinstance(found, (list, tuple)) and found:
        found = found[0]
    return getattr(getattr(found, "device", None), "type", "")


# Functions that the control thread calls while the other threads run


def begun_messages() -> int | None:
    """Return how many messages this rank has begun to send or receive, in all groups that have ever existed.

    None if nothing is watched.
    """
    return _messages if is_watched else None


def open_now() -> list[tuple[int, Begun | None]]:
    """Return the operations that threads begin or wait for now, by thread; None for one that C++ has begun."""
    awaited = [(thread, *_works.get(id(work), (None, None))) for thread, work in list(_awaits.items())]
    return [*list(_begins.items()), *((thread, begun) for thread, _, begun in awaited)]


def numbers_of(name: str, group: Any) -> Iterator[tuple[str, int | None, Tally]]:
    """Yield for each backend of a group a name, the number of collectives that it has begun, and mlaunch's tally.

    The number is None if the backend counts nothing: what C++ has begun is then not known.
    """
    for part, backend, device, counts_messages in _parts_of(name, group):
        numbers = _tally_of(group, device) or Tally()
        yield part, _number(backend, numbers, counts_messages), numbers


# A part's name, its backend, one of its devices, and whether the backend counts messages.
_Part = tuple[str, Any, str, bool]
# The same with mlaunch's tally in place of the device; a group keeps its tallies as long as it exists.
_TalliedPart = tuple[str, Any, Tally, bool]


def _parts_of(name: str, group: Any) -> list[_Part]:
    return [
        (f"{name} {'cpu' if 'cpu' in devices else devices[0]}", one, devices[0], process_groups.counts_messages(one))
        for one, devices in process_groups.backends(group)
    ]


def _tallied_parts_of(name: str, group: Any) -> Iterator[_TalliedPart]:
    _of_group(group, ())  # so that there is a tally, also before the first operation
    for part, backend, device, counts_messages in _parts_of(name, group):
        yield part, backend, _tally_of(group, device) or Tally(), counts_messages


def _tally_of(group: Any, device: str) -> Tally | None:
    held = _groups.get(id(group))
    if held is None or held.known() is not group:
        return None
    return held.by_device.get(device, held.numbers)


def _number(backend: Any, numbers: Tally, counts_messages: bool) -> int | None:
    if numbers.held is not None:
        return numbers.held
    number = process_groups.number_of(backend)
    return None if number is None else number - numbers.skipped - (numbers.messages if counts_messages else 0)


class AllNumbers:
    """The numbers of all groups, as ``numbers_of`` has them, by part.

    Every call on ranks that stay begins with them. Asking torch for groups and backends takes longer than everything
    else that a rank does for a short call, so it is asked again only when the groups have changed.
    """

    def __init__(self) -> None:
        # With a weak reference to the group.
        self._parts: list[tuple[Any, list[_TalliedPart]]] = []

    def read(self) -> dict[str, int | None]:
        """Return the numbers."""
        groups, parts = process_groups.in_order(), self._parts
        if [group() for group, _ in parts] != groups:
            parts = self._look_up(groups)
        found: dict[str, int | None] = {}
        for _, of_group in parts:
            for part, backend, tally, counts_messages in of_group:
                found[part] = _number(backend, tally, counts_messages)
        return found

    def _look_up(self, groups: list[Any]) -> list[tuple[Any, list[_TalliedPart]]]:
        names = {id(group): name for name, group in process_groups.by_name().items()}
        parts = [
            (weakref.ref(group, self._forget), list(_tallied_parts_of(names[id(group)], group)))
            for group in groups
            if id(group) in names
        ]
        self._parts = parts if len(parts) == len(groups) else []  # otherwise another thread is making one
        return parts

    def _forget(self, _gone: object) -> None:
        """Drop the backends, which must not outlive a group that was destroyed."""
        self._parts = []


def meeting(frame: FrameType | None) -> tuple[str, tuple[int, ...], str] | None:
    """Return name and members of the group that a thread is making, and by which function; None: it makes none."""
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
