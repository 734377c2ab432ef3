"""What SECURITY.rst says that nothing checks: whom each of its lines speaks of is played here, and gets that far."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlaunch import Client, Server, comm, launcher
from mlaunch.engines import Command
from tests import launches
from tests.another_user import greet, said_by_another_user
from tests.system.wire_of_command import Evil
from tests.unit.test_wire import Wire

TEE = 'file=$1; shift; "$@" | tee "$file"'


@pytest.mark.slow
def test_torchs_own_object_collectives_unpickle_what_comes(tmp_path: Path) -> None:
    """Of whoever stands in for a rank; ``mlaunch.comm`` does not."""

    def train() -> str:
        if dist.get_rank() == 0:  # which sends what torch's own would
            evil = torch.frombuffer(bytearray(pickle.dumps(Evil(str(tmp_path / "ran")))), dtype=torch.uint8)
            dist.broadcast(torch.tensor([evil.numel()]), 0)
            dist.broadcast(evil, 0)
            comm.broadcast_object(None)
            return ""
        dist.broadcast_object_list([None], 0)
        comm.broadcast_object(None)
        return "unpickled" if (tmp_path / "ran").exists() else "refused"

    assert launcher(train, 2)() == ["", "unpickled"]


def test_a_process_that_stands_in_for_a_rank_changes_tensors() -> None:
    """What is reduced is what comes, whoever has sent it."""

    def train() -> float:
        forged = torch.full((4,), 666.0) if dist.get_rank() == 0 else torch.ones(4)
        dist.all_reduce(forged)
        return float(forged[0])

    assert launcher(train, 2)() == [667.0] * 2


def test_ranks_of_other_launchers_share_no_secret(tmp_path: Path) -> None:
    """So whoever writes to their store, or to gloo's connections, can seal an object as they do."""

    def train() -> str:
        launches.be_no_rank()  # as in a process that torchrun has started
        if dist.get_rank() == 0:
            comm.broadcast_object(Evil(str(tmp_path / "ran")))
            return ""
        comm.broadcast_object(None)
        return "unpickled" if (tmp_path / "ran").exists() else "refused"

    assert launcher(train, 2)() == ["", "unpickled"]


def test_another_user_reaches_gloos_ports() -> None:
    """Their numbers are in ``/proc/net/tcp``, which all may read; the store's, beside them, turns strangers away."""

    def train() -> tuple[str, str]:
        dist.barrier()
        mine = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the list
                mine.add(os.readlink(f"/proc/self/fd/{fd}"))
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        port = next(int(row[1][9:], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine)

        def connect() -> str:
            with socket.socket() as end:
                end.settimeout(60)
                end.connect(("127.0.0.1", port))
                return "connected"

        found = said_by_another_user(connect), said_by_another_user(lambda: greet(int(os.environ["MASTER_PORT"])))
        dist.barrier()
        return found

    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    assert launcher(train, 2)() == [("connected", "turned away")] * 2


def test_a_server_answers_another_user_who_puts_an_old_value_back() -> None:
    """A client that has seen no newer one takes it."""
    with Server() as server:
        port = server.py_server_port
        assert said_by_another_user(lambda: greet(port)) == "served"
        ours = Client("127.0.0.1", port)
        stranger: Any = dist.PrefixStore("mlaunch/user", launches.connect_to_store(port))
        ours.user_set("key", "first")
        signed = stranger.get("value/key/1")
        ours.user_set("key", "second")
        stranger.set("value/key/1", signed)
        stranger.add("value/key/version", -1)
        assert Client("127.0.0.1", port).user_get("key") == "first"


@pytest.mark.nightly
def test_a_reader_of_what_a_command_starts_learns_its_secrets(tmp_path: Path) -> None:
    """They are printed, and passed on as the program passes it on."""
    together = ["sh", "-c", TEE, "sh", str(tmp_path / "read"), sys.executable, "-m", "tests.system.wire_of_command"]
    launcher(int, 1, engine=Command([*together, "nothing", str(tmp_path / "ran")]), machines=2, device_type="cpu")()
    secrets = launches.secrets_in((tmp_path / "read").read_bytes())
    assert len(secrets) == 2
    assert "" not in secrets


def test_a_reader_of_the_wire_reads_values() -> None:
    def set_value(port: int, secret: str) -> None:
        Client("127.0.0.1", port, secret=secret).user_set("key", "a plain value")

    async def pass_value() -> bytes:
        with Server() as server:
            async with Wire().to(server.py_server_port) as wire:
                await asyncio.to_thread(set_value, wire.port, server.secret)
        return bytes(wire.said[0])

    assert b"a plain value" in asyncio.run(pass_value())
