"""Leases of devices, without a launch: who gets which, in which order, and who is told of an end."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mlaunch.base.linux import wait_readable
from mlaunch.caller.options.launch_options import Options
from mlaunch.leases import command as lease_command
from mlaunch.leases.caller import VARIABLE, LeaseRequest, acquisition, lease_directory
from mlaunch.leases.caller.acquisition import Acquisition, DeviceLease, Wish
from tests.lease_storm import storm

_PATIENCE = 120.0  # seconds for what comes at once


def take(directory: Path, names: str, count: int = 1) -> DeviceLease:
    """Takes devices, each named by a letter, that are free."""
    acquisition = Acquisition(directory, Wish(names, count, "test"))
    lease = acquisition.step()
    acquisition.close()
    assert lease is not None
    return lease


def told(acquisition: Acquisition) -> bool:
    return bool(wait_readable(acquisition.fds(), _PATIENCE))


def is_told(acquisition: Acquisition) -> bool:
    return bool(wait_readable(acquisition.fds(), 0.0))


def in_child(work: Callable[[], object]) -> int:
    """Does it in a process that then waits to be killed; returns its pid once it is done."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kept = work()
            os.write(writer, b"done" if kept is not None else b"")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 4) == b"done"
    os.close(reader)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_takes_the_first_that_are_free_and_all_or_none(tmp_path: Path) -> None:
    first = take(tmp_path / "leases", "abcd", 2)
    second = take(tmp_path / "leases", "abcd", 1)
    assert (first.names, second.names) == (("a", "b"), ("c",))
    third = Acquisition(tmp_path / "leases", Wish("abcd", 2))
    assert third.step() is None
    assert not is_told(third)
    first.close()
    assert told(third)
    lease = third.step()
    assert lease is not None
    assert lease.names == ("a", "b")
    for one in (third, lease, second):
        one.close()


def test_in_order_of_arrival_among_those_that_want_the_same(tmp_path: Path) -> None:
    lease = take(tmp_path, "ab", 1)
    large, small, other = (Acquisition(tmp_path, Wish(*wish)) for wish in (("ab", 2), ("b", 1), ("c", 1)))
    assert large.step() is None
    assert small.step() is None  # b is free, but who came before wants it
    apart = other.step()
    assert apart is not None
    assert apart.names == ("c",)
    lease.close()
    assert told(large)
    assert not is_told(small)  # an end wakes one
    both = large.step()
    assert both is not None
    assert told(small)
    assert small.step() is None
    both.close()
    assert told(small)
    last = small.step()
    assert last is not None
    for one in (large, small, other, apart, last):
        one.close()


def test_a_killed_process_holds_nothing_and_blocks_nobody(tmp_path: Path) -> None:
    holder = in_child(lambda: take(tmp_path, "a"))
    waiter = in_child(lambda: (one := Acquisition(tmp_path, Wish("a", 1)), one.step()))
    ours = Acquisition(tmp_path, Wish("a", 1))
    assert ours.step() is None
    kill(waiter)
    assert told(ours)
    assert ours.step() is None
    kill(holder)
    assert told(ours)
    lease = ours.step()
    assert lease is not None
    ours.close()
    lease.close()
    assert not list(tmp_path.glob("ticket.*"))  # what the killed left is removed


