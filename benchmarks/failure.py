"""From the SIGKILL of one rank of eight, all in a collective, to the exception in the caller."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from typing import Any

from benchmarks.measure import Row
from benchmarks.work import wait_for_ever
from mlaunch import LaunchError, launcher


def victim(note: str) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 3:
        with open(note, "w") as file:
            file.write(str(os.getpid()))
    wait_for_ever()


def run(rounds: int) -> list[Row]:
    times = [_once() for _ in range(rounds * 5)]
    rows = [Row("SIGKILL of 1 rank of 8", "median", statistics.median(times), "s", "", None, "<= 60 ms")]
    return [*rows, Row("SIGKILL of 1 rank of 8", f"worst of {len(times)}", max(times), "s", "", None, "")]


def _once() -> float:
    killed: list[float] = []
    reader, writer = os.pipe()

    def kill() -> None:
        pid = int(os.read(reader, 100))
        time.sleep(0.1)  # until the others sit in the barrier
        killed.append(time.perf_counter())
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        launcher(victim, 8)(f"/proc/{os.getpid()}/fd/{writer}")
    except LaunchError as error:
        _check(error)
        return time.perf_counter() - killed[0]
    finally:
        thread.join()
        os.close(reader)
        os.close(writer)
    raise RuntimeError("the launch survived the death of a rank")


def _check(error: Any) -> None:
    if error.failures[0].rank != 3:
        raise RuntimeError(f"the wrong rank was blamed: {error}")
