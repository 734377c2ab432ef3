"""A failing rank ends the launch, and the caller learns why; nothing is left behind."""

from __future__ import annotations

import builtins
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import mlaunch
from mlaunch import LaunchError, launcher
from tests import launches
from tests.conftest import OURS
from tests.contract import crashes, functions
from tests.processes import alive, wait_gone, wait_until

pytestmark = pytest.mark.usefixtures("as_users_have_it", "the_next_call_works")
METHODS = ("forkserver", "fork", "spawn")


class Odd(Exception):
    """Takes other arguments than it passes on."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"{code} at {where}")
        self.code = code
        self.lock = threading.Lock()


def stuck() -> None:
    """What the healthy ranks do meanwhile: wait in a collective for ever."""
    dist.barrier()


def on_rank_1(action: Any) -> Any:
    def train() -> None:
        if dist.get_rank() == 1:
            action()
        stuck()

    return train


def raise_value_error() -> None:
    raise ValueError("no such luck")


def segfault() -> None:
    import ctypes

    ctypes.string_at(1)


@pytest.mark.slow
@pytest.mark.parametrize("start_method", METHODS)
def test_the_ranks_own_exception_is_raised(start_method: str) -> None:
    with pytest.raises(ValueError, match="no such luck") as caught:
        launcher(on_rank_1(raise_value_error), 3, start_method=start_method)()
    report = caught.value.__cause__
    assert isinstance(report, LaunchError)
    assert report.failures[0].rank == 1
    assert report.failures[0].type_name == "ValueError"
    assert "in raise_value_error" in report.failures[0].traceback
    assert "rank 1 of on_rank_1.<locals>.train() raised ValueError: no such luck" in str(report)
    assert "while running the function" in str(report)
    assert OURS not in report.failures[0].traceback
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__[0].startswith("raised by rank 1 of on_rank_1.<locals>.train() (host ")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Pair(Exception):
    """Its ``__new__`` wants two arguments."""

    def __new__(cls, first: int, _second: int) -> Pair:
        return super().__new__(cls, first)

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)
        self.second = second


def test_an_exception_that_refuses_attributes() -> None:
    def train() -> None:
        raise Frozen(7)

    try:  # pytest.raises would set its __traceback__
        launcher(train, 1)()
    except Frozen as error:
        assert error.code == 7  # noqa: PT017
        assert error.__notes__[0].startswith("raised by rank 0 of ")  # noqa: PT017


def test_an_exception_whose_new_wants_more() -> None:
    def train() -> None:
        raise Pair(3, 4)

    with pytest.raises(Pair) as caught:
        launcher(train, 1)()
    assert (caught.value.args, caught.value.second) == ((3,), 4)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no exception groups before Python 3.11")
def test_a_group_of_exceptions_that_pickle_cannot_rebuild() -> None:
    group: Any = vars(builtins)["ExceptionGroup"]

    def train() -> None:
        raise group("several", [Odd(1, where="a"), group("inner", [Pair(3, 4), OSError(2, "gone")])])

    with pytest.raises(group, match="several") as caught:
        launcher(train, 1)()
    odd, inner = caught.value.exceptions
    assert isinstance(odd, Odd)
    assert odd.code == 1
    assert isinstance(inner, group)
    assert [type(error) for error in inner.exceptions] == [Pair, FileNotFoundError]
    assert "Odd: 1 at a" in str(caught.value.__cause__)


@pytest.mark.slow
def test_an_exception_that_pickle_cannot_rebuild() -> None:
    def train() -> None:
        raise Odd(3, where="sea")

    with pytest.raises(Odd, match="3 at sea") as caught:
        launcher(train, 2)()
    assert caught.value.code == 3
    assert not hasattr(caught.value, "lock")


class Status(Exception):
    """Makes its text of what it takes; pickle would have it make one of the text."""

    def __init__(self, status: int = 500) -> None:
        self.status = status
        super().__init__(f"status {status}")


class Coded(Exception):
    """Loses its code on pickle's own way, and with it its text."""

    __slots__ = ("code",)

    def __init__(self, message: str = "none", *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code

    def __str__(self) -> str:
        return f"[{self.code}] {self.args[0].upper()}"


class Unprintable(Exception):
    """Can be made without its line, and not be shown then."""

    def __init__(self, message: str, line: str = "") -> None:
        super().__init__(message)
        self.__dict__["place"] = {} if not line else {"line": line}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args

    def __str__(self) -> str:
        return f"{self.args[0]} at {self.place['line']}"


@pytest.mark.parametrize(
    "make",
    [lambda: Status(404), lambda: Coded("bad", code=3), lambda: Unprintable("bad", "7")],
    ids=["text", "slot", "unprintable"],
)
def test_an_exception_arrives_unchanged(make: Callable[[], Exception]) -> None:
    def train() -> None:
        raise make()

    error = make()
    with pytest.raises(type(error)) as caught:
        launcher(train, 1)()
    assert (str(caught.value), caught.value.args) == (str(error), error.args)
    assert launches.content_of(caught.value).items() >= launches.content_of(error).items()  # there are notes


def leave(how: Any) -> None:
    raise how


class Leaves(Exception):
    """Ends who unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return leave, (self.args[0],)


@pytest.mark.slow
@pytest.mark.parametrize("how", [SystemExit(0), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_an_exception_that_ends_who_unpickles_it(how: BaseException) -> None:
    def train() -> None:
        raise Leaves(how)

    with mlaunch.Ranks(n_gpus=1) as ranks:
        pids = ranks.run(os.getpid)
        with pytest.raises(Leaves):
            ranks.run(train)
        assert ranks.run(os.getpid) == pids


def test_an_exception_of_a_class_without_a_name_in_the_caller() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("class Local(Exception): pass\ndef train(): raise Local('here')", names)
    with pytest.raises(names["Local"], match="here"):
        launcher(names["train"], 1)()


def test_an_exception_of_what_cannot_be_pickled_keeps_its_words() -> None:
    def train() -> None:
        raise ValueError("no such", threading.Lock())

    with pytest.raises(ValueError, match=r"'no such', .*<unlocked _thread\.lock") as caught:
        launcher(train, 1)()
    assert caught.value.args[0] == "no such"


def test_an_exception_whose_class_is_local_is_still_that_class() -> None:
    class Local(RuntimeError):
        pass

    def train() -> None:
        raise Local("here")

    with pytest.raises(Local, match="here"):
        launcher(train, 1)()


@pytest.mark.nightly(  # each way once, the start methods in turn
    *("os._exit-fork", "os._exit-spawn", "sys.exit-forkserver", "sys.exit-spawn", "sys.exit-text-fork*"),
    *("SIGKILL-fork", "SIGKILL-spawn", "SIGTERM-forkserver", "SIGTERM-spawn", "abort-fork*"),
)
@pytest.mark.slow
@pytest.mark.parametrize("start_method", METHODS)
@pytest.mark.parametrize(
    ("action", "words", "exitcode"),
    [
        (lambda: os._exit(3), "exited with code 3 (sys.exit or os._exit)", 3),
        (lambda: sys.exit(4), "exited with code 4 (sys.exit or os._exit)", 4),
        (lambda: sys.exit("why"), "exited with code 1 (sys.exit or os._exit)", 1),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL", -9),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "was killed by SIGTERM", -15),
        (os.abort, "was killed by SIGABRT", -6),
    ],
    ids=["os._exit", "sys.exit", "sys.exit-text", "SIGKILL", "SIGTERM", "abort"],
)
def test_a_rank_that_dies(start_method: str, action: Any, words: str, exitcode: int) -> None:
    with pytest.raises(LaunchError) as caught:
        launcher(on_rank_1(action), 2, start_method=start_method)()
    cause = caught.value.failures[0]
    assert (cause.rank, cause.what, cause.exitcode) == (1, words, exitcode)
    assert f"rank 1 of on_rank_1.<locals>.train() {words}\n  host " in str(caught.value)
    assert "while running the function" in str(caught.value)


@pytest.mark.slow
def test_the_text_of_an_exit_is_in_the_report() -> None:
    def leave() -> None:
        sys.exit("no such luck \N{GRINNING FACE}")

    with pytest.raises(LaunchError) as caught:
        launcher(on_rank_1(leave), 2)()
    assert caught.value.failures[0].traceback == "SystemExit: no such luck \N{GRINNING FACE}"
    assert "\n  SystemExit: no such luck" in str(caught.value)


def test_the_text_of_an_exit_is_not_written_into_a_file_of_the_functions(tmp_path: Path) -> None:
    """Whose descriptor has the number of one that the function has closed."""
    path = tmp_path / "file"

    def leave() -> None:
        memfds = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
        crash = [fd for fd in memfds if "mlaunch-crash" in os.readlink(f"/proc/self/fd/{fd}")]
        for fd in crash:
            own = os.open(path, os.O_WRONLY | os.O_CREAT)
            os.dup2(own, fd)
        sys.exit("no such luck")

    with pytest.raises(LaunchError, match="exited with code 1"):
        launcher(leave, 1)()
    assert path.read_text() == ""


@pytest.mark.slow
def test_a_segfault_shows_the_python_stack() -> None:
    with pytest.raises(LaunchError, match="was killed by SIGSEGV") as caught:
        launcher(on_rank_1(segfault), 2)()
    assert "in segfault" in str(caught.value)
    assert "mlaunch/rank" not in str(caught.value)
    assert "Extension modules" not in str(caught.value)


def test_a_keyboard_interrupt_of_a_rank_does_not_interrupt_the_caller() -> None:
    def train() -> None:
        raise KeyboardInterrupt

    with pytest.raises(LaunchError, match="raised KeyboardInterrupt"):
        launcher(train, 1)()


@pytest.mark.parametrize("leave", [lambda: sys.exit(0), sys.exit, lambda: os._exit(0)])
def test_leaving_well_without_a_value_is_none_and_one_warning(leave: Any) -> None:
    def train() -> int:
        if dist.get_rank() != 1:
            leave()
        return 5

    with pytest.warns(RuntimeWarning, match=r"^ranks 0, 2 of .* without returning a value; their") as seen:
        assert launcher(train, 3)() == [None, 5, None]
    assert [warning.filename for warning in seen] == [__file__]


def test_dying_after_the_value_was_sent_is_told() -> None:
    import atexit

    def train() -> int:
        atexit.register(os._exit, 7)
        return 1

    with pytest.warns(
        RuntimeWarning, match=r"train\(\): rank 0 returned its value, then exited with code 7 .* No value"
    ):
        assert launcher(train, 1)() == [1]


def test_exit_handlers_of_a_rank_run() -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)

    def train() -> None:
        import atexit

        atexit.register(os.write, writer, b"bye")

    launcher(train, 1, start_method="fork")()
    os.close(writer)
    with open(reader) as file:
        assert file.read() == "bye"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_the_cause_is_told_from_its_consequences(how: str) -> None:
    def train(culprit: int) -> None:
        dist.barrier()
        if dist.get_rank() == culprit:
            if how == "raise":
                raise ValueError(f"from {culprit}")
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    for culprit in (0, 2, 3):
        with pytest.raises((ValueError, LaunchError)) as caught:
            launcher(train, 4)(culprit)
        report = caught.value if isinstance(caught.value, LaunchError) else caught.value.__cause__
        assert isinstance(report, LaunchError)
        assert report.failures[0].rank == culprit


@pytest.mark.slow
@pytest.mark.parametrize("stays", [False, True])
def test_a_cause_that_ends_long_after_its_connections(stays: bool) -> None:
    """As a process does on a busy machine: the others' errors are there before its end."""

    def train() -> None:
        if dist.get_rank() == 1:
            crashes.close_connections_at_exec()
            os.execv("/bin/sh", ["sh", "-c", "sleep 0.5; exit 6"])
        dist.barrier()

    def call() -> list[None]:
        if not stays:
            return launcher(train, 2)()
        with mlaunch.Ranks(n_gpus=2) as ranks:
            return ranks.run(train)

    with pytest.raises(LaunchError, match=r"rank 1 of .* exited with code 6") as caught:
        call()
    assert caught.value.failures[0].rank == 1


@pytest.mark.slow
def test_no_collective_breaks_before_its_ranks_are_stopped(tmp_path: Path) -> None:
    """The failed rank stays until then: its end would be "Connection closed by peer" to the others.

    These are signalled one after the other, so on a busy machine one of them may see the end of the one before.
    """

    @launcher(n_gpus=4, device_type="cpu")
    def work(number: int) -> None:
        if dist.get_rank() == 2:
            raise ValueError("the cause")
        try:
            dist.barrier()
        except RuntimeError:
            (tmp_path / f"{number} {dist.get_rank()}").touch()
            raise

    launches, others = 10, 3
    for number in range(launches):
        with pytest.raises(ValueError, match="the cause"):
            work(number)
    assert len(list(tmp_path.iterdir())) < launches * others / 2


def states_of_this_launch() -> list[str]:
    """In a rank: what ``mlaunch ps`` says of all of them."""
    for launch in launches.ask("status"):
        if os.getpid() in [rank["pid"] for rank in launch["ranks"]]:
            return [rank["state"] for rank in launch["ranks"]]
    return []


@pytest.mark.slow
def test_finished_ranks_results_are_in_the_error() -> None:
    def train() -> int:
        if dist.get_rank() == 1:
            wait_until(lambda: any("it returned" in state for state in states_of_this_launch()))
            raise_value_error()
        return 10

    with pytest.raises(ValueError, match="no such luck") as caught:
        launcher(train, 2)()
    assert caught.value.__cause__.results == {0: 10}  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period() -> None:
    def train() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.barrier()
        if dist.get_rank() == 1:
            raise_value_error()
        while True:
            signal.pause()

    with pytest.raises(ValueError, match="no such luck"):
        launcher(train, 2, grace_period=0.2)()


@pytest.mark.slow
def test_a_stopped_rank_is_killed() -> None:
    def train() -> None:
        if dist.get_rank() == 1:
            dist.distributed_c10d._get_default_store().get("stopping")
            raise_value_error()
        dist.distributed_c10d._get_default_store().set("stopping", "1")
        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(ValueError, match="no such luck"):
        launcher(train, 2, grace_period=0.2)()


def test_a_ranks_own_processes_end_with_the_launch(tmp_path: Any) -> None:
    """A child, and a daemon that has left group and session, and closed everything."""
    note = tmp_path / "pids"

    def train() -> None:
        child = subprocess.Popen(["sleep", "1000"])
        daemon = subprocess.run(
            [sys.executable, "-c", "import subprocess;"
             "print(subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=-3, stderr=-3).pid)"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        with open(note, "a") as file:
            print(child.pid, daemon.stdout.strip(), file=file)
        dist.barrier()
        if dist.get_rank() == 1:
            raise_value_error()
        dist.barrier()

    with pytest.raises(ValueError, match="no such luck"):
        launcher(train, 2)()
    pids = [int(word) for word in note.read_text().split()]
    assert len(pids) == 4
    wait_gone(pids, 0)


def test_a_ranks_own_processes_end_with_it(tmp_path: Any) -> None:
    """And not only with the launch."""
    note = tmp_path / "pid"

    def train() -> str:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            note.write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
            store.set("noted", "")
            os._exit(0)
        store.wait(["noted"])
        wait_gone([int(note.read_text())])
        return "gone"

    with pytest.warns(RuntimeWarning, match="^rank 1 of .* without returning a value; its"):
        assert launcher(train, 2)() == ["gone", None]


def test_a_daemon_ends_though_the_fork_server_is_dead(tmp_path: Any) -> None:
    note = tmp_path / "pid"

    def train() -> None:
        if dist.get_rank() == 0:
            note.write_text(str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))
            os.kill(crashes.fork_server_of_a_rank(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(LaunchError, match=r"the fork server .* was killed by SIGKILL"):
        launcher(train, 2)()
    wait_gone([int(note.read_text())])


@pytest.mark.slow
def test_data_loader_workers_end_with_their_rank() -> None:
    import torch.utils.data

    def train() -> None:
        data = torch.utils.data.DataLoader(list(range(100)), num_workers=2, persistent_workers=True)
        for _ in data:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(LaunchError, match=r"rank 1 .* was killed by SIGKILL"):
        launcher(train, 2)()


@pytest.mark.slow
@pytest.mark.parametrize("start_method", METHODS)
def test_the_next_call_works(start_method: str) -> None:
    with pytest.raises(ValueError, match="no such luck"):
        launcher(on_rank_1(raise_value_error), 2, start_method=start_method)()
    assert functions.launched.options(start_method=start_method)(1) == [10, 11]


# The launch's other processes


def kill_when_told(find: Any) -> Any:
    """A function whose rank 0 kills what ``find`` names, with all other ranks waiting."""

    def train() -> None:
        if dist.get_rank() == 0:
            os.kill(find(), signal.SIGKILL)
        signal.pause()

    return train


@pytest.mark.slow
def test_death_of_the_agent() -> None:
    with pytest.raises(LaunchError, match=r"train\(\) was ended: the agent was killed by SIGKILL"):
        launcher(kill_when_told(os.getppid), 2)()
    assert functions.launched(1) == [10, 11]


def leave_a_daemon_and_kill_the_agent(path: Path) -> None:
    path.write_text(str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def test_nothing_that_a_killed_agents_rank_has_started_is_left_when_that_is_told(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="the agent was killed by SIGKILL"):
        launcher(leave_a_daemon_and_kill_the_agent, 1)(tmp_path / "pid")
    assert not alive(int((tmp_path / "pid").read_text()))


def test_death_of_the_fork_server() -> None:
    with pytest.raises(LaunchError, match=r"train\(\) was ended: the fork server .* was killed by SIGKILL"):
        launcher(kill_when_told(crashes.fork_server_of_a_rank), 2)()
    assert functions.launched(1) == [10, 11]


def test_an_agent_that_lacks_file_descriptors(run_script: Any) -> None:
    done = run_script(
        "import resource\n"
        "from mlaunch import launcher\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "launcher(lambda: 1, 20)()\n"
    )
    assert "LaunchError: <lambda>() was ended: the agent failed:" in done.stderr
    assert "OSError: [Errno 24] Too many open files: the limit is 40 open files; raise it with ulimit -n" in done.stderr
    assert "<lambda>(): 20 ranks need about 195 open files, and this process may have 40: raise" in done.stderr
    assert "fork_ranks.py" not in done.stderr  # where we met the limit helps nobody


@pytest.mark.slow
def test_death_of_the_rendezvous_server() -> None:
    """A launch over two machines has one, in a process beside the master's agent; here both machines are this one."""

    def server() -> int:
        from tests.processes import children

        siblings = [pid for pid in children(os.getppid()) if pid != os.getpid()]
        return min(
            pid for pid in siblings if os.getpgid(pid) == os.getpgid(os.getppid())
        )  # it is forked before the link

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    train = launcher(kill_when_told(server), 1, 2, master_ip="127.0.0.1", port=port, grace_period=1)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(train.options(rank_start=1))
        with pytest.raises(LaunchError, match=r"the rendezvous server of .* was killed by SIGKILL"):
            train()
        with pytest.raises(LaunchError, match=r"the master at 127.0.0.1, port .* was lost"):
            other.result(60)


# Ctrl-C


@pytest.mark.slow
@pytest.mark.parametrize("start_method", METHODS)
def test_ctrl_c_ends_the_launch_and_keeps_the_handlers(start_method: str) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    caller = os.getpid()

    def train() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(caller, signal.SIGINT)
        signal.pause()

    with pytest.raises(KeyboardInterrupt):
        launcher(train, 2, start_method=start_method)()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == before
    assert functions.launched(1) == [10, 11]


def test_a_second_ctrl_c_skips_the_grace_period() -> None:
    caller = os.getpid()

    def train() -> None:
        def again(*_: object) -> None:
            os.kill(caller, signal.SIGINT)

        signal.signal(signal.SIGTERM, again)
        os.kill(caller, signal.SIGINT)
        while True:
            signal.pause()

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launcher(train, 1, grace_period=1000)()
    assert time.monotonic() - start < 900
