"""Who has the same user and fewer rights is kept out: by a fork server that is kept, and by a launch's socket."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlaunch.agreed_stop.wire import STOP
from mlaunch.base import linux
from mlaunch.base.exceptions import LaunchError
from mlaunch.base.fds import close_all
from mlaunch.base.peer_process import (
    confinement,
    differences_to_peer,
    is_filtered,
    rights_lacking,
    rights_lacking_to_peer,
)
from mlaunch.caller import running_launches
from mlaunch.cli import launch_commands, main
from mlaunch.protocol import registry
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.registry import END, STATUS, VISIT, Reception
from mlaunch.warm.caller import zygotes
from mlaunch.warm.server import Zygote
from mlaunch.warm.wire import import_facts, zygote_place
from mlaunch.warm.wire.zygote_messages import AskZygote, NotServed, ZygoteState
from tests.another_user import by_another_user
from tests.sandboxes import (
    SANDBOXES,
    Said,
    in_sandbox,
    landlock,
    no_new_privs,
    nothing,
    own_mounts,
    said_in_sandbox,
    seccomp_filter,
)

LIMIT = 60.0  # seconds
VISITS = (VISIT + b"debug come", VISIT + b"debug stop 0")
Confine = Callable[[], None]
IS_FILTERED = is_filtered(confinement())
pytestmark = pytest.mark.skipif(IS_FILTERED, reason="this process is in a container or sandbox with a filter")


class Evil:
    """Makes a directory where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("unpickled",)


@contextlib.contextmanager
def kept(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[Zygote]:
    """A fork server that is kept, in this process; its place is the working directory, for who has another root."""
    directory.chmod(0o700)
    monkeypatch.chdir(directory)
    offered: Any = None
    zygote = Zygote(offered, (), 60.0, import_facts.of_this_process({}), directory, "key")
    zygote.open()
    try:
        yield zygote
    finally:
        close_all([zygote._listener.detach(), zygote._removals])
        for visitor in zygote.visitors:
            visitor.channel.close()


def asks(what: object) -> Callable[[], str]:
    """What a process does that asks for it: says how it was answered."""

    def ask() -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.connect("key.warm")
            end.send(pickle.dumps(what))
            channel: Channel[Any, Any] = Channel(end)
            try:
                answer, _ = channel.receive()
            except EOFError:
                return "turned away"
            return f"{type(answer).__name__}: {getattr(answer, 'reason', '')}"

    return ask


def told(zygote: Zygote, confine: Confine, what: object) -> str:
    """Serves until who asks has its answer."""
    with in_sandbox(confine, asks(what)) as said:
        while said.fd not in (ready := linux.wait_readable([said.fd, *zygote._sources()], LIMIT)):
            assert ready
            zygote._turn(ready)
        return said()


@pytest.mark.parametrize("confine", SANDBOXES)
def test_a_kept_server_reads_nothing_of_a_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, confine: Confine
) -> None:
    with kept(monkeypatch, tmp_path) as zygote:
        assert told(zygote, nothing, AskZygote()) == f"{ZygoteState.__name__}: "
        assert told(zygote, confine, Evil()).startswith(f"{NotServed.__name__}: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key.warm"]


@pytest.mark.parametrize("confine", [no_new_privs, seccomp_filter, landlock])
def test_two_that_are_filtered_alike_may_be_in_two_sandboxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, confine: Confine
) -> None:
    """So one is not served by the other, unless the user says that all are in the same."""

    def serve() -> str:
        with kept(monkeypatch, tmp_path) as zygote:
            refused = told(zygote, nothing, Evil())
            monkeypatch.setenv(import_facts.SANDBOX, "1")
            return f"{refused}; {told(zygote, nothing, AskZygote())}"

    said = said_in_sandbox(confine, serve)
    why = f"it has no_new_privs or a seccomp filter, and {import_facts.SANDBOX}=1 is not set"
    assert said == f"{NotServed.__name__}: {why}; {ZygoteState.__name__}: "


