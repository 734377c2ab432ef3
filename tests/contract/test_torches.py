"""What differs between releases and builds of torch. ``tests/matrix`` runs all tests with others than this one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mlaunch import comm, launcher

# The store without libuv


def how_it_is_served() -> tuple[bool, str | None]:
    comm.synchronize(timeout=60)
    store: Any = dist.distributed_c10d._get_default_store()
    return store._underlying_non_prefix_store.libuvBackend, os.environ.get("USE_LIBUV")


def test_the_store_is_served_without_libuv_if_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_LIBUV", "0")
    assert launcher(how_it_is_served, 2)() == [(False, "0")] * 2


# Old releases


def test_a_torch_that_is_too_old_is_refused_in_one_sentence(run_script, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "torch.py").write_text('__version__ = "2.5.1+cu121"\n')
    done = run_script("from mlaunch import launcher\nlauncher(lambda: None, 1)()\n", fresh=True)
    sentence = "torch 2.5.1+cu121 is too old for mlaunch, which needs 2.6 or later: pip install -U torch"
    assert done.stderr.splitlines()[-1] == f"mlaunch.errors.LaunchError: {sentence}"


def test_a_cloudpickle_that_is_too_old_is_refused_in_one_sentence(run_script, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "cloudpickle").mkdir()
    (tmp_path / "cloudpickle" / "__init__.py").write_text('__version__ = "2.2.1"\n')
    (tmp_path / "cloudpickle" / "cloudpickle.py").write_text("")
    done = run_script("from mlaunch import launcher\nlauncher(lambda: None, 1)()\n", fresh=True)
    sentence = "cloudpickle 2.2.1 is too old for mlaunch, which needs 3.0 or later: pip install -U cloudpickle"
    assert done.stderr.splitlines()[-1].endswith(f"Error: {sentence}")
