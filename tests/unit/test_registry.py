"""Sockets of launches in their directory, and who comes there: whatever has died, floods, or is deaf."""

from __future__ import annotations

import errno
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlaunch.base import linux
from mlaunch.base.text import in_two_units
from mlaunch.caller import running_launches
from mlaunch.cli import launch_commands, main
from mlaunch.protocol import registry
from mlaunch.protocol.registry import ASK, END, STATUS, Reception, answer
from tests import launches

LIMIT = 60.0  # seconds


@pytest.fixture(autouse=True)
def no_other_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches.hide_other_launches(monkeypatch)


def test_files_of_a_killed_launch_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    registry.listen(os.environ, "dead").close()
    assert os.listdir(tmp_path / "mlaunch") == ["dead.sock"]
    assert running_launches.ask(b"status") == []
    assert os.listdir(tmp_path / "mlaunch") == []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as unfinished:  # it was killed at this moment
        unfinished.bind(str(tmp_path / "mlaunch" / "dead.new"))
    registry.remove(os.environ, "dead")
    assert os.listdir(tmp_path / "mlaunch") == []


def test_files_of_no_dead_launch_are_neither_replaced_nor_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not a launch that runs, of the same name; no file of another kind; nothing in another directory."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "users.sock").write_text("the user's")
    with registry.listen(os.environ, "alive"):
        for name in ("alive", "file", "../users", "/tmp/users"):
            (tmp_path / "mlaunch" / "file.sock").write_text("the user's")
            with pytest.raises(OSError, match=r"File exists|no launch has such an id"):
                registry.listen(os.environ, name)
            assert sorted(os.listdir(tmp_path / "mlaunch")) == ["alive.sock", "file.sock"]
            registry.remove(os.environ, name)
            assert registry.connect(os.environ, "../users") is None
        assert sorted(os.listdir(tmp_path / "mlaunch")) == ["alive.sock", "file.sock"]
        other = registry.connect(os.environ, "alive")
        assert other is not None
        other.close()
    assert (tmp_path / "users.sock").read_text() == (tmp_path / "mlaunch" / "file.sock").read_text() == "the user's"


def test_a_launch_that_does_not_listen_yet_is_not_taken_for_a_dead_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    class Looking(socket.socket):
        def listen(self, *args: int) -> None:
            assert running_launches.ask(b"status") == []  # another process asks at this moment
            super().listen(*args)

    monkeypatch.setattr(registry.socket, "socket", Looking)
    with registry.listen(os.environ, "new"):
        assert os.listdir(tmp_path / "mlaunch") == ["new.sock"]
        os.utime(tmp_path / "mlaunch" / "new.sock", (0, 0))
        (tmp_path / "mlaunch" / "new.sock").rename(tmp_path / "mlaunch" / "killed.new")
        assert running_launches.ask(b"status") == []
        assert os.listdir(tmp_path / "mlaunch") == []


def test_the_parts_of_one_launch_on_a_machine_are_stopped_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[bytes, str]] = []

    def ask(word: bytes, start: str = "", **_: object) -> list[dict[str, Any]]:
        asked.append((word, start))
        part = {"id": "6d064c40f1", "function": "f()", "world_size": 2, "restart_count": 0, "age": 2.0, "caller": 7}
        return [{**part, "ranks": [{"rank": rank}]} for rank in range(2)]

    monkeypatch.setattr(launch_commands, "ask", ask)
    assert main(["stop", "--now", "6d06"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in told] == [["ending", "6d064c40"]] * 2 + [["ended"]]
    assert asked == [(STATUS, "6d06"), (END, "6d064c40f1")]  # which goes to both


def test_silent_visitors_make_way() -> None:
    """Nor do they take the descriptors of those who speak: the oldest leave."""
    environ = {"XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]}
    reception = Reception(environ, "crowded")
    reception.open()
    silent = []
    for _ in range(100):
        silent.append(registry.connect(environ, "crowded"))
        assert reception.take(reception.fds()[:1]) == []
    assert len(reception.fds()) < 40
    silent[-1].send(STATUS)
    ((visitor, word),) = reception.take(linux.wait_readable(reception.fds(), LIMIT))
    assert word == STATUS
    answer(visitor, {})
    for one in silent:
        one.close()
    reception.close()


def test_no_descriptor_for_a_visitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener would stay readable, and the agent would spin."""
    environ = {"XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]}
    reception = Reception(environ, "poor")
    reception.open()
    with registry.connect(environ, "poor"):
        listener = reception.fds()
        refusing = SimpleNamespace(
            accept=raise_emfile, fileno=reception._listener.fileno, close=reception._listener.close
        )
        monkeypatch.setattr(reception, "_listener", refusing)
        assert reception.take(listener) == []
        assert reception.fds() == []
    assert registry.connect(environ, "poor") is None


def raise_emfile() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.slow
def test_a_launch_whose_visitors_queue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is slow to take them in is waited for; one that is stopped is left out."""
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with registry.listen(environ, "slow") as agent:
        silent = list(iter(lambda: registry.connect(environ, "slow"), None))
        monkeypatch.setattr(running_launches, "_QUEUE_TIMEOUT", 1)
        assert running_launches.ask(STATUS) == []
        monkeypatch.setattr(running_launches, "_QUEUE_TIMEOUT", int(LIMIT))
        with ThreadPoolExecutor(1) as asking:
            asked = asking.submit(running_launches.ask, STATUS)
            for _ in silent:
                agent.accept()[0].close()
            linux.wait_readable([agent.fileno()], LIMIT)
            one, _ = agent.accept()
            assert one.recv(64) == STATUS
            answer(one, {"id": "slow"})
            assert asked.result(LIMIT) == [{"id": "slow"}]
    for visitor in silent:
        visitor.close()


@pytest.mark.timeout(60)  # it would wait for ever
def test_a_launch_that_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One whose agent somebody has stopped: the kernel takes connections for it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(running_launches, "_ANSWER_TIMEOUT", 0.01)
    with registry.listen(os.environ, "deaf"):
        assert running_launches.ask(b"status") == []


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (64, "1 min 4 s"), (7500, "2 h 5 min"), (90_000, "1 d 1 h")]
)
def test_durations(seconds: float, words: str) -> None:
    assert in_two_units(seconds) == words


def test_what_no_part_of_a_feature_answers_is_sent_away() -> None:
    """An agent that looked for that part would end, and its launch with it."""
    environ = {"XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]}
    reception = Reception(environ, "asked")
    reception.open()
    for name in (b"profile", b"leases", b"nothing", b""):
        visitor = registry.connect(environ, "asked")
        assert visitor is not None
        with visitor:
            visitor.send(ASK + name)
            while not linux.wait_readable([visitor.fileno()], 0.0):
                taken = reception.take(linux.wait_readable(reception.fds(), LIMIT))
                assert (taken, reception.take_request()) == ([], None)
            assert visitor.recv(1) == b""
    reception.close()
