"""What ranks display and print, and how cells fail, in a real kernel: code may be right only without one."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.kernels import Kernel, Ran

pytestmark = [pytest.mark.slow, pytest.mark.dear("a kernel of Jupyter is a fresh interpreter, and has ranks")]
FIRST = """
from mlaunch import Ranks, launcher
from IPython.display import HTML, clear_output
import os
%load_ext mlaunch
%ranks 2 --device-type cpu
def show():
    print("before")
    display(HTML("<b>1</b>"))
    clear_output(wait=True)
    print("after")
    return 3
ours = launcher(show, n_gpus=2, device_type="cpu")
ours()
"""
HTML = ["text/html", "text/plain"]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    if not all(map(importlib.util.find_spec, ("jupyter_client", "ipykernel"))):
        pytest.skip("ipykernel is not installed (extra: integration)")
    own = {name: str(tmp_path_factory.mktemp(name.lower())) for name in ("XDG_RUNTIME_DIR", "IPYTHONDIR")}
    made = Kernel({**os.environ, **own, "PYTHONPATH": str(ROOT)})
    try:
        assert made.run(FIRST).result == "[3, 3]"
        yield made
    finally:
        made.close()


@pytest.fixture
def ranks(kernel: Kernel) -> Iterator[Kernel]:
    """With two ranks open, and closed at the end what a test has changed."""
    kernel.run("%ranks 2 --device-type cpu")
    yield kernel
    assert kernel.run("%ranks --local").error == ""


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("ours()", "[3, 3]"),
        ("ours.submit().result()", "[3, 3]"),
        ("ours.options(progress=False)()", "[3, 3]"),
        ("with Ranks(n_gpus=2, device_type='cpu') as own: found = own.run(show)\nfound", "[3, 3]"),
        ("launcher(lambda _: show(), n_gpus=1, device_type='cpu').map([1, 2]).results()", "[[3], [3]]"),
        ("%%ranks\ndef show():\n    display(HTML('<b>1</b>'))\n    clear_output()\nshow()\n3", "3"),
    ],
)
def test_what_clears_the_output_costs_no_call_its_values(ranks: Kernel, call: str, result: str) -> None:
    ranks.run("%%ranks\nfrom IPython.display import HTML, clear_output")
    found = ranks.run(call)
    assert (found.error, found.result) == ("", result)
    assert found.of("clear_output")


def test_a_front_end_that_fails_costs_no_call_its_values(ranks: Kernel) -> None:
    ranks.run("""
        pub = get_ipython().display_pub
        def broken(*args, **options): raise RuntimeError("no front end")
        pub.publish = pub.clear_output = broken
    """)
    found = ranks.run("found = ours()\nfound")
    again = ranks.run("ours()")
    restored = ranks.run("del pub.publish, pub.clear_output")
    assert (found.error, found.result, again.result, restored.error) == ("", "[3, 3]", "[3, 3]", "")
    assert found.printed.count("could not show what ranks do or print, and left it out: RuntimeError") <= 1
    assert "could not show" not in again.printed  # it is reported once


def test_rich_output_is_that_of_the_ranks_that_a_cell_names(ranks: Kernel) -> None:
    pytest.importorskip("matplotlib")
    show = "from IPython.display import HTML\nimport os\ndisplay(HTML('<b>%s</b>' % os.environ['RANK']))"
    of_one, of_all = ranks.run(f"%%ranks 1\n{show}"), ranks.run(f"%%ranks --rich all\n{show}")
    assert of_one.forms == [HTML]
    assert of_one.of("display_data")[-1]["data"]["text/html"] == "<b>1</b>"
    shown = [data["data"].get("text/html", data["data"]["text/plain"]) for data in of_all.of("display_data")]
    assert [text for text in shown if "<b>" in text] == ["<b>0</b>", "<b>1</b>"]
    assert of_all.printed == "[0]\n[1]\n"
    figure = ranks.run("%%ranks 1\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()")
    assert figure.forms == [["image/png", "text/plain"]]
    usual = ranks.run(f"%%ranks\n{show}")
    assert usual.forms == [HTML]
    assert "[1] <IPython.core.display.HTML object>\n" in usual.printed  # said, though it is not shown


def test_displays_of_a_job_are_in_its_own_cell(ranks: Kernel, tmp_path: Path) -> None:
    go = str(tmp_path / "go")
    os.mkfifo(go)
    job = f"open({go!r}).read()\nfrom IPython.display import HTML\nprint('hello')\ndisplay(HTML('<b>2</b>'))\n7"
    begun = ranks.run(f"%%ranks 0 --bg job\n{job}", until="job: running")
    (area,) = begun.of("display_data")
    later = ranks.run(f"open({go!r}, 'w').write('x'); job.result()", until="job: done")
    assert later.result == "7"
    strange = [content for kind, content, own in later.messages if kind == "display_data" and not own]
    assert [content["data"].get("text/html") for content in strange] == ["<b>2</b>"]
    assert later.forms == []  # the cell that runs has none of it
    updates = [content for kind, content, _ in later.messages if kind == "update_display_data"]
    last = [content for content in updates if content["transient"] == area["transient"]][-1]
    assert last["data"]["text/plain"].splitlines()[1:] == ["[0] hello", "7"]


def test_what_a_cell_is_refused_for_is_said_in_a_few_lines(ranks: Kernel) -> None:
    """With the cell's lines, without ours, and before anything has run."""
    for source, said in {
        "%%ranks\nx = 1\ndef f(:\n    pass": "def f(:",
        "%%ranks\nran = 1\nreturn 3": "'return' outside function",
        "%%ranks\nran = 1\nyield 3": "'yield' outside function",
        "%%ranks\nx =": "x =",
        "%%ranks --deadline 0\nran = 1": "--deadline 0: allowed: a number of seconds above 0",
        "%%ranks --bg class\nran = 1": "--bg class: allowed: a name for the job",
    }.items():
        refused = ranks.run(source)
        error = refused.error or refused.printed  # as a UsageError is
        assert said in error, source
        assert len(error.splitlines()) <= 4, error
        assert "mlaunch" not in error
        assert "site-packages" not in error
    assert "NameError: name 'ran' is not defined" in ranks.run("%%ranks\nran").error
    raised = ranks.run("%%ranks\neval('1 +')").error
    assert raised.count("eval('1 +')") == 1
    assert "mlaunch" not in raised
    assert "site-packages" not in raised


