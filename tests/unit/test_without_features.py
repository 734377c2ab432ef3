"""Each feature can be taken out: what a plain call does is there without it, and its option says what is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlaunch.features import FEATURES
from tests.conftest import ROOT

# Values, surroundings, failures of all kinds, restarts, the deadline, Ctrl-C.
CORE = [f"tests/contract/test_{name}.py" for name in ("calls", "failures", "output", "restarts")]
SOME = "reduce or surroundings or env_option or closures or local or exit or last or ctrl_c or killed or shows_what"
CALL = "mlaunch.launcher(print, 1, {})()"
ASKS = {
    "agreed_stop": ("stop_on='TERM'", CALL.format("stop_on='TERM'")),
    "cells": ("cells on ranks", "mlaunch.Ranks(n_gpus=1).cell('1')"),
    "debug": ("debug=True", CALL.format("debug=True")),
    "display": ("to_svg()", "mlaunch.LaunchReport('f()', 'here', 0.1, 0, 1, ()).to_svg()"),
    "engines": (
        "--engine ssh:a",
        "import mlaunch.run.command as run\nrun.main(['--engine', 'ssh:a', 'setup.cfg'])",
    ),
    "events": ("events='t'", CALL.format("events='t'")),
    "insight": ("stall=60", CALL.format("stall=60")),
    "leases": ("lease=True", CALL.format("lease=True")),
    "machines": ("world_size=2", CALL.format("world_size=2, port=29511")),
    "numa": ("numa='node'", CALL.format("numa='node'")),
    "profile": ("profile='t'", CALL.format("profile='t'")),
    "ranks": ("keep=60", CALL.format("keep=60")),
    "run": ("python -m mlaunch.launch", "import runpy\nrunpy.run_module('mlaunch.launch', run_name='__main__')"),
    "slow": ("slow='10%'", CALL.format("slow='10%'")),
    "sweeps": ("print.submit()", "mlaunch.launcher(print, 1).submit()"),
    "warm": ("MLAUNCH_WARM=30m", f"import os; os.environ['MLAUNCH_WARM'] = '30m'; {CALL.format('')}"),
}
FLAGS = {"agreed_stop": "--stop-on", "events": "--events", "insight": "--stall", "leases": "--lease"}
FLAGS |= {"numa": "--numa-binding", "profile": "--profile", "slow": "--slow"}
COMMANDS = {"debug": ("debug",), "insight": ("stacks", "why", "ps --watch"), "run": ("run",), "warm": ("warm",)}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this project, with what conftest.py has compiled, so that no interpreter does it again."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("mlaunch", "tests"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "setup.cfg", folder)
    return folder


@pytest.fixture(scope="module", params=[feature.name for feature in FEATURES])
def without(request: pytest.FixtureRequest, copy: Path) -> Iterator[tuple[str, Path]]:
    """A feature, and the copy, in which its folder cannot be imported."""
    package = copy / "mlaunch" / request.param / "__init__.py"
    there = package.rename(package.with_name("there"))
    # In place of its removal: an editable installation would find the folder that it was installed from.
    package.write_text("raise ModuleNotFoundError(f'No module named {__name__!r}', name=__name__)")
    yield request.param, copy
    there.replace(package)


def python(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ["PYTHONPATH"] = str(copy)
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.nightly  # each day test_house holds the core to naming no feature, and this takes some thirty tests
def test_what_every_launch_has(without: tuple[str, Path]) -> None:
    name, copy = without
    if name == "pytest":
        pytest.skip("it runs these tests")
    done = python(
        copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SOME, "-m", "not slow and not fresh", *CORE
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.parametrize("without", [*ASKS], indirect=True, scope="module")
def test_its_option_says_that_it_is_not_there(without: tuple[str, Path]) -> None:
    """Of the others, users import what they want by its name, and Python says that there is none."""
    name, copy = without
    asked, statement = ASKS[name]
    if "Ranks" in statement or name == "machines":
        pytest.importorskip("torch", reason="the ranks come before what is asked of them")
    done = python(copy, "-c", f"import mlaunch\n{statement}")
    told_by = "mlaunch run" if asked.startswith("--") else "ModuleNotFoundError"
    assert done.stderr.splitlines()[-1] == (
        f"{told_by}: {asked}: this installation of mlaunch lacks mlaunch/{name}, which does it; "
        f"install mlaunch again, or do without"
    )


@pytest.mark.parametrize("without", ["debug"], indirect=True, scope="module")
def test_a_breakpoint_in_a_rank_is_pythons_without_a_debugger(without: tuple[str, Path]) -> None:
    _, copy = without
    pytest.importorskip("torch", reason="its rank needs torch")
    statement = "import mlaunch, sys\nmlaunch.launcher(breakpoint, 1, device_type='cpu')()"
    done = python(copy, "-c", statement)
    assert "bdb.BdbQuit" in done.stderr, done.stderr


@pytest.mark.parametrize("without", ["machines"], indirect=True, scope="module")
def test_a_flag_is_named_as_it_was_given(without: tuple[str, Path]) -> None:
    pytest.importorskip("torch", reason="the plan comes after torch's import")
    _, copy = without
    done = python(copy, "-m", "mlaunch", "run", "--nnodes", "2", "--rdzv-endpoint", "localhost:29512", "setup.cfg")
    assert done.stderr.splitlines()[-1].startswith("mlaunch run: --nnodes 2: this installation of mlaunch lacks")


def test_the_command_is_there(without: tuple[str, Path]) -> None:
    """And says so of a command that is a feature's own."""
    name, copy = without
    for command in COMMANDS.get(name, ()):
        words = [*command.split(), *(["--for", "8h"] if command == name else [])]
        done = python(copy, "-m", "mlaunch", *words)
        assert done.stderr == (
            f"mlaunch: mlaunch {command}: this installation of mlaunch lacks mlaunch/{name}, which does it; install "
            f"mlaunch again, or do without\n"
        )
        assert done.returncode == 1
    if name in COMMANDS:
        others = [python(copy, "-m", "mlaunch", word).stdout for word in ("ps", "--help")]
        assert all(others)
        listed = [command for command in COMMANDS[name] if " " not in command]
        assert re.findall(r"^    (\S+) +not installed$", others[-1], re.MULTILINE) == listed
    if name == "run":
        return
    done = python(copy, "-m", "mlaunch", "run", "--help")
    assert done.returncode == 0, done.stderr
    assert FLAGS.get(name, "--cells") not in done.stdout


@pytest.mark.nightly("debug", "insight", "warm")  # two interpreters with torch, and a launch
@pytest.mark.parametrize("without", [*COMMANDS], indirect=True, scope="module")
def test_the_doctor_is_there(without: tuple[str, Path]) -> None:
    _, copy = without
    assert python(copy, "-m", "mlaunch", "doctor", "--json").stdout
