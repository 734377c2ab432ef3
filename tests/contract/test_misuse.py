"""What newcomers do wrong is told from their line, before ranks start where that can be; and small helpers."""

from __future__ import annotations

import bdb
import contextlib
import functools
import inspect
import io
import os
import pdb
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mlaunch
from mlaunch import LaunchError, Ranks, launcher
from tests import launches
from tests.conftest import ROOT
from tests.contract import functions


def frames_of_ours(error: BaseException) -> list[str]:
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [code.co_name for code in codes if code.co_filename.startswith(str(ROOT / "mlaunch"))]


def told(call: Callable[[], object], kind: type[Exception]) -> Exception:
    with pytest.raises(kind) as caught:
        call()
    assert frames_of_ours(caught.value) == ["__call__"]
    return caught.value


def takes(*_given: object) -> int:
    return 1


class Refuses:
    def __reduce__(self) -> str:
        raise ValueError("refused")


def test_an_argument_that_cannot_be_pickled() -> None:
    error = told(lambda: launcher(takes, 1)(threading.Lock()), TypeError)
    assert str(error).startswith("argument 0 of takes() is a _thread.lock, which cannot be pickled")
    assert error.__cause__ is None


def counted(n: int) -> Iterator[int]:
    yield from range(n)


def test_generators_are_refused_before_anything_starts() -> None:
    told(lambda: launcher(takes, 1)(x for x in ()), TypeError)
    told(lambda: launcher(counted, 1)(2), TypeError)
    for call in (launcher(takes, 1), launcher(takes, 1).submit, lambda value: launcher(takes, 1).map([value])):
        with pytest.raises(TypeError, match=r"argument 0 of takes\(\) is a generator, which cannot be pickled: pass a"):
            call(x for x in ())
    for call in (launcher(counted, 1), launcher(counted, 1).submit, lambda value: launcher(counted, 1).grid(n=[value])):
        with pytest.raises(TypeError, match=r"counted\(\) is a generator function: each rank would return a generator"):
            call(2)
    assert launcher(takes, 1, start_method="fork")(x for x in ()) == [1]  # in memory


def test_the_frame_of_a_users_reduce_is_kept() -> None:
    error = told(lambda: launcher(takes, 1)([Refuses()]), TypeError)
    assert error.__cause__ is not None
    assert [entry.name for entry in traceback.extract_tb(error.__cause__.__traceback__)] == ["__reduce__"]


def test_a_lack_of_this_machine_is_told_from_the_callers_line() -> None:
    told(launcher(takes, 1, backend="none-such"), ValueError)
    told(launcher(takes, 2, world_size=4), ValueError)


def test_more_ranks_than_anybody_means(monkeypatch: pytest.MonkeyPatch) -> None:
    launches.have_cpus(monkeypatch, 2)
    error = told(launcher(takes, 99_999, device_type="cpu"), ValueError)
    assert str(error) == (
        "n_gpus=99999 (--nproc-per-node) on 2 CPU(s): more than 64 ranks, and more than 8 for each CPU; allowed: up to "
        "64, or oversubscribe=True (--oversubscribe) if so many are meant"
    )
    with pytest.raises(ValueError, match="allowed: up to 64, or"):
        Ranks(n_gpus=65, device_type="cpu")
    launches.have_cpus(monkeypatch, 9)
    launches.check_share(72, 9)
    with pytest.raises(ValueError, match="allowed: up to 72, or"):
        launches.check_share(73, 9)


