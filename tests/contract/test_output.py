"""What ranks print, as their caller sees it; the report of a call; the progress of a loop."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mlaunch import LaunchError, LaunchReport, launcher, progress
from tests import builds, launches
from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.terminal import Terminal
from tests.users import users_environ

Capture = pytest.CaptureFixture[str]


def lines(text: str) -> list[str]:
    return sorted(text.splitlines())


@builds.silent
def test_lines_have_their_rank_in_front_and_equal_ones_are_shown_once(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches.be_patient(monkeypatch, "merging", 60.0)  # on a busy machine ranks come late

    def train() -> None:
        dist.barrier()
        print("all the same")
        dist.barrier()
        print("rank", dist.get_rank())
        print("error of", dist.get_rank(), file=sys.stderr)

    launcher(train, 3)()
    shown = capsys.readouterr()
    assert lines(shown.out) == ["[0-2] all the same", "[0] rank 0", "[1] rank 1", "[2] rank 2"]
    assert shown.out.startswith("[0-2] all the same\n")
    assert lines(shown.err) == ["[0] error of 0", "[1] error of 1", "[2] error of 2"]


@builds.silent
@pytest.mark.parametrize("start_method", ["forkserver", "fork", "spawn"])
def test_all_that_writes_is_shown(capsys: Capture, start_method: str) -> None:
    def train() -> None:
        import ctypes

        libc = ctypes.CDLL(None)
        libc.printf(b"from C, buffered\n")
        os.write(1, b"from a descriptor\n")
        subprocess.run(["echo", "from a child"], check=True)
        logging.basicConfig(force=True)
        logging.getLogger("trainer").error("from logging")
        sys.stdout.write("without an end")

    launcher(train, 1, start_method=start_method)()
    shown = capsys.readouterr()
    written = ["from C, buffered", "from a child", "from a descriptor", "without an end"]
    assert lines(shown.out) == [f"[0] {text}" for text in written]
    assert shown.err == "[0] ERROR:trainer:from logging\n"


@builds.silent
@pytest.mark.parametrize("by", ["Python", "C"])
def test_text_that_the_caller_has_buffered_is_written_once(run_script: Any, by: str) -> None:
    """Ranks that are forked from it inherit its buffers; a cell's are filled by the warning of threads."""
    script = """
import ctypes, os, sys, threading
from mlaunch import launcher

class Buffered:
    text = ""
    def write(self, text):
        self.text += text
    def flush(self):
        sys.__stderr__.write(self.text)
        sys.__stderr__.flush()
        self.text = ""

if BY == "C":
    ctypes.CDLL(None).printf(b"in the buffer\\n")
else:
    sys.stderr = kernels = Buffered()
    os.register_at_fork(after_in_child=kernels.flush)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
launcher(lambda: None, 2, device_type="cpu", start_method="fork", output="raw")()
"""
    done = run_script(script.replace("BY", repr(by)))
    assert done.returncode == 0, done.stderr
    said = {"Python": "RuntimeWarning: start_method='fork'", "C": "in the buffer"}[by]
    assert (done.stdout + done.stderr).count(said) == 1


@pytest.mark.parametrize(
    ("output", "shown"), [("all", "[0] 0\n[1] 1\n"), ("rank0", "[0] 0\n"), ("none", ""), ("raw", "")]
)
def test_output_shows_what_its_option_says(capsys: Capture, output: str, shown: str) -> None:
    def train() -> None:
        for rank in (0, 1):
            if dist.get_rank() == rank:
                print(rank)
            dist.barrier()

    launcher(train, 2, output=output)()
    assert "".join(sorted(capsys.readouterr().out.splitlines(keepends=True))) == shown


