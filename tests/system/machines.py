"""The machines of one launch: a calling process on each of a network's hosts, and what it says."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

from tests.system.network import Host, Network, end, free_port

PORT = free_port()  # of all tests in this process, which run one after the other


class Machines:
    """The processes of one launch, in the order of their machines."""

    def __init__(self, network: Network, sizes: tuple[int, ...], **options: Any) -> None:
        self._network = network
        self._sizes = sizes
        self._options = {"join_timeout": 60, "grace_period": 1, **options}
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self._taken: list[tuple[Host, subprocess.Popen[str]]] = []
        self._busy: set[int] = set()  # pids

    def host(self, index: int) -> Host:
        return self._network.hosts[index]

    def start(
        self, index: int, how: dict[str, Any] | None = None, environ: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        asked = {
            "n_gpus": self._sizes[index],
            "world_size": sum(self._sizes),
            "rank_start": sum(self._sizes[:index]),
            "master_ip": self.host(0).address,
            "port": PORT,
            **self._options,
            **options,
        }
        process = self._process(index)
        assert process.stdin is not None
        process.stdin.write(json.dumps([asked, how or {}, environ or {}]) + "\n")
        process.stdin.flush()
        self._busy.add(process.pid)
        return process

    def _process(self, index: int) -> subprocess.Popen[str]:
        """The one of this machine, if it has nothing to do; else another."""
        process = self.processes.get(index)
        if process is None or process.pid in self._busy or process.poll() is not None:
            process = self.processes[index] = self.host(index).take()
            self._taken.append((self.host(index), process))
        return process

    def start_all(self, how: dict[str, Any] | None = None, **options: Any) -> None:
        for index in range(len(self._sizes)):
            self.start(index, how, **options)

    def until(self, index: int, word: str) -> None:
        """Waits until a machine's ranks have printed a word."""
        stdout = self.processes[index].stdout
        assert stdout is not None
        for line in stdout:
            if re.fullmatch(rf"\[{self.host(index).name}:[\d,-]+\] {word}\n", line):
                return
        raise AssertionError(f"machine {index} ended without {word!r}: {self.processes[index].communicate()[1]}")

    def until_waiting(self, index: int) -> str:
        """Waits for the line that says what a machine waits for."""
        stderr = self.processes[index].stderr
        assert stderr is not None
        for line in stderr:
            if "waits for its other machines" in line:
                return line
        raise AssertionError(f"machine {index} ended without waiting")

    def end(self, index: int) -> dict[str, Any]:
        process = self.processes[index]
        assert process.stdout is not None
        assert process.stderr is not None
        watchdog = threading.Timer(90, process.kill)
        watchdog.start()
        try:
            said = next((line for line in process.stdout if line.startswith("{")), "")
            err = "".join(iter(process.stderr.readline, "over\n" if said else ""))
        finally:
            watchdog.cancel()
            watchdog.join()
        assert said, err
        self._busy.discard(process.pid)
        return {**json.loads(said), "stderr": err}

    def ends(self) -> list[dict[str, Any]]:
        return [self.end(index) for index in sorted(self.processes)]

    def close(self) -> None:
        """Those that have nothing to do stay for the next test."""
        over = []
        for host, process in self._taken:
            if process.pid in self._busy or process.poll() is not None or host.idle is not None:
                over.append(process)
            else:
                host.idle = process
        end(over)
        self._network.warm()


@contextlib.contextmanager
def launched(network: Network, *sizes: int, **options: Any) -> Iterator[Machines]:
    machines = Machines(network, sizes, **options)
    try:
        yield machines
    finally:
        machines.close()
