"""Tests on ranks: the pytest plugin against torch's own classes of tests, and against no ranks at all."""

from __future__ import annotations

import statistics

from benchmarks import suites
from benchmarks.measure import Row, alternate, compare

_MANY, _THOUSAND = 100, 1000
_FEW = 4  # tests of a class that takes seconds for each; their time is given for as many as the others'
_DEADLINE = 1.0  # seconds
_BAD = {
    "fails": ("raise ValueError", 60.0, "<= 100 ms"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", 60.0, "<= 200 ms"),
    "hangs (after its deadline)": ("time.sleep(600)", _DEADLINE, "<= grace + 200 ms"),
}


def run(rounds: int) -> list[Row]:
    return [*_against_peers(rounds), *_against_one_process(rounds), *_afterwards(rounds), *_memory()]


def _against_peers(rounds: int) -> list[Row]:
    first: list[float] = []

    def ours() -> float:
        found = suites.timed(suites.RANKS, count=_MANY)
        first.append(found.ends[0])
        return found.all

    def processes() -> float:
        found = suites.timed(suites.PROCESSES, count=_FEW)
        return found.all + found.tests * (_MANY / _FEW - 1)

    medians = alternate(
        {
            "mlaunch": ours,
            "MultiProcContinuousTest": lambda: suites.timed(suites.CONTINUOUS, count=_MANY).all,
            "MultiProcessTestCase": processes,
        },
        rounds,
    )
    bounds = {"MultiProcContinuousTest": ("mlaunch", ">= 4"), "MultiProcessTestCase": ("mlaunch", ">= 100")}
    rows = compare(f"{_MANY} tests on 2 ranks", medians, bounds, "s")
    return [*rows, Row("end of the first test, after collection", "mlaunch", statistics.median(first), "s", "", None,
                       "<= 300 ms")]  # fmt: skip


def _against_one_process(rounds: int) -> list[Row]:
    medians = alternate(
        {
            "mlaunch, 2 ranks": lambda: suites.timed(suites.RANKS, count=_THOUSAND).tests,
            "two bare processes": lambda: suites.timed(suites.BARE, count=_THOUSAND).tests,
            "one process": lambda: suites.timed(suites.ALONE, count=_THOUSAND).tests,
        },
        rounds,
    )
    rows = compare(f"{_THOUSAND} tests, after collection", medians, {"mlaunch, 2 ranks": ("one process", "")}, "s")
    aims = {"one process": "<= 2 ms", "two bare processes": ""}
    more = {other: (medians["mlaunch, 2 ranks"] - medians[other]) / _THOUSAND for other in aims}
    rows += [
        Row(f"a test on 2 ranks, above {other}", "mlaunch", more[other], "s", "", None, aims[other]) for other in aims
    ]
    return rows


def _afterwards(rounds: int) -> list[Row]:
    rows = []
    for name, (how, deadline, aim) in _BAD.items():
        times = [_after(how, deadline) for _ in range(rounds)]
        rows.append(Row(f"next test after one that {name}", "mlaunch", statistics.median(times), "s", "", None, aim))
    return rows


def _after(how: str, deadline: float) -> float:
    (_, bad), (_, after) = suites.timed(suites.AFTERWARDS, failures=1, how=how, deadline=deadline).notes
    return after - bad - (deadline if deadline == _DEADLINE else 0)


def _memory() -> list[Row]:
    """By how much a process grows; torch keeps a record of collectives, which grows in one process, too."""
    grown = {}
    for name, suite in suites.MEMORY.items():
        (_, before), (_, after) = suites.timed(suite, count=_THOUSAND).notes
        grown[name] = after - before
    grown["mlaunch, above one process"] = grown["mlaunch"] - grown["one process"]
    aims = {"mlaunch, above one process": "< 1 MiB"}
    case = f"growth from {_MANY} tests to {_THOUSAND}"
    return [Row(case, name, value, "MiB", "", None, aims.get(name, "")) for name, value in grown.items()]
