"""How much code a plain call runs in the caller, so that its way does not grow unseen."""

from __future__ import annotations

import os
import re
import subprocess

from tests.conftest import ROOT
from tests.imported import IMPORTED


def test_a_plain_call_runs_few_functions_in_the_caller() -> None:
    """The limits are above what is measured, by a tenth: lower them when the way becomes shorter."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [IMPORTED, "-m", "tests.hops"]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    functions, files = map(int, re.findall(r"\d+", done.stdout))
    assert (functions <= 292, files <= 66) == (True, True), done.stdout
