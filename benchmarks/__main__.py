"""Runs all benchmarks, or those named; prints a table of each, and in words what was compared."""

from __future__ import annotations

import argparse
import compileall
import platform
from pathlib import Path

import torch

from benchmarks import (
    cold,
    command,
    engines,
    failure,
    gather,
    large,
    memory,
    rank_tests,
    ranks,
    repeat,
    scale,
    sweep,
    warm,
)
from benchmarks.measure import Row, table
from benchmarks.report import words, write

_ROOT = Path(__file__).resolve().parent.parent
_ALL = {
    "warm": warm.run,
    "cold": cold.run,
    "command": command.run,
    "results": large.results,
    "arguments": large.arguments,
    "failure": failure.run,
    "gather": gather.run,
    "memory": memory.run,
    "repeat": repeat.run,
    "ranks": ranks.run,
    "pytest": rank_tests.run,
    "scale": scale.run,
    "engines": engines.run,
    "sweep": sweep.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(_ALL)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each contestant (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(_ALL))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(_ALL)}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no such directory; nothing was measured")
    for name in ("mlaunch", "benchmarks"):  # as pip does with what it installs
        compileall.compile_dir(_ROOT / name, quiet=1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {options.rounds} rounds")
    results: dict[str, list[Row]] = {}
    for name in options.names or _ALL:
        results[name] = _ALL[name](options.rounds)
        print(table(results[name]), *words(results[name]), sep="\n", end="\n\n", flush=True)
        if options.json is not None:  # after each, since all take long
            write(options.json, results, options.rounds)


if __name__ == "__main__":
    main()
