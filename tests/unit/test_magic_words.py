"""What is said to ``%ranks``, and what it says; and cells where IPython is not."""

from __future__ import annotations

import queue
import re
import types

import pytest

from mlaunch.base.exceptions import LaunchError, misuse
from mlaunch.cells.caller import CellJob, CellResult, cell_source
from mlaunch.cells.kernel import JobArea, shown_in_cell, traceback_lines
from mlaunch.cells.kernel.magic_words import CellWords, LineWords, WordError, cell_words, line_words
from mlaunch.cells.rank import PlainShell
from mlaunch.cells.wire import Bundle, CellAnswer, NamesOfRank


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("", LineWords("table")),
        ("4", LineWords("open", options={"n_gpus": 4})),
        ("2 --backend gloo --timeout=1.5 --lease --no-progress --deadline None --idle-timeout 60",
         LineWords("open", options={"n_gpus": 2, "backend": "gloo", "timeout": 1.5, "lease": True, "progress": False,
                                    "deadline": None, "idle_timeout": 60})),
        ("--devices 0,2-3 --env A=1,B=x --seed per-rank --token 12",
         LineWords("open", options={"devices": [0, 2, 3], "env": {"A": "1", "B": "x"}, "seed": "per-rank",
                                    "token": "12"})),
        ("--restart", LineWords("restart")),
        ("--restart 3", LineWords("restart", options={"n_gpus": 3})),
        ("--close", LineWords("close")),
        ("--pull loss", LineWords("pull", ("loss",))),
        ("--auto", LineWords("auto")),
        ("--cancel job", LineWords("cancel", ("job",))),
        ("--push lr data --targets 1-2", LineWords("push", ("lr", "data"), (1, 2))),
    ],
)  # fmt: skip
def test_lines(line: str, meant: LineWords) -> None:
    assert line_words(line) == meant


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("", CellWords()),
        ("0,2-3", CellWords((0, 2, 3))),
        ("--targets 0,2 --deadline 60", CellWords((0, 2), 60.0)),
        ("--rich=all", CellWords(rich="all")),
        ("1 --bg job", CellWords((1,), bg="job")),
        ("--auto", CellWords(auto=True)),
    ],
)
def test_cells(line: str, meant: CellWords) -> None:
    assert cell_words(line) == meant


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--pull", "--pull has no names"),
        ("--pull a.b", "a.b: allowed with --pull: names, as in"),
        ("--pull a --deadline 3", "allowed with --pull: names, and --targets"),
        ("--stop job --targets 1", "allowed with --stop: names"),
        ("--pull a --close", "--pull and --close do two things"),
        ("--close 3", "--close takes nothing else: leave out 3"),
        ("--bakend gloo", "no option --bakend; did you mean --backend?"),
        ("--backend", "--backend has no value"),
        ("--bakend", "no option --bakend; did you mean --backend?"),
        ("gloo", "allowed: a number of ranks, then options"),
        ("--env 'A", "No closing quotation"),
    ],
)
def test_lines_that_say_nothing(line: str, said: str) -> None:
    with pytest.raises(WordError) as raised:
        line_words(line)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("one", "one: allowed: ranks and ranges of ranks"),
        ("3-2", "3-2: allowed: ranges that count up"),
        ("0 --targets 1", "targets is given twice"),
        ("--timeout 3", "options of the ranks belong to %ranks"),
        ("--deadline soon", "allowed: a number of seconds"),
        ("--deadline 0", "--deadline 0: allowed: a number of seconds above 0"),
        ("--deadline nan", "--deadline nan: allowed: a number of seconds above 0"),
        ("--bg 1", "--bg 1: allowed: a name for the job"),
        ("--bg class", "--bg class: allowed: a name for the job"),
        ("--rich none", "allowed: first (of the ranks), all"),
    ],
)
def test_cells_that_say_nothing(line: str, said: str) -> None:
    with pytest.raises(WordError) as raised:
        cell_words(line)
    assert said in str(raised.value)


def test_plain_cells_go_to_the_ranks_until_told_otherwise() -> None:
    pytest.importorskip("IPython", reason="IPython is not installed (extra: test)")
    from mlaunch.cells.kernel import Automatic

    automatic = Automatic()
    assert automatic(["x = 1\n"]) == ["x = 1\n"]
    automatic.on = True
    assert automatic(["x = 1\n"]) == ["%%ranks --auto\n", "x = 1\n"]
    for cell in (["%%ranks 0\n", "x\n"], ["y = 1\n", "z = %ranks --pull y\n"], ["\n"]):
        assert automatic(cell) == cell
    assert automatic(["%%ranks --local\n", "x\n"]) == ["# %%ranks --local\n", "x\n"]
    automatic.paused = True  # a cell is on its way
    assert automatic(["x = 1\n"]) == ["x = 1\n"]


def area_of(job: CellJob) -> tuple[JobArea, list[tuple[str, bool]]]:
    """An area in something like a kernel, and what it shows there."""
    shown: list[tuple[str, bool]] = []

    def publish(data: dict[str, str], _: object, *, update: bool, **__: object) -> None:
        shown.append((re.sub(r"\d+ ms|\d+\.\d s", "N s", data["text/plain"]), update))

    shell = types.SimpleNamespace(kernel=object(), display_pub=types.SimpleNamespace(publish=publish))
    area = JobArea(shell, job)
    area.open()
    return area, shown


