"""Ways in which ranks end and places where they do. Calling processes import it, so torch comes in where it is used."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlaunch import launcher
from tests.contract.preparing import pids_of, prepared, preparing
from tests.launches import Phase, phase_of
from tests.processes import alive, status_of, wait_gone, wait_until

if TYPE_CHECKING:
    from mlaunch import Ranks


def raise_error() -> None:
    raise ValueError("no such luck")


def close_connections_at_exec() -> None:
    """The other ranks see them closed then. Before, gloo's thread would abort the process."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if _is_inet(fd):
                os.set_inheritable(fd, False)


def close_descriptors() -> None:
    """All but what gloo's thread waits on, without which it aborts the process."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            kind = os.readlink(f"/proc/self/fd/{fd}")
            if fd > 2 and "eventpoll" not in kind and "eventfd" not in kind and not _is_inet(fd):
                os.close(fd)


def _is_inet(fd: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return False
    with socket.socket(fileno=os.dup(fd)) as end:
        return end.family in {socket.AF_INET, socket.AF_INET6}


def hang() -> None:
    while True:
        signal.pause()  # which the request for stacks ends


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def fork_server_of_a_rank() -> int:
    return parent_of(os.getppid())


HOW: dict[str, Callable[[], object]] = {
    "exception": raise_error,
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(4),
    "segfault": lambda: ctypes.string_at(1),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "execs": lambda: os.execv("/bin/sh", ["sh", "-c", "exit 6"]),
    "forks": os.fork,
    "closes its descriptors": lambda: (close_descriptors(), raise_error()),
    "stops its agent": lambda: (os.kill(os.getppid(), signal.SIGSTOP), hang()),
    "stops the fork server": lambda: os.kill(fork_server_of_a_rank(), signal.SIGSTOP),
    "caller dies": lambda: (os.kill(int(os.environ["CALLER"]), signal.SIGKILL), signal.pause()),
}


ENDING = {"os._exit", "segfault", "SIGKILL", "execs"}  # in whichever thread
NEVER_END = {"SIGSTOP", "stops its agent", "stops the fork server"}


def crash(how: str) -> None:
    """In rank 1 alone."""
    if os.environ.get("RANK") == "1":
        HOW[how]()


class Fuse:
    """Burns when it is pickled; ``late``: when it is unpickled; ``anywhere``: not in rank 1 alone."""

    def __init__(self, how: str, *, late: bool = False, anywhere: bool = False) -> None:
        self.how, self.late, self.anywhere = how, late, anywhere

    def __reduce__(self) -> tuple[Any, ...]:
        if self.late:
            return crash, (self.how,)
        (HOW[self.how] if self.anywhere else lambda: crash(self.how))()
        return int, ()


# Each place: what the ranks run, with which argument.


def in_the_function(how: str) -> None:
    import torch.distributed as dist

    crash(how)
    dist.barrier()


def in_a_collective(how: str) -> None:
    import torch.distributed as dist

    dist.all_gather_object([None] * dist.get_world_size(), Fuse(how))


def pickling_the_result(how: str) -> object:
    return Fuse(how)


def after_return(how: str) -> int:
    atexit.register(crash, how)
    return 5


def after_the_answer(how: str) -> int:
    """Rank 1 has answered and waits for rank 0, which returns when it sees what became of rank 1."""
    import threading

    import torch.distributed as dist

    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        threading.Thread(target=_crash_in_time, args=(how,), daemon=True).start()
    elif how in ENDING:
        wait_gone([pids[1]])
    elif how == "SIGSTOP":
        wait_until(lambda: not alive(pids[1]) or status_of(pids[1])[0] == "T")
    elif how == "caller dies":
        hang()
    return 5


def _crash_in_time(how: str) -> None:
    if phase_of(1) is not None:
        wait_until(lambda: phase_of(1) is Phase.RETURNED)
        crash(how)


def unpickling(_fuse: object) -> None:
    import torch.distributed as dist

    dist.barrier()


def limits(how: str, function: Callable[..., object] | None = None) -> dict[str, Any]:
    """A deadline, where the launch would not end by itself."""
    deadline = 60.0 if how == "stops the fork server" else 0.7  # for which nobody waits, so it is never reached
    ends_itself = function in {after_return, after_the_answer} and how == "SIGSTOP"
    return ({} if ends_itself else {"deadline": deadline}) | {"grace_period": 0.1} if how in NEVER_END else {}


PLACES = {
    place.__name__: place
    for place in (in_the_function, in_a_collective, pickling_the_result, after_return, after_the_answer)
}


STAYING, PREPARED = "ranks that stay", "prepared"  # in place of a start method


def call_at(where: str, how: str, start_method: str) -> Callable[[], object]:
    argument = how if where in PLACES else Fuse(how, late=where == "unpickling", anywhere=True)
    function = PLACES.get(where, unpickling)
    if start_method == STAYING:
        return lambda: call_staying(how, function, argument)
    if start_method == PREPARED:
        return lambda: call_prepared(how, function, argument)
    return lambda: launcher(function, 2, start_method=start_method, **limits(how, function))(argument)


def call_prepared(how: str, function: Callable[..., object], *args: object) -> object:
    """Makes a call that takes a launch which was prepared."""
    with preparing():
        launcher(os.getpid, 2, **limits(how))()
        pids = pids_of(prepared())
        try:
            return launcher(function, 2, **limits(how, function))(*args)
        finally:
            wait_gone(pids)


def call_staying(how: str, function: Callable[..., object], *args: object) -> object:
    """Makes a call on ranks that stay, which then end."""
    from mlaunch import Ranks

    with Ranks(n_gpus=2, **(limits(how) | {"deadline": None})) as ranks:
        return call_on(ranks, how, function, *args)


def call_on(ranks: Ranks, how: str, function: Callable[..., object], *args: object) -> object:
    """Makes a call after which ranks that stay are what its error says, and take the next one."""
    held, pids = ranks.hold(dict), ranks.run(os.getpid)
    deadline = 0.3 if how in NEVER_END else None
    stay, lost = True, False
    try:
        return launcher(function, deadline=deadline).options(ranks=ranks)(*args)
    except Exception as error:
        stay = any("the ranks are in step and stay" in note for note in error.__notes__)
        lost = any("what they held is lost" in note for note in error.__notes__)
        raise
    finally:
        assert stay is not lost
        assert held.alive is stay
        assert (ranks.run(os.getpid) == pids) is stay
        assert not stay or held.fetch() == [{}, {}]
        assert stay or not any(map(alive, pids))