def test_raw_output_is_the_ranks_own(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """And comes after what the caller has printed before, which a pipe's buffer still holds."""
    ours = "from mlaunch import launcher\nprint('before')\nlauncher(lambda: print('bare'), 1, output='raw')()"
    done = run_script(ours)
    assert (done.stdout, done.stderr) == ("before\nbare\n", "")


def test_strange_bytes(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    def train() -> None:
        os.write(1, b"\xff\xfe\0 and\r\n" + b"x" * ((3 << 20) + 5) + b"\nend\n")

    launcher(train, 1)()
    first, *long, last = capfdbinary.readouterr().out.splitlines()
    assert first == b"[0] \xff\xfe\0 and"
    assert [len(line) for line in long] == [4 + (1 << 20)] * 3 + [9]
    assert last == b"[0] end"


@builds.silent
def test_a_bar_is_one_line(capsys: Capture) -> None:
    def train() -> None:
        for percent in (0, 50, 100):
            print(f"\r{percent}%", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)

    launcher(train, 1)()
    assert capsys.readouterr().err == "[0] 100%\n"


def test_the_last_lines_of_a_killed_rank(capsys: Capture) -> None:
    def train() -> None:
        for number in range(2000):
            print(number)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(LaunchError):
        launcher(train, 1)()
    assert capsys.readouterr().out == "".join(f"[0] {number}\n" for number in range(2000))


@builds.silent
def test_files(tmp_path: Path, capsys: Capture) -> None:
    def train() -> None:
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
        os.write(2, b"\r10%\r20%")
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("no such luck")
        dist.barrier()

    ours = launcher(train, 2, log_dir=tmp_path / "logs", output="none", max_restarts=1)
    with pytest.warns(RuntimeWarning, match="is started again"), pytest.raises(ValueError, match="luck") as caught:
        ours()
    assert capsys.readouterr().out == ""
    (folder,) = (tmp_path / "logs").iterdir()
    assert folder.name.startswith("test_files.-locals-.train_")
    for attempt in "01":
        for rank in "01":
            assert (folder / f"attempt_{attempt}" / rank / "stdout.log").read_text() == f"attempt {attempt}\n"
            assert (folder / f"attempt_{attempt}" / rank / "stderr.log").read_bytes() == b"\r10%\r20%"
    report = caught.value.__cause__
    assert isinstance(report, LaunchError)
    assert report.log_dir == str(folder)
    assert f"\n  its output is in {folder}/attempt_1/1\n" in str(report)
    assert ours.last is not None
    assert ours.last.log_dir == str(folder)


def test_files_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(OSError, match=re.escape(f"log_dir={str(tmp_path / 'logs')!r}: File exists")):
        launcher(lambda: 1, 1, log_dir=str(tmp_path / "logs"))()
    with pytest.raises(ValueError, match="log_dir='x' with output='raw'"):
        launcher(lambda: 1, 1, log_dir="x", output="raw")
    with pytest.raises(ValueError, match="output='loud': allowed: 'all', 'rank0', 'none', 'raw'"):
        launcher(lambda: 1, 1, output="loud")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_flood(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """256 MiB that nobody holds in memory."""
    done = run_script("""
import os, resource, sys
from mlaunch import launcher
def flood():
    line = b"x" * 120 + b"\\n"
    for _ in range(1 << 10):
        os.write(1, line * 2200)
    print("the end")
launcher(lambda: None, 1)()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
launcher(flood, 1)()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, file=sys.stderr)
""")  # fmt: skip
    assert done.stdout.endswith("[0] the end\n")
    assert len(done.stdout) > 256 << 20
    assert int(done.stderr) < 32


UNREAD = """
import os, sys
from mlaunch import LaunchTimeout, launcher
def flood():
    while True:
        os.write(1, b"x" * 99 + b"\\n")
try:
    launcher(flood, 2, deadline={deadline}, grace_period=1)()
except (KeyboardInterrupt, LaunchTimeout) as error:
    print(type(error).__name__, file=sys.stderr)
"""


@pytest.mark.parametrize(("deadline", "error"), [("2", "LaunchTimeout"), ("None", "KeyboardInterrupt")])
def test_nobody_reads(tmp_path: Path, deadline: str, error: str) -> None:
    """A full pipe holds up neither the deadline nor Ctrl-C, of which one does."""
    (tmp_path / "script.py").write_text(UNREAD.format(deadline=deadline))
    environ = {**users_environ(), "PYTHONPATH": str(ROOT)}
    command = [IMPORTED, "script.py"]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=environ, text=True, **streams) as process:
        try:
            assert select.select([process.stdout], [], [], 60)[0]
            if deadline == "None":
                process.send_signal(signal.SIGINT)
            process.wait(60)
            assert error in process.stderr.read()
        finally:
            process.kill()


def test_a_stream_that_raises_does_not_end_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise RuntimeError("no")

    monkeypatch.setattr(sys, "stdout", Broken())
    assert launcher(lambda: print("lost") or 1, 2)() == [1, 1]  # type: ignore[func-returns-value]


def test_the_report_of_a_call(tmp_path: Path) -> None:
    def train(fail: bool) -> bytes:
        dist.barrier()
        if fail and dist.get_rank() == 1:
            raise ValueError("no such <luck>")
        dist.barrier()
        return bytes(5000)

    launcher(os.getpid, 2)()  # the first call of a server counts devices, where torch was built for some
    ours = launcher(train, 2)
    assert ours.last is None
    ours(fail=False)
    report = ours.last
    assert isinstance(report, LaunchReport)
    assert [(rank.rank, rank.device, rank.end) for rank in report.ranks] == [
        (0, "cpu", "returned"),
        (1, "cpu", "returned"),
    ]
    for rank in report.ranks:
        assert [span.phase for span in rank.spans] == ["start", "rendezvous", "receive", "run", "send", "wait", "stop"]
        assert all(before.end == after.start for before, after in zip(rank.spans, rank.spans[1:], strict=False))
        assert 0 <= rank.spans[0].start <= rank.spans[-1].end <= report.seconds
        assert rank.peak_memory > 1 << 20
        assert rank.returned is not None
        assert rank.returned > 5000
    title, head, *rows = str(report).splitlines()
    assert title.startswith("test_the_report_of_a_call.<locals>.train()  2 ranks on ")
    assert " ".join(head.split()) == "rank pid device start rendezvous receive run send wait stop peak memory value end"
    assert [row.split()[0] for row in rows] == ["0", "1"]
    ElementTree.fromstring(report.to_svg())
    assert "<table>" in report._repr_html_()
    report.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"run", "rendezvous"}
    with pytest.raises(ValueError, match="luck"):
        ours.options(n_gpus=3)(fail=True)  # a copy shares the report
    assert ours.last is not None
    assert [rank.end for rank in ours.last.ranks] == ["was stopped", "raised ValueError: no such <luck>", "was stopped"]
    ElementTree.fromstring(ours.last.to_svg())
    assert "<td>raised ValueError: no such &lt;luck&gt;</td>" in ours.last._repr_html_()


@builds.silent
@pytest.mark.parametrize("output", ["all", "rank0", "none"])
def test_output_of_a_rank_is_in_the_report(output: str) -> None:
    def train(fail: bool) -> None:
        print("rank", dist.get_rank())
        print("error of", dist.get_rank(), file=sys.stderr)
        print("\r 50%\r100%\nno end", end="")
        sys.stdout.flush()
        dist.barrier()
        if fail and dist.get_rank() == 1:
            raise ValueError("no such luck")

    ours = launcher(train, 2, output=output)
    ours(fail=False)
    assert ours.last is not None
    assert [ours.last.output(rank) for rank in (0, 1)] == [
        f"rank {rank}\nerror of {rank}\n100%\nno end\n" for rank in (0, 1)
    ]
    assert "error of" not in repr(ours.last)
    with pytest.raises(ValueError, match="no such luck"):
        ours(fail=True)
    assert ours.last.output(1) == "rank 1\nerror of 1\n100%\nno end\n"
    words = r"rank 2 of \S+train\(\) was not started on \S+; started here: ranks 0-1"
    with pytest.raises(LookupError, match=words):
        ours.last.output(2)


def test_output_that_went_into_the_callers_streams_is_not_known() -> None:
    ours = launcher(lambda: None, 1, output="raw")
    ours()
    assert ours.last is not None
    with pytest.raises(ValueError, match=r"what rank 0 of .* printed is not known: with output='raw' it goes straight"):
        ours.last.output(0)


def test_a_picture(tmp_path: Path, run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: notebook)")
    done = run_script("from mlaunch import launcher\nf = launcher(lambda: 1, 2)\nf()\nf.last.save_png('timeline.png')")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_method_remembers_too() -> None:
    from tests.contract.functions import Model

    Model(1).fit(2)
    assert Model.fit.last is not None
    assert Model.fit.last.name == "Model.fit()"


def test_progress_in_a_rank_iterates() -> None:
    def train() -> list[Any]:
        found: list[Any] = [*progress(range(3), "outer"), *progress(iter("ab"), total=2)]
        for _ in progress(range(2)):
            found += progress([5])
        return found

    assert launcher(train, 2)() == [[0, 1, 2, "a", "b", 5, 5]] * 2


def test_progress_counts_what_is_done() -> None:
    """The item at work is not."""

    def train() -> list[int]:
        done = [launches.loop_here().done for _ in progress(range(3))]
        return [*done, launches.loop_here().done]

    assert launcher(train, 1)() == [[0, 1, 2, 3]]


def test_progress_of_how_many() -> None:
    def train() -> list[int]:
        loops = (progress(range(3)), progress(iter("abc"), total=3), progress("abcd", total=2), progress(iter("a")))
        return [{launches.loop_here().total for _ in loop}.pop() for loop in loops]

    assert launcher(train, 1)() == [[3, 3, 2, -1]]


def test_of_loops_within_loops_the_outermost_is_counted() -> None:
    def train() -> list[int]:
        for _ in progress("ab"):
            for _ in progress(range(5)):
                pass
        loop = launches.loop_here()
        return [loop.number, loop.total, loop.done]

    assert launcher(train, 1)() == [[1, 2, 2]]


def test_progress_elsewhere(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_script("from mlaunch import progress\nprint(list(progress(range(3), 'alone')))")
    assert done.stdout == "[0, 1, 2]\n", done.stderr
    assert "alone: 100%" in done.stderr


SHOW = """
import sys
import torch.distributed as dist
from mlaunch import launcher, progress
@launcher(n_gpus=2)
def train(fifo):
    for step in progress(range(4), "epoch"):
        if step == 2 and dist.get_rank() == 1:
            print("\\r 10%\\r 50% loaded", end="", file=sys.stderr, flush=True)
            open(fifo).read()
    print("finished")
train("fifo")
"""


HIDES_CURSOR = "\x1b[?25l"
UP = "\x1b[1A"


@pytest.mark.slow
def test_the_lines_that_change(tmp_path: Path) -> None:
    """On a terminal: what the launch is doing, one bar that stands where the slowest rank is, and a rank's own bar.

    After Ctrl-Z they are drawn below what the shell has written, and no cursor is hidden.
    """
    pytest.importorskip("rich", reason="rich is not installed (extra: notebook)")
    (tmp_path / "show.py").write_text(SHOW)
    os.mkfifo(tmp_path / "fifo")
    script = Terminal(tmp_path / "show.py", TERM="xterm", COLUMNS="100", LINES="30")
    pid, terminal = script.process.pid, script.fd
    seen = until(terminal, "[1]  50% loaded")
    seen += until(terminal, "rank 1 is 2 behind")
    assert "epoch:  50%" in seen
    assert re.search(r"train\(\)  \d:\d\d  running", seen)
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    while select.select([terminal], [], [], 0)[0]:
        os.read(terminal, 65536)  # of before
    os.kill(pid, signal.SIGCONT)
    assert UP not in until(terminal, "train()").partition("train()")[0]  # where the shell's lines would be
    assert HIDES_CURSOR not in seen
    (tmp_path / "fifo").write_text("x")
    seen = until(terminal, None)
    assert script.end() == 0
    assert "[0-1] finished" in seen or "[1] finished" in seen
    assert "epoch: 100%" in seen


def test_no_lines_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``progress=False``, though there is a place for them."""
    shown: list[str] = []

    class Place:
        def __init__(self, *, blocks: bool) -> None:
            assert blocks

        def show(self, text: str) -> str:
            shown.append(text)
            return ""

        def hide(self) -> str:
            return ""

        def close(self, _: list[str]) -> str:
            return ""

    launches.show_progress_at(monkeypatch, Place)
    launcher(lambda: 1, 1, progress=False)()
    assert shown == []
    launcher(lambda: 1, 1)()
    assert "<lambda>()  0:00  " in shown[0]


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_lines_are_drawn_over_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls that were submitted at one; a call that blocks has the terminal for itself."""
    pytest.importorskip("rich", reason="rich is not installed (extra: notebook)")
    monkeypatch.setattr(sys, "stderr", _Screen())
    monkeypatch.setenv("TERM", "xterm")
    assert launches.display_area() is not None
    assert launches.display_area(blocks=False) is not None
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert launches.display_area() is not None
    assert launches.display_area(blocks=False) is None
    assert launcher(lambda: 1, n_gpus=1).submit().result() == [1]
    assert sys.stderr.getvalue() == ""


def until(terminal: int, words: str | None) -> str:
    """What a terminal shows until some words; None: to its end."""
    seen, end = "", time.monotonic() + 60
    while words is None or words not in seen:
        assert select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0], seen
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        seen += data.decode(errors="replace")
    return seen
