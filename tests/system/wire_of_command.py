"""Starts two processes as ``mpirun`` does, the second behind a wire on which somebody stands.

argv: what that one does ("nothing", "adds to what the caller says", "adds to what the member says", "changes what the
member says"), the file that a pickle of theirs makes, the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from tests import launches

_READ = 1 << 16


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def frame(path: str) -> bytes:
    """As one of ours, with a code that its sender has no secret for."""
    record = pickle.dumps(Evil(path))
    return struct.pack("!IQ", len(record), 0) + record + bytes(32) + b"\n"


class Wire:
    """Carries between the first process and the second, at ``port`` on its machine."""

    def __init__(self, attack: str, path: str, port: int) -> None:
        self._attack, self._path, self._port = attack, path, port
        self._greeted = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))

    def carry(self) -> None:
        near, _ = self.listener.accept()
        far = socket.create_connection(("127.0.0.1", self._port))
        for source, sink, side in ((near, far, "caller"), (far, near, "member")):
            threading.Thread(target=self._pump, args=(source, sink, side), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, side: str) -> None:
        change: Callable[[bytes], bytes] = bytes
        with contextlib.suppress(OSError):
            while data := source.recv(_READ):
                if self._greeted.is_set() and side in self._attack:
                    change = self._add if "adds" in self._attack else self._turn
                sink.sendall(change(data))
                if side == "member" and launches.marks()[1] in data:
                    self._greeted.set()
            sink.shutdown(socket.SHUT_WR)

    def _add(self, data: bytes) -> bytes:
        return frame(self._path) + data

    def _turn(self, data: bytes) -> bytes:
        return data[:20] + bytes([data[20] ^ 1]) + data[21:] if len(data) > 20 else data


def start(command: list[str], number: int, **streams: Any) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_SIZE": "2"}
    return subprocess.Popen(command, env=environ, **streams)


def main(attack: str, path: str, *command: str) -> None:
    first = start([*command], 0)
    second = start([*command], 1, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert second.stdout is not None
    mark, _ = launches.marks()
    for line in second.stdout:
        if line.startswith(mark):
            said = json.loads(line[len(mark) :])
            wire = Wire(attack, path, said["port"])
            threading.Thread(target=wire.carry, daemon=True).start()
            said.update(addresses=["127.0.0.1"], port=wire.listener.getsockname()[1])
            os.write(1, b"\n" + mark + json.dumps(said).encode() + b"\n")
            break
    os.close(1)
    first.wait()
    second.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
