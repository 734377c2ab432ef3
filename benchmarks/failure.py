"""From the failure of one rank of eight, with the others in a collective, to the exception in the caller."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable

from benchmarks.measure import Row
from mlaunch import LaunchError, launcher

_CULPRIT = 3
_GRACE = 0.5


def victim(how: str) -> None:
    import torch.distributed as dist

    if how == "raises, one ignores SIGTERM" and dist.get_rank() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
    if dist.get_rank() == _CULPRIT:
        time.sleep(0.1)  # until the others sit in the barrier
        with open(os.environ["NOTE"], "w", encoding="utf-8") as file:
            file.write(str(time.perf_counter()))  # one clock for all processes
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no such luck")
    dist.barrier()


def run(rounds: int) -> list[Row]:
    rows = []
    for how, median, worst in (
        ("is killed", "<= 20 ms", "< 250 ms"),
        ("raises", "<= 60 ms", "< 250 ms"),
        ("raises, one ignores SIGTERM", f"grace_period={_GRACE}", "< 800 ms"),
    ):
        times = [_once(lambda how=how: launcher(victim, 8, grace_period=_GRACE)(how)) for _ in range(rounds * 10)]
        rows.append(Row(f"1 rank of 8 {how}", "median", statistics.median(times), "s", "", None, median))
        rows.append(Row(f"1 rank of 8 {how}", f"worst of {len(times)}", max(times), "s", "", None, worst))
    return rows


def _once(launch: Callable[[], object]) -> float:
    reader, writer = os.pipe()
    os.environ["NOTE"] = f"/proc/{os.getpid()}/fd/{writer}"
    try:
        launch()
    except (LaunchError, ValueError) as error:
        now = time.perf_counter()
        report = error if isinstance(error, LaunchError) else error.__cause__
        if not isinstance(report, LaunchError) or report.failures[0].rank != _CULPRIT:
            raise RuntimeError("the wrong rank was blamed") from error
        return now - float(os.read(reader, 100))
    finally:
        os.close(reader)
        os.close(writer)
    raise RuntimeError("the launch survived the failure of a rank")
