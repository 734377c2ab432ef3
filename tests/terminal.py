"""A script in a terminal of its own, as a person has it: what it shows, and what is typed."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from pathlib import Path

from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.users import users_environ

# The terminal that is standard input becomes the one of its session: Ctrl-C, and its end, reach the script.
BEGIN = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
_LIMIT = 60.0  # seconds for words to come
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


class Terminal:
    """Runs a script in it. ``seen``: all that it has shown."""

    def __init__(self, script: Path, *args: str, **variables: str) -> None:
        self.fd, theirs = pty.openpty()
        environ = {**users_environ(), "PYTHONPATH": str(ROOT), "TERM": "dumb", **variables}
        script.write_text(BEGIN + script.read_text())
        self.process = subprocess.Popen(
            [IMPORTED, str(script), *args], stdin=theirs, stdout=theirs, stderr=theirs, env=environ, cwd=script.parent,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""
        self._at = 0  # what follows was not asked for yet

    def until(self, words: str) -> str:
        """What it shows from where the last one ended until some words."""
        end = time.monotonic() + _LIMIT
        while words not in self.seen[self._at :]:
            assert self._read(end), f"no {words!r} in:\n{self.seen}"
        start, self._at = self._at, self.seen.index(words, self._at) + len(words)
        return self.seen[start : self._at]

    def type(self, line: str) -> None:
        """Types a line; Ctrl-C is "\\x03", the end of input "\\x04"."""
        os.write(self.fd, line.encode() if line in {"\x03", "\x04"} else f"{line}\n".encode())

    def end(self) -> int:
        """Waits for its end; returns its exit code."""
        end = time.monotonic() + _LIMIT
        while self._read(end):
            pass
        code = self.process.wait(_LIMIT)
        self.close()
        return code

    def close(self) -> None:
        """Closes the window."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _read(self, end: float) -> bool:
        if not select.select([self.fd], [], [], max(0.0, end - time.monotonic()))[0]:
            return False
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # nobody has the other end any more
            return False
        self.seen += _ESCAPES.sub("", data.decode(errors="replace"))
        return bool(data)
