"""The texts of errors that no other test provokes."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest

import mlaunch
from mlaunch import LaunchError, launcher


def test_a_rank_that_imports_another_version_of_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "changing.py"
    module.write_text("def train():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    train = __import__("changing").train
    module.write_text("something_else = 1\n")
    os.utime(module, (1, 1))
    with pytest.raises(AttributeError, match="has no function 'train': it differs from the one that the caller"):
        launcher(train, 1)()
    del sys.modules["changing"]


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = f"was not started: the rendezvous cannot listen at 127.0.0.1, port {port}: Address already in use; give"
        with pytest.raises(LaunchError, match=words):
            launcher(lambda: 1, 1, port=port)()


def test_a_world_that_is_too_small_for_this_machine() -> None:
    cpus = len(os.sched_getaffinity(0))
    words = rf"world_size={cpus} with {cpus} rank\(s\) on this machine from rank_start=1: allowed: {cpus + 1} or more"
    with pytest.raises(ValueError, match=words):
        launcher(lambda: 1, world_size=cpus, rank_start=1, port=29600, device_type="cpu")()


def test_a_name_that_the_package_lacks() -> None:
    with pytest.raises(AttributeError, match="module 'mlaunch' has no attribute 'lunch'"):
        _ = mlaunch.lunch


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("helper", "; coming from MegEngine: for get_device_count_by_fork() call torch.accelerator.device_count()"),
        ("get_device_count_by_fork", "; coming from MegEngine: call torch.accelerator.device_count()"),
        ("functional", "; coming from MegEngine: use torch.distributed: all_reduce, "),
        ("launch_from_torch", "; coming from ColossalAI: call join_from_torch()"),
        ("DistCoordinator", "; coming from ColossalAI: use mlaunch.comm: is_main_process()"),
    ],
)
def test_a_name_of_another_launcher_says_what_to_use(name: str, words: str) -> None:
    assert not hasattr(mlaunch, name)
    with pytest.raises(AttributeError, match=re.escape(f"module 'mlaunch' has no attribute {name!r}{words}")):
        getattr(mlaunch, name)
    with pytest.raises(ImportError, match=re.escape(f"module 'mlaunch' has no attribute {name!r}{words}")):
        exec(f"from mlaunch import {name}", {})


def test_names_that_are_recommended_are_there() -> None:
    from mlaunch import comm

    for name in ("join_from_torch", "join_from_slurm", "join_from_openmpi", "override_backend", "get_py_server_addr"):
        assert callable(getattr(mlaunch, name))
    for name in ("is_main_process", "get_rank", "synchronize", "main_process_first"):
        assert callable(getattr(comm, name))


def test_a_decorated_classmethod() -> None:
    with pytest.raises(TypeError, match="put @launcher below @classmethod or @staticmethod"):
        launcher(classmethod(lambda cls: cls))  # type: ignore[arg-type]


def test_an_exception_that_cannot_be_shown() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise KeyError("no words")

    def train() -> None:
        raise Mute

    with pytest.raises(Mute) as caught:
        launcher(train, 1)()
    assert "Mute: <its __str__ raised KeyError>" in str(caught.value.__cause__)
