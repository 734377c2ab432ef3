"""The suite on a busy machine: ``python -m tests.busy [TIMES] [ARGUMENTS OF PYTEST]``, five times unless told.

Beside it run four processes that only spin, a writer that fills the page cache, and another suite, whose outcome does
not count. It ends at the first run that fails, with pytest's exit code: what fails there and passes alone has a race,
which is to be mended at its cause.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPINNERS = 4
SPIN = "while True: pass"
WRITE = """
import os, sys
block = b"x" * (1 << 20)
while True:
    with open(sys.argv[1], "wb") as file:
        for _ in range(2048):
            file.write(block)
"""
SUITE = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
AGAIN = """
import subprocess, sys
while True:
    subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


@contextlib.contextmanager
def neighbours(folder: Path) -> Iterator[None]:
    """Keep the machine busy; end all of it afterwards, each in a session of its own."""
    commands = [[sys.executable, "-c", SPIN]] * SPINNERS
    commands += [[sys.executable, "-c", WRITE, str(folder / "written")], [sys.executable, "-c", AGAIN, *SUITE]]
    started = [subprocess.Popen(command, cwd=ROOT, start_new_session=True) for command in commands]
    try:
        yield
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def main(times: int, arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by which the neighbours would stay
    with tempfile.TemporaryDirectory(prefix="mlaunch-busy-") as folder, neighbours(Path(folder)):
        for number in range(1, times + 1):
            code = subprocess.run([*SUITE, "-q", *arguments], cwd=ROOT, check=False).returncode
            print(f"run {number} of {times}: exit code {code}, load {os.getloadavg()[0]:.0f}", flush=True)
            if code:
                return code
    return 0


if __name__ == "__main__":
    times = int(sys.argv.pop(1)) if sys.argv[1:] and sys.argv[1].isdigit() else 5
    sys.exit(main(times, sys.argv[1:]))
