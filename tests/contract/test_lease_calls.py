"""Launches that wait for devices, or for a place on the CPUs, until those are theirs alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import threading
from pathlib import Path

import pytest

from mlaunch import launcher
from tests import launches
from tests.processes import wait_gone, wait_until


def held(pid: int | str = "self") -> list[str]:
    """Returns the devices that a process holds."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found.append(os.path.basename(os.readlink(f"/proc/{pid}/fd/{fd}")))
    return [name for name in found if name.startswith("device.")]


def one_at_a_time(folder: Path) -> str:
    """Fails if another launch is doing this, too."""
    mark = os.open(folder / f"only-{os.environ['RANK']}", os.O_CREAT | os.O_EXCL)
    os.close(mark)
    signal.sigtimedwait([], 0.05)
    os.unlink(folder / f"only-{os.environ['RANK']}")
    return os.environ["MLAUNCH_LEASED"]


@pytest.mark.slow
def test_calls_of_several_threads_take_turns(tmp_path: Path) -> None:
    train = launcher(one_at_a_time, n_gpus=2, concurrent=1)
    values: list[list[str]] = []
    threads = [threading.Thread(target=lambda: values.append(train(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [["place on the CPUs 0"] * 2] * 4


def test_more_ranks_than_cpus_are_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launches.have_cpus(monkeypatch, 1)
    launches.forget_warnings()
    train = launcher(os.getpid, n_gpus=2, device_type="cpu", lease=True)
    assert len({*train(), *train()}) == 4
    train.options(concurrent=1)()
    assert caplog.messages == [
        "a lease for 2 ranks on 1 CPU: only one such launch runs at a time, and its ranks share the CPUs"
    ]


def fds_of_leases() -> list[tuple[list[str], list[str], bool]]:
    fds = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    ours = [fd for fd in fds if "device." in os.readlink(f"/proc/self/fd/{fd}")]
    closed = all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in ours)
    return [(held(), held(os.getppid()), closed)]


def test_agent_and_ranks_hold_it_and_what_they_execute_does_not() -> None:
    ((of_rank, of_agent, closed),) = launcher(fds_of_leases, n_gpus=1, lease=True, concurrent=3)()[0]
    assert of_rank == of_agent == ["device.place%20on%20the%20CPUs%200"]
    assert closed
    assert held() == []


def nested() -> list[int]:
    return launcher(os.getpid, n_gpus=1, concurrent=1, join=False)()


@pytest.mark.slow
def test_a_launch_inside_the_one_that_holds_its_devices_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"getpid\(\) would deadlock: it wants 1 of place on the CPUs 0, and"):
        launcher(nested, n_gpus=1, concurrent=1)()


def crossed(folder: Path, number: int) -> list[int]:
    """Launches once both of them have what the other one's launch wants."""
    (folder / f"{number}.begun").touch()
    while len(list(folder.glob("*.begun"))) < 2:
        os.sched_yield()
    return launcher(os.getpid, n_gpus=1, concurrent=2, join=False)()


@pytest.mark.dear("ranks that launch have fork servers of their own")
@pytest.mark.slow
def test_two_launches_that_want_what_the_other_has_are_not_left_waiting(tmp_path: Path) -> None:
    """One is refused; it leaves its device to the other."""
    runs = [launcher(crossed, n_gpus=1, concurrent=2).submit(tmp_path, number) for number in range(2)]
    (error,) = (found for run in runs if (found := run.exception(120)) is not None)
    assert isinstance(error, RuntimeError)
    told = r"getpid\(\) would deadlock: it wants 1 of place on the CPUs (\d) and waits for getpid\(\) \(pid \d+\), "
    told += r"which is called in crossed\(\) \(pid \d+\), on place on the CPUs \1, and wants place"
    assert re.search(told, str(error))


def forever(folder: Path) -> None:
    (folder / f"{os.getppid()}.pid").touch()
    signal.pause()


def test_the_end_of_a_killed_agents_ranks_ends_the_lease(tmp_path: Path) -> None:
    """Whoever waits is told, though nobody was left to say so; standing tells who it was."""
    caller = threading.Thread(target=lambda: _fails(tmp_path))
    caller.start()
    wait_until(lambda: bool(list(tmp_path.glob("*.pid"))))
    agent = int(next(tmp_path.glob("*.pid")).stem)
    waiter = threading.Thread(target=launcher(os.getpid, n_gpus=1, concurrent=1))
    waiter.start()
    wait_until(lambda: bool(launches.leases()[1]))
    ((found,), _) = launches.leases()
    assert (found["device"], found["who"]) == ("place on the CPUs 0", "forever()")
    os.kill(agent, signal.SIGKILL)
    caller.join()
    waiter.join()
    wait_gone([agent])


def _fails(folder: Path) -> None:
    with pytest.raises(Exception, match="was ended"):
        launcher(forever, n_gpus=1, concurrent=1)(folder)


def test_devices_that_are_not_there_are_refused_before_anything_waits() -> None:
    with pytest.raises(ValueError, match="ranks on CPUs have no device numbers"):
        launcher(os.getpid, device_type="cpu", devices=[0, 1], n_gpus=1)()
    assert launches.leases() == ([], [])


def test_an_interrupt_of_a_call_that_waits_leaves_no_place_in_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process goes on. Meanwhile whoever holds a lease keeps systemd-tmpfiles from removing the directory."""
    launches.be_patient(monkeypatch, "word of a wait", 0.01)
    caller, here = threading.Thread(target=lambda: _fails(tmp_path)), threading.get_ident()
    caller.start()
    wait_until(lambda: bool(list(tmp_path.glob("*.pid"))))
    agent = int(next(tmp_path.glob("*.pid")).stem)

    def press() -> None:
        wait_until(lambda: bool(launches.leases()[1]) and bool(caplog.messages))
        signal.pthread_kill(here, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        launcher(os.getpid, n_gpus=1, concurrent=1)()
    presser.join()
    [told] = caplog.messages  # where no line can change, it says once for whom it waits
    assert told == f"getpid() waits for a place on the CPUs, after forever() (pid {os.getpid()})"
    held_now, waiting = launches.leases()
    assert ([one["who"] for one in held_now], waiting) == (["forever()"], [])
    assert not can_be_removed()
    os.kill(agent, signal.SIGKILL)
    caller.join()
    wait_gone([agent])
    wait_until(can_be_removed)


def can_be_removed() -> bool:
    """As systemd-tmpfiles finds out whether somebody uses the directory of leases."""
    directory = os.open(launches.lease_directory(), os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(directory)
    return True


def test_a_leased_call_that_comes_to_no_launch_holds_nothing(tmp_path: Path) -> None:
    """Its argument cannot be pickled, or its plan fails, when it has its devices already."""
    with pytest.raises(TypeError, match="argument 0 of len"):
        launcher(len, n_gpus=1, concurrent=1)(threading.Lock())  # type: ignore[arg-type]
    assert held() == []
    with pytest.raises(ValueError, match=r"profile_ranks=\[1\]"):
        launcher(os.getpid, n_gpus=1, concurrent=1, profile=tmp_path / "trace", profile_ranks=[1])()
    assert held() == []
    assert launches.leases() == ([], [])
