"""Processes that somebody has stopped (SIGSTOP, a debugger): their caller bounds what it waits for, and nothing stays.

That a deadline ends such a launch is in the crash matrix; a stopped link is in tests/system/test_machines.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch.distributed as dist

from mlaunch import LaunchError, LaunchTimeout, launcher
from tests import launches
from tests.contract import crashes
from tests.contract.families import start_family
from tests.processes import children, listen, wait_gone

STOPPED = {"agent": os.getppid, "fork server": crashes.fork_server_of_a_rank}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests stop need not be waited for as long as a busy machine may take."""
    launches.become_impatient(monkeypatch)


def stop_and_interrupt(victim: str, caller: int, note: str = "") -> None:
    """In rank 0: stops the victim, then has the caller end the launch; again, once the note is there."""
    if dist.get_rank() == 0:
        if note:  # the first Ctrl-C must not end this rank before it has sent the second
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(STOPPED[victim](), signal.SIGSTOP)
        os.kill(caller, signal.SIGINT)
        while note and not os.path.exists(note):
            signal.sigtimedwait([], 0.01)
        if note:
            os.kill(caller, signal.SIGINT)
    crashes.hang()


@pytest.mark.slow
@pytest.mark.usefixtures("the_next_call_works", "impatient")
@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
@pytest.mark.parametrize("victim", STOPPED)
def test_ctrl_c(victim: str, start_method: str) -> None:
    server = launches.server_pid()
    call = launcher(stop_and_interrupt, 2, grace_period=0.1, start_method=start_method)
    with pytest.raises(KeyboardInterrupt):
        call(victim, os.getpid())
    kept = victim == "agent" or start_method == "fork"  # only who does not answer is killed
    assert (launches.server_pid() == server) is kept


@pytest.mark.slow
@pytest.mark.usefixtures("the_next_call_works", "impatient")
@pytest.mark.parametrize("victim", STOPPED)
def test_a_second_ctrl_c_skips_the_grace_period(victim: str, tmp_path: Path) -> None:
    def handler(_number: int, _frame: FrameType | None) -> None:
        (tmp_path / "first").touch()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            launcher(stop_and_interrupt, 2, grace_period=1000)(victim, os.getpid(), str(tmp_path / "first"))
    finally:
        signal.signal(signal.SIGINT, before)


class StopsTheServer:
    """An argument that stops the fork server as it is pickled: after the call has found it running."""

    def __reduce__(self) -> tuple[type[int], tuple[()]]:
        stop_server()
        return int, ()


