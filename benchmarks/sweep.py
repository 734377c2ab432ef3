"""Many launches: a sweep of trials that wait, futures against blocking calls, and how soon a lease is free.

A trial of ours is two ranks in a process group. A task of the peers is one process without a group, which is less: none
of them starts ranks, and what their users start in a task imports torch each time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.contestant import in_a_process
from benchmarks.measure import Row, alternate, compare, seconds
from benchmarks.work import WAIT, wait
from mlaunch import launcher
from mlaunch.base.linux import wait_readable
from mlaunch.leases.caller.acquisition import Acquisition, Wish

_TRIALS, _AT_ONCE = 64, 4
_IDEAL = _TRIALS / _AT_ONCE * WAIT
_PAUSE = 0.3  # seconds
_DEVICES = [f"gpu{number}" for number in range(8)]


def run(rounds: int) -> list[Row]:
    return [*_sweeps(rounds), *_futures(rounds), *_leases(rounds)]


def _sweeps(rounds: int) -> list[Row]:
    with contextlib.ExitStack() as running:
        found = {name: running.enter_context(in_a_process("benchmarks.sweep", way)) for name, way in _WAYS.items()}
        medians = alternate(found, rounds)
    bounds = {"mlaunch": ("ideal", "<= 1.15"), **{name: ("mlaunch", "") for name in _WAYS if name != "mlaunch"}}
    case = f"{_TRIALS} trials that wait {WAIT} s, {_AT_ONCE} at a time"
    return compare(case, {"ideal": _IDEAL, **medians}, bounds, "s")


@contextlib.contextmanager
def ours() -> Iterator[Callable[[], float]]:
    train = launcher(wait, 2, device_type="cpu", concurrent=_AT_ONCE)
    train.map(range(_AT_ONCE)).results()

    def sweep() -> None:
        _check([values[0] for values in train.map(range(_TRIALS)).results()])

    yield lambda: seconds(sweep)


@contextlib.contextmanager
def loky() -> Iterator[Callable[[], float]]:
    from joblib import Parallel, delayed

    with Parallel(n_jobs=_AT_ONCE) as parallel:
        yield lambda: seconds(lambda: _check(parallel(delayed(wait)(number) for number in range(_TRIALS))))


@contextlib.contextmanager
def submitit() -> Iterator[Callable[[], float]]:
    """Its local executor starts whatever it is given, so it is given four at a time."""
    import submitit

    with tempfile.TemporaryDirectory() as folder:
        executor = submitit.AutoExecutor(folder, cluster="local")

        def sweep() -> None:
            left, jobs = list(range(_TRIALS)), {}
            while left or not all(job.done() for job in jobs.values()):
                while left and sum(not job.done() for job in jobs.values()) < _AT_ONCE:
                    number = left.pop(0)
                    jobs[number] = executor.submit(wait, number)
                time.sleep(0.002)
            _check([jobs[number].result() for number in sorted(jobs)])

        yield lambda: seconds(sweep)


@contextlib.contextmanager
def tune() -> Iterator[Callable[[], float]]:
    import ray
    from ray import tune

    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    ray.init("local", num_cpus=_AT_ONCE, include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory() as folder:
        trainable = tune.with_resources(lambda config: {"number": wait(config["number"])}, {"cpu": 1})

        def sweep() -> None:
            space = {"number": tune.grid_search(list(range(_TRIALS)))}
            run_config = tune.RunConfig(storage_path=folder, verbose=0)
            found = tune.Tuner(trainable, param_space=space, run_config=run_config).fit()
            _check(sorted(one.metrics["number"] for one in found))

        yield lambda: seconds(sweep)
    ray.shutdown()


_WAYS = {"mlaunch": "ours", "joblib (loky)": "loky", "submitit (local)": "submitit", "Ray Tune": "tune"}


def _check(values: list[int]) -> None:
    if values != list(range(_TRIALS)):
        raise RuntimeError(f"the trials returned {values}")


def _futures(rounds: int) -> list[Row]:
    train = launcher(int, 2, device_type="cpu")
    call, submitted = "mlaunch, a blocking call", "mlaunch, submit().result()"
    ways: dict[str, Callable[[], float]] = {
        call: functools.partial(_later, train),
        submitted: functools.partial(_later, lambda: train.submit().result()),
    }
    for way in ways.values():
        way()
    medians = alternate(ways, rounds * 10)
    rows = compare("a launch of 2 ranks, after a pause", medians, {submitted: (call, "")}, "s")
    over = medians[submitted] - medians[call]
    return [*rows, Row("a launch of 2 ranks, after a pause", "what a future costs", over, "s", bound="<= 1 ms")]


def _later(call: Callable[[], object]) -> float:
    time.sleep(_PAUSE)
    return seconds(call)


def _leases(rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        taken = [_killed(Path(folder)) for _ in range(rounds * 20)]
    case = "a lease whose holder is killed"
    after = [late for late, _ in taken]
    return [
        Row(case, "from its end until another has it", statistics.median(after), "s", bound="<= 5 ms"),
        Row(case, f"the worst of {len(taken)}", max(after), "s", bound="<= 50 ms"),
        Row(case, "from the signal", statistics.median(whole for _, whole in taken), "s"),
    ]


def _killed(folder: Path) -> tuple[float, float]:
    """Kills a holder; returns how long after its end (0: before), and after the signal, another has what it held."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            first = Acquisition(folder, Wish(_DEVICES, len(_DEVICES), "first"))
            first.step()
            os.write(writer, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.read(reader, 1)
    second = Acquisition(folder, Wish(_DEVICES, 2, "second"))
    lease, holder, gone = second.step(), os.pidfd_open(pid), 0.0
    begun = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    while lease is None:
        if holder in wait_readable([*second.fds(), holder]):
            gone = gone or time.perf_counter()
        lease = second.step()
    taken = time.perf_counter()
    wait_readable([holder])
    os.close(holder)
    os.waitpid(pid, 0)
    second.close()
    lease.close()
    os.close(reader)
    os.close(writer)
    return taken - (gone or taken), taken - begun
