"""Calls that fail while other ranks import, at random moments: afterwards all of it can be used, or the ranks are lost.

    python -m tests.import_storm [moments] [seed]

One of six ranks fails at some moment, and the others are called back from imports of packages whose modules import
each other, each in an order of its own. Then each rank imports all of them and uses them, unless the ranks were ended.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from mlaunch import Ranks

RANKS = 6
MODULES = ("IPython.core.interactiveshell", "xml.dom.minidom", "http.server", "sqlite3", "email.mime.text", "doctest")

_IMPORTING = re.compile(r"ranks? ([\d, -]+) (?:was|were) importing")


@dataclass
class Told:
    """What came of the moments. ``inside``: ranks that were importing."""

    moments: int = 0
    inside: int = 0
    lost: int = 0
    broken: list[str] = field(default_factory=list)


def work(modules: Sequence[str], seed: int, delay: float) -> None:
    """Import on all ranks but the first, which fails after ``delay`` seconds."""
    dist.barrier()
    if dist.get_rank() == 0:
        signal.sigtimedwait([], delay)
        raise ValueError("now")
    for name in random.Random(seed + dist.get_rank()).sample(modules, len(modules)):
        importlib.import_module(name)
    while True:
        signal.sigtimedwait([], 1.0)


def seconds_of_all(modules: Sequence[str]) -> float:
    begun = time.monotonic()
    dist.barrier()
    for name in modules:
        importlib.import_module(name)
    return time.monotonic() - begun


def use(modules: Sequence[str]) -> str:
    """Return how it fails to use all modules; "": it does not."""
    try:
        for name in modules:
            importlib.import_module(name)
        if "matplotlib.pyplot" in modules:
            importlib.import_module("matplotlib.figure").Figure().subplots()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def storm(moments: int, seed: int = 1, modules: Sequence[str] = MODULES) -> Told:
    """Call ranks back at that many moments, at least; those of one call count for each."""
    chance, told = random.Random(seed), Told()
    with Ranks(n_gpus=RANKS, device_type="cpu") as ranks:
        longest = max(ranks.run(seconds_of_all, modules))
    while told.moments < moments:
        with Ranks(n_gpus=RANKS, device_type="cpu") as ranks:  # fresh: each imports once
            before = ranks.run(os.getpid)
            try:
                ranks.run(work, modules, chance.randrange(2**31), chance.uniform(0.0, longest))
            except ValueError as error:
                told.inside += importing(str(error.__cause__))
            told.moments += RANKS - 1
            if ranks.run(os.getpid) != before:
                told.lost += RANKS - 1
            else:
                told.broken += _broken(ranks, modules)
    return told


def importing(report: str) -> int:
    """Return how many ranks a failure's report places in an import."""
    runs = [run for line in _IMPORTING.findall(report) for run in line.split(", ")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in (run.partition("-") for run in runs))


def _broken(ranks: Ranks, modules: Sequence[str]) -> list[str]:
    found = [failed for failed in ranks.run(use, modules) if failed]
    try:
        ranks.cell("1 + 1")
    except Exception as error:
        found.append(f"a cell: {type(error).__name__}: {error}")
    return found


if __name__ == "__main__":
    counts = [int(word) for word in sys.argv[1:]]
    there = [name for name in (*MODULES, "matplotlib.pyplot") if importlib.util.find_spec(name.partition(".")[0])]
    told = storm(*(counts or [200]), modules=there)
    print(
        f"{told.moments} moments: {told.inside} inside of imports, {told.lost} of lost ranks, {len(told.broken)} broken"
    )
    print(*told.broken, sep="\n")
    sys.exit(bool(told.broken))
