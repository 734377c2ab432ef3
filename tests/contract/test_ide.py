"""``debug="debugpy"``: ranks that wait for an IDE, as which a small client of its protocol attaches."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlaunch import Server, launcher
from tests.conftest import ROOT
from tests.processes import wait_until
from tests.users import users_environ

debugpy = pytest.importorskip("debugpy", reason="debugpy is not installed (extra: debug)")


class Client:
    """Speaks the Debug Adapter Protocol."""

    def __init__(self, host: str, port: int) -> None:
        self._connection = socket.create_connection((host, port), timeout=60)
        self._stream = self._connection.makefile("rwb")
        self._number = 0

    def ask(self, command: str, **arguments: Any) -> None:
        self._number += 1
        text = json.dumps({"seq": self._number, "type": "request", "command": command, "arguments": arguments}).encode()
        self._stream.write(b"Content-Length: %d\r\n\r\n" % len(text) + text)
        self._stream.flush()

    def hear(self, kind: str, name: str) -> Any:
        """The body of the next response or event of this name."""
        while True:
            length = 0
            while (line := self._stream.readline().strip()) != b"":
                length = int(line.partition(b":")[2]) if line.lower().startswith(b"content-length") else length
            message = json.loads(self._stream.read(length))
            if (message["type"], message.get("command" if kind == "response" else "event")) == (kind, name):
                assert message.get("success", True), message
                return message.get("body")

    def attach(self, **arguments: Any) -> None:
        self.ask("initialize", adapterID="python", pathFormat="path")
        self.hear("response", "initialize")
        self.ask("attach", justMyCode=False, **arguments)
        self.hear("event", "initialized")
        self.ask("configurationDone")

    def read_on(self) -> None:
        """Takes whatever is said, to its end."""
        with contextlib.suppress(OSError):
            while self._stream.readline():
                pass

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):  # the other end has closed it
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._stream.close()
        self._connection.close()


@pytest.mark.slow
def test_a_rank_waits_for_an_ide(capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> float:
        scale = float(dist.get_rank())
        if dist.get_rank() == 1:
            breakpoint()
        total = torch.tensor(scale)
        dist.all_reduce(total)
        return float(total)

    said = ""

    def is_there() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return "launch.json: " in said and "\n" in said.partition("launch.json: ")[2]

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(launcher(train, 2, device_type="cpu", debug="debugpy:1", timeout=1))
        wait_until(is_there)
        entry = json.loads(said.partition("launch.json: ")[2].partition("\n")[0])
        assert re.fullmatch(r"rank 1 of .*train\(\)", entry["name"])
        assert (entry["type"], entry["request"], entry["connect"]["host"]) == ("debugpy", "attach", "127.0.0.1")
        client = Client(**entry["connect"])
        client.attach()
        thread = client.hear("event", "stopped")["threadId"]
        client.ask("stackTrace", threadId=thread)
        frames = client.hear("response", "stackTrace")["stackFrames"]
        assert frames[0]["source"]["path"] == os.path.abspath(__file__)
        client.ask("continue", threadId=thread)
        assert call.result() == [1.0, 1.0]
        client.close()


def test_a_rank_that_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"debug='debugpy:0,2' with 2 rank\(s\): allowed: ranks from 0 to 1"):
        launcher(print, 2, device_type="cpu", debug="debugpy:0,2")()


def test_without_debugpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ModuleNotFoundError, match=r"debug='debugpy' needs debugpy \(extra: debug\)"):
        launcher(print, 2, device_type="cpu", debug="debugpy")()


FOLLOWED = """
import os, sys
from mlaunch import launcher
started = {"n_gpus": 2, "device_type": "cpu", "output": "raw", "start_method": sys.argv[1]}
print(*launcher(os.getpid, **started)(), flush=True)
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_an_ide_that_follows_children_is_shown_ranks_alone(tmp_path: Path, start_method: str) -> None:
    """Fork server and agents run without its debugger, and wait for it nowhere."""
    (tmp_path / "train.py").write_text(FOLLOWED)
    with Server() as server:  # a port that is free once the server has ended
        port = server.py_server_port
    listen = ["--listen", f"127.0.0.1:{port}", "--wait-for-client"]
    debugged = [sys.executable, "-m", "debugpy", *listen, "train.py", start_method]
    environ = {**users_environ(), "PYTHONPATH": str(ROOT)}
    with (tmp_path / "said").open("w") as said:  # no pipe: debugpy's own server has it, too, until its clients leave
        caller = subprocess.Popen(debugged, cwd=tmp_path, env=environ, stdout=said)
    ide_itself, ranks = connected(port), []
    ide_itself.attach(subProcess=True)
    shown = []
    for _ in range(2):
        body = ide_itself.hear("event", "debugpyAttach")
        shown.append(body["subProcessId"])
        ranks.append(Client(body["connect"]["host"], body["connect"]["port"]))
        ranks[-1].attach(subProcessId=body["subProcessId"])
    with ThreadPoolExecutor(3) as pool:
        for client in (ide_itself, *ranks):
            pool.submit(client.read_on)
        assert caller.wait(120) == 0
        for client in (ide_itself, *ranks):
            client.shut_down()
    lines = (tmp_path / "said").read_text().splitlines()
    assert sorted(map(int, lines[-1].split())) == sorted(shown)
    for rank, pid in enumerate(map(int, lines[-1].split())):
        assert f"rank {rank} of getpid() is process {pid}, which the IDE calls Subprocess {pid}" in lines
    for client in (ide_itself, *ranks):
        client.close()


def connected(port: int) -> Client:
    """A client of an IDE's server that is about to listen."""
    found: list[Client] = []

    def try_it() -> bool:
        with contextlib.suppress(ConnectionError):
            found.append(Client("127.0.0.1", port))
        return bool(found)

    wait_until(try_it)
    return found[0]
