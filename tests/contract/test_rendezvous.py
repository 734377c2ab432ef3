"""``Server`` and ``Client``: what processes share besides collectives."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import mlaunch
from mlaunch import Client, Server, launcher
from tests import launches
from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.processes import wait_gone

LIMIT = timedelta(seconds=60)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One for all, so each test has keys of its own."""
    with Server() as server:
        yield server


def client(server: Server, **options: Any) -> Client:
    return Client("127.0.0.1", server.py_server_port, **options)


def test_values_under_names(server: Server) -> None:
    ours, theirs = client(server), client(server)
    ours.user_set("key", {"big": 2**70, 1: (None, [])})
    assert theirs.user_get("key") == {"big": 2**70, 1: (None, [])}
    ours.user_set("key", None)
    assert theirs.user_pop("key") is None
    with pytest.raises(TimeoutError, match=r"user_get\('key'\): nobody has set it within 0.05 s"):
        theirs.user_get("key", timeout=0.05)


def test_a_value_that_is_set_again_takes_no_more_place(server: Server) -> None:
    ours = client(server)
    for number in range(3):
        ours.user_set("again", number)
    before = ours._store.num_keys()
    ours.user_set("again", 3)
    assert ours._store.num_keys() == before


def test_a_value_of_a_stranger_is_not_unpickled(server: Server) -> None:
    client(server).user_set("hid", 1)
    with pytest.raises(ValueError, match=r"user_get\('hid'\): the value has another signature: it was set by a client"):
        client(server, secret="hush").user_get("hid")
    client(server, secret="hush").user_set("hid", 2)
    assert client(server, secret="hush").user_get("hid") == 2


def test_a_value_that_the_store_would_not_take_is_refused(server: Server) -> None:
    """torch's hangs up, and so does ours for ranks of several machines; the connection is of no use then."""
    ours = client(server, timeout=60)
    most = launches.longest_value()
    fits = b"x" * (most - len(pickle.dumps(b"x" * most)) + most)
    ours.user_set("large", fits)
    assert ours.user_get("large") == fits
    for call in (lambda value: ours.user_set("large", value), lambda value: ours.bcast_val(value, "large", 1)):
        with pytest.raises(
            ValueError, match=rf"the value takes {most + 1} bytes pickled, and the store takes {most} at"
        ):
            call(fits + b"x")
    ours.user_set("small", 1)
    assert ours.user_get("small") == 1


class Bomb:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def test_a_strangers_value_in_the_store_is_not_unpickled(server: Server, tmp_path: Path) -> None:
    """With defaults on both sides: anybody on this machine can write to the store."""
    ours = client(server, timeout=60)
    stranger: Any = dist.PrefixStore("mlaunch/user", launches.connect_to_store(server.py_server_port))
    for place in ("value/planted/1", "bcast/planted/0/0/value"):
        stranger.set(place, b"\0" * 32 + pickle.dumps(Bomb(tmp_path / "ran")))
    stranger.add("value/planted/version", 1)
    for call in (ours.user_get, ours.user_pop, lambda key: ours.bcast_val(None, key, 1)):
        with pytest.raises(ValueError, match="the value has another signature"):
            call("planted")
    assert not (tmp_path / "ran").exists()


def test_a_signature_holds_for_one_place(server: Server) -> None:
    """A signed value that somebody moved, or brought back, is not the one that was put there."""
    ours = client(server, timeout=60)
    ours.user_set("old", "first")
    stranger: Any = dist.PrefixStore("mlaunch/user", launches.connect_to_store(server.py_server_port))
    signed = stranger.get("value/old/1")
    ours.user_set("old", "second")
    stranger.set("value/old/2", signed)
    ours.user_set("new", "third")
    stranger.set("value/new/1", signed)
    for key in ("old", "new"):
        with pytest.raises(ValueError, match="the value has another signature"):
            ours.user_get(key)


def test_an_old_value_that_is_put_back_is_refused(server: Server) -> None:
    """With its own version, so that its signature is right."""
    ours = client(server, timeout=60)
    stranger: Any = dist.PrefixStore("mlaunch/user", launches.connect_to_store(server.py_server_port))
    ours.user_set("back", "first")
    signed = stranger.get("value/back/1")
    ours.user_set("back", "second")
    assert ours.user_get("back") == "second"
    stranger.set("value/back/1", signed)
    stranger.add("value/back/version", -1)
    for call in (ours.user_get, ours.user_pop):
        with pytest.raises(ValueError, match="the store has gone back to version 1: somebody else writes to it"):
            call("back")