def test_more_ranks_than_the_machine_has_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the agent finds, before it forks any."""
    launches.let_ranks_need(monkeypatch, 2**50)
    with pytest.raises(LaunchError, match=r"takes\(\) was not started: 2 ranks need at least 2097152 GiB of memory "):
        launcher(takes, 2, start_method="fork")()


def test_a_launch_inside_a_rank_is_told_from_the_callers_line() -> None:
    def inside() -> list[str]:
        with pytest.raises(RuntimeError, match="is called inside rank 0") as caught:
            launcher(takes, 1)()
        return frames_of_ours(caught.value)

    assert launcher(inside, 1)()[0][-1:] == ["__call__"]


# Arguments that the function does not take


def wants(rank: int, world_size: int, lr: float = 0.1) -> float:
    return rank + world_size + lr


def keyword(*, local_rank: int) -> int:
    return local_rank


class Model:
    @launcher(n_gpus=1)
    def fit(self, steps: int) -> int:
        return steps


WRONG: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (wants, (), {}),
    (wants, (1,), {}),
    (wants, (1, 2, 3, 4), {}),
    (wants, (1,), {"rank": 2}),
    (wants, (1,), {"colour": 2}),
    (keyword, (), {}),
    (keyword, (1,), {"local_rank": 1}),
    (lambda a, b, c: a + b + c, (), {}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), WRONG)
def test_the_words_are_pythons(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(TypeError) as python:
        function(*args, **kwargs)
    ours = launcher(function, 1)
    error = told(lambda: ours(*args, **kwargs), TypeError)
    said = str(python.value)
    assert str(error).startswith(said.partition(" positional arguments (")[0].partition(" but ")[0])
    assert ours.last is None  # no rank was started
    assert not hasattr(error, "__notes__")


def test_a_function_written_for_mp_spawn() -> None:
    words = (
        "; unlike torch.multiprocessing.spawn, mlaunch passes no rank: in the function, call "
        "torch.distributed.get_rank() and torch.distributed.get_world_size()"
    )
    assert str(told(launcher(wants, 1), TypeError)).endswith(words)
    error = told(launcher(keyword, 1), TypeError)
    assert str(error).endswith("in the function, call mlaunch.comm.get_local_rank()")

    def third(rank: int, world_size: int, lr: float) -> None: ...

    error = told(lambda: launcher(third, 1)(2, 0.1), TypeError)  # type: ignore[call-arg, arg-type]
    assert str(error) == f"{third.__qualname__}() missing 1 required positional argument: 'lr'" + words


def test_an_option_among_the_arguments() -> None:
    told = (
        r"unexpected keyword argument 'deadline'; it is an option of launcher: @launcher\(deadline=...\), or \.options"
    )
    with pytest.raises(TypeError, match=told):
        launcher(lambda lr: lr, 2)(0.1, deadline=5)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'dead_line'$"):
        launcher(lambda lr: lr, 2)(0.1, dead_line=5)


def test_arguments_of_a_method() -> None:
    error = told(lambda: Model().fit(), TypeError)  # type: ignore[call-arg]
    assert str(error) == "Model.fit() missing 1 required positional argument: 'steps'"
    assert Model().fit(3) == [3]


@pytest.mark.slow
def test_arguments_of_a_decorator_are_its_own_business() -> None:
    @functools.wraps(wants)
    def passes(*args: Any, **kwargs: Any) -> float:
        return wants(0, 1, *args, **kwargs)

    assert launcher(passes, 1)(0.5) == [1.5]
    vars(passes)["__signature__"] = inspect.signature(wants)  # what it says that it takes
    assert launcher(passes, 1)(0.5) == [1.5]
    assert launcher(functools.partial(wants, 1, 2), 1)(0.5) == [3.5]
    assert launcher(max, 1)(1, 2) == [2]


def test_a_second_process_group() -> None:
    def train() -> None:
        dist.init_process_group("gloo")

    with pytest.raises(ValueError, match="default process group twice") as caught:
        launcher(train, 2)()
    hint = "mlaunch puts each rank into a process group before it calls the function: remove the call of"
    assert caught.value.__notes__[-1].startswith(hint)
    assert isinstance(caught.value.__cause__, LaunchError)
    assert f"\n  {hint}" in str(caught.value.__cause__)


def test_two_ranks_on_one_gpu() -> None:
    """In NCCL's words, as an H100 gave them; the real refusal is a part of ``tests/gpu``."""

    def train() -> None:
        raise RuntimeError("ncclInvalidUsage: ...\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 60")

    with pytest.raises(RuntimeError, match="Duplicate GPU") as caught:
        launcher(train, 1)()
    assert "or give backend='gloo', with which ranks can share one" in caught.value.__notes__[-1]


def test_a_module_that_ranks_do_not_find() -> None:
    def train() -> None:
        import of_another_directory  # type: ignore[import-not-found]

        of_another_directory.run()

    with pytest.raises(ModuleNotFoundError, match="of_another_directory") as caught:
        launcher(train, 1)()
    hint = "ranks look for modules on the sys.path that the caller has when they start"
    assert caught.value.__notes__[-1].startswith(hint)
    assert f"\n  {hint}" in str(caught.value.__cause__)


@pytest.mark.slow
def test_a_collective_that_takes_longer_than_its_timeout() -> None:
    def train() -> None:
        if dist.get_rank() == 0:
            signal.pause()
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RuntimeError, match="Timed out") as caught:
        launcher(train, 2, device_type="cpu", timeout=1)()
    hint = "a collective took longer than timeout=, an option of launcher in seconds: another rank does not take part"
    assert caught.value.__notes__[-1].startswith(hint)
    assert f"\n  {hint}" in str(caught.value.__cause__)


