"""Signals at many moments of a start: of ``mlaunch run`` nothing is to be left half a second later.

    python -m tests.start_storm [moments] [signals]

Each of SIGINT, SIGTERM and SIGKILL (or those that are named) ends so many starts, at moments from the first to the one
at which ranks run. What is left is found by a variable that all processes of a start have. On a busy machine half a
second may pass while these want a CPU and get none. So their time is taken apart: ``needed`` is what they computed and
what they slept through, which is all that an idle machine would take. It counts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.users import users_environ

_SCRIPT = "import os, time\nos.write(1, b'.')\ntime.sleep(600)\n"
_COMMAND = (sys.executable, "-m", "mlaunch", "run", "--nproc-per-node", "2")
_MARK = "START_STORM"
_ALLOWED = 0.5  # seconds
_LOOK = 0.005
_LIMIT = 60.0  # seconds until nothing is left, whatever the machine does


@dataclass
class Ending:
    """How a start ended. ``idle``: seconds in which all that was left slept; ``computed``: on all CPUs."""

    number: int
    moment: float
    took: float = 0.0
    idle: float = 0.0
    computed: float = 0.0
    waited: dict[str, int] = field(default_factory=dict)  # who slept in what, and how often it was seen there

    @property
    def needed(self) -> float:
        """Seconds that an idle machine would take, at most."""
        return min(self.took, self.idle + self.computed)

    def __str__(self) -> str:
        slept = ", ".join(
            f"{name} ({count})" for name, count in sorted(self.waited.items(), key=lambda one: -one[1])[:4]
        )
        return (
            f"{signal.Signals(self.number).name} after {self.moment:.2f} s: gone after {self.took:.2f} s, of which it "
            f"computed {self.computed:.2f} and slept {self.idle:.2f}; seen asleep: {slept or 'nobody'}"
        )


def storm(moments: int, numbers: list[int]) -> list[Ending]:
    """End that many starts by each signal."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(_SCRIPT, encoding="utf-8")
        length = statistics.median(_length(script) for _ in range(3))
        print(f"a start takes {length:.2f} s now", flush=True)
        found = []
        for place in range(moments):
            for number in numbers:
                found.append(_ended(script, number, length * (place + 0.5) / moments))
                if found[-1].took > _ALLOWED:
                    print(found[-1], flush=True)
        return found


@contextlib.contextmanager
def _started(script: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    environ = {**users_environ(), "XDG_RUNTIME_DIR": str(script.parent), "MLAUNCH_WARM": "0", _MARK: mark}
    pipe = subprocess.PIPE
    command = [*_COMMAND, str(script)]
    with subprocess.Popen(
        command, env=environ, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            yield process, mark
        finally:
            for pid in _marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _length(script: Path) -> float:
    begun = time.monotonic()
    with _started(script) as (process, _):
        assert process.stdout is not None
        process.stdout.read(2)
        taken = time.monotonic() - begun
        process.terminate()
        process.wait()
    return taken


def _ended(script: Path, number: int, moment: float) -> Ending:
    with _started(script) as (process, mark):
        signal.sigtimedwait([], moment)
        found = Ending(number, moment)
        left = _marked(mark)
        before = {pid: _computed(pid) for pid in left}
        process.send_signal(number)
        _watch(found, left, process)
        found.computed = sum(after - before.get(pid, 0.0) for pid, after in left.items())
        stayed = _marked(mark).keys() - {process.pid}
        if stayed:  # forked by one that was gone before it was looked at
            _watch(found, dict.fromkeys(stayed, 0.0), process)
    return found


def _watch(found: Ending, left: dict[int, float], process: subprocess.Popen[bytes]) -> None:
    """Look at what is left until nothing is. ``left``: seconds that each has computed."""
    begun = last = time.monotonic()
    there = set(left)
    while there and time.monotonic() < begun + _LIMIT:
        process.poll()
        states = {pid: _state(pid) for pid in there}
        there = {pid for pid, state in states.items() if state not in "ZX"}
        for pid in list(there):
            left[pid] = max(left.get(pid, 0.0), _computed(pid))
            there |= _children(pid)
        now = time.monotonic()
        if there and not any(states.get(pid, "R") == "R" for pid in there):
            found.idle += now - last
            for pid in there:
                name = f"{_text(pid, 'comm')} in {_text(pid, 'wchan') or '?'}"
                found.waited[name] = found.waited.get(name, 0) + 1
        last = now
        if there:
            signal.sigtimedwait([], _LOOK)
    found.took += time.monotonic() - begun


def _marked(mark: str) -> dict[int, float]:
    """Return the processes of a start that are no zombies, with the seconds that they have computed."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if f"{_MARK}={mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                    found[int(entry)] = _computed(int(entry))
    return found


def _state(pid: int) -> str:
    """Return R if any of its threads runs, or wants to; X: it is gone."""
    with contextlib.suppress(OSError):
        states = [
            Path(f"/proc/{pid}/task/{task}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
            for task in os.listdir(f"/proc/{pid}/task")
        ]
        return "R" if "R" in states else states[0] if states else "X"
    return "X"


def _computed(pid: int) -> float:
    """Return the seconds that its threads have been on a CPU."""
    found = 0.0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9
    return found


def _children(pid: int) -> set[int]:
    with contextlib.suppress(OSError):
        return {int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()}
    return set()


def _text(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace").strip()
    return ""


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it is ignored, and so inherited
    moments = int(sys.argv[1]) if sys.argv[1:] else 50
    numbers = [signal.Signals[name] for name in sys.argv[2:]] or [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    found = storm(moments, list(numbers))
    for number in numbers:
        ours = [one for one in found if one.number == number]
        late, slow = (sum(value > _ALLOWED for value in values) for values in (
            [one.took for one in ours], [one.needed for one in ours]))  # fmt: skip
        print(
            f"{number.name}: {len(ours)} starts; later than {_ALLOWED} s: {late}, of which {slow} by what they did; "
            f"longest {max(one.took for one in ours):.2f} s, needed {max(one.needed for one in ours):.2f} s"
        )
    sys.exit(any(one.needed > _ALLOWED for one in found))


if __name__ == "__main__":
    main()
