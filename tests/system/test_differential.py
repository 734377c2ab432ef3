"""One script under ``mlaunch run`` and under torchrun: all that differs is listed in docs/command.rst."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.system.commands import FRESH, LAUNCHERS, TORCHRUN, at_once, run, write

pytestmark = [pytest.mark.slow]
PROBE = str(ROOT / "tests" / "system" / "probe.py")
PAGE = (ROOT / "docs" / "command.rst").read_text()
# By path in what the probe prints; each stands in the page's table under the words beside it.
DIFFERENT = {
    "environ GLOO_SOCKET_IFNAME": "GLOO_SOCKET_IFNAME",
    "environ MASTER_ADDR": "MASTER_ADDR",
    "environ MASTER_PORT": "MASTER_PORT",
    "environ NCCL_SOCKET_IFNAME": "NCCL_SOCKET_IFNAME",
    "environ MLAUNCH_RANK_PID": "MLAUNCH_RANK_PID",
    "environ NODE_RANK": "NODE_RANK",
    "environ OMP_NUM_THREADS": "OMP_NUM_THREADS",
    "environ TORCHELASTIC_ERROR_FILE": "TORCHELASTIC_ERROR_FILE",
    "environ TORCHELASTIC_RUN_ID": "TORCHELASTIC_RUN_ID",
    "faulthandler": "faulthandler",
    "frames": "frames below the script",
    "gc frozen": "garbage collector",
    "hash": "hash of a string",
    "modules": "sys.modules",
    "process open files": "file descriptors",
    "streams stderr buffer": "sys.stdout and sys.stderr",
    "streams stderr line_buffering": "sys.stdout and sys.stderr",
    "streams stderr write_through": "sys.stdout and sys.stderr",
    "streams stdin write_through": "sys.stdout and sys.stderr",
    "streams stdout buffer": "sys.stdout and sys.stderr",
    "streams stdout line_buffering": "sys.stdout and sys.stderr",
    "streams stdout write_through": "sys.stdout and sys.stderr",
    "sys flags": "sys.flags",
    "sys orig_argv": "sys.orig_argv",
    "torch threads": "OMP_NUM_THREADS",
    "warnings": "warnings.filters",
}
RANDOM = {"random", "environ MASTER_PORT"}


def differences(first: Any, second: Any, path: str = "") -> Iterator[str]:
    if isinstance(first, dict) and isinstance(second, dict):
        for name in sorted(first.keys() | second.keys()):
            yield from differences(first.get(name), second.get(name), f"{path} {name}".strip())
    elif first != second:
        yield path


def ranks(cwd: Path, launcher: str, *flags: str, **environ: str) -> list[dict[str, Any]]:
    flags = ("--nproc-per-node", "2", *flags)
    command = FRESH if launcher == "mlaunch" else TORCHRUN
    done = run(cwd, *flags, PROBE, "a", "rank ${local_rank}", command=command, **environ)
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 2, done.stderr
    return sorted(found, key=lambda rank: rank["environ"]["RANK"])


@pytest.mark.nightly
def test_a_script_sees_the_same(tmp_path: Path) -> None:
    ours, theirs = at_once(lambda name: ranks(tmp_path, name), LAUNCHERS)
    found = {path for pair in zip(ours, theirs, strict=True) for path in differences(*pair)}
    assert found - RANDOM <= DIFFERENT.keys()
    for path in found - RANDOM:
        assert DIFFERENT[path] in PAGE, f"{path} is not in docs/command.rst"
    for mine, their in zip(ours, theirs, strict=True):
        assert set(their["modules"]) <= set(mine["modules"])
        assert mine["warnings after the imports"] == their["warnings after the imports"]
    assert ours[0]["hash"] == ours[1]["hash"]  # one interpreter's
    assert not set(ours[0]["random"]) & set(ours[1]["random"])


@pytest.mark.nightly
def test_a_script_sees_the_same_of_virtual_local_ranks(tmp_path: Path) -> None:
    flags = {"CUDA_VISIBLE_DEVICES": "5,3"}
    ours, theirs = at_once(lambda name: ranks(tmp_path, name, "--virtual-local-rank", **flags), LAUNCHERS)
    for mine, their in zip(ours, theirs, strict=True):
        for name in ("LOCAL_RANK", "RANK", "CUDA_VISIBLE_DEVICES"):
            assert mine["environ"][name] == their["environ"][name]


ENDS = {
    "exit 0": "import sys; sys.exit(0)",
    "exit 3": "import sys; sys.exit(3)",
    "exit -1": "import sys; sys.exit(-1)",
    "exit text": "import sys; sys.exit('text')",
    "raise": "raise ValueError(1)",
    "interrupt": "raise KeyboardInterrupt",
    "kill": "import os; os.kill(os.getpid(), 9)",
    "exit handler": "import atexit; atexit.register(print, 'bye', flush=True); raise SystemExit(2)",
}


@pytest.mark.nightly("exit 0", "exit -1", "exit text", "interrupt", "kill")
@pytest.mark.parametrize("how", ENDS)
def test_how_a_script_ends(tmp_path: Path, how: str) -> None:
    """torchrun's own status is always 1; which code the rank had, it tells in its report."""
    write(tmp_path, ENDS[how])
    ours, theirs = at_once(lambda command: run(tmp_path, "train.py", command=command), LAUNCHERS.values())
    assert ours.stdout == theirs.stdout
    assert bool(ours.returncode) == bool(theirs.returncode)
    code = ours.returncode if ours.returncode <= 128 else 128 - ours.returncode
    if ours.returncode == 255:  # sys.exit(-1)
        code = 255
    assert (f"exitcode  : {code} " in theirs.stderr) == bool(code), theirs.stderr
