"""The crash matrix: where in its life a rank (or the caller) ends, by how it ends, under every start method.

Ranks that stay are one column more, and so are launches that were prepared. The fixtures look at what each cell leaves,
and whether the next call works. Each commit runs every pair of where and how, the start methods in turn; the other
cells are for the night.
"""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import subprocess
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from _pytest.mark import ParameterSet

from mlaunch import LaunchError, LaunchTimeout, Ranks, launcher
from tests import launches
from tests.conftest import ROOT
from tests.contract.crashes import (
    ENDING,
    HOW,
    PLACES,
    PREPARED,
    STAYING,
    call_at,
    call_on,
    call_staying,
    limits,
)
from tests.imported import IMPORTED
from tests.processes import alive, wait_gone

pytestmark = pytest.mark.usefixtures("the_next_call_works")
METHODS = ["forkserver", "fork", "spawn", STAYING]
IMPOSSIBLE = {
    ("unpickling", "fork"),  # nothing is pickled where the ranks inherit the call
    ("pickling the call", "fork"),
    ("after_the_answer", STAYING),  # these wait for the next call then, and their end loses it
}


WORDS = {
    "sys.exit": "exited with code 3 (sys.exit or os._exit)",
    "os._exit": "exited with code 4 (sys.exit or os._exit)",
    "segfault": "was killed by SIGSEGV",
    "SIGKILL": "was killed by SIGKILL",
    "execs": "exited with code 6 (sys.exit or os._exit)",
    "closes its descriptors": "exited with code 1 (sys.exit or os._exit)",
}
RETURNED = {
    "in_the_function": None,
    "in_a_collective": None,
    "pickling_the_result": 0,
    "after_return": 5,
    "after_the_answer": 5,
}
ANSWERED = {"after_return", "after_the_answer"}
# Each of them costs seconds, or a fork server.
STOPPED = ["stops its agent", "stops the fork server"]
ENDS = [how for how in HOW if how not in {*STOPPED, "caller dies"}]
LATE = {"SIGSTOP"}  # who ends so is killed when the grace period is over


def cells(where: Sequence[str], hows: Sequence[str], methods: Sequence[str]) -> list[ParameterSet]:
    """Return all cells, as pytest takes them; those that no commit runs are marked."""
    found = []
    for row, place in enumerate(where):
        possible = [method for method in methods if (place, method) not in IMPOSSIBLE]
        for column, how in enumerate(hows):
            chosen = possible[(row + column) % len(possible)]
            for method in possible:
                plain = (place, method) == ("in_the_function", "forkserver") and how not in {*LATE, *STOPPED}
                marks = [] if plain else [pytest.mark.slow, *([] if method == chosen else [pytest.mark.nightly])]
                found.append(pytest.param(place, how, method, marks=marks))
    return found


