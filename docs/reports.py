"""Prints the reports that documentation and README show, as they really print: python docs/reports.py

Only what differs from machine to machine is replaced: the host's name, pids, directories, sizes of memory.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import mlaunch

HERE = Path(__file__).resolve().parent
KINDS = ("raised", "killed", "stuck")


def report(kind: str) -> str:
    """What a script whose launch fails in this way prints."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(HERE / "reports" / "train.py", directory)
        environ = {**os.environ, "FAIL": kind, "PYTHONPATH": str(HERE.parent)}
        command = [sys.executable, "train.py"]
        done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, encoding="utf-8", check=False)
    package = str(Path(mlaunch.__file__).parent.parent)
    text = done.stderr.replace(f"{directory}/", "").replace(f"{package}/", "")
    text = re.sub(rf"host {re.escape(socket.gethostname())}\b", "host gpu7", text)
    text = re.sub(r"\bpid \d+", "pid 4242", text)
    text = re.sub(r"memory was [\d.]+ MiB", "memory was 182 MiB", text)
    return re.sub(r'(launcher.py", line) \d+', r"\1 136", text)


if __name__ == "__main__":
    for kind in KINDS:
        (HERE / "reports" / f"{kind}.txt").write_text(report(kind), encoding="utf-8")
