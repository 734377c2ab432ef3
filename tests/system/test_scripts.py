"""Whole scripts, as a user runs them."""

from __future__ import annotations

import doctest
import os
import re
import runpy
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mlaunch import launcher
from tests import launches
from tests.conftest import ROOT
from tests.contract.preparing import LIMIT
from tests.imported import IMPORTED
from tests.processes import children
from tests.users import users_environ


@pytest.mark.dear("it trains, as the README's first command does")
@pytest.mark.slow
def test_the_digits_example() -> None:
    done = subprocess.run(
        [IMPORTED, "examples/digits.py"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**users_environ(), "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    accuracies = [float(value) for value in re.findall(r"rank \d+ measured an accuracy of (\S+)", done.stdout)]
    assert len(accuracies) == (torch.accelerator.device_count() or 2)
    assert min(accuracies) >= 0.95


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="the page has the table of two CPU ranks")
def test_the_sweep_of_the_digits(run_script: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    """Prints the table of the page, up to seconds and the last digits."""
    page = (ROOT / "docs" / "sweeps.rst").read_text()
    table = textwrap.dedent(page[page.index("    lr     width") : page.index("Resume a sweep")]).splitlines()
    code = f"import runpy, sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); "
    done = run_script(code + f"runpy.run_path({str(ROOT / 'examples' / 'sweep.py')!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr
    for row, told in zip(table, done.stdout.splitlines(), strict=False):
        assert row.split()[:3] == told.split()[:3]
    assert "the best: lr=0.01, width=128" in table
    assert done.stdout.splitlines()[-1] == "the best: lr=0.01, width=128"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("examples/first.py", r"\[30\.0, 30\.0\]\n"),
        ("docs/listings/submitting.py", r"([123] \[\d, \d\]\n){3}"),
        ("docs/listings/reporting.py", r"1\.0 pruned after \d+ steps\n0\.1 done after 31 steps\n"),
        ("docs/listings/sweeping.py", r"(0\.\d+ (64|128) \[[\d.]+, [\d.]+\]\n){4}"),
        ("docs/listings/staying.py", r"\d\.\d+, then 0\.000; 5 weights\n"),
    ],
)
def test_the_first_examples(script: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / script), run_name="__main__")
    assert re.fullmatch(said, capsys.readouterr().out)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Returns the blocks of Python that stand in a page itself, with the two lines before each."""
    found = re.findall(r"(.*\n.*\n)\.\. code-block:: python\n\n((?:    .*\n|\n)+)", page.read_text())
    return [(before, textwrap.dedent(code)) for before, code in found]


def test_code_of_pages_is_run_or_says_why_not() -> None:
    """What runs stands in files that pages include, or is a doctest."""
    pages = [ROOT / "README.rst", ROOT / "CONTRIBUTING.rst", *(ROOT / "docs").rglob("*.rst")]
    found = [(page, *block) for page in pages for block in blocks(page)]
    assert len(found) >= 4
    for page, before, code in found:
        assert before.lstrip().startswith(".. Not run: "), f"{page}: {code}"
        compile(code, str(page), "exec")
    for page in pages:  # a block that is not said to be Python
        assert not re.search(r"::\n\n    (from|import) \w+", page.read_text().replace("code-block:: python", ""))


@pytest.mark.slow
@pytest.mark.parametrize("page", ["tour.rst", "ranks.rst"])
def test_the_tour(page: str) -> None:
    failed, tried = doctest.testfile(str(ROOT / "docs" / page), module_relative=False)
    assert tried >= 3
    assert not failed


def test_the_docstrings() -> None:
    import mlaunch.caller.launcher

    globs = {"launcher": launcher}
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder(recurse=False).find(mlaunch.caller.launcher.launcher, "launcher", globs=globs):
        runner.run(test)
    assert runner.summarize().failed == 0


@pytest.mark.parametrize("name", ["processes", "machines"])
def test_the_picture_is_what_its_script_draws(name: str) -> None:
    code = f"import sys; sys.path.insert(0, 'docs'); import pictures; print(pictures.{name}(), end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == (ROOT / "docs" / f"{name}.svg").read_text()


@pytest.mark.nightly
def test_the_reports_are_what_really_prints() -> None:
    """Those of documentation and README; how far the other ranks come meanwhile differs from run to run."""
    code = (
        "import sys; sys.path.insert(0, 'docs'); import reports; from concurrent.futures import ThreadPoolExecutor; "
        "print(*ThreadPoolExecutor().map(reports.report, reports.KINDS), sep='\\0')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    for kind, text in zip(("raised", "killed", "stuck"), done.stdout.split("\0"), strict=True):
        shown = (ROOT / "docs" / "reports" / f"{kind}.txt").read_text()
        assert without_the_others(text) == without_the_others(shown)
    readme = (ROOT / "README.rst").read_text()
    first, _, _ = (ROOT / "docs" / "reports" / "raised.txt").read_text().partition("\nThe above exception")
    assert textwrap.indent(first, "    ") in readme


def test_the_figures_of_the_readme() -> None:
    """They are those of the documentation: one command made both, on one day."""
    code = (
        "import sys; sys.path.insert(0, 'docs'); import json, measured; f = json.loads(measured.FIGURES.read_text()); "
    )
    code += "print(*measured.summary(f), measured.sentence(f), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    *table, said = done.stdout.splitlines()
    readme = (ROOT / "README.rst").read_text()
    assert len(table) == 7
    assert "\n".join(table) in readme
    assert said.replace("``", "") in " ".join(readme.replace("``", "").split())


def without_the_others(text: str) -> str:
    return re.sub(r"\n(after which|meanwhile):\n(  .*\n)+", "", text).rstrip()


FAILING = """
import os, signal, sys, threading, warnings
from mlaunch import LaunchError, launcher