def test_lasts_as_long_as_the_last_process_that_inherited_it(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    lease = take(tmp_path, "a")
    fds = [os.dup(fd) for fd in lease.fds]  # as those that an agent is sent
    pid = in_child(lambda: fds)
    for fd in (*fds, reader, writer):
        os.close(fd)
    lease.close()
    ours = Acquisition(tmp_path, Wish("a", 1))
    assert ours.step() is None
    kill(pid)
    assert told(ours)
    taken = ours.step()
    assert taken is not None
    ours.close()
    taken.close()


def test_a_launch_says_what_the_launch_around_it_holds_as_well() -> None:
    """A call in one of its ranks would else wait for what that has."""
    request = LeaseRequest(Options(n_gpus=1), {VARIABLE: "a"}, Wish(["b"], 1, holds=["a"]), None)
    assert request.granted(DeviceLease(("b",))).environ[VARIABLE] == "a,b"


def test_the_directory_is_not_tidied_up_while_a_lease_is_held(tmp_path: Path) -> None:
    """What tidies up (systemd-tmpfiles) leaves alone what it cannot lock."""
    acquisition = Acquisition(tmp_path, Wish(["a"], 1))
    lease = acquisition.step()
    acquisition.close()
    assert lease is not None
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lease.close()
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


def test_a_fork_of_the_caller_keeps_nothing(tmp_path: Path) -> None:
    lease = take(tmp_path, "a")
    pid = in_child(lambda: "nothing of the lease's")
    lease.close()
    take(tmp_path, "a").close()
    kill(pid)


def test_tells_who_holds_and_who_waits(tmp_path: Path) -> None:
    assert acquisition.standing(tmp_path / "none") == ([], [])
    lease = take(tmp_path, ["GPU-1/2"])  # type: ignore[arg-type]
    waiter = Acquisition(tmp_path, Wish(["GPU-1/2"], 1, "train()"))
    assert waiter.step() is None
    assert waiter.waits_for() == f"test (pid {os.getpid()})"
    ((held,), (waits,)) = acquisition.standing(tmp_path)
    assert (held["device"], held["who"], held["pid"]) == ("GPU-1/2", "test", os.getpid())
    assert (waits["names"], waits["count"], waits["who"]) == (["GPU-1/2"], 1, "train()")
    (tmp_path / "device.GPU-1%2F2.json").write_text('{"torn')  # by who was killed as it wrote
    assert waiter.waits_for() == "? (pid None)"
    waiter.close()
    lease.close()
    assert acquisition.standing(tmp_path) == ([], [])


def test_who_has_stopped_is_passed_over(tmp_path: Path) -> None:
    """It blocked all behind it, though the device is free; it has its place again once it goes on."""
    lease = take(tmp_path, "a")
    stopped = in_child(lambda: (one := Acquisition(tmp_path, Wish("a", 1, "search()")), one.step()))
    ours = Acquisition(tmp_path, Wish("a", 1))
    assert ours.step() is None
    assert ours.timeout() is not None  # since nobody is told of a process that stops
    os.kill(stopped, signal.SIGSTOP)
    os.waitpid(stopped, os.WUNTRACED)
    assert ours.step() is None
    over = f"search() (pid {stopped}), which has stopped and is passed over"
    assert ours.waits_for() == f"test (pid {os.getpid()}), {over}"
    assert [one.get("stopped") for one in acquisition.standing(tmp_path)[1]] == [True, None]
    assert "it has stopped, and is passed over" in lease_command.rows({lease_directory.VARIABLE: str(tmp_path)})[2]
    os.kill(stopped, signal.SIGCONT)
    os.waitpid(stopped, os.WCONTINUED)
    assert ours.step() is None
    assert ours.waits_for() == f"search() (pid {stopped})"
    os.kill(stopped, signal.SIGSTOP)
    os.waitpid(stopped, os.WUNTRACED)
    lease.close()
    taken = ours.step()
    assert taken is not None
    for one in (ours, taken):
        one.close()
    kill(stopped)


def test_a_circle_is_refused_as_it_closes(tmp_path: Path) -> None:
    """Each is called in the launch that has what the other wants; directly, or behind one that came before it."""
    leases = [take(tmp_path, name) for name in "ab"]
    first = Acquisition(tmp_path, Wish("b", 1, "first()", "a"))
    assert first.step() is None
    free = Acquisition(tmp_path, Wish("bc", 1, "free()", "z"))  # of the two one is free, though not in its turn
    assert free.step() is None
    second = Acquisition(tmp_path, Wish("a", 1, "second()", "b"))
    with pytest.raises(RuntimeError, match=r"second\(\) would deadlock: it wants 1 of a and waits for first\(\) "):
        second.step()
    free.close()
    second.close()
    leases[1].close()
    got = first.step()
    assert got is not None
    for one in (first, got):
        one.close()
    large = Acquisition(tmp_path, Wish("ab", 2, "large()"))
    assert large.step() is None
    behind = Acquisition(tmp_path, Wish("b", 1, "behind()", "a"))
    with pytest.raises(
        RuntimeError, match=r"behind\(\) .* waits for large\(\) .*, which came before it and wants 2 of"
    ):
        behind.step()
    for other in (behind, large, leases[0]):
        other.close()


def test_strange_things_in_the_directory_are_told_of_only_where_they_are_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "ticket.mine").touch()
    (tmp_path / "ticket.5").mkdir()
    (tmp_path / "device.b").mkdir()
    take(tmp_path, "a").close()
    for make in (Path.mkdir, Path.touch, lambda path: path.symlink_to("/dev/null")):
        make(tmp_path / "device.c")
        ours = Acquisition(tmp_path, Wish("c", 1))
        with pytest.raises(OSError, match=r"device\.c is in the way of a device's lease: remove it"):
            ours.step()
        ours.close()
        assert acquisition.standing(tmp_path) == ([], [])
        (tmp_path / "device.c").rmdir() if make is Path.mkdir else (tmp_path / "device.c").unlink()


def test_a_directory_that_is_removed_is_told_of(tmp_path: Path) -> None:
    lease = take(tmp_path / "leases", "a")
    ours = Acquisition(tmp_path / "leases", Wish("a", 1))
    assert ours.step() is None
    shutil.rmtree(tmp_path / "leases")
    for look in (ours.step, ours.waits_for):
        with pytest.raises(FileNotFoundError, match=r"somebody has removed .*/leases, the directory of device leases"):
            look()
    ours.close()
    lease.close()
    take(tmp_path / "leases", "a").close()


def test_refuses_a_directory_that_is_not_this_users_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError, match=r"must belong to this user with mode 0700, .* mode 0755: chmod 700 "):
        Acquisition(tmp_path, Wish("a", 1))
    with pytest.raises(OSError, match=r"MLAUNCH_LEASE_DIR=leases: .*; give an absolute path"):
        Acquisition(Path("leases"), Wish("a", 1))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="device leases need the directory"):
        Acquisition(tmp_path / "file", Wish("a", 1))


def test_has_one_place_whatever_a_session_sets() -> None:
    usual = Path(f"/tmp/mlaunch-{os.getuid()}-leases")
    assert lease_directory.place({"XDG_RUNTIME_DIR": "/run/user/1", "TMPDIR": "/scratch"}) == usual
    assert lease_directory.place({"MLAUNCH_LEASE_DIR": "/shared"}) == Path("/shared")


@pytest.mark.slow
def test_nothing_is_double_or_out_of_order_where_processes_are_killed(tmp_path: Path) -> None:
    found = storm(tmp_path, 40, 10)
    assert (found.double, found.out_of_order) == (0, 0)
    assert found.killed >= 10
