"""How much code a plain call runs in each of its processes, so that its way does not grow unseen."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests import launches
from tests.conftest import ROOT

# Functions and files, by process; and modules loaded. Lower them when the way becomes shorter; never raise them. They
# are some 2% above what a busy machine takes: there an agent takes 27 steps that a quiet one does not.
LIMITS = {
    "caller": (238, 41),
    "fork server": (79, 10),
    "agent": (286, 39),
    "rank": (158, 32),
    "all": (662, 81),
}
MODULES = {"caller": 75, "rank": 92}
FEATURES = {"caller": {"warm"}}  # of which something is loaded: it is asked for a fork server


def test_a_plain_call_runs_few_functions() -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.hops"]  # fresh: modules are counted
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    found = re.findall(r"(.+): (\d+) functions in (\d+) files(?:, (\d+) modules loaded from (.+))?", done.stdout)
    assert [role for role, *_ in found] == [*LIMITS]
    for role, functions, files, modules, folders in found:
        most_functions, most_files = LIMITS[role]
        assert (int(functions) <= most_functions, int(files) <= most_files) == (True, True), done.stdout
        assert int(modules or 0) <= MODULES.get(role, 0), done.stdout
        assert launches.feature_names() & {*folders.split()} == FEATURES.get(role, set()), done.stdout
