"""Interrupts calls on an engine's machines at random moments, as Ctrl-C does, and looks what is left.

By hand: ``python -m tests.engine_interrupts ssh mpirun slurm --count 100``. One calling process holds machines, calls
on them and gives them back, again and again; each time, SIGINT comes at a moment between the beginning and the end of
what that takes undisturbed. The last time is undisturbed again.

What it gave on 2026-11-27: nothing was left by 100 interrupts over ssh (96 raised KeyboardInterrupt, 2 came when the
call had returned, 2 outside of it), by 100 with mpirun (88, 6, 6), nor by 100 with Slurm (98, 1, 1).
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import time
from typing import Any

from tests.engine_scenes import RIGS, Stage, described, heard, shared_names, stage_of
from tests.system.engine_rigs import Rig


def interrupted(stage: Stage, count: int, chance: random.Random) -> tuple[dict[str, int], list[str]]:
    """Returns how often each end was told, and what was wrong."""
    ends, wrong = dict[str, int](), list[str]()
    names, caller = shared_names(), stage.caller()
    stage.note_what_is_there()
    length = undisturbed(caller, wrong)
    for _ in range(count):
        caller = told_to_begin(stage, caller)
        time.sleep(chance.uniform(0.0, length))
        caller.process.send_signal(signal.SIGINT)
        found = heard(caller)
        if found is None or caller.process.poll() is not None:  # the interrupt came before or after all of it
            caller.close()
            caller = stage.caller()
        end = "no answer" if found is None else found.get("error", "returned")
        ends[end] = ends.get(end, 0) + 1
        wrong += [f"left after {end}: {described(pid)}" for pid in stage.leave({caller.process.pid})]
        wrong += [f"a job stays: {job}" for job in (stage.jobs_left() if "Slurm" in caller.engine else [])]
    undisturbed(caller, wrong)
    caller.close()
    return ends, [*wrong, *(f"a file stays: {name}" for name in shared_names() - names)]


def told_to_begin(stage: Stage, caller: Rig) -> Rig:
    """Returns who begins such a call: another one, where the last interrupt came after the last answer."""
    try:
        caller.say("whole")
    except BrokenPipeError:
        with contextlib.suppress(BrokenPipeError):
            caller.close()
        caller = stage.caller()
        caller.say("whole")
    return caller


def undisturbed(caller: Any, wrong: list[str]) -> float:
    """Makes such a call; returns how many seconds it takes."""
    begun = time.monotonic()
    found = heard(caller, "whole")
    if found is None or "value" not in found:
        wrong.append(f"undisturbed, it ends with {found}")
    return time.monotonic() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="*", default=["ssh", "mpirun", "slurm"])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args, bad = parser.parse_args(), 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    for engine in args.engines:
        with stage_of(RIGS[engine]) as stage:
            ends, wrong = interrupted(stage, args.count, random.Random(args.seed))
        print(f"{engine:6} {args.count} interrupts: {ends}")
        for line in wrong:
            print(f"    WRONG {line}")
        sys.stdout.flush()
        bad += bool(wrong)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
