"""What the system is asked for: children that are really ours."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable

import pytest

from mlaunch.base import linux, own_process
from mlaunch.caller.fork_server import start_interpreter
from mlaunch.cli import doctor


@pytest.fixture
def child() -> int:  # type: ignore[misc]
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_children(child: int) -> None:
    assert child in linux.children()


def test_no_stranger_is_taken_for_a_child(child: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever /proc says: here, that of an outer namespace in which numbers mean others."""
    monkeypatch.setattr(linux, "_numbers_here", lambda _: {1, os.getpid(), os.getppid(), child})
    monkeypatch.setattr(linux.os, "readlink", lambda _: "1")
    assert linux.children() == {child}


def test_a_stopped_child_is_told_from_one_that_runs(child: int) -> None:
    assert not linux.is_stopped(child)
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOWAIT)
    assert linux.is_stopped(child)
    assert linux.is_stopped(child)  # a look takes nothing away
    assert not linux.is_stopped(1)


@pytest.mark.parametrize("name", ["pidfd_open", "memfd_create"])
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_system_call_that_is_refused_is_named(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    linux.check_kernel.cache_clear()
    linux.check_kernel()
    linux.check_kernel.cache_clear()
    monkeypatch.setattr(os, name, refuse)
    said = (
        rf"mlaunch needs the system call {name}, which is refused here .*: the kernel is older than Linux 5\.3, or this"
    )
    for ask in (linux.check_kernel, lambda: start_interpreter(os.environ)):
        with pytest.raises(OSError, match=said):
            ask()
    finding = doctor._kernel()
    assert finding.state == "problem"
    assert name in finding.text


def test_a_child_that_leads_no_group_yet_is_signalled_by_itself(child: int) -> None:
    """As a rank that was forked a moment ago."""
    pidfd = os.pidfd_open(child)
    linux.signal_if_not_leader(child, pidfd, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOWAIT)
    os.close(pidfd)


def test_a_child_that_is_killed_costs_no_descriptor() -> None:
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    before = os.listdir("/proc/self/fd")
    linux.kill_children(spare=linux.children() - {pid})
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)


def in_a_fork(work: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if work() else 1)
    return os.waitpid(pid, 0)[1] == 0


def test_waiting_on_one_core() -> None:
    before = os.sched_getaffinity(0)
    assert own_process.wait_on_one_core(len(before)) == before
    assert os.sched_getaffinity(0) == {min(before)}
    own_process.leave_core(before)
    assert os.sched_getaffinity(0) == before
    own_process.leave_core({max(before) + 10_000})  # it has lost them: it stays where it is
    assert os.sched_getaffinity(0) == before


def test_other_threads_end_on_one_core() -> None:
    all_cores = os.sched_getaffinity(0)

    def end() -> bool:
        there, never = threading.Barrier(2), threading.Event()
        threading.Thread(target=lambda: there.wait() + never.wait(), daemon=True).start()
        there.wait()
        own_process.end_on_one_core(len(all_cores) - 1)
        found = {int(thread): os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")}
        return found.pop(os.getpid()) == all_cores and list(found.values()) == [{max(all_cores)}]

    assert in_a_fork(end)


@pytest.mark.parametrize("limit", [600, 100])
def test_a_descriptor_aside(limit: int) -> None:
    """With a number that others do not get; where so many are not allowed, the one that it has."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reader, writer = os.pipe()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        moved = linux.aside(writer)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (moved >= 500) is (limit > 500)
    assert linux.identity(moved) == linux.identity(writer)
    assert not os.get_inheritable(moved)
    for fd in {reader, writer, moved}:
        os.close(fd)


def test_a_process_that_was_an_orphan_before_it_could_say_with_whom_to_die_ends() -> None:
    pid = os.fork()
    if pid == 0:
        linux.die_with(os.getpid())  # who is not its parent, as if that one were gone
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1


def test_a_number_that_is_no_childs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a namespace of pids, where numbers are read from an outer /proc, and may be others' by then."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    monkeypatch.setattr(os, "readlink", lambda _path: "another number")
    monkeypatch.setattr(linux, "_numbers_here", lambda foreign: {*foreign, os.getppid(), 1})
    assert child in linux.children()
    assert not {os.getppid(), 1} & linux.children()
    os.waitpid(child, 0)
