"""A real kernel that the tests of a file share, since one takes seconds to start.

A client of kernels keeps sockets and threads, so it is in a process of its own, which speaks JSON lines.
"""

from __future__ import annotations

import json
import math
import os
import queue
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

LIMIT = 120.0  # seconds, of every wait
_AGAIN = 10.0  # seconds after which an interrupt has come before the cell, and counted for nothing


@dataclass
class Ran:
    """What a kernel has sent of a cell: (kind, content, whether it belongs to that cell)."""

    messages: list[tuple[str, dict[str, Any], bool]] = field(default_factory=list)

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [content for kind, content, own in self.messages if own and kind in kinds]

    @property
    def printed(self) -> str:
        return "".join(content["text"] for content in self.of("stream"))

    @property
    def error(self) -> str:
        """The traceback that it shows, without colours."""
        lines = [line for content in self.of("error") for line in content["traceback"]]
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(lines))

    @property
    def forms(self) -> list[list[str]]:
        """The forms of what it displays, in order, less the lines that change."""
        shown = [content["data"] for content in self.of("display_data")]
        return [sorted(data) for data in shown if sorted(data) != ["text/plain"]]

    @property
    def result(self) -> str:
        """The plain form of its value; "" without one."""
        return "".join(content["data"]["text/plain"] for content in self.of("execute_result"))


class Kernel:
    """Runs cells. It and what it starts end with ``close``."""

    def __init__(self, environ: dict[str, str]) -> None:
        # With pytest's variable in its environment a kernel does not show what children print.
        environ = {name: value for name, value in environ.items() if name != "PYTEST_CURRENT_TEST"}
        environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "tests.kernels"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )

    def run(self, source: str, *, interrupt: str | float = "", until: str = "") -> Ran:
        """Runs a cell.

        ``interrupt``: a text in what it sends after which it is interrupted, or seconds after its beginning;
        ``until``: a text in what the kernel sends, then or later, before which this does not return.
        """
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        json.dump({"source": source, "interrupt": interrupt, "until": until}, self._driver.stdin)
        self._driver.stdin.write("\n")
        self._driver.stdin.flush()
        answer = self._driver.stdout.readline()
        assert answer, "the kernel's client has ended"
        return Ran([(kind, content, own) for kind, content, own in json.loads(answer)])

    def close(self) -> None:
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.close()
        self._driver.wait(LIMIT)
        self._driver.stdout.close()


def _drive() -> None:
    """Starts a kernel and runs what stdin says, a line each."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", env=dict(os.environ))
    try:
        for line in sys.stdin:
            print(json.dumps(_run(manager, client, **json.loads(line)), default=str), flush=True)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _run(manager: Any, client: Any, source: str, interrupt: str | float, until: str) -> list[Any]:
    asked, found, is_idle = client.execute(source), [], False
    interrupts_at, due = math.inf, time.monotonic() + LIMIT
    while not is_idle or until not in json.dumps(found, default=str):
        now = time.monotonic()
        if now >= interrupts_at and not is_idle:
            interrupts_at = now + _AGAIN
            manager.interrupt_kernel()
        try:
            message = client.get_iopub_msg(timeout=max(min(interrupts_at, due) - now, 0.001))
        except queue.Empty:
            assert now < due, found
            continue
        content, own = message["content"], message["parent_header"].get("msg_id") == asked
        found.append([message["msg_type"], content, own])
        if isinstance(interrupt, float) and own and message["msg_type"] == "execute_input":
            interrupts_at = time.monotonic() + interrupt
        elif isinstance(interrupt, str) and interrupt and interrupt in content.get("text", ""):
            interrupts_at, interrupt = 0.0, ""
        is_idle = is_idle or (own and content.get("execution_state") == "idle")
    return found


if __name__ == "__main__":
    _drive()