def stop_server() -> None:
    server = launches.server_pid()
    os.kill(server, signal.SIGSTOP)
    os.waitid(os.P_PID, server, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.usefixtures("the_next_call_works", "impatient")
def test_a_fork_server_that_was_stopped_between_calls() -> None:
    """It is replaced."""
    stopped = launches.server_pid()
    stop_server()
    assert launcher(lambda: 7, 1, deadline=60)() == [7]
    assert launches.server_pid() != stopped
    wait_gone([stopped])


@pytest.mark.usefixtures("the_next_call_works", "impatient")
def test_a_fork_server_that_is_stopped_as_the_call_begins() -> None:
    """The deadline counts once: what was killed for it is not asked again in another server."""
    with pytest.raises(LaunchTimeout, match="its agent or its fork server did not answer"):
        launcher(lambda _: 7, 2, deadline=0.5, grace_period=0.1)(StopsTheServer())


@pytest.mark.usefixtures("the_next_call_works", "impatient")
def test_ctrl_c_of_a_call_that_never_began() -> None:
    """It ends the call, which is not begun anew in another server."""
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            launcher(lambda _: 7, 2, grace_period=0.1)(StopsTheServer())
    finally:
        timer.join()


OTHER = {"MALLOC_TEST_": "1"}  # a variable that is read at import: a call with it gets a fork server of its own


def fork_servers() -> list[int]:
    """Those that are interpreters already: who forked one that is not would wait with it in the kernel."""
    found = []
    for pid in children(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            found += [pid] * any(name in command for name in (b"mlaunch-fork-server", b"mlaunch: fork server"))
    return found


@contextlib.contextmanager
def stopping_the_next_interpreter() -> Iterator[list[int]]:
    """Stops the fork server that a call starts, long before it has imported torch; gives its pid."""
    before, stopped = set(fork_servers()), []

    def stop() -> None:
        while not (new := set(fork_servers()) - before):
            signal.sigtimedwait([], 0.01)
        stopped.extend(new)
        os.kill(stopped[0], signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    yield stopped
    thread.join()


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("the_next_call_works")
@pytest.mark.nightly("forkserver")
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_fork_server_that_is_stopped_while_it_imports(start_method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is slow has more time than the deadline gives, but not one that is stopped."""
    launches.be_patient(monkeypatch, "import", 3600.0)
    call = launcher(lambda: 7, 1, env=OTHER, deadline=1, start_method=start_method)
    words = "had not imported torch when the deadline had passed .* and was killed"
    with stopping_the_next_interpreter() as stopped, pytest.raises(LaunchTimeout, match=words):
        call()
    wait_gone(stopped)
    assert call.options(deadline=100)() == [7]


@pytest.mark.usefixtures("the_next_call_works")
@pytest.mark.nightly("spawn")
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_ctrl_c_while_a_stopped_fork_server_imports(start_method: str) -> None:
    call = launcher(lambda: 7, 1, env=OTHER, start_method=start_method)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with stopping_the_next_interpreter(), pytest.raises(KeyboardInterrupt):
            call()
    finally:
        timer.join()
    assert call() == [7]


def test_an_import_may_take_longer_than_the_deadline() -> None:
    server = launches.start_server()
    try:
        assert server.ready(0.0).backends
    finally:
        server.close()


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
@pytest.mark.parametrize(
    ("stopped", "killed"),
    [
        (["agent"], "caller"),
        (["fork server"], "caller"),
        (["agent", "fork server"], "caller"),
        (["agent"], "fork server"),
    ],
)
def test_no_orphans(stopped: list[str], killed: str, start_method: str) -> None:
    family = start_family(start_method)
    for name in stopped:
        os.kill(family.pids[name], signal.SIGSTOP)
    os.kill(family.pids[killed], signal.SIGKILL)
    family.wait()
    wait_gone(family.everyone)


def take_a_name_and_hang(name: bytes) -> None:
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)  # PR_SET_NAME
    crashes.hang()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["\N{GREEK SMALL LETTER LAMDA}".encode()[:1], b") S 1\rState:\tZ"], ids=["cut", "like a field"]
)
def test_a_rank_has_any_name(name: bytes) -> None:
    """The kernel keeps 15 bytes of it, which may end within a letter, and shows it where it shows the state."""
    with pytest.raises(LaunchTimeout, match="meanwhile:\n  ranks 0-1 were in hang at"):
        launcher(take_a_name_and_hang, 2, deadline=1)(name)


def stop_the_fork_server_and_return() -> int:
    if dist.get_rank() == 0:
        os.kill(STOPPED["fork server"](), signal.SIGSTOP)
    return 7


@pytest.mark.usefixtures("the_next_call_works", "impatient")
def test_a_fork_server_that_is_stopped_while_ranks_return() -> None:
    """No deadline and no Ctrl-C: nobody waits for it where all has been told."""
    assert launcher(stop_the_fork_server_and_return, 2)() == [7, 7]


@pytest.mark.usefixtures("the_next_call_works", "impatient")
def test_a_fork_server_whose_word_is_needed_is_stopped_while_ranks_return() -> None:
    """The next call may want the port, which the agent's end gives back: that is missed once the agent has ended."""
    with listen() as listener:
        port = listener.getsockname()[1]
    with pytest.raises(LaunchError, match="its agent or its fork server did not answer") as caught:
        launcher(stop_the_fork_server_and_return, 2, port=port)()
    assert caught.value.results == {0: 7, 1: 7}
