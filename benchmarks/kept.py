"""What ``mlaunch warm`` keeps, for measurements beside others that must not use it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping

_WARM = [sys.executable, "-m", "mlaunch", "warm"]


@contextlib.contextmanager
def kept(environ: Mapping[str, str], *options: str) -> Iterator[dict[str, str]]:
    """Keeps one; yields the environment in which commands find it: it stands in a directory of its own.

    ``options``: of ``mlaunch warm``.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = {**environ, "XDG_RUNTIME_DIR": folder}
        subprocess.run([*_WARM, *options], check=True, env=found, stdout=subprocess.DEVNULL)
        try:
            yield found
        finally:
            subprocess.run([*_WARM, "--stop"], check=True, env=found, stdout=subprocess.DEVNULL)
