"""What a failed or stuck launch says of the others, of the reason, and of its deadline."""

from __future__ import annotations

import bdb
import dataclasses
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
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mlaunch import LaunchError, LaunchTimeout, comm, launcher
from mlaunch.agent.supervision.evidence import Evidence
from mlaunch.base.exceptions import RankFailure
from mlaunch.base.text import name_ranks
from mlaunch.caller.launch.hints import hints_of
from mlaunch.caller.launch.outcome import Outcome
from mlaunch.caller.launch.plan import Attempt, ThisMachine, plan
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.report.failure_text import in_order, in_words, operation_of, summarise
from mlaunch.caller.report.stacks_of_ranks import grouped
from mlaunch.caller.why_text import view_of
from mlaunch.protocol import channel, payload
from mlaunch.protocol.messages.launch_messages import (
    AnswerKind,
    Phase,
    RankAnswered,
    RankGone,
    RankStacks,
    Ready,
    RemoteError,
)
from mlaunch.protocol.stack_dump import in_letters
from mlaunch.pytest import explanation
from mlaunch.rank import function as rank_function
from mlaunch.rank import remote_error
from mlaunch.rank.setup import group as rank_group
from tests.conftest import ROOT

HERE = os.path.basename(__file__)
pytestmark = pytest.mark.usefixtures("the_next_call_works")
METHODS = ("forkserver", "fork", "spawn")


def wait_for_ever() -> None:
    threading.Event().wait()


def once_it_waits(act: Callable[[], object]) -> None:
    """In a rank: acts, in a thread, as soon as the main thread is held in ``wait_for_ever``, and no sooner."""

    def watch() -> None:
        while not is_waiting(sys._current_frames()[threading.main_thread().ident or 0]):
            os.sched_yield()
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


@pytest.mark.slow
def test_a_stopped_rank_is_named_without_being_waited_for() -> None:
    def train() -> None:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            from mlaunch.agent.supervision.stack_requests import state_of

            peer = int(store.get("pid"))
            while state_of(peer) != "T":
                os.sched_yield()
            raise ValueError("no such luck")
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(ValueError, match="no such luck") as caught:
        launcher(train, 2, grace_period=0.2)()
    assert "rank 0 was running the function and did not show its stack (it was stopped by a signal)" in str(
        caught.value.__cause__
    )


LETTERS = """
import json, signal, sys, threading
sys.path.insert(0, {folder!r})
import mlaunch.agent.supervision.stopping
mlaunch.agent.supervision.stopping.STACKS_TIMEOUT = 3600.0  # a stack that is never found to be whole ends this test
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


def test_only_what_can_be_printed_is_made_letters() -> None:
    """An end of a line in a name is none in the report, and what is no text stays as the kernel's bytes."""
    assert in_letters(r"a\xe4\u8a13\U0001f680") == "aä訓🚀"
    for kept in (r"\x0a", r"\x85", r"\u2028", r"\udcfc", r"\U00110000", r"\Uffffffff", "\\"):
        assert in_letters(kept) == kept


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
            while dist.get_rank() == 0 and store.add("waiting", 0) < 2:
                os.sched_yield()
            if dist.get_rank() == 0:
                os.kill(caller, signal.SIGINT)

        once_it_waits(press_once_all_wait)
        wait_for_ever()

    error = failure_of(launcher(train, 2), KeyboardInterrupt)
    assert f"was interrupted; ranks 0-1 were in wait at {HERE}:" in error.__notes__[0]


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


