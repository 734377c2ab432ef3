"""What a report calls a notebook's cells, with IPython's own compiler and linecache."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from mlaunch.caller.report import notebook

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


def test_what_calls(monkeypatch: pytest.MonkeyPatch) -> None:
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
