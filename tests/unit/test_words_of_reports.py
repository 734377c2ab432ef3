"""The words of reports: frames, stacks, hints and failures as users read them."""

from __future__ import annotations

import bdb
import dataclasses
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mlaunch import comm, launcher
from mlaunch.agent.machine_limits import Evidence
from mlaunch.base.exceptions import RankFailure
from mlaunch.base.frames import in_letters
from mlaunch.base.text import name_ranks, with_article
from mlaunch.caller.launch.outcome import Outcome
from mlaunch.caller.launch.plan import Attempt, ThisMachine, plan
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.report.failure_text import hints_of, in_order, in_words, operation_of, summarise
from mlaunch.insight.caller import grouped
from mlaunch.insight.caller.answers import view_of
from mlaunch.protocol import channel, payload
from mlaunch.protocol.messages import AnswerKind, Phase, RankAnswered, RankGone, RankStacks, RemoteError
from mlaunch.protocol.server_messages import Ready
from mlaunch.pytest.rank import explanation
from mlaunch.rank import function as rank_function
from mlaunch.rank import group as rank_group
from mlaunch.rank import remote_error
from tests.conftest import ROOT


@pytest.mark.slow
def test_a_stopped_rank_is_named_without_being_waited_for() -> None:
    def train() -> None:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            from mlaunch.agent.rank_process import state_of

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


def test_only_what_can_be_printed_is_made_letters() -> None:
    """An end of a line in a name is none in the report, and what is no text stays as the kernel's bytes."""
    assert in_letters(r"a\xe4\u8a13\U0001f680") == "aä訓🚀"
    for kept in (r"\x0a", r"\x85", r"\u2028", r"\udcfc", r"\U00110000", r"\Uffffffff", "\\"):
        assert in_letters(kept) == kept


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
    assert "raise the pids limit" in told
    assert "shape" not in told


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
    ours = str(ROOT / "mlaunch" / "debug" / "rank" / "rank_pdb.py")
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
    assert told == "rank 0 was running the function, before its first line or after its last"
    assert "running the function" in view_of({"rank": 0, "state": "running the function", "frames": frames}).doing


def test_a_function_of_ours_on_ranks_is_where_it_has_called() -> None:
    frames = [("/x/site-packages/torch/d.py", "7", "barrier"), (comm.__file__, "73", "synchronize")]
    assert in_words(frames) == "in barrier at d.py:7"


def test_a_hang_in_a_module_of_the_users_is_in_its_line() -> None:
    frames = [("/home/mine.py", "4", "<module>"), *MACHINERY, ("/home/train.py", "8", "train")]
    assert in_words(frames) == "importing mine at mine.py:4"
    sleeps = ("/x/site-packages/slow.py", "1", "sleep")
    assert in_words([sleeps, *frames]) == "importing mine, in sleep, at mine.py:4"


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
        "ranks 2-4 were running the function, before its first line or after its last",
    ]


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


@pytest.mark.parametrize(
    "said", ["an int", "a list", "an OrderedDict", "a _thread.lock", "an _io.TextIOWrapper", "a X"]
)
def test_the_article_of_a_type(said: str) -> None:
    assert with_article(said.partition(" ")[2]) == said
