"""What a failed or stuck launch says of the others, of the reason, and of its deadline."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from mlaunch import LaunchError, LaunchTimeout, comm, launcher
from tests.conftest import ROOT
from tests.processes import wait_until
from tests.sandboxes import memory_group

HERE = os.path.basename(__file__)
pytestmark = pytest.mark.usefixtures("the_next_call_works")
METHODS = ("forkserver", "fork", "spawn")


def wait_for_ever() -> None:
    threading.Event().wait()


def once_it_waits(act: Callable[[], object]) -> None:
    """In a rank: acts, in a thread, as soon as the main thread is held in ``wait_for_ever``, and no sooner."""

    def watch() -> None:
        wait_until(lambda: is_waiting(sys._current_frames()[threading.main_thread().ident or 0]))
        act()

    threading.Thread(target=watch, daemon=True).start()


def is_waiting(frame: FrameType) -> bool:
    """Whether a thread will show no other frame any more: it has let go of the condition's own lock."""
    below = [frame, *(caller for caller in (frame.f_back, frame.f_back and frame.f_back.f_back) if caller)]
    return "saved_state" in frame.f_locals and below[-1].f_code.co_name == "wait_for_ever"


def failure_of(call: Callable[[], object], kind: type[BaseException]) -> Any:
    """What a call raises. Again if a stack is missing: a machine may need longer than the 0.3 s allowed."""
    for _ in range(10):
        with pytest.raises(kind) as caught:
            call()
        texts = [str(caught.value), str(caught.value.__cause__), *getattr(caught.value, "__notes__", [])]
        if not any("did not show its stack" in text for text in texts):
            break
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize("start_method", METHODS)
def test_the_others_stacks_are_grouped(start_method: str) -> None:
    def train() -> None:
        store = dist.distributed_c10d._get_default_store()
        store.add("here", 1)
        if dist.get_rank() == 2:
            store.wait([f"at {rank}" for rank in (0, 1, 3)])
            raise ValueError("no such luck")
        if dist.get_rank() == 3:
            store.set("at 3", "1")
            store.get("never")
        once_it_waits(lambda: store.set(f"at {dist.get_rank()}", "1"))
        wait_for_ever()

    report = failure_of(launcher(train, 4, start_method=start_method), ValueError).__cause__
    assert isinstance(report, LaunchError)
    _, _, meanwhile = str(report).partition("\nmeanwhile:\n")
    assert f"ranks 0-1 were in wait at {HERE}:" in meanwhile
    assert f"rank 3 was in train at {HERE}:" in meanwhile
    assert sorted(report.stacks) == [0, 1, 3]
    assert "in wait_for_ever" in report.stacks[0]


LETTERS = """
import json, signal, sys, threading
sys.path.insert(0, {folder!r})
import mlaunch.agent.stopping
mlaunch.agent.stopping.STACKS_TIMEOUT = 3600.0  # a stack that is never found to be whole ends this test
from mlaunch import LaunchError, launcher
import torch.distributed as dist
code = (
    "def träin(number):\\n"
    "    store = dist.distributed_c10d._get_default_store()\\n"
    "    if dist.get_rank() == 1:\\n"
    "        store.wait(['here'])\\n"
    "        signal.raise_signal(number)\\n"
    "    store.set('here', '1'), threading.Event().wait()\\n"
)
exec(compile(code, "/home/訓練.py", "exec"))
try:
    launcher(träin, 2, start_method="fork")(signal.SIGSEGV)
except LaunchError as error:
    print(json.dumps([mlaunch.__file__, str(error), error.stacks[0]]))
"""