@pytest.mark.slow
@pytest.mark.parametrize("staying", [False, True])
def test_a_value_that_belongs_to_a_process_group(staying: bool) -> None:
    def train() -> torch.nn.Module:
        return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))

    words = (
        r"this process does not have: for a model in DistributedDataParallel, return model.module or its state_dict\(\)"
    )
    with contextlib.ExitStack() as stack:
        run: Any = launcher(train, 1, device_type="cpu")
        if staying:
            run = functools.partial(stack.enter_context(Ranks(n_gpus=1, device_type="cpu")).run, train)
        with pytest.raises(LaunchError, match=words):
            run()


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="from Python 3.14 on, pdb ends the process instead")
def test_a_debugger_without_a_terminal() -> None:
    def train() -> None:
        pdb.Pdb().set_trace()

    with pytest.raises(bdb.BdbQuit) as caught:
        launcher(train, 2)()
    assert caught.value.__notes__[-1].startswith("a debugger found nothing to read, since ranks have no terminal: ")


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="from Python 3.14 on, pdb ends the process instead")
def test_a_debugger_that_is_left_had_something_to_read() -> None:
    def train() -> None:
        pdb.Pdb(stdin=io.StringIO("where\nq\n"), stdout=io.StringIO()).set_trace()

    with pytest.raises(bdb.BdbQuit) as caught:
        launcher(train, 1)()
    assert "nothing to read" not in f"{caught.value.__notes__} {caught.value.__cause__}"


def test_another_debugger_stops_in_the_users_frame() -> None:
    """Debuggers of PYTHONBREAKPOINT stop in the frame that has called them."""

    def train(hook: str) -> object:
        os.environ["PYTHONBREAKPOINT"] = hook
        return breakpoint(), sys.breakpointhook(1, key=2)

    called = f"{functions.__name__}.{functions.caller_and_arguments.__name__}"
    assert launcher(train, 1)(called) == [(("train", (), {}), ("train", (1,), {"key": 2}))]


def test_a_breakpoint_that_nobody_asked_for() -> None:
    def train(skipped: str = "") -> str:
        os.environ["PYTHONBREAKPOINT"] = skipped
        breakpoint()
        return "went on"

    with pytest.raises(
        RuntimeError, match=r"breakpoint\(\) in rank \d of .*train\(\), which has no terminal: debug=True"
    ):
        launcher(train, 2)()
    assert launcher(train, 2)("0") == ["went on", "went on"]


def test_nobody_to_ask() -> None:
    with pytest.raises(ValueError, match=r"debug=True: there is nobody to ask: standard input or output is no"):
        launcher(print, 2, debug=True)()
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="this is not the main thread, and only that"):
        pool.submit(launcher(print, 2, debug=True)).result()
    with pytest.raises(ValueError, match=r"debug=True with submit\(\): allowed: a blocking call"):
        launcher(print, 2, debug=True).submit()
    with pytest.raises(ValueError, match=r"Ranks does not take debug \(a decorated function does, for a call on ranks"):
        Ranks(n_gpus=2, debug=True)


# Helpers


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_the_value_of_rank_0_alone(start_method: str) -> None:
    def train() -> object:
        return threading.Lock() if dist.get_rank() else os.getpid()

    ours = launcher(train, 3, results="rank0", start_method=start_method)
    first, *others = ours()
    assert ours.last is not None
    assert first == ours.last.ranks[0].pid
    assert others == [None, None]
    with pytest.raises(LaunchError, match="cannot be pickled"):
        ours.options(results="all")()


def test_devices() -> None:
    if torch.accelerator.is_available():
        pytest.skip("test_gpu sees to it")
    assert launcher(mlaunch.device, 2)() == [torch.device("cpu")] * 2
    assert mlaunch.device() == torch.device("cpu")


def test_the_latest_reports_are_kept() -> None:
    @launcher(n_gpus=1)
    def train(fail: bool) -> None:
        if fail:
            raise ValueError("no such luck")

    assert train.history == ()
    train(False)
    first = train.last
    with pytest.raises(ValueError, match="luck"):
        train.options(seed=1)(True)
    assert train.history == (first, train.last)
    assert [report.ranks[0].end for report in train.history] == ["returned", "raised ValueError: no such luck"]
    launches.reports_of(train).extend([launches.reports_of(train)[-1]] * 19)
    assert len(train.history) == 20
    assert first not in train.history


def test_a_report_at_a_prompt_is_the_table() -> None:
    ours = launcher(takes, 1)
    ours()
    assert repr(ours.last) == str(ours.last)
    assert repr(ours.last).startswith("takes()  1 rank on ")
