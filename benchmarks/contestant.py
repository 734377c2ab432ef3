"""Contestants in processes of their own: they install signal handlers, start threads, fork and print as they like."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_TO_END = 60.0  # seconds


class ContestantError(RuntimeError):
    """It cannot run here, or failed."""


@contextlib.contextmanager
def in_a_process(module: str, name: str, *args: int) -> Iterator[Callable[[], float]]:
    """Gives what measures a contestant once, in seconds.

    ``name``: of a function of the module, which gives the same in the contestant's own process. What
    cannot run here raises ContestantError when it is measured.
    """
    command = [sys.executable, "-m", "benchmarks.contestant", module, name, *map(str, args)]
    environ = {**os.environ, "PYTHONPATH": str(_ROOT)}
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:
        asks, answers = process.stdin, process.stdout
        if asks is None or answers is None:
            raise RuntimeError("the contestant has no pipes")

        def measure() -> float:
            with contextlib.suppress(BrokenPipeError):
                asks.write("\n")
                asks.flush()
            said = json.loads(answers.readline() or '"its process ended"')
            if isinstance(said, str):
                raise ContestantError(said)
            return float(said)

        try:
            yield measure
            with contextlib.suppress(BrokenPipeError):
                asks.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TO_END)
        finally:
            process.kill()


def serve(start: Callable[[], contextlib.AbstractContextManager[Callable[[], float]]]) -> None:
    """Answers each line of the standard input with seconds, or with why there are none."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a contestant prints is no answer

    def answer(said: float | str) -> None:
        answers.write(f"{json.dumps(said)}\n")
        answers.flush()

    try:
        with start() as measure:
            for _ in sys.stdin:
                answer(_measured(measure))
    except Exception as error:
        for _ in sys.stdin:
            answer(f"{type(error).__name__}: {error}")


def _measured(measure: Callable[[], float]) -> float | str:
    try:
        return measure()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    found = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
    serve(lambda: found(*map(int, sys.argv[3:])))