def run(name, action, **options):
    def train():
        import torch.distributed as dist
        if dist.get_rank() == 1:
            return action()
        dist.barrier() if name not in ("exit 0", "generator") else None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            print(name, launcher(train, 2, **options)(), [str(w.message).split("(")[0] for w in seen])
        except BaseException as error:
            print(name, type(error).__name__, str(error).splitlines()[0].replace("run.<locals>.", ""))

def boom():
    raise ValueError("boom")

run("raise", boom)
run("exit", lambda: sys.exit(3))
run("exit 0", lambda: os._exit(0))
run("kill", lambda: os.kill(os.getpid(), signal.SIGKILL))
run("generator", lambda: (x for x in ()))
run("options", boom, device_type="abacus")
try:
    launcher(n_gpus=-1)
except ValueError as error:
    print(error)
try:
    launcher(print, 1)(threading.Lock())
except TypeError as error:
    print(error)
"""


@pytest.mark.nightly
def test_optimised_python_fails_in_the_same_words(run_script) -> None:  # type: ignore[no-untyped-def]
    plain, optimised = run_script(FAILING), run_script(FAILING, "-O")
    assert optimised.stdout == plain.stdout
    assert plain.stdout.splitlines()[:4] == [
        "raise ValueError boom",
        "exit LaunchError rank 1 of train() exited with code 3 (sys.exit or os._exit)",
        "exit 0 [None, None] ['rank 1 of run.<locals>.train']",
        "kill LaunchError rank 1 of train() was killed by SIGKILL",
    ]
    assert "__debug__" not in optimised.stderr


def test_a_rank_that_imports_the_script_anew_is_told_to_guard_it(run_script) -> None:  # type: ignore[no-untyped-def]
    done = run_script("""
import multiprocessing
from mlaunch import launcher
train = launcher(lambda: 1, 1)
if __name__ == '__main__':
    process = multiprocessing.get_context('spawn').Process(target=print)
    process.start()
    process.join()
else:
    train()
""")
    assert "is called while multiprocessing imports this script into a process of its own; put the call" in done.stderr


@pytest.mark.nightly
def test_ranks_have_what_the_fork_server_imports(run_script, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Also where the server is there already, which has not; a module that is missing is said by the call."""
    (tmp_path / "large.py").write_text("import os\nimported_by = os.getpid()\n")
    done = run_script("""
import mlaunch

def who():
    import large, os
    return large.imported_by == os.getpid()

print(mlaunch.launcher(who, 2)())
mlaunch.warm_up(preload=["large"])
print(mlaunch.launcher(who, 2)(), mlaunch.launcher(who, 2)())
mlaunch.warm_up(n_gpus=2)
print(mlaunch.launcher(who, 2)())
mlaunch.warm_up(preload=["no_such_module"])
try:
    mlaunch.launcher(who, 2)()
except mlaunch.LaunchError as error:
    print("no_such_module" in str(error), "could not import its modules" in str(error))
try:
    mlaunch.warm_up(preload="large")
except TypeError as error:
    print(error)
mlaunch.warm_up(preload=[])
print(mlaunch.launcher(who, 2)())
""")
    assert done.stdout.splitlines() == [
        "[True, True]", "[False, False] [False, False]", "[False, False]", "True True",
        "preload='large': allowed: a list of names of modules", "[True, True]",
    ], done.stderr  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["torch.distributed.checkpoint", "mlaunch.ranks.caller.ranks"])
def test_later_ranks_find_what_ranks_had_to_import(run_script, name: str) -> None:  # type: ignore[no-untyped-def]
    """Though no pause is between the calls; where there is one, the first pause will do."""
    done = run_script(f"""
import mlaunch, sys

def step():
    before = {name!r} in sys.modules
    import {name}
    return before

train = mlaunch.launcher(step, 2)
print(train())
while not all(train()):
    pass
print(train())
""")
    assert done.stdout.splitlines() == ["[False, False]", "[True, True]"], done.stderr


def test_warm_up_returns_before_torch_is_imported(run_script) -> None:  # type: ignore[no-untyped-def]
    code = """
import sys, mlaunch
mlaunch.warm_up()
print('torch' in sys.modules)
print(mlaunch.launcher(lambda: 7, 1)())
"""
    done = run_script(code, fresh=True)
    assert done.stdout == "False\n[7]\n", done.stderr


def test_a_fork_server_that_cannot_import_torch_says_so(run_script, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "torch.py").write_text("raise ImportError('no torch for you')")
    done = run_script("from mlaunch import launcher\nlauncher(lambda: 1, 1)()\n", fresh=True)
    assert re.search(r"LaunchError: the fork server \(pid \d+\) could not import its modules:", done.stderr)
    assert "no torch for you" in done.stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_two_hundred_calls_leave_nothing_more() -> None:

    train = launcher(lambda: None, 2)

    def state() -> tuple[int, int]:
        """Looks while the server has no child, and often: it closes the last descriptors just after its last word."""
        server = launches.server_pid()
        looks: list[int] = []
        until = time.monotonic() + LIMIT
        while len(looks) < 2000:
            if children(server):  # an agent that rests, a trial of an import
                looks.clear()
                assert time.monotonic() < until, children(server)
            else:
                looks.append(len(os.listdir(f"/proc/{server}/fd")))
        return len(os.listdir("/proc/self/fd")), min(looks)

    train()
    before = state()
    for _ in range(200):
        train()
    assert state() == before