def test_a_job_shows_what_it_prints_and_how_it_ends() -> None:
    job = CellJob("job")
    job.set_running_or_notify_cancel()
    area, shown = area_of(job)
    area.sink(1, b"hello\n")
    job.set_result([CellAnswer(Bundle({"text/plain": "3"}, {}, {})), None])
    assert shown[0] == ("job: running", False)
    assert shown[-1] == ("job: done after N s\nhello\n3", True)
    assert repr(job.result()) == "3"
    assert not job.cancel()
    failed = CellJob("job")
    _, shown = area_of(failed)
    failed.set_exception(misuse(NameError("no x")))
    assert shown[-1] == ("job: failed after N s\nNameError: no x", True)
    waiting = CellJob("job")
    _, shown = area_of(waiting)
    assert shown == [("job: waits for the cells before it", False)]
    assert waiting.cancel()
    assert shown[-1] == ("job: cancelled after N s", True)


def test_a_job_shows_that_it_begins_and_its_last_line_though_none_follows() -> None:
    """One that comes just after another waits for a moment, and for no other line."""
    shown: queue.Queue[str] = queue.Queue()
    publisher = types.SimpleNamespace(publish=lambda data, _metadata, **_how: shown.put(data["text/plain"]))
    job = CellJob("job")
    area = JobArea(types.SimpleNamespace(kernel=object(), display_pub=publisher), job)
    area.open()
    assert shown.get(timeout=30) == "job: waits for the cells before it"
    job.set_running_or_notify_cancel()
    assert shown.get(timeout=30) == "job: running"
    area.sink(1, b"first\n")
    area.sink(1, b"second\n")
    while not shown.get(timeout=30).endswith("first\nsecond"):
        pass
    area.sink(1, b"third\n")
    job.set_exception(misuse(NameError("no x")))
    while not (last := shown.get(timeout=30)).startswith("job: failed after "):
        pass
    assert last.endswith("first\nsecond\nthird\nNameError: no x")


def test_the_table() -> None:
    pytest.importorskip("IPython", reason="IPython is not installed (extra: test)")
    from mlaunch.cells.kernel import table

    told = [
        NamesOfRank(11, 1 << 20, 0, {"x": ("int", 28), "model": ("torch.nn.Linear", 2048)}),
        NamesOfRank(12, 2 << 20, 4096, {"x": ("int", 28)}),
    ]
    assert table(["cuda:0", "cuda:1"], "idle", told) == (
        "2 ranks on cuda, idle\n"
        "rank  pid  device  memory   on device\n"
        "0     11   cuda:0  1.0 MiB  -\n"
        "1     12   cuda:1  2.0 MiB  4.0 KiB\n"
        "[0] model: torch.nn.Linear, 2.0 KiB\n"
        "x: int, 28 B"
    )
    assert "busy ranks cannot be asked" in table(["cpu"], "running", [])


def test_equal_looks_are_shown_once_and_others_by_rank() -> None:
    def result(*texts: str | None) -> CellResult:
        looks = [None if text is None else Bundle({"text/plain": text}, {}, {}) for text in texts]
        return CellResult({rank: CellAnswer(look) for rank, look in enumerate(looks)})

    assert repr(result("3", "3")) == "3"
    assert repr(result("a\nb", "c", "a\nb")) == "[0,2] a\n      b\n[1] c"
    assert result(None, None).is_empty
    rich = Bundle({"text/plain": "3", "text/html": "<b>3</b>"}, {"a": 1}, {})
    shown = CellResult({0: CellAnswer(rich), 1: CellAnswer(rich.plain())})
    assert shown._repr_mimebundle_() == (rich.data, rich.metadata)
    apart = CellResult({0: CellAnswer(rich), 1: CellAnswer()})
    assert apart._repr_mimebundle_()[0] == {"text/plain": "[0] 3\n[1] "}


def test_the_cause_is_shown_without_our_frames() -> None:
    report = LaunchError("rank 1 of cell In[3] raised ValueError: no", [], {}, {})
    error = ValueError("no")
    error.__cause__ = report
    error.__notes__ = ["raised by rank 1 of cell In[3] (host a)", "the ranks are in step and stay"]
    assert traceback_lines(error) == [str(report), "the ranks are in step and stay"]
    assert shown_in_cell(error)._render_traceback_() == traceback_lines(error)
    assert traceback_lines(report)[0].startswith("LaunchError: rank 1")
    assert traceback_lines(misuse(NameError("no x"))) == ["NameError: no x"]
    assert traceback_lines(RuntimeError("a fault of ours keeps its frames")) == []


def test_cells_without_ipython() -> None:
    module = types.ModuleType("cells")
    shell = PlainShell(module)
    assert shell.run("x = 3", "<cell>", 1, 0) == CellAnswer(without_ipython=True)
    answer = shell.run("import asyncio\nawait asyncio.sleep(0)\nx + 1", "<cell>", 1, 0)
    assert answer.last is not None
    assert answer.last.text == "4"
    assert shell.run("x;", "<cell>", 1, 0).last is None
    with pytest.raises(ZeroDivisionError) as raised:
        shell.run("x = 4\n1 / 0", "<cell>", 1, lines_above := 1)
    assert raised.traceback[-1].lineno + 1 == 2 + lines_above
    assert vars(module)["x"] == 4


def test_a_syntax_error_is_told_before_a_rank_has_it() -> None:
    with pytest.raises(SyntaxError) as raised:
        cell_source("x = 1\ndef f(:", magic="%%ranks")
    assert raised.value.lineno == 3
    for half in ("x = 1\nreturn 3", "yield 1", "x ="):  # of which a part would have run
        with pytest.raises(SyntaxError):
            cell_source(half)
    assert cell_source("!ls\n%time 1").text == "!ls\n%time 1"  # IPython's, on the ranks
