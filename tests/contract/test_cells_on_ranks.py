"""Cells on ranks that stay: their namespace, what they show, how they fail, and the magics for them."""

from __future__ import annotations

import builtins
import concurrent.futures
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlaunch import Ranks
from tests import launches

pytest.importorskip("torch")
pytest.importorskip("IPython", reason="IPython is not installed (extra: test)")
Run = Callable[[str], Any]
Offered = Callable[[str], list[str]]
RANK = "from mlaunch import comm\nrank = comm.get_rank()"


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(n_gpus=2) as opened:
        yield opened


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs a cell in an IPython shell of this process."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    for name in ("ps1", "ps2", "ps3"):
        monkeypatch.setattr(sys, name, "", raising=False)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    before = dict(vars(builtins))
    config = Config({"HistoryManager": {"enabled": False}, "InteractiveShell": {"colors": "nocolor"}})
    shell = InteractiveShell.instance(config=config)
    try:
        yield lambda text: shell.run_cell(text, store_history=True)
    finally:
        shell.run_cell("%unload_ext mlaunch")
        InteractiveShell.clear_instance()
        for name in vars(builtins).keys() - before.keys():
            delattr(builtins, name)


@pytest.fixture
def offered(run: Run) -> Offered:
    """Tells what that shell offers at the end of a text, as a front end would ask for it."""
    from IPython.core.completer import provisionalcompleter

    completer = run("get_ipython()").result.Completer

    def complete(text: str) -> list[str]:
        with provisionalcompleter():
            return [one.text for one in completer.completions(text, len(text))]

    return complete


def test_names_stay_and_looks_are_shown_once_where_equal(ranks: Ranks) -> None:
    ranks.cell(f"{RANK}\nx = 3")
    assert repr(ranks.cell("x")) == "3"
    assert repr(ranks.cell("x + rank")) == "[0] 3\n[1] 4"
    assert ranks.cell("rank", targets=[1]).answers.keys() == {1}
    with pytest.raises(ValueError, match=r"no rank 2 here; these are ranks 0-1"):
        ranks.cell("rank", targets=[0, 2])