def test_names_in_any_script(run_script, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Of files, functions, and the directory that the package is in."""
    folder = tmp_path / "Jörg"
    folder.mkdir()
    (folder / "mlaunch").symlink_to(ROOT / "mlaunch")
    done = run_script(LETTERS.format(folder=str(folder)), fresh=True)
    assert done.returncode == 0, done.stderr
    file, report, stack = json.loads(done.stdout)
    assert file.startswith(str(folder))
    assert '  File "/home/訓練.py", line 5 in träin' in report
    assert re.search(r"meanwhile:\n  rank 0 was in \w+ at 訓練.py:", report), report
    assert '  File "/home/訓練.py", line 6 in träin\n' in stack


def test_handlers_of_user_code_are_left_alone() -> None:
    def train() -> list[Any]:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        with open(os.devnull, "w") as sink:
            faulthandler.register(signal.SIGUSR2, sink)
            os.kill(os.getpid(), signal.SIGUSR2)
        return [signal.getsignal(signal.SIGUSR1), faulthandler.unregister(signal.SIGUSR2)]

    assert launcher(train, 1)() == [[signal.SIG_IGN, True]]


@pytest.mark.slow
def test_a_deadline() -> None:
    def train() -> int:
        if dist.get_rank() == 1:
            wait_for_ever()
        return 5

    for deadline in (1.5, 6, 24):
        error = failure_of(launcher(train, 3, deadline=deadline), LaunchTimeout)
        if len(error.results) == 2:
            break  # else the machine is so busy that the others did not come to their return
    assert str(error).startswith(
        f"test_a_deadline.<locals>.train() did not finish within its deadline of {deadline} s; "
        f"rank 1 had not returned\n\nmeanwhile:\n  rank 1 was in wait at {HERE}:"
    )
    assert error.results == {0: 5, 2: 5}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before Python 3.11")
def test_ctrl_c_tells_where_the_ranks_were() -> None:
    caller = os.getpid()

    def train() -> None:
        store = dist.distributed_c10d._get_default_store()

        def press_once_all_wait() -> None:
            store.add("waiting", 1)
            if dist.get_rank() == 0:
                wait_until(lambda: store.add("waiting", 0) == 2)
                os.kill(caller, signal.SIGINT)

        once_it_waits(press_once_all_wait)
        wait_for_ever()

    error = failure_of(launcher(train, 2), KeyboardInterrupt)
    assert f"was interrupted; ranks 0-1 were in wait at {HERE}:" in error.__notes__[0]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_cause_is_right_every_time_under_load() -> None:
    """Random culprits, both kinds of failure, more ranks than cores."""
    import random

    def train(culprit: int, how: str) -> None:
        dist.barrier()
        if dist.get_rank() == culprit:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"from {culprit}")
        dist.barrier()

    chance = random.Random(7)
    ours = launcher(train, 8)
    for _ in range(25):
        culprit, how = chance.randrange(8), chance.choice(["kill", "raise"])
        with pytest.raises((ValueError, LaunchError)) as caught:
            ours(culprit, how)
        report = caught.value if isinstance(caught.value, LaunchError) else caught.value.__cause__
        assert isinstance(report, LaunchError)
        assert report.failures[0].rank == culprit, str(report)
        assert report.failures[0].what == (
            "was killed by SIGKILL" if how == "kill" else f"raised ValueError: from {culprit}"
        )


def test_a_killed_ranks_peak_memory_is_told() -> None:
    def train() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(LaunchError, match=r"  its peak memory was \d+ MiB"):
        launcher(train, 1)()


def test_a_sigbus_tells_of_shared_memory() -> None:
    def train() -> None:
        os.kill(os.getpid(), signal.SIGBUS)

    with pytest.raises(LaunchError, match=r"SIGBUS\n.*\n  /dev/shm has \S+ \wiB free: a full one is a likely reason"):
        launcher(train, 1)()


LATE = """
import os, threading
state = {"depth": 0, "forks": 0}

def before():
    state["forks"] += 1

def in_child():
    state["depth"] += 1
    if state["depth"] == 3 and state["forks"] == 5:  # server, its look for libuv, agent, two ranks
        threading.Event().wait()

os.register_at_fork(before=before, after_in_child=in_child)
from mlaunch import launcher
launcher(lambda: 1, 3, start_method="fork", timeout=1, grace_period=0.1)()
"""


def test_a_rank_that_never_comes_to_the_group_is_named(run_script: Any) -> None:
    done = run_script(LATE)
    assert re.search(r"rank [02] of .* raised TimeoutError: rank 1 did not come to the process group within 1 s",
                     done.stderr), done.stderr  # fmt: skip
    assert "  rank 1 was starting\n" in done.stderr.partition("\nmeanwhile:\n")[2]


OUT_OF_MEMORY = """
import sys
from mlaunch import LaunchError, launcher

def greedy():
    hoard = []
    while True:
        hoard.append(b"x" * 2**24)

try:
    launcher(greedy, 1)()
except LaunchError as error:
    print(error)
"""


@pytest.mark.nightly
def test_a_real_death_by_memory(run_script: Any) -> None:
    """In a memory cgroup of our own; the launch's own processes need some 300 MiB of the GiB."""
    with memory_group(2**30) as procs:
        done = run_script(f"import os\nopen('{procs}', 'w').write(str(os.getpid()))\n{OUT_OF_MEMORY}", fresh=True)
    assert "rank 0 of greedy() was killed by SIGKILL" in done.stdout, done.stderr
    # The kernel may kill another one, too, before the memory of the first is free.
    words = r"memory\.oom_control\) rose by [1-9] while this rank ran: it was probably killed for lack of memory"
    assert re.search(words, done.stdout), done.stdout


@pytest.mark.nightly("90-*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("hard", "killed", "told"),
    [
        (1, "SIGKILL", "it had used 1 s of CPU, and the kernel kills it at its hard limit of 1 s (ulimit -t)"),
        (90, "SIGXCPU", "it had used 1 s of CPU, its soft limit (ulimit -t)"),
    ],
)
def test_a_limit_of_cpu_time_is_told(hard: int, killed: str, told: str) -> None:
    def train() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (1, hard))
        while True:
            pass

    with pytest.raises(LaunchError, match=f"rank 0 of .* was killed by {killed}") as caught:
        launcher(train, 1)()
    assert caught.value.failures[0].hints == (told,)


