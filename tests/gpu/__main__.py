"""Runs the parts one by one, each in processes of its own, and writes one text with what came of them."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tests import toy
from tests.gpu.figures import MARK

ROOT = Path(__file__).resolve().parent.parent.parent
SHOWN = 80  # lines of a part
# No option of setup.cfg: the machine has neither its plugins nor, maybe, its pytest.
PYTEST = [
    "-m",
    "pytest",
    "-c",
    os.devnull,
    f"--rootdir={ROOT}",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-p",
    "no:timeout",
    "-q",
    "-rs",
    "-m",
    "gpu",
]
PYTEST += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
WITHOUT_TENSORS = ["-k", "device_of_a_rank or counting or more_devices"]  # of toy, which has none


# Name, title, and after how many seconds it is ended: some four times what it takes.
LOOKS = (
    ("late", "Imports that the fork server makes later wake no driver", 90),
    ("eager", "What a call without a collective costs", 60),
    ("returned", "When the memory of a device is back", 90),
    ("endless", "A kernel without an end", 120),
    ("ports", "What ranks listen on: loopback alone", 30),
    ("touched", "A launch after the caller has touched its device", 30),
    ("prepared", "Prepared launches leave devices untouched until their call", 30),
    ("memory", "Ranks that stay hold memory, and give it back", 45),
    ("queued", "An error of queued work is its rank's", 45),
    ("faults", "An assertion of a kernel, and an illegal access", 60),
    ("stacks", "Where ranks are that wait for each other's devices", 60),
    ("travel", "Tensors on devices as values and arguments", 90),
    ("names", "UUIDs as names of devices, and their leases", 60),
    ("signals", "The signal that asks for stacks, while a rank works", 60),
    ("interrupted", "Ctrl-C while ranks that stay wait for their device", 45),
    ("preloaded", "A preload that wakes the driver", 60),
    ("awake", "A caller whose CUDA and NVML are awake", 30),
    ("beside", "A group with NCCL beside gloo's", 45),
    ("growth", "A hundred held objects", 60),
    ("shared", "Two ranks on one GPU", 90),
    ("compiling", "torch.compile in ranks", 150),
    ("numa", "Pinned copies from each NUMA node", 30),
    ("figures", "Figures", 240),
)


@dataclass(frozen=True)
class Part:
    """``seconds``: when it is ended. ``command``: arguments of Python."""

    name: str
    title: str
    seconds: float
    command: list[str]


def parts(*, without_gpu: bool) -> list[Part]:
    """In order of value."""
    tests = [*PYTEST, str(ROOT / "tests" / "system" / "test_gpu.py"), *(WITHOUT_TENSORS if without_gpu else [])]
    return [
        Part("tests", "Tests that are marked gpu", 120, tests),
        *(Part(name, title, seconds, ["-m", "tests.gpu.one", name]) for name, title, seconds in LOOKS),
    ]


@dataclass(frozen=True)
class Outcome:
    part: Part
    word: str
    seconds: float
    text: str

    def __str__(self) -> str:
        lines = self.text.splitlines()
        left = [f"({len(lines) - SHOWN} lines before)"] if len(lines) > SHOWN else []
        body = "\n".join([*left, *lines[-SHOWN:]])
        return f"== {self.part.title} ({self.part.name}): {self.word}, {self.seconds:.0f} s\n{body}\n"


def run(part: Part, seconds: float, environ: dict[str, str]) -> Outcome:
    """Runs a part; when ``seconds`` have passed, ends it and all that it has started in its session."""
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, *part.command], cwd=ROOT, env=environ, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(seconds)
            word = "passed" if code == 0 else f"FAILED (exit code {code})"
        except subprocess.TimeoutExpired:
            word = f"FAILED: not over after {seconds:.0f} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its fork server and ranks end with it
            process.wait()
        output.seek(0)
        return Outcome(part, word, time.monotonic() - begun, output.read())


def machine() -> str:
    """Says what all of it was run on."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    names = [f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"] if torch.cuda.is_available() else []
    library = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if kind and kind.type == "cuda" else ""
    devices = ", ".join(names) or (f"{torch.accelerator.device_count()} of {kind}" if kind else "no device")
    today = datetime.datetime.now(datetime.timezone.utc).date()
    cpus = len(os.sched_getaffinity(0))
    return f"{today}: Python {platform.python_version()}, torch {torch.__version__}{library}; {devices}; {cpus} CPUs"


def report(on: str, outcomes: list[Outcome], left_out: list[str]) -> str:
    """Returns the whole text; what documentation can take from it is at the top."""
    said = [f"{outcome.part.name} {outcome.word}" for outcome in outcomes]
    said += [f"{name} not run" for name in left_out]
    lines = ["For docs/install.rst", "", f"{on}: {'; '.join(said)}.", "", "For docs/performance.rst", "", on, ""]
    found = [line for outcome in outcomes for line in outcome.text.splitlines() if line.startswith(MARK)]
    lines += [line.removeprefix(MARK) for line in found] or ["(no figures)"]
    return "\n".join([*lines, "", *map(str, outcomes)])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=Path("gpu.txt"), help="where the text goes (gpu.txt)")
    parser.add_argument("--minutes", type=float, default=28.0, help="for all parts together (28)")
    parser.add_argument("--parts", default="", help="of these alone, with commas between them")
    parser.add_argument("--without-gpu", action="store_true", help="on CPUs, with an accelerator without hardware")
    parser.add_argument("--folder", type=Path, default=Path(), help=argparse.SUPPRESS)
    found = parser.parse_args()
    known = [part.name for part in parts(without_gpu=False)]
    unknown = sorted({name for name in found.parts.split(",") if name} - set(known))
    if unknown:
        parser.error(f"--parts {','.join(unknown)}: there are {', '.join(known)}")
    if not found.without_gpu and not torch.accelerator.is_available():
        parser.error("this torch sees no device here; --without-gpu tries the parts on CPUs")
    return found


def main() -> int:
    given = arguments()
    wanted = [name for name in given.parts.split(",") if name]
    chosen = [part for part in parts(without_gpu=given.without_gpu) if part.name in wanted or not wanted]
    until, outcomes = time.monotonic() + 60 * given.minutes, list[Outcome]()
    on = machine() + (" (tried without a GPU)" if given.without_gpu else "")
    with tempfile.TemporaryDirectory() as folder:
        environ = dict(os.environ)
        if given.without_gpu:
            toy.install(Path(folder))
            environ |= {"PYTHONPATH": f"{environ.get('PYTHONPATH', ROOT)}:{folder}", "TOY_LOG": f"{folder}/log"}
        for number, part in enumerate(chosen):
            left = until - time.monotonic()
            if left > 0:
                outcomes.append(run(part, min(part.seconds, left), environ))
                print(outcomes[-1], flush=True)
            left_out = [late.name for late in chosen[number + (left > 0) :]]
            (given.folder / given.file).write_text(report(on, outcomes, left_out), encoding="utf-8")  # what there is
            if left <= 0:
                break
    print(f"written to {given.folder / given.file}")
    return 0 if len(outcomes) == len(chosen) and all(outcome.word == "passed" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
