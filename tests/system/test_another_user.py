"""What another user of the node can do, who reaches all that listens on loopback; and the lines of SECURITY.rst."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable

import pytest

from mlaunch import launcher
from mlaunch.protocol import registry
from tests.another_user import greet, said_by_another_user
from tests.conftest import ROOT
from tests.stores import store_of_a_launch, store_of_one_machine

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


def test_another_user_finds_no_launch_of_ours() -> None:
    home = registry.home(os.environ)
    with registry.listen(os.environ, "another"):
        assert said_by_another_user(lambda: str(os.listdir(home))) == "PermissionError"
        assert os.listdir(home) == ["another.sock"]
    registry.remove(os.environ, "another")


def test_the_tests_that_the_security_page_names_are_there() -> None:
    named = set(re.findall(r"``(test_\w+)``", (ROOT / "SECURITY.rst").read_text()))
    files = (ROOT / "tests").rglob("test_*.py")
    there = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert len(named) > 10
    assert not named - there