def test_a_client_without_a_secret_carries_no_values(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"MLAUNCH_SECRET_{server.py_server_port}"
    assert os.environ[name] == server.secret
    with monkeypatch.context() as patch:
        patch.delenv(name)
        ours = client(server, timeout=60)
    calls = (lambda: ours.user_set("k", 1), lambda: ours.user_get("k"), lambda: ours.bcast_val(1, "k", 1))
    for call in calls:
        with pytest.raises(ValueError, match=rf"has no secret to sign values with; .* {name} in the environment"):
            call()
    ours.group_barrier("k", 1)  # which carries none
    given = client(server, secret=server.secret)
    given.user_set("k", 1)
    assert client(server).user_get("k") == given.user_get("k") == 1


def test_a_closed_server_leaves_no_secret() -> None:
    before = dict(os.environ)
    with Server() as first, Server() as second:
        assert first.secret != second.secret
        assert len(os.environ.keys() - before.keys()) == 2
    assert dict(os.environ) == before


def test_children_find_the_secret(server: Server, run_script: Any) -> None:
    client(server).user_set("told", "value")
    done = run_script(f"import mlaunch\nprint(mlaunch.Client(port={server.py_server_port}).user_get('told', 60))")
    assert done.stdout == "value\n", done.stderr


def test_ranks_sign_for_their_launch_alone() -> None:
    def train() -> tuple[str, str]:
        mlaunch.get_client().user_set("k", 1)
        stranger = Client(store=dist.distributed_c10d._get_default_store(), secret="")
        with pytest.raises(ValueError, match="the value has another signature"):
            stranger.user_get("k")
        secret, _, launch = launches.secret_here().partition("/")
        return secret, launch

    first, second = (launcher(train, 1)()[0] for _ in range(2))
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_value_is_waited_for_and_popped_by_one(server: Server) -> None:
    with ThreadPoolExecutor(3) as pool:
        popped = [pool.submit(lambda: client(server).user_pop("popped", 60)) for _ in range(3)]
        source = client(server)
        for number in range(3):
            source.user_set("popped", number)
            while True:  # the next may come once this one is taken
                try:
                    source.user_get("popped", 0.01)
                except TimeoutError:
                    break
        assert sorted(future.result(60) for future in popped) == [0, 1, 2]


def test_a_barrier_may_be_used_again(server: Server) -> None:
    passed: list[int] = []

    def come(_number: int) -> None:
        ours = client(server)
        for turn in range(5):
            ours.group_barrier("0,1,2", 3, 60)
            passed.append(turn)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(come, range(3)))
    assert sorted(passed) == passed == [turn for turn in range(5) for _ in range(3)]


def test_a_barrier_tells_who_came(server: Server) -> None:
    with pytest.raises(TimeoutError, match=rf"group_barrier\('h'\): 1 of 2 came within 0.1 s: .* pid {os.getpid()}$"):
        client(server, timeout=0.1).group_barrier("h", 2)


@pytest.mark.parametrize("value", [7, 0, None])
def test_a_value_is_broadcast_to_all(server: Server, value: object) -> None:
    clients = [client(server, timeout=60) for _ in range(3)]

    def take_part(number: int, turn: int) -> object:
        return clients[number].bcast_val(value if number == turn else None, f"sent {value}", 3)

    left = []
    with ThreadPoolExecutor(3) as pool:
        for turn in range(3):
            assert list(pool.map(take_part, range(3), [turn] * 3)) == [value] * 3
            left.append(clients[0]._store.num_keys())
    assert left[0] == left[1] == left[2]


def test_nobody_answers() -> None:
    with Server() as server:
        port = server.py_server_port
    with pytest.raises(ConnectionError, match=f"no rendezvous server answers at 127.0.0.1, port {port}: .*refused"):
        Client("127.0.0.1", port, timeout=5)
    with pytest.raises(ValueError, match="port=0: a client must know the port on which the server listens"):
        Client()


def test_a_port_that_is_taken(server: Server) -> None:
    with pytest.raises(OSError, match="Address already in use"):
        Server(server.py_server_port)


def test_ctrl_c_reaches_one_who_waits(server: Server, run_script: Any) -> None:
    done = run_script(
        "import os, signal, threading, mlaunch\n"
        f"ours = mlaunch.Client(port={server.py_server_port})\n"
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "ours.user_get('never', 600)\n"
    )
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


def test_a_server_ends_with_its_process() -> None:
    code = (
        "import os, signal, mlaunch\n"
        "server = mlaunch.Server()\n"
        "print(server._process.pid, flush=True)\n"
        "mlaunch.Client(port=server.py_server_port).user_set('a', 1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([IMPORTED, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_gone([int(done.stdout)])


def test_a_server_alone() -> None:
    command = [IMPORTED, "-m", Server.__module__, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        told = re.fullmatch(r"serving at (\S+), port (\d+)\n", process.stdout.readline())
        assert told is not None
        pattern = rf"clients need MLAUNCH_SECRET_{told[2]}=(\w+) in their environment\n"
        copied = re.fullmatch(pattern, process.stdout.readline())
        assert copied is not None
        ours = Client(told[1], int(told[2]), secret=copied[1])
        ours.user_set("a", 1)
        assert ours.user_get("a") == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_ranks_share_the_launchs_own_server() -> None:
    def train() -> Any:
        ours, rank = mlaunch.get_client(), mlaunch.get_rank()
        ours.user_set(f"of {rank}", rank * 10)
        other = ours.user_get(f"of {1 - rank}")
        text = ""
        if rank == 0:
            try:
                ours.group_barrier("0,1", 2, timeout=0.2)
            except TimeoutError as error:
                text = str(error)
            ours.user_set("done", text)
        return other, ours.bcast_val(rank or None, "key", 2), ours.user_get("done"), mlaunch.get_py_server_addr()[0]

    text = "group_barrier('0,1'): 1 of 2 came within 0.2 s: rank 0; missing: rank 1"
    assert launcher(train, 2)() == [(10, 1, text, "127.0.0.1"), (0, 1, text, "127.0.0.1")]
    assert launcher(train, 2)() == [(10, 1, text, "127.0.0.1"), (0, 1, text, "127.0.0.1")]