def test_a_very_long_message_is_told_once_and_shortened() -> None:
    """The exception itself keeps it: that is the caller's."""

    def train() -> None:
        try:
            raise KeyError("y" * 100_000)
        except KeyError as error:
            raise ValueError("\n" + "x" * 1_000_000) from error

    with pytest.raises(ValueError, match="xxx") as caught:
        launcher(train, 1)()
    assert len(str(caught.value)) == 1_000_001
    told = str(caught.value.__cause__)
    assert len(told) < 40_000
    assert told.count("[1,000,001 characters in all]") == 1
    assert "ValueError: \n  xxx" in told.replace("\n  \n", "\n")
    assert told.count("[the message is above]") == 1
    assert "[100,012 characters in all]" in told  # of its cause


def test_a_rank_that_hangs_in_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "site-packages" / "stuck_of_mine"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("import os, threading\nos.write(int(os.environ['TOLD']), b'x')\n"
                                       "threading.Event().wait()\n")  # fmt: skip
    monkeypatch.syspath_prepend(place.parent)
    told, tell = os.pipe()

    def train() -> None:
        if dist.get_rank() == 1:
            os.read(told, 1)
            raise ValueError("no such luck")
        os.environ["TOLD"] = str(tell)
        import stuck_of_mine  # type: ignore[import-not-found]  # noqa: F401

    try:
        with pytest.raises(ValueError, match="no such luck") as caught:
            launcher(train, 2, start_method="fork")()
    finally:
        os.close(told)
        os.close(tell)
    assert f"rank 0 was importing stuck_of_mine at {HERE}:" in str(caught.value.__cause__)


def test_a_hang_in_a_helper_of_ours_is_in_the_users_line() -> None:
    """Also where mlaunch is installed in place, and so not among the libraries by its path."""

    def train() -> None:
        store = dist.distributed_c10d._get_default_store()
        main = threading.main_thread().ident or 0

        def tell() -> None:
            wait_until(
                lambda: "barrier" in {frame.name for frame in traceback.extract_stack(sys._current_frames()[main])}
            )
            store.set("waits", "")

        if dist.get_rank() == 0:
            threading.Thread(target=tell, daemon=True).start()
            comm.synchronize()
        store.wait(["waits"])
        raise ValueError("no such luck")

    error = failure_of(launcher(train, 2), ValueError)
    assert f"rank 0 was in synchronize at {HERE}:" in str(error.__cause__)


def test_a_rank_that_left_is_named_beside_what_follows() -> None:
    def train() -> None:
        if dist.get_rank() == 1:
            sys.exit(0)
        dist.barrier()

    error = failure_of(launcher(train, 2), RuntimeError)
    assert "rank 1 had exited with code 0 without returning a value" in str(error.__cause__)