def test_a_cell_is_ipythons(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    result = ranks.cell(
        "import asyncio\nawait asyncio.sleep(0)\n!echo hello\nfrom IPython.display import HTML, display\n"
        "display(HTML('<b>1</b>'), display_id='a')\nget_ipython().display_formatter.active_types"
    )
    assert "hello\n" in capfd.readouterr().out
    assert [len(answer.displays) for answer in result.answers.values()] == [1, 0]  # of the first rank
    (shown,) = result.answers[0].displays
    assert (shown.data["text/html"], shown.transient) == ("<b>1</b>", {"display_id": "a"})
    assert all(answer.displays for answer in ranks.cell("display(1)", rich="all").answers.values())


def test_the_latest_value_and_what_ends_a_program(ranks: Ranks) -> None:
    ranks.cell(f"{RANK}\nrank + 3")
    assert repr(ranks.cell("_ + 1")) == "[0] 4\n[1] 5"
    assert repr(ranks.cell("_ = 'mine'\n7; _")) == "'mine'"
    ranks.cell("8")
    assert repr(ranks.cell("_")) == "'mine'"
    for source in ("exit", "quit()"):
        with pytest.raises(RuntimeError, match=r"called sys.exit\(\); ranks end with %ranks --close") as raised:
            ranks.cell(f"{source}")
        assert raised.value.__notes__[-1] == "the ranks are in step and stay, with what they hold"


def test_a_name_that_cannot_be_looked_at_costs_the_table_nothing_else(ranks: Ranks) -> None:
    ranks.cell("class Bad:\n    def __getattr__(self, name): raise RuntimeError(name)\n"
               "bad = Bad()\nring = []\nring.append(ring)\nx = b'123'")  # fmt: skip
    (names,) = {tuple(one.names.items()) for one in ranks.cells.names()}
    assert dict(names) == {"bad": ("Bad", dict(names)["bad"][1]), "ring": ("list", 0), "x": ("bytes", 3)}


def test_a_failure_names_the_line_and_names_live_on_where_ranks_are_in_step(ranks: Ranks) -> None:
    ranks.cell(f"{RANK}\nx = 3")
    with pytest.raises(ValueError, match="no") as raised:
        # Both have the new value, whoever is called back first.
        ranks.cell("x = 4; __import__('torch').distributed.barrier()\nif rank == 1:\n    raise ValueError('no')")
    assert re.search(r'File "<cell \d+>", line 3, in <module>\n +raise ValueError', str(raised.value.__cause__))
    assert raised.value.__notes__[-1] == "the ranks are in step and stay, with what they hold"
    assert repr(ranks.cell("x")) == "4"
    with pytest.raises(RuntimeError, match=r"called sys.exit\(3\); ranks end with"):
        ranks.cell("import sys; sys.exit(3)")


@pytest.mark.slow
def test_a_failure_tells_where_in_the_cell_the_others_were(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "running")
    waiting = f"while not os.path.exists({path!r}): signal.sigtimedwait([], 0.01)\nraise ValueError('no')"
    loop = f"while [os.close(os.open({path!r}, os.O_CREAT))]: n += 1"  # of no function that is written in Python
    with pytest.raises(ValueError, match="no") as raised:
        ranks.cell(f"import os, signal\n{RANK}\nif rank == 0:\n    n = 0\n    {loop}\n{waiting}")
    assert re.search(r"rank 0 was in <module> at <cell \d+>:6", str(raised.value.__cause__))


def test_names_go_to_and_fro(ranks: Ranks) -> None:
    ranks.push({"lr": 3, "targets": lambda: 4})
    ranks.cell(f"{RANK}\nclass Point:\n    x = lr + rank + targets()\npoint = Point()\nif rank: apart = 1")
    assert [point.x for point in ranks.pull("point")] == [7, 8]  # by value: this process has no such class
    assert ranks.pull("apart", targets=[1]) == [1]
    assert ranks.run(lambda: hasattr(sys.modules["__main__"], "point")) == [False, False]  # it is the cells' alone
    with pytest.raises(NameError, match=r"'apart' is not on rank 0, but on rank 1; pull it from there"):
        ranks.pull("apart")
    with pytest.raises(NameError, match=r"'nothing' is not on ranks 0-1; cells have not set it"):
        ranks.pull("nothing")
    ranks.cell("lock = __import__('threading').Lock()")
    with pytest.raises(Exception, match=r"value\['lock'\] is a _thread.lock"):
        ranks.pull("lock")
    with pytest.raises(TypeError, match=r"lock"):
        ranks.push({"lock": threading.Lock()})


def test_the_magics(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("%load_ext mlaunch")
    assert "no ranks are open: %ranks 4" in str(run("%%ranks\n1").error_in_exec)
    run("%ranks 2 --device-type cpu")
    assert "2 ranks on cpu, idle\nrank  pid" in capsys.readouterr().out
    assert repr(run(f"%%ranks\n{RANK}\nx = 1\nrank").result) == "[0] 0\n[1] 1"
    assert run("z = %ranks --pull rank\nz").result == [0, 1]
    run("lr = 5")
    run("%ranks --push lr")
    assert repr(run("%%ranks {lr - 4}\nlr").result) == "5"
    assert "the notebook has no names nothing" in str(run("%ranks --push nothing").error_in_exec)
    assert "with other options: %ranks --restart" in str(run("%ranks 3").error_in_exec)
    failed = run("%%ranks\n\nif rank == 1:\n    raise ValueError('no')").error_in_exec
    assert isinstance(failed, ValueError)
    shown = "\n".join(failed._render_traceback_())  # type: ignore[attr-defined]
    assert re.search(r"Cell In\[\d+\], line 4, in <module>\n +raise ValueError\('no'\)", shown), shown
    assert isinstance(run("%%ranks\nx = 1\ndef f(:").error_in_exec, SyntaxError)
    run("%%ranks\nx = 2")
    assert "n_gpus=0: allowed" in str(run("%ranks --restart 0").error_in_exec)
    assert "backend='glo': torch" in str(run("%ranks --restart 2 --backend glo").error_in_exec)
    assert "Ranks does not take debug" in str(run("%ranks --restart 2 --debug").error_in_exec)
    assert repr(run("%%ranks\nx").result) == "2"  # what is wrong costs nothing that ranks hold
    run("%ranks --restart")
    assert isinstance(run("%%ranks\nx").error_in_exec, NameError)
    run("%ranks --close")
    assert "no ranks are open" in str(run("%ranks").error_in_exec)


def test_an_interrupt_before_the_ranks_know_of_it_shows_no_frames(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    run("%load_ext mlaunch")
    run("%ranks 1 --device-type cpu")
    launches.read_cells_by(monkeypatch, interrupted)
    shown = run("%%ranks\n1").error_in_exec
    assert isinstance(shown, KeyboardInterrupt)
    assert shown._render_traceback_() == ["KeyboardInterrupt"]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_cells_in_the_background_and_of_themselves(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("%load_ext mlaunch")
    run("%ranks 2 --device-type cpu")
    wait = "import mlaunch, signal\nwhile not mlaunch.stopping(): signal.sigtimedwait([], 0.01)\n3"
    run(f"%%ranks --bg job\n{wait}")
    run("%ranks")
    assert "2 ranks on cpu, running" in capsys.readouterr().out
    run("%ranks --stop job")
    assert repr(run("job.result()").result) == "3"
    run("%%ranks --bg job --rich all\ndisplay(1)")
    assert [label for label, _ in run("job.result()").result.displays()] == ["[0]", "[1]"]
    run("%%ranks --bg job\nwhile True: pass")
    run("%ranks --cancel job")
    assert isinstance(run("job.result()").error_in_exec, concurrent.futures.CancelledError)
    assert "the notebook has no job y" in str(run("%ranks --cancel y").error_in_exec)
    run("%ranks --auto")
    assert repr(run("y = 4\ny").result) == "4"
    assert capsys.readouterr().out.splitlines()[-2] == "on ranks 0-1:"
    assert isinstance(run("%%ranks --local\ny").error_in_exec, NameError)
    run("%ranks --local")
    assert isinstance(run("y").error_in_exec, NameError)
    run("%%ranks --bg job\nwhile True: pass")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that ranks had returned their values, and had not ended
        run("%ranks --close")
        assert run("job.exception()").result is not None


HANGS = """import torch, time
from mlaunch import comm
ran = []
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first_layer = torch.nn.Linear(1, 1)
    @property
    def first_costs(self):
        ran.append(1)
        comm.synchronize()
    def __dir__(self):
        ran.append(1)
        while True: time.sleep(1)
model = Model()"""


def test_completion_asks_one_rank_and_runs_nothing_there(run: Run, offered: Offered) -> None:
    run("%load_ext mlaunch")
    run("%ranks 2 --device-type cpu")
    run(f"%%ranks\n{HANGS}")
    run("%%ranks 1\napart = 2\nsettings = {'rate': 1}")
    run("model_here = 3")
    assert offered("%%ranks\nmodel.first_") == ["first_costs", "first_layer"]
    assert offered("%%ranks\nx = model.first_layer.weigh") == ["weight"]
    assert offered("%%ranks\nmodel.first_costs.") == []
    assert offered("%%ranks\nmod") == ["model"]
    assert (offered("%%ranks\napa"), offered("%%ranks 1\napa")) == ([], ["apart"])
    assert offered("%%ranks 1\nsettings['r") == ["rate'"]
    assert offered("%ranks --pull mod") == ["model"]
    assert offered("%ranks --push mod") == ["model_here"]
    assert "model_here" in offered("model_")
    assert repr(run("%%ranks\ncomm.synchronize(); ran, comm.get_world_size()").result) == "([], 2)"
    run("%ranks --auto")
    assert offered("model.first_l") == ["first_layer"]
    assert "model_here" in offered("%%ranks --local\nmodel_")
    run("%ranks --local")
    run("%ranks --close")
    assert offered("%%ranks\nmod") == []
    run("%unload_ext mlaunch")
    assert "model_here" in offered("%%ranks\nmodel_")


def test_completion_on_busy_ranks_is_empty_at_once(run: Run, offered: Offered, tmp_path: Path) -> None:
    run("%load_ext mlaunch")
    run("%ranks 2 --device-type cpu")
    run(f"%%ranks\n{RANK}\nimport os, signal\nmodel = 1")
    go = str(tmp_path / "go")
    waiting = f"while rank and not os.path.exists({go!r}): signal.sigtimedwait([], 0.01)\ncomm.synchronize()\nmodel"
    run(f"%%ranks --bg job\n{waiting}")
    assert offered("%%ranks\nmod") == []
    assert not run("job.done()").result
    Path(go).touch()
    assert repr(run("job.result()").result) == "1"
    assert offered("%%ranks\nmod") == ["model"]


@pytest.mark.slow
def test_completion_waits_for_no_rank_that_does_not_answer(run: Run, offered: Offered) -> None:
    run("%load_ext mlaunch")
    run("%ranks 2 --device-type cpu")
    run(f"%%ranks\n{RANK}\nimport os\nmodel, pid = 1, os.getpid()")
    pid = run("pid = %ranks --pull pid\npid").result[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert offered("%%ranks\nmod") == []
        assert offered("%%ranks\nmod") == []
    finally:
        os.kill(pid, signal.SIGCONT)
    assert repr(run("%%ranks\ncomm.synchronize(); model, pid == os.getpid()").result) == "(1, True)"
    assert offered("%%ranks\nmod") == ["model"]
    os.kill(pid, signal.SIGSTOP)
    assert offered("%%ranks\nmod") == []
    os.kill(pid, signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="the ranks were lost between calls: rank 0 "):
        assert repr(run("%%ranks\n2").result) == "2"
