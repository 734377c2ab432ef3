"""Ranks that stay are called back in the middle of what must not be torn: an import, and what cells need."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from mlaunch import Ranks, launcher
from tests import launches
from tests.contract.functions import caught
from tests.contract.test_in_step import STAYED, intact, lost, notes, spin
from tests.import_storm import importing, storm
from tests.processes import wait_until

REGISTRY = """
import os
names, (reading, writing) = [], os.pipe()
os.set_blocking(writing, False)
"""
# As a package that registers operations with torch: twice is an error, and a second import would do that.
REGISTERED = """
import os, registry
if registry.names:
    raise RuntimeError("registered twice")
registry.names.append(__name__)
os.close(os.open({inside!r}, os.O_CREAT))
while {forever} or not os.read(registry.reading, 1):  # until a signal has come
    pass
ready = True
"""


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(n_gpus=2, device_type="cpu", grace_period=20) as opened:
        yield opened


def modules(tmp_path: Path, *, forever: bool = False) -> tuple[str, str]:
    """Makes two modules; returns where they are, and the file that says that one is being imported."""
    inside = str(tmp_path / "inside")
    (tmp_path / "registry.py").write_text(REGISTRY)
    (tmp_path / "registered.py").write_text(REGISTERED.format(inside=inside, forever=forever))
    return str(tmp_path), inside


def import_while_the_other_fails(directory: str, inside: str) -> None:
    if dist.get_rank() == 1:
        wait_until(lambda: os.path.exists(inside))
        raise ValueError("no such luck")
    sys.path.insert(0, directory)
    import registry  # type: ignore[import-not-found]

    signal.set_wakeup_fd(registry.writing)
    import registered  # type: ignore[import-not-found]  # noqa: F401

    spin()


def what_was_imported() -> tuple[bool, list[str]]:
    signal.set_wakeup_fd(-1)
    if dist.get_rank() == 1:
        return True, []
    import registered
    import registry

    return registered.ready, registry.names


def test_a_rank_comes_back_from_an_import_once_that_is_complete(ranks: Ranks, tmp_path: Path) -> None:
    with intact(ranks):
        error = caught(lambda: ranks.run(import_while_the_other_fails, *modules(tmp_path)))
        assert isinstance(error, ValueError)
        assert STAYED in notes(error)
        assert ranks.run(what_was_imported)[0] == (True, ["registered"])


@pytest.mark.slow
def test_an_import_that_does_not_end_costs_the_ranks(tmp_path: Path) -> None:
    with Ranks(n_gpus=2, device_type="cpu", grace_period=0.5) as ranks, lost(ranks):
        error = caught(lambda: ranks.run(import_while_the_other_fails, *modules(tmp_path, forever=True)))
        assert isinstance(error, ValueError)
        assert "rank 0 was importing registered" in str(error.__cause__) + notes(error)
        assert "what they held is lost" in notes(error)


@pytest.mark.slow
def test_fresh_ranks_have_what_cells_need_before_the_first(ranks: Ranks) -> None:
    """Also those on which it does not run, and those that follow lost ones."""
    pytest.importorskip("IPython")

    def is_open() -> bool:
        return launches.is_ready_for_cells()

    for _ in range(2):
        assert ranks.run(is_open) == [False, False]
        ranks.cell("1", targets=[0])
        assert ranks.run(is_open) == [True, True]
        assert caught(lambda: ranks.run(os._exit, 3)) is not None


@pytest.mark.nightly
@pytest.mark.slow
def test_random_moments_of_imports() -> None:
    """``python -m tests.import_storm`` has more of them."""
    pytest.importorskip("IPython")
    assert importing("rank 1 was importing a\n  ranks 0, 2-4 were importing b.c, in f") == 5
    told = storm(20)
    assert told.broken == []
    assert told.inside >= 5, told  # else it shows nothing


def ignore_it() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_a_handler_of_an_earlier_call_keeps_no_rank_from_being_called_back(ranks: Ranks) -> None:
    ranks.run(ignore_it)
    with intact(ranks):
        assert STAYED in notes(caught(launcher(spin, deadline=0.2).options(ranks=ranks)))