def test_what_would_end_a_program_ends_the_cell(ranks: Kernel) -> None:
    for source in ("exit", "quit()", "import sys\nsys.exit()"):
        error = ranks.run(f"%%ranks\n{source}").error
        assert "RuntimeError: the cell called sys.exit(); ranks end with %ranks --close" in error
        assert source.splitlines()[-1] in error
        assert "site-packages" not in error
        assert "in step and stay" in error


def test_an_interrupt_at_any_moment_shows_no_frames_of_ours(ranks: Kernel) -> None:
    ranks.run("%%ranks\nkept = 5")
    shown = []
    for hundredths in range(8):
        stopped = ranks.run("%%ranks\nimport time\nwhile True: time.sleep(0.01)", interrupt=hundredths / 100)
        shown += stopped.of("error")  # none where the interrupt is first in the kernel's own code, before the cell
        assert not re.search(r"\bmlaunch/\w+/", stopped.error), stopped.error
    assert {error["ename"] for error in shown} == {"KeyboardInterrupt"}
    assert ranks.run("%%ranks\nkept").result == "5"


DRAW = """
import pytest
from tests import launches
launches.be_patient(pytest.MonkeyPatch(), "slow import", 0)  # matplotlib's may take long on a busy machine
def draw():
    print("before")
    display(HTML("<b>1</b>"))
    print("after")
    import matplotlib.pyplot
    matplotlib.pyplot.plot([1, 2])
    matplotlib.pyplot.show()
"""
ONCE = "_ = launcher(draw, 1, device_type='cpu', progress=False, output={output!r})()"
TWICE = """
with Ranks(n_gpus=2, device_type="cpu", progress=False, output="rank0") as own:
    for _ in range(2):
        own.run(draw)
"""


def in_order(ran: Ran) -> list[Any]:
    """The texts that a cell prints and the forms of what it displays, as a front end puts them below it."""
    found: list[Any] = []
    for kind, content, _ in ran.messages:
        if kind == "display_data":
            found.append(sorted(content["data"]))
        elif kind == "stream":
            joins = found and isinstance(found[-1], str)
            found.append((found.pop() if joins else "") + content["text"])
    return found


def test_displays_of_rank_0_stand_between_the_lines_of_the_cell(kernel: Kernel) -> None:
    pytest.importorskip("matplotlib")
    assert kernel.run(DRAW).error == ""
    shown, hidden, kept = (kernel.run(cell) for cell in (ONCE.format(output="all"), ONCE.format(output="none"), TWICE))
    wanted = ["[0] before\n", HTML, "[0] after\n", ["image/png", "text/plain"]]
    assert (in_order(shown), in_order(hidden), in_order(kept)) == (wanted, [], wanted * 2)
