"""Whether the tests notice what somebody breaks who moves code.

    python -m tests.slips                     # all slips of tests/slip_list.py, in some 25 minutes on two cores
    python -m tests.slips leases stop_clears  # those of an area, or of these names
    python -m tests.slips --list              # the slips, by area
    python -m tests.slips --unpatched         # the tests alone: they must pass where there is no slip

Each slip is a small change, made one at a time to a copy of the tree. The tests of its area run there until one fails.
It is an error if a slip applies no longer, or if fewer than nine of ten are noticed: by a failure that says so, since a
hang alone says nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlaunch.base import linux
from tests.processes import alive, descendants, wait_until
from tests.slip_list import SLIPS, Slip

ROOT = Path(__file__).resolve().parent.parent
WANTED = 0.9  # of the slips are to be noticed
HANGS = 120.0  # seconds after which a test counts as one that hangs
LIMIT = 400.0  # seconds for the tests of a slip
NOTICED, MISSED, HUNG = "noticed", "not noticed", "by a hang alone"
_LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", "_build", ".*_cache", "*.egg-info", "build", "dist")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", re.MULTILINE)


@dataclass(frozen=True)
class Tried:
    """What came of a slip. ``by``: the test that failed, and its first words."""

    slip: Slip
    how: str
    seconds: float
    by: str = ""


class Copy:
    """A copy of the tree, whose tests run its own package."""

    def __init__(self, directory: Path) -> None:
        self._tree, self._tmp = directory / "tree", directory / "t"  # short: sockets have their places below it
        shutil.copytree(ROOT, self._tree, ignore=_LEFT_OUT)
        path = os.pathsep.join([str(self._tree), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._environ = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(self._tmp)}
        found = subprocess.run([sys.executable, "-c", "import mlaunch; print(mlaunch.__file__)"], cwd=directory,
                               env=self._environ, capture_output=True, text=True, check=True).stdout  # fmt: skip
        if not Path(found.strip()).is_relative_to(self._tree):
            raise SystemExit(f"the copy's tests would run {found.strip()}: install mlaunch editable, or not at all")

    @contextlib.contextmanager
    def patched(self, slip: Slip) -> Iterator[None]:
        """Make the slip, and take it back."""
        path = self._tree / "mlaunch" / slip.file
        right = path.read_text(encoding="utf-8")
        if right.count(slip.before) != 1:
            raise SystemExit(f"{slip.name} applies no longer: its text is {right.count(slip.before)} times in {path}")
        try:
            self._write(path, right.replace(slip.before, slip.after))
            yield
        finally:
            self._write(path, right)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # One is taken for current if size and second are the same.
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()

    def run(self, tests: Sequence[str]) -> tuple[int, str]:
        """Return the exit code of pytest, and its last words; -1: it took too long."""
        self._tmp.mkdir()
        options = [
            "-x",
            "-q",
            "--nightly",
            "-p",
            "no:cacheprovider",
            "--tb=no",
            f"--timeout={HANGS}",
            "--basetemp",
            self._tmp / "b",
        ]
        command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
        with (self._tmp / "output").open("w+b") as output:
            pytest = subprocess.Popen(command, cwd=self._tree, env=self._environ, stdin=subprocess.DEVNULL,
                                      stdout=output, stderr=output, start_new_session=True)  # fmt: skip
            try:
                code = pytest.wait(LIMIT)
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                _end_all()
            output.seek(0)
            text = output.read().decode(errors="replace")
        shutil.rmtree(self._tmp, ignore_errors=True)
        return code, text


def _end_all() -> None:
    """End what a slip has left, which has fallen to this process."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    linux.kill_children()
    wait_until(lambda: not [pid for pid in descendants(os.getpid()) if alive(pid)])


def tried(copy: Copy, slip: Slip) -> Tried:
    """Return what the tests say of a slip."""
    started = time.monotonic()
    with copy.patched(slip):
        code, text = copy.run(slip.tests)
    seconds = time.monotonic() - started
    if code == 0:
        return Tried(slip, MISSED, seconds)
    failed = _FAILED.search(text)
    if code == -1 or (failed is not None and "Timeout" in (failed[2] or "")):
        return Tried(slip, HUNG, seconds, failed[1] if failed else "")
    if code != 1:
        raise SystemExit(f"{slip.name}: its tests could not be run\n{text}")
    return Tried(slip, NOTICED, seconds, f"{failed[1]}: {failed[2] or ''}"[:110] if failed else "")


def wanted(names: Sequence[str]) -> list[Slip]:
    """Return the slips of these names and areas; all, if there are none."""
    if unknown := set(names) - {slip.name for slip in SLIPS} - {slip.area for slip in SLIPS}:
        raise SystemExit(f"no slip and no area is called {', '.join(sorted(unknown))}; --list shows them")
    return [slip for slip in SLIPS if not names or slip.name in names or slip.area in names]


def show_table(done: Sequence[Tried]) -> None:
    """Print what was noticed, by area."""
    print(f"\n{'area':<22}{'tried':>7}{NOTICED:>10}{HUNG:>18}")
    for area in dict.fromkeys(one.slip.area for one in done):
        of_area = [one.how for one in done if one.slip.area == area]
        print(f"{area:<22}{len(of_area):>7}{of_area.count(NOTICED):>10}{of_area.count(HUNG):>18}")
    hows = [one.how for one in done]
    print(f"{'all':<22}{len(hows):>7}{hows.count(NOTICED):>10}{hows.count(HUNG):>18}")


def try_all(slips: Sequence[Slip]) -> bool:
    """Try slips one after the other; True if the tests notice enough of them."""
    done = []
    with tempfile.TemporaryDirectory(prefix="slips-", ignore_cleanup_errors=True) as directory:
        copy = Copy(Path(directory))
        for slip in slips:
            done.append(tried(copy, slip))
            print(f"{done[-1].how:<16}{done[-1].seconds:5.0f} s  {slip.name:<28}{done[-1].by}", flush=True)
    show_table(done)
    return [one.how for one in done].count(NOTICED) >= WANTED * len(done)


def run_unpatched(slips: Sequence[Slip]) -> bool:
    """Run the tests of slips without them; True if all pass."""
    with tempfile.TemporaryDirectory(prefix="slips-", ignore_cleanup_errors=True) as directory:
        code, text = Copy(Path(directory)).run([*dict.fromkeys(test for slip in slips for test in slip.tests)])
    print(text)
    return code == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of slips or areas")
    parser.add_argument("--list", action="store_true", help="show the slips, and run nothing")
    parser.add_argument("--unpatched", action="store_true", help="run their tests without them")
    given = parser.parse_args()
    slips = wanted(given.names)
    if given.list:
        for slip in slips:
            print(f"{slip.area:<22}{slip.name:<42}{slip.file}: {slip.why}")
        return
    if importlib.util.find_spec("pytest_timeout") is None:
        raise SystemExit("needs pytest-timeout (extra: test)")
    linux.adopt_orphans()
    sys.exit(0 if (run_unpatched if given.unpatched else try_all)(slips) else 1)


if __name__ == "__main__":
    main()