def test_a_real_death_by_memory(run_script: Any) -> None:
    """In a memory cgroup of our own; the launch's own processes need some 300 MiB of the GiB."""
    group = Path(f"/sys/fs/cgroup/memory/mlaunch-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(2**30))
        script = f"import os\nopen('{group}/cgroup.procs', 'w').write(str(os.getpid()))\n{OUT_OF_MEMORY}"
        done = run_script(script, fresh=True)
    finally:
        group.rmdir()
    assert "rank 0 of greedy() was killed by SIGKILL" in done.stdout, done.stderr
    # The kernel may kill another one, too, before the memory of the first is free.
    words = r"memory\.oom_control\) rose by [1-9] while this rank ran: it was probably killed for lack of memory"
    assert re.search(words, done.stdout), done.stdout


@pytest.mark.parametrize(
    ("line", "counter", "text"),
    [
        ("0::/job/step", "job/step/memory.events", "low 0\nhigh 0\nmax 9\noom 1\noom_kill {}\noom_group_kill 0\n"),
        ("9:memory:/job", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
    ],
    ids=["v2", "v1"],
)
def test_both_versions_of_cgroups(tmp_path: Path, line: str, counter: str, text: str) -> None:
    own, events = tmp_path / "cgroup", tmp_path / counter
    own.write_text(f"1:name=systemd:/\n{line}\n")
    events.parent.mkdir(parents=True)
    events.write_text(text.format(3))
    evidence = Evidence(own, tmp_path)
    assert evidence.hints(-signal.SIGKILL, used(3 * 2**20), {}) == ("its peak memory was 3.0 GiB",)
    events.write_text(text.format(5))
    first, _ = evidence.hints(-signal.SIGKILL, used(0), {})
    assert first == (
        f"the oom_kill counter of the cgroup ({events}) rose by 2 while this rank ran: "
        f"it was probably killed for lack of memory"
    )
    assert evidence.hints(1, used(0), {}) == ()


@pytest.mark.parametrize(
    ("line", "counter"), [("0::/job/step", "job/step/pids.events"), ("8:pids:/job", "pids/job/pids.events")]
)
def test_a_pids_limit_that_was_met_is_told(tmp_path: Path, line: str, counter: str) -> None:
    own, events = tmp_path / "cgroup", tmp_path / counter
    own.write_text(f"1:name=systemd:/\n{line}\n")
    events.parent.mkdir(parents=True)
    events.write_text("max 3\n")
    evidence = Evidence(own, tmp_path)
    assert evidence.hints(-signal.SIGABRT, used(0), {}) == ()
    events.write_text("max 5\n")
    (told,) = evidence.hints(-signal.SIGABRT, used(0), {})
    assert told == (
        f"the pids limit of the cgroup ({events}) was met 2 times while this rank ran: it could probably start no more "
        f"threads"
    )
    collective = 'File "/x/torch/distributed/distributed_c10d.py", line 2 in all_reduce\n'
    aborted = RankFailure(1, 5, "was killed by SIGABRT", exitcode=-signal.SIGABRT, traceback=collective)
    assert "another shape or dtype" in hints_of(aborted)[0]
    assert hints_of(dataclasses.replace(aborted, hints=(told,))) == []  # what was looked at, and no guess beside it


@pytest.mark.parametrize("within", ["new_group", "_new_group_with_tag", "init_process_group"])
def test_an_abort_while_a_group_is_made_is_no_collective(within: str) -> None:
    trace = f'File "/x/torch/distributed/distributed_c10d.py", line 2 in {within}\n  File "train.py", line 8 in train\n'
    (told,) = hints_of(RankFailure(1, 5, "was killed by SIGABRT", exitcode=-signal.SIGABRT, traceback=trace))
    assert "by a pids limit" in told
    assert "shape" not in told


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


def used(memory: int) -> Any:
    return SimpleNamespace(ru_maxrss=memory, ru_utime=0.5, ru_stime=0.1)


def test_ranks_in_few_words() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([7, 0, 1, 2, 4]) == "ranks 0-2, 4, 7"


@pytest.mark.parametrize(
    ("below", "words"),
    [
        (["barrier torch/distributed/distributed_c10d.py"], "barrier"),
        (["_get_msg_dict torch/distributed/c10d_logger.py"], "a failed call of torch.distributed"),
        (["debug logging/__init__.py", "isEnabledFor logging/__init__.py"], "a failed call of torch.distributed"),
        ([], "train"),
    ],
)
def test_a_collective_is_named_and_not_what_torch_wraps_it_in(below: list[str], words: str) -> None:
    outer = ["wrapper torch/distributed/c10d_logger.py", *below]
    frames = [(f"/x/site-packages/{file}", "1", name) for name, file in map(str.split, reversed(outer))]
    assert in_words([*frames, ("/home/train.py", "8", "train")]) == f"in {words} at train.py:8"


def test_an_import_of_a_library_is_named_and_is_no_collective() -> None:
    library, users = "/x/site-packages/torch/nn/parallel/distributed.py", ("/home/train.py", "18", "train")
    begins = [(library, "8", "__init__"), users]
    importing = [
        ("/x/site-packages/torch/distributed/tensor.py", "3", "<module>"),
        ("<frozen importlib._bootstrap>", "1", "_call_with_frames_removed"),
        ("/x/site-packages/torch/_dynamo/__init__.py", "3", "<module>"),
        ("<frozen importlib._bootstrap>", "1", "_call_with_frames_removed"),
        *begins,
    ]
    assert in_words(importing) == "importing torch._dynamo, in __init__, at train.py:18"
    assert operation_of(importing) == ""
    broadcasts = ("/x/site-packages/torch/distributed/utils.py", "5", "_sync_module_states")
    assert in_words([broadcasts, *begins]) == "in __init__ at train.py:18"
    assert operation_of([broadcasts, *begins]) == ""  # which has no name that a user knows
    assert operation_of([("/x/site-packages/torch/distributed/d.py", "1", "barrier"), users]) == "barrier"


def test_a_rank_at_a_prompt_is_in_the_debugger() -> None:
    ours = str(ROOT / "mlaunch" / "rank" / "debugging" / "rank_pdb.py")
    pythons = [(bdb.__file__, "90", "trace_dispatch"), (ours, "7", "interaction"), (bdb.__file__, "90", "dispatch")]
    assert in_words([*pythons, ("/home/train.py", "8", "train")]) == "in the debugger at train.py:8"


def test_generated_code_is_no_place_of_the_users() -> None:
    library, users = "/x/site-packages/config.py", ("/home/train.py", "18", "train")
    generated, attrs = ("<string>", "3", "__init__"), ("<attrs generated methods train.Config>", "25", "__init__")
    assert in_words([(library, "8", "read"), generated, users]) == "in __init__ at train.py:18"
    assert in_words([attrs, users]) == "in __init__ at train.py:18"
    assert in_words([(library, "8", "read"), generated, (library, "2", "load"), users]) == "in load at train.py:18"
    assert in_words([("/home/train.py", "7", "__post_init__"), generated, users]) == "in __post_init__ at train.py:7"
    assert in_words([("<string>", "7", "train")]) == "in train at <string>:7"  # of python -c
    assert (
        in_words([(library, "8", "read"), ("<string>", "7", "train"), ("<string>", "9", "f")])
        == "in read at <string>:7"
    )
    loads = f'Current thread:\n  File "<string>", line 3 in __init__\n  File "{library}", line 2 in load\n'
    assert summarise([RankStacks(0, Phase.RECEIVING, "S", loads)]) == [f"rank 0 was {Phase.RECEIVING.value}"]


MACHINERY = [
    ("<frozen importlib._bootstrap_external>", "1", "create_module"),
    ("<frozen importlib._bootstrap>", "1", "_find_and_load"),
]


@pytest.mark.parametrize(
    ("inner", "line", "words"),
    [
        ([("/x/site-packages/pandas/core/api.py", "3", "<module>"), *MACHINERY,
          ("/x/site-packages/pandas/__init__.py", "9", "<module>"), *MACHINERY], "8", "importing pandas"),
        ([(json.__file__, "106", "<module>"), *MACHINERY], "8", "importing json"),
        (MACHINERY, "1", "importing slow.part"),
        (MACHINERY, "2", "importing other"),
        (MACHINERY, "9", "importing a module"),
        ([("/x/site-packages/torch/nn/modules/linear.py", "1", "forward"),
          ("/x/site-packages/torch/nn/modules/module.py", "1", "_call_impl"),
          ("/x/site-packages/torch/nn/modules/module.py", "1", "_wrapped_call_impl")], "8", "in forward"),
        ([("/x/site-packages/torch/_dynamo/eval_frame.py", "1", "compile_wrapper")], "8", "in train"),
    ],
)  # fmt: skip
def test_work_that_user_code_has_begun_is_named(
    inner: list[tuple[str, str, str]], line: str, words: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("from slow.part import x\nimport other, more\n")
    assert in_words([*inner, (str(script), line, "train")]) == f"{words} at train.py:{line}"


def test_an_import_is_the_users_line_alone() -> None:
    """A library that is imported has dozens of frames of its own; why and stacks are asked where the ranks are."""
    library = [(f"/x/site-packages/big/part{number}.py", "3", "<module>") for number in range(30)]
    begins = [("/home/train.py", "18", "train"), ("/home/train.py", "40", "main")]
    frames = [step for file in library for step in (file, *MACHINERY)] + begins
    told = grouped([{"rank": 0, "state": "running the function", "frames": frames}])
    lines = ['File "/home/train.py", line 40, in main', 'File "/home/train.py", line 18, in train']
    head = "  rank 0: running the function, importing big.part29 at train.py:18"
    assert told.splitlines() == [head, *(f"    {line}" for line in lines)]
    works = ("/x/site-packages/big/work.py", "5", "work")
    assert "work.py" in grouped([{"rank": 0, "state": "running the function", "frames": [works, *begins]}])


@pytest.mark.parametrize("ours", [remote_error.__file__, explanation.__file__])
def test_frames_of_ours_are_nowhere_a_rank_was(ours: str) -> None:
    """As it says how a test has failed: what it calls for that is no place, either."""
    frames = [("/x/site-packages/_pytest/code.py", "7", "repr_failure"), (ours, "73", "of_error")]
    assert in_words(frames) == ""
    text = "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in frames)
    (told,) = summarise([RankStacks(0, Phase.RUNNING, "S", f"Current thread (most recent call first):\n{text}")])
    assert told == "rank 0 was running the function, at its very beginning or end"
    assert "running the function" in view_of({"rank": 0, "state": "running the function", "frames": frames}).doing


def test_a_function_of_ours_on_ranks_is_where_it_has_called() -> None:
    frames = [("/x/site-packages/torch/d.py", "7", "barrier"), (comm.__file__, "73", "synchronize")]
    assert in_words(frames) == "in barrier at d.py:7"


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


def test_a_hang_in_a_module_of_the_users_is_in_its_line() -> None:
    frames = [("/home/mine.py", "4", "<module>"), *MACHINERY, ("/home/train.py", "8", "train")]
    assert in_words(frames) == "importing mine at mine.py:4"
    sleeps = ("/x/site-packages/slow.py", "1", "sleep")
    assert in_words([sleeps, *frames]) == "importing mine, in sleep, at mine.py:4"


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


def test_a_rank_that_is_not_running_is_told_by_its_phase() -> None:
    bare = f'Current thread 0x1 (most recent call first):\n  File "{rank_function.__file__}", line 8 in live\n'
    joining = bare.replace("\n", f'\n  File "{rank_group.__file__}", line 6 in _meet\n', 1)
    waiting = bare.replace("\n", f'\n  File "{channel.__file__}", line 6 in _take\n', 1)
    dumps = [
        RankStacks(0, Phase.JOINING, "S", ""),
        RankStacks(1, Phase.RUNNING, "R", ""),
        RankStacks(2, Phase.RUNNING, "R", bare),
        RankStacks(3, Phase.RUNNING, "R", joining),
        RankStacks(4, Phase.RUNNING, "R", waiting),
    ]
    assert summarise(dumps) == [
        "rank 0 was joining the process group",
        "rank 1 was running the function and did not show its stack",
        "ranks 2-4 were running the function, at its very beginning or end",
    ]


def test_a_hang_in_a_helper_of_ours_is_in_the_users_line() -> None:
    """Also where mlaunch is installed in place, and so not among the libraries by its path."""

    def train() -> None:
        store = dist.distributed_c10d._get_default_store()
        main = threading.main_thread().ident or 0

        def tell() -> None:
            while "barrier" not in {frame.name for frame in traceback.extract_stack(sys._current_frames()[main])}:
                os.sched_yield()
            store.set("waits", "")

        if dist.get_rank() == 0:
            threading.Thread(target=tell, daemon=True).start()
            comm.synchronize()
        store.wait(["waits"])
        raise ValueError("no such luck")

    error = failure_of(launcher(train, 2), ValueError)
    assert f"rank 0 was in synchronize at {HERE}:" in str(error.__cause__)


def test_a_failure_names_the_device_as_the_machine_numbers_it() -> None:
    machine = ThisMachine(Ready("2.13", "cuda", ("nccl", "gloo")), lambda _environ: 4)
    spec = plan(Options(devices=[2, 3]), machine, "train()", {}, Attempt(0, None))
    outcome = Outcome(spec)
    crash = os.memfd_create("crash")
    outcome.take(RankGone(1, 7, -9, Phase.RUNNING, answered=False, stopped=False, at=0.0), [crash])
    assert outcome.failures[0].device == "cuda:3"


@pytest.mark.parametrize("first", ["the end", "what follows from it"])
def test_a_rank_that_should_have_stayed_is_the_cause(first: str) -> None:
    """Whichever its agent hears first."""
    machine = ThisMachine(Ready("2.13", None, ("gloo",)), lambda _environ: 0)
    spec = plan(Options(n_gpus=2), machine, "train()", {}, Attempt(0, None))
    outcome = Outcome(dataclasses.replace(spec, stays=True))
    remote = RemoteError("RuntimeError", "Connection closed by peer", "", Phase.RUNNING, "here", "cpu", None)
    answer, crash = os.memfd_create("answer"), os.memfd_create("crash")
    payload.write(answer, remote)
    records: list[tuple[object, int]] = [
        (RankGone(1, 7, 0, Phase.RUNNING, answered=False, stopped=False, at=2.0), crash),
        (RankAnswered(0, 6, AnswerKind.ERROR, consequence=True, at=1.0), answer),
    ]
    for record, fd in records if first == "the end" else reversed(records):
        outcome.take(record, [fd])
    assert in_order(outcome.failures)[0].what == "exited with code 0 (sys.exit or os._exit)"


def test_what_a_rank_that_stays_answered_before_is_none_of_this_call() -> None:
    """Its agent had heard of its end, and not yet of the call."""
    machine = ThisMachine(Ready("2.13", None, ("gloo",)), lambda _environ: 0)
    spec = plan(Options(n_gpus=1), machine, "train()", {}, Attempt(0, None))
    outcome = Outcome(dataclasses.replace(spec, stays=True))
    outcome.take(RankGone(0, 7, -9, Phase.IDLE, answered=True, stopped=False, at=2.0), [os.memfd_create("crash")])
    assert [failure.what for failure in outcome.failures] == ["was killed by SIGKILL"]


def test_a_rank_that_left_is_named_beside_what_follows() -> None:
    def train() -> None:
        if dist.get_rank() == 1:
            sys.exit(0)
        dist.barrier()

    error = failure_of(launcher(train, 2), RuntimeError)
    assert "rank 1 had exited with code 0 without returning a value" in str(error.__cause__)