def test_who_is_in_a_landlock_domain_uses_nothing_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the kernel does not show him, though both have no_new_privs and the user says that they share a sandbox."""

    def visit() -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.connect("key.warm")
            return f"{differences_to_peer(end, confinement())}; {rights_lacking_to_peer(end)}"

    with kept(monkeypatch, tmp_path):
        assert said_in_sandbox(nothing, visit) == "; "
        assert said_in_sandbox(landlock, visit).count("is not shown to process") == 2


def test_a_kept_server_and_its_caller_are_of_one_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the directory is open to others, as on a file system without modes."""
    with kept(monkeypatch, tmp_path) as zygote:
        tmp_path.chmod(0o777)
        (tmp_path / "key.warm").chmod(0o777)
        with by_another_user(asks(AskZygote())) as said:
            zygote._turn(linux.wait_readable([zygote._listener.fileno()], LIMIT))
            assert zygote.visitors == []
            assert said() in {"turned away", "BrokenPipeError", "ConnectionResetError"}


def test_a_caller_asks_no_kept_server_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.chdir(tmp_path)
    listening, telling = os.pipe()
    over, end = os.pipe()

    def listen() -> str:
        os.close(end)
        theirs = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.bind("key.warm")
        theirs.listen()
        os.write(telling, b".")
        os.read(over, 1)
        return "listened"

    with by_another_user(listen) as said:
        assert linux.wait_readable([listening], LIMIT)
        tmp_path.chmod(0o700)
        assert zygote_place.connect(tmp_path, "key") is None
        os.close(end)
        assert said() == "listened"
    close_all([listening, telling, over])
    assert (tmp_path / "key.warm").exists()


@pytest.mark.parametrize("confine", [own_mounts, no_new_privs])
def test_a_command_gives_nothing_to_a_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, confine: Confine
) -> None:
    """That listens where a kept fork server, or a launch, would be; nor is its answer unpickled."""
    (tmp_path / "mlaunch").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path / "mlaunch")
    listening, telling = os.pipe()

    def listen() -> str:
        heard = b""
        with contextlib.ExitStack() as stack:
            ends = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(2)]
            for end, name in zip(ends, ("key.warm", "key.sock"), strict=True):
                end.bind(name)
                end.listen()
            os.write(telling, b".")
            for end in (ends[0], ends[0], ends[1]):
                visitor, _ = end.accept()
                with visitor, contextlib.suppress(OSError):
                    visitor.send(pickle.dumps(Evil()))
                    heard += visitor.recv(100)
        return f"heard {len(heard)} bytes"

    with in_sandbox(confine, listen) as said:
        assert linux.wait_readable([listening], LIMIT)
        like: Any = None
        connection = zygote_place.connect(Path.cwd(), "key")
        assert connection is not None
        assert zygotes._ask(connection, confinement(), {}, like) is None
        assert zygotes.states(os.environ) == []
        with pytest.raises(LookupError, match="the launch key is not debugged from here: of its process, "):
            running_launches.connect("key")
        assert said() == "heard 0 bytes"
    close_all([listening, telling])
    assert not Path("unpickled").exists()