def importing(how: str, start_method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    name = f"module_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(
        f"from tests.contract.crashes import crash\ncrash({how!r})\ndef train():\n    return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    function = __import__(name).train
    return (lambda: call_staying(how, function)) if start_method == STAYING else launcher(function, 2, **limits(how))


def check_answered(how: str, call: Callable[[], object]) -> None:
    """That all values are there, and that an end which is none of an interpreter's is told."""
    words = f"rank 1 returned its value, then {WORDS[how]}" if how in ENDING else ""
    words = "rank 1 had returned its value but did not end, and was ended" if how in LATE else words
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert call() == [5, 5]
    told = [str(warning.message) for warning in seen if warning.category is RuntimeWarning]
    assert words in " ".join(told) if words else told == []


def check(where: str, how: str, call: Callable[[], object], *, stays: bool = False) -> None:
    """That the cell ends as it must, in words that name rank 1 and the reason."""
    if where == "after_return" and stays:
        assert call() == [5, 5]
    elif where in ANSWERED and not how.startswith("stops"):
        check_answered(how, call)
    elif where == "pickling_the_result" and how == "exception":
        with pytest.raises(LaunchError, match=r"rank 1 of .* returned a value that cannot be pickled: .*no such luck"):
            call()
    elif how == "exception":
        with pytest.raises(ValueError, match="no such luck") as raised:
            call()
        assert "rank 1 of " in str(raised.value.__cause__)
    elif how == "forks":  # only the process that became the rank answers
        assert call() in ([None, None], [0, 0], [1, 1])
    elif how == "stops the fork server":  # nobody waits for it where all has been told
        assert call() == [RETURNED[where]] * 2
    elif how == "stops its agent":  # which keeps the launch from ending until its caller ends it
        with pytest.raises(LaunchTimeout, match=r"its agent or its fork server did not answer \(was one stopped\?\)"):
            call()
    elif how == "SIGSTOP":
        with pytest.raises(LaunchTimeout, match=r"(rank 1|ranks 0-1) had not returned"):
            call()
    else:
        with pytest.raises(LaunchError, match=re.escape(WORDS[how])) as caught:
            call()
        assert caught.value.failures[0].rank == 1
        assert how != "segfault" or "Fatal Python error: Segmentation fault" in caught.value.failures[0].traceback


@pytest.mark.parametrize(("where", "how", "start_method"), cells([*PLACES, "unpickling"], ENDS, [*METHODS, PREPARED]))
def test_a_rank_ends(where: str, how: str, start_method: str) -> None:
    check(where, how, call_at(where, how, start_method), stays=start_method == STAYING)


@pytest.mark.parametrize(
    ("where", "how", "start_method"),
    cells([place for place in PLACES if place != "after_the_answer"], STOPPED, METHODS),  # which is as before it
)
def test_a_process_that_keeps_a_launch_is_stopped(
    where: str, how: str, start_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank stops its agent or its fork server; its caller does not depend on them."""
    launches.become_impatient(monkeypatch)
    check(where, how, call_at(where, how, start_method), stays=start_method == STAYING)


@pytest.mark.parametrize(("where", "how", "start_method"), cells(["importing"], ENDS, ["forkserver", STAYING]))
def test_a_rank_ends_importing(
    where: str, how: str, start_method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(where, how, importing(how, start_method, tmp_path, monkeypatch))


def test_ranks_take_row_after_row() -> None:
    """Of those that leave them in step."""
    with Ranks(n_gpus=2) as ranks:
        pids = ranks.run(os.getpid)
        for where, how in [
            ("pickling_the_result", "exception"),
            ("pickling_the_result", "forks"),
            ("after_return", "sys.exit"),
        ] * 3:
            check(where, how, functools.partial(call_on, ranks, how, PLACES[where], how), stays=True)
        assert ranks.run(os.getpid) == pids


def test_pickling_the_call_raises() -> None:
    with pytest.raises(TypeError, match=r"argument 0 of unpickling\(\) is a .*Fuse, which cannot be pickled"):
        call_at("pickling the call", "exception", "forkserver")()
    with pytest.raises(SystemExit):
        call_at("pickling the call", "sys.exit", "forkserver")()


@pytest.mark.parametrize(
    ("where", "how", "start_method"), cells([*PLACES, "unpickling", "pickling the call"], ["caller dies"], METHODS)
)
def test_the_caller_dies(where: str, how: str, start_method: str) -> None:
    mark = uuid.uuid4().hex
    code = (
        f"import os\nos.environ['CALLER'] = str(os.getpid())\nfrom tests.contract.crashes import call_at\n"
        f"call_at({where!r}, {how!r}, {start_method!r})()"
    )
    done = subprocess.run(
        [IMPORTED, "-c", code],
        env={**os.environ, "MARK": mark},
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,  # its end comes when caller, agent and ranks have closed it
        stderr=subprocess.STDOUT,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL, done.stdout.decode()
    wait_gone([pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if marked(pid, mark)])


SOAK = int(os.environ.get("MLAUNCH_SOAK", "60"))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(max(1800, 6 * SOAK))
def test_many_launches_of_which_a_third_fail() -> None:
    """MLAUNCH_SOAK is how many; whatever one leaves behind shows in the next, or in the leak fixture."""
    chance = random.Random(os.environ.get("MLAUNCH_SOAK_SEED", "3"))
    failed = 0
    for _ in range(SOAK):
        if chance.randrange(3) == 0:
            where, how = chance.choice([*PLACES, "unpickling"]), chance.choice(ENDS)
            check(where, how, call_at(where, how, "forkserver"))
            failed += 1
        assert launcher(dist_total, 2)(10) == [12, 12]
    assert failed > 0


def dist_total(base: int) -> int:
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, 1)
    return base + sum(everyone)


def marked(pid: int, mark: str) -> bool:
    try:
        return alive(pid) and mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except (OSError, ValueError):
        return False
