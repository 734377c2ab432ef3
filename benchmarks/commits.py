"""What a change costs: two or more commits of this repository, in turn, each in processes and a copy of its own.

By hand, in a clone with its history: ``python -m benchmarks.commits a0f5eb1^ a0f5eb1 --rounds 9`` compares torch's
store with ours, which answers this user alone, and ``91a12bc^ 91a12bc --cases warm gather join`` plain objects with
signed ones. Each commit is compared with the one before it. An environment beside its copy has this one's packages,
and none of ours.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.measure import Row, alternate, compare, table

_ROOT = Path(__file__).resolve().parent.parent
_CASES = {
    "warm": "a warm call of 2 ranks",
    "pause": "a call of 2 ranks, after a pause",
    "failure": "a call of 2 ranks of which one raises",
    "first": "an interpreter's first call, of 2 ranks",
    "command": "a command of 2 ranks, mlaunch warm",
    "stay": "an empty call on 4 ranks that stay, 20 in a row",
    "gather": "comm.all_gather of 2 ranks, small",
    "join": "1,024 ranks on 128 machines join",
    "held": "a call of 2 machines, held",
}
# What runs in a commit's own environment: it measures once for each line, in seconds.
_CONTESTANT = """
import contextlib, os, pathlib, statistics, subprocess, sys, time
import torch, torch.distributed as dist
import mlaunch
from mlaunch import Ranks, comm, launcher

answers, case, where = os.fdopen(os.dup(1), "w"), sys.argv[1], sys.argv[2]
os.dup2(2, 1)
assert mlaunch.__file__.startswith(where), mlaunch.__file__

def nothing():
    pass

def reduce():
    dist.all_reduce(torch.ones(1))

def fails():
    if dist.get_rank() == 1:
        raise ValueError
    dist.all_reduce(torch.ones(1))

def failure(call):
    with contextlib.suppress(ValueError):
        call()

def gather():
    dist.barrier()
    begun = time.perf_counter()
    for number in range(200):
        comm.all_gather({"step": number})
    return (time.perf_counter() - begun) / 200

def timed(call):
    def measure():
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun
    return measure

def measures():
    if case == "warm":
        call = timed(launcher(reduce, 2, device_type="cpu"))
        return lambda: statistics.median(call() for _ in range(10))
    if case == "pause":
        call = timed(launcher(reduce, 2, device_type="cpu"))
        return lambda: statistics.median((time.sleep(0.5), call())[1] for _ in range(5))
    if case == "failure":
        call = timed(lambda: failure(launcher(fails, 2, device_type="cpu")))
        return lambda: statistics.median(call() for _ in range(5))
    if case == "first":
        return timed(lambda: subprocess.run([sys.executable, "-c", FIRST], check=True, stdout=subprocess.DEVNULL))
    if case == "command":
        from benchmarks.kept import kept
        script = pathlib.Path(where).parent / "reduce.py"
        script.write_text(REDUCE)
        # In a place of its own, until this process has ended.
        environ = keeps.enter_context(kept({**os.environ, "MLAUNCH_WARM": ""}))
        command = [sys.executable, "-m", "mlaunch", "run", "--nproc-per-node", "2", str(script)]
        once = timed(lambda: subprocess.run(command, check=True, env=environ, stdout=subprocess.DEVNULL))
        return lambda: statistics.median(once() for _ in range(5))
    if case == "stay":
        ranks = Ranks(n_gpus=4, device_type="cpu")
        call = timed(lambda: ranks.run(nothing))
        return lambda: statistics.median(call() for _ in range(20))
    if case == "gather":
        ranks = Ranks(n_gpus=2, device_type="cpu")
        return lambda: max(ranks.run(gather))
    if case == "held":
        from mlaunch.engines import Hosts
        held = Hosts(["a", "b"], ssh=["sh", "-c", 'exec sh -c "$2"', "sh"]).hold(2, 1)
        call = timed(launcher(reduce, 1, engine=held, device_type="cpu", progress=False))
        return lambda: statistics.median(call() for _ in range(5))
    from benchmarks import swarm
    def join():
        one = swarm.join_through_links(swarm.Size(128, 8))
        return one.machines + one.ranks
    return join

FIRST = "import mlaunch; mlaunch.launcher(print, 2, device_type='cpu')()"
REDUCE = '''
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
'''

if __name__ == "__main__":
    with contextlib.ExitStack() as keeps:
        measure = measures()
        for _ in sys.stdin:
            answers.write(f"{measure()}\\n")
            answers.flush()
"""


@contextlib.contextmanager
def copy_of(commit: str, folder: Path) -> Iterator[tuple[Path, str]]:
    """Checks it out; yields where, and the interpreter whose packages are these and this copy's."""
    there = folder / "copy"
    git = ["git", "-C", str(_ROOT)]
    subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(there), commit], check=True)
    try:
        venv.create(folder / "environment", symlinks=True)
        paths = sysconfig.get_paths(vars={"base": str(folder / "environment"), "platbase": str(folder / "environment")})
        found = f"{there}\n{sysconfig.get_paths()['purelib']}\n"
        Path(paths["purelib"], "copy.pth").write_text(found, encoding="utf-8")
        yield there, str(folder / "environment" / "bin" / "python")
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(there)], check=True)


@contextlib.contextmanager
def measured(case: str, there: Path, python: str) -> Iterator[Callable[[], float]]:
    """Gives what measures a case once with a copy."""
    script = there.parent / "contestant.py"  # a file: what is started by it may import it
    script.write_text(_CONTESTANT, encoding="utf-8")
    command = [python, str(script), case, str(there)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=there, stdin=pipe, stdout=pipe, encoding="utf-8") as process:
        asks, answers = process.stdin, process.stdout
        if asks is None or answers is None:
            raise RuntimeError("the contestant has no pipes")

        def measure() -> float:
            print(file=asks, flush=True)
            if not (said := answers.readline()):
                raise RuntimeError(f"it ended with {process.wait()}")
            return float(said)

        measure()  # which starts what stays
        yield measure
        asks.close()


def compared(case: str, copies: dict[str, tuple[Path, str]], rounds: int) -> list[Row]:
    with contextlib.ExitStack() as running:
        contestants = {commit: running.enter_context(measured(case, *where)) for commit, where in copies.items()}
        medians = alternate(contestants, rounds)
    names = list(copies)
    before = {name: (names[place], "") for place, name in enumerate(names[1:])}
    return compare(_CASES[case], medians, before, "s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commits", description=__doc__)
    parser.add_argument("commits", nargs="+")
    parser.add_argument("--cases", nargs="+", choices=list(_CASES), default=list(_CASES))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlaunch-commits-") as folder, contextlib.ExitStack() as copied:
        copies = dict[str, tuple[Path, str]]()
        for commit in options.commits:
            Path(folder, str(len(copies))).mkdir()
            copies[commit] = copied.enter_context(copy_of(commit, Path(folder, str(len(copies)))))
        for case in options.cases:
            print(table(compared(case, copies, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