@contextlib.contextmanager
def launch(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[Reception]:
    """The socket of a launch, beside the working directory."""
    directory.chmod(0o700)
    environ = {"XDG_RUNTIME_DIR": str(directory)}
    reception = Reception(environ, "launch")
    reception.open()
    monkeypatch.chdir(directory / "mlaunch")
    try:
        yield reception
    finally:
        reception.close()


def says(word: bytes) -> Callable[[], str]:
    """What a process does that says a word to the launch; a question is answered by the test."""

    def say() -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.connect("launch.sock")
            return json.dumps(registry.ask(end, word, LIMIT))

    return say


def answered(reception: Reception, said: Said) -> list[bytes]:
    """Returns the words that reach the launch until who says them has his answer; those are answered with {}."""
    heard = []
    while said.fd not in (ready := linux.wait_readable([said.fd, *reception.fds()], LIMIT)):
        assert ready
        for visitor, word in reception.take(ready):
            heard.append(word)
            registry.answer(visitor, {})
        for visitor, feature, word in reception.take_guests():
            heard.append(VISIT + f"{feature} {word}".encode())
            registry.answer(visitor, {})
        reception.let_stoppers_go()
    return heard


@pytest.mark.parametrize("confine", SANDBOXES)
def test_a_launch_lets_a_sandbox_neither_debug_nor_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, confine: Confine
) -> None:
    """It may ask what the launch does."""
    with launch(monkeypatch, tmp_path) as reception:
        for word in (*VISITS, STOP, END):
            with in_sandbox(confine, says(word)) as said:
                assert answered(reception, said) == []
                assert "the launch refuses this to process" in json.loads(said())["refused"]
        assert (reception.stopped_by, reception.asked_by) == (None, None)
        with in_sandbox(confine, says(STATUS)) as said:
            assert (answered(reception, said), said()) == ([STATUS], "{}")


def test_a_launch_obeys_who_has_its_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with launch(monkeypatch, tmp_path) as reception:
        for word in VISITS:
            with in_sandbox(nothing, says(word)) as said:
                assert answered(reception, said) == [word]
        with in_sandbox(nothing, says(END)) as said:
            assert (answered(reception, said), said()) == ([], "null")
        assert reception.stopped_by


def test_a_launch_tells_another_user_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its directory is open to others."""
    with launch(monkeypatch, tmp_path) as reception:
        for path in (tmp_path, tmp_path / "mlaunch", tmp_path / "mlaunch/launch.sock"):
            path.chmod(0o777)
        with by_another_user(says(STATUS)) as said:
            assert reception.take(linux.wait_readable(reception.fds(), LIMIT)) == []
            assert len(reception.fds()) == 1
            assert said() == "null"


def test_a_stop_that_is_refused_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = {"id": "x", "function": "f()", "age": 1.0, "world_size": 1, "restart_count": 0, "caller": 1, "ranks": []}
    told = {STATUS: seen, STOP: {"refused": "not from there"}}
    monkeypatch.setattr(launch_commands, "ask", lambda word, *_, **__: [told[word]])
    assert main(["stop"]) == 1
    assert capsys.readouterr().err == "mlaunch: not from there\n"


def test_nothing_is_kept_that_would_serve_nobody() -> None:
    def begin() -> str:
        try:
            zygotes.begin({}, 1.0, ())
        except LaunchError as error:
            return str(error)
        return "begun"

    said = said_in_sandbox(no_new_privs, begin)
    assert said.startswith("this process has no_new_privs or a seccomp filter")
    assert f"set {import_facts.SANDBOX}=1 for all of them" in said


def test_rights() -> None:
    """More of them do no harm, and the account that its work is counted for gives none."""
    ours = confinement()
    assert not rights_lacking(ours, ours)
    assert not rights_lacking({**ours, "cgroup": "other", "login session": "7"}, ours)
    assert not rights_lacking({**ours, "status Groups": "1 2 3"}, {**ours, "status Groups": "2"})
    assert rights_lacking({**ours, "status Groups": "1 3"}, {**ours, "status Groups": "2"}).endswith("lacks a group")
    assert not rights_lacking({**ours, "status CapEff": "ff"}, {**ours, "status CapEff": "0f"})
    assert "CapEff" in rights_lacking({**ours, "status CapEff": "f0"}, {**ours, "status CapEff": "0f"})
    assert not rights_lacking(ours, {**ours, "status NoNewPrivs": "1"})
    assert "NoNewPrivs" in rights_lacking({**ours, "status NoNewPrivs": "1"}, {**ours, "status NoNewPrivs": "0"})
    assert rights_lacking({**ours, "namespace mnt": "mnt:[1]"}, ours) == "its namespace mnt differs"
