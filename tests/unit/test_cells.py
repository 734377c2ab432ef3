"""What a report calls a notebook's cells, with IPython's own compiler and linecache."""

from __future__ import annotations

import pickle
import re
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

import mlaunch
from mlaunch import LaunchError, launcher
from mlaunch.caller.launch.settle import settle
from mlaunch.caller.report import notebook, user_frames
from tests.conftest import OURS

IPython = pytest.importorskip("IPython")


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> str:
    """The file that stands for a cell with the number 3."""
    from IPython.core.compilerop import CachingCompiler

    compiler = CachingCompiler()
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(compile=compiler))
    return compiler.cache("def train():\n    raise ValueError('no')\n", 3)


def test_short_names(cell: str) -> None:
    assert notebook.short_name(cell) == "In[3]"
    assert notebook.short_name("/home/user/train.py") == "train.py"


def test_the_source_of_a_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    shell = SimpleNamespace(execution_count=7, user_ns={})
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    assert notebook.source() == "In[7] of IPython"
    shell.user_ns["__vsc_ipynb_file__"] = "/home/ada/tour.ipynb"
    assert notebook.source() == "In[7] of tour.ipynb"
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    for main, said in [
        ({"__file__": "/home/ada/train.py", "__spec__": None}, "train.py"),
        ({"__file__": "/x/pkg/__main__.py", "__spec__": SimpleNamespace(name="pkg.__main__")}, "python -m pkg"),
        ({}, "a prompt"),
    ]:
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(**main))
        monkeypatch.setattr(sys, "argv", [""])
        assert notebook.source() == said


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("", ""),
        ("  File {}, line 2, in train\nValueError: no",
         "  Cell In[3], line 2, in train\n    raise ValueError('no')\nValueError: no"),
        ("  | File {}, line 2, in train\n  | ValueError: no",
         "  | Cell In[3], line 2, in train\n  |   raise ValueError('no')\n  | ValueError: no"),
        # faulthandler's
        ("  File {}, line 2 in train", "  Cell In[3], line 2 in train\n    raise ValueError('no')"),
        # a rank that was forked from the notebook has the lines itself
        ("  File {}, line 2, in train\n    raise ValueError('no')\n    ^^^^\nValueError: no",
         "  Cell In[3], line 2, in train\n    raise ValueError('no')\n    ^^^^\nValueError: no"),
        ('  File "/home/train.py", line 2, in train\n    go()', '  File "/home/train.py", line 2, in train\n    go()'),
    ],
)  # fmt: skip
def test_tracebacks(cell: str, given: str, shown: str) -> None:
    assert notebook.complete(given.replace("{}", f'"{cell}"')) == shown


def shown(raiser: object, monkeypatch: pytest.MonkeyPatch, mode: str = "Context") -> str:
    """What IPython shows of what a call raises, without colours."""
    from IPython.core.ultratb import AutoFormattedTB

    table = AutoFormattedTB(mode=mode, tb_offset=1)
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(InteractiveTB=table))
    with pytest.raises((TypeError, ValueError), match=r"\w") as caught:
        raiser()  # type: ignore[operator]
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    lines = caught.value._render_traceback_()  # type: ignore[attr-defined]
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(lines))


def fail() -> None:
    raise user_frames.without_ours(ValueError("no data")) from LaunchError("rank 1 of train() raised")


@pytest.mark.parametrize(
    "misused",
    [lambda: launcher(3), lambda: launcher(fail, nodes=2), lambda: launcher(fail)(2), lambda: mlaunch.Ranks(seed="x")],
)
def test_ipython_shows_the_line_of_a_misuse_last(misused: object, monkeypatch: pytest.MonkeyPatch) -> None:
    told = shown(misused, monkeypatch)
    assert OURS not in told
    assert "test_cells.py" in told


def test_ipython_shows_the_report_and_where_to_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told = shown(fail, monkeypatch).splitlines()
    assert told[1].startswith("LaunchError")
    assert told[-2:] == ["ValueError: no data", user_frames._READ_ON]
    assert "ValueError: no data" in shown(fail, monkeypatch, "Minimal").splitlines()[-1]  # nothing stands above


def test_ipython_shows_the_line_that_asks_a_future_last(monkeypatch: pytest.MonkeyPatch) -> None:
    future: Future[None] = Future()
    monkeypatch.setattr(IPython, "get_ipython", SimpleNamespace)
    future.set_exception(user_frames.hide_ours(ValueError("no data")))
    told = shown(future.result, monkeypatch)
    assert "raiser()" in told
    assert "concurrent" not in told


def test_an_error_is_hidden_in_ipython_alone_and_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    assert not vars(user_frames.hide_ours(ValueError()))
    monkeypatch.setattr(IPython, "get_ipython", SimpleNamespace)
    assert type(pickle.loads(pickle.dumps(user_frames.hide_ours(ValueError())))) is ValueError
    outcome: Any = SimpleNamespace(
        failed=True, interrupt=ValueError(), values={}, spec=SimpleNamespace(local_world_size=1)
    )
    assert hasattr(settle(outcome, lambda: pytest.fail("nobody has asked")).error, "_render_traceback_")
