"""A call on machines that an engine holds, against a warm call here: what the way there and back costs.

The engines are real, and their two machines are this one. Those that cannot run here are said so.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import work
from benchmarks.measure import Row, alternate, compare, seconds
from mlaunch import launcher
from mlaunch.engines import Cluster, Command, Hosts, Slurm
from tests.system import engine_rigs, slurm

_MACHINES, _EACH = 2, 2
_LOCAL = "warm call here"


def run(rounds: int) -> list[Row]:
    os.environ["MLAUNCH_PREPARE"] = "0"  # on machines nothing is prepared, either
    local = launcher(work.reduce_once, _MACHINES * _EACH)
    contestants: dict[str, Callable[[], float]] = {_LOCAL: functools.partial(seconds, local)}
    with contextlib.ExitStack() as held:
        for name, hold in {"ssh": _ssh, "Slurm": _slurm, "mpirun": _mpirun}.items():
            cluster = held.enter_context(hold())
            if cluster is None:
                print(f"{name} cannot run here", file=sys.stderr)
                continue
            there = launcher(work.reduce_once, engine=cluster, progress=False)
            contestants[f"mlaunch, held by {name}"] = functools.partial(seconds, there)
        for call in contestants.values():
            call()
        medians = alternate(contestants, 3 * rounds)
    bounds = {name: (_LOCAL, "<= 3") for name in contestants if name != _LOCAL}
    return compare("call of 4 ranks on 2 machines", medians, bounds, "s")


@contextlib.contextmanager
def _ssh() -> Iterator[Cluster | None]:
    if shutil.which("sshd") is None or os.geteuid() != 0:
        yield None
        return
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as serving:
        command = engine_rigs.ssh_files(Path(name), {"a": "127.0.0.1", "b": "127.0.0.1"})
        serving.enter_context(engine_rigs.serving([command]))
        engine_rigs.wait_for_ssh(Path(name), ["a", "b"])
        with Hosts(["a", "b"], ssh=["ssh", "-T", "-F", f"{name}/ssh.conf"]).hold(n_gpus=_EACH) as cluster:
            yield cluster


@contextlib.contextmanager
def _slurm() -> Iterator[Cluster | None]:
    if slurm.why_not():
        yield None
        return
    with tempfile.TemporaryDirectory() as name, slurm.running(Path(name)) as environ:
        os.environ.update(environ)
        with Slurm(time="10:00").hold(_MACHINES, _EACH) as cluster:
            yield cluster


@contextlib.contextmanager
def _mpirun() -> Iterator[Cluster | None]:
    if shutil.which("mpirun") is None:
        yield None
        return
    with Command(engine_rigs.MPIRUN).hold(_MACHINES, _EACH) as cluster:
        yield cluster
