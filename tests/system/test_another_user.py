"""What another user of the node can do, who reaches all that listens on loopback; and the lines of SECURITY.rst."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mlaunch import launcher
from mlaunch.engines import Hosts
from tests import launches
from tests.another_user import greet, said_by_another_user
from tests.conftest import ROOT
from tests.system.commands import run, write
from tests.unit.stores import store_of_a_launch, store_of_one_machine

SCRIPT = """
import os
import torch.distributed as dist
from tests.another_user import greet, said_by_another_user

dist.init_process_group("gloo")
port = int(os.environ["MASTER_PORT"])
print(said_by_another_user(lambda: greet(port)), greet(port))
dist.destroy_process_group()
"""
Stores = Callable[[], contextlib.AbstractContextManager[int]]


@pytest.mark.parametrize("store", [store_of_one_machine, store_of_a_launch])
def test_a_store_serves_its_user_alone(store: Stores) -> None:
    with store() as port:
        assert said_by_another_user(lambda: greet(port)) == "turned away"
        assert greet(port) == "served"


def test_the_store_of_a_running_launch_is_closed_to_others() -> None:
    def train() -> tuple[str, str]:
        port = int(os.environ["MASTER_PORT"])
        return said_by_another_user(lambda: greet(port)), greet(port)

    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    assert launcher(train, 1)() == [("turned away", "served")]


def test_another_user_finds_no_launch_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    home = launches.runtime_directory()
    with launches.listening_as("another"):
        monkeypatch.chdir(home)  # so that no directory above it keeps another user away
        assert said_by_another_user(lambda: str(os.listdir("."))) == "PermissionError"
        assert os.listdir(home) == ["another.sock"]


def test_another_user_reads_no_lease_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = tmp_path / "leases"
    with launches.lease_site(leases) as site:
        held = site.take("lease", {"function": "train()"})
        monkeypatch.chdir(leases)
        assert said_by_another_user(lambda: str(os.listdir("."))) == "PermissionError"
        assert site.said("lease") == {"function": "train()"}
        os.close(held)


def test_a_sweep_reads_no_file_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands there is unpickled."""
    tmp_path.chmod(0o777)
    monkeypatch.chdir(tmp_path)
    planted = Path("sweep.jsonl")
    assert said_by_another_user(lambda: str(planted.write_bytes(b""))) == "0"
    with pytest.raises(PermissionError, match="its contents are unpickled here; allowed: a file of your own"):
        launches.read_trials(planted)


@pytest.mark.dear("members and their fork servers are fresh interpreters")
@pytest.mark.slow
def test_no_secret_of_an_engine_is_where_others_look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Command lines are open to all, variables and files to more than who runs the launch, as to a batch system."""
    secret = launches.secret_of_launches(monkeypatch)
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def look(start: str, rest: str, folder: str) -> list[str]:
        wanted, found = (start + rest).encode(), []
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        for path in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ"), *files]:
            with contextlib.suppress(OSError):
                found += [str(path)] if wanted in path.read_bytes() else []
        return found

    engine = Hosts(["a", "b"], ssh=["sh", "-c", 'exec sh -c "$2"', "sh"])
    ours = launcher(look, 1, engine=engine, machines=2, device_type="cpu")
    assert ours(secret[:20], secret[20:], str(tmp_path)) == [[], []]


def test_each_line_of_the_security_page_names_who_plays_it() -> None:
    """Each row of the table, and, in their order, the lines on what is not checked."""
    page = (ROOT / "SECURITY.rst").read_text()
    played = dict(
        re.findall(r"^- ([a-z][^:]+):(.*?)(?=^-|^$)", page.partition("The tests play each of them:")[2], re.M | re.S)
    )
    rows = {
        "Another user of the node": "another user of the node",
        "Who has fewer of your rights": "who has fewer of your rights",
        "Who reaches the port, token": "who reaches the port",
        "Who reaches the port, no": "without a token",
        "Who listens there first,": "who listens there first",
        "Who reads the wire": "who reads the wire",
        "Who changes the wire": "who changes it",
    }
    table = page.partition("\nWho can do what\n")[2].partition("The tests play")[0]
    first = [line[:28].strip() for line in table.splitlines() if re.match(r"(Who \w+|Another) .*  [(\w]", line)]
    assert first == list(rows)
    assert all(words in page.partition("The tests play")[2] for words in rows.values())
    unchecked = page.partition("\nWhat is not\n")[2].partition("\nWho can do what\n")[0]
    tests = played["what is not checked, line by line"].split(";")
    assert len(tests) == len(re.findall("^- ", unchecked, re.M))
    assert all("``test_" in test for test in tests)


def test_the_store_of_a_script_is_closed_to_others(tmp_path: Path) -> None:
    """Its ranks share no secret, and their store answers this user alone."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    done = run(tmp_path, "--nproc-per-node", "1", write(tmp_path, SCRIPT))
    assert done.stdout == "turned away served\n", done.stderr


def test_each_claim_of_the_security_page_has_its_code_and_its_tests() -> None:
    page = (ROOT / "SECURITY.rst").read_text()
    rows = page.partition("\nEach claim\n")[2].split("\n   * - ")[2:]
    assert len(rows) > 20
    for row in rows:
        claim, code, tests = row.split("\n     - ")
        assert "``test_" in tests, claim
        assert [path for path in re.findall("``(.*?)``", code) if not (ROOT / "mlaunch" / path).exists()] == [], claim


def test_the_tests_that_the_security_page_names_are_there() -> None:
    named = set(re.findall(r"``(test_\w+)``", (ROOT / "SECURITY.rst").read_text()))
    files = (ROOT / "tests").rglob("test_*.py")
    there = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert len(named) > 10
    assert not named - there
