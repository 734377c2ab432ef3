"""Many commands that are served by what ``mlaunch warm`` keeps, some of which are killed: others are right, none stays.

    python -m tests.warm_storm [commands] [at a time]

One in five is killed at a random moment: its caller, its fork server, its agent, or, rarely, what all are forked from,
in whose place the next command leaves another.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests import launches

_SCRIPT = "import os; print(os.environ['RANK'], flush=True)\n"
_COMMAND = (sys.executable, "-m", "mlaunch", "run", "--nproc-per-node", "2")
_LONGEST = 0.2  # seconds before a kill: about as long as a command takes
_LIMIT = 120.0  # seconds for a command
_TIDY = 30.0  # seconds for what is killed to leave
_RIGHT = b"0\n1\n"


@dataclass
class Outcome:
    """What came of it. ``forks``: how many commands were served; ``left``: processes and files that stayed."""

    right: int = 0
    wrong: int = 0
    killed: int = 0
    late: int = 0
    forks: int = 0
    left: tuple[str, ...] = ()


@dataclass
class _Command:
    process: subprocess.Popen[bytes]
    begun: float
    victim: str  # "" for none
    at: float

    def strike(self) -> None:
        """Kills what is to be killed, or the caller where that is not there yet."""
        pid = self.process.pid
        server = _named(f"mlaunch: fork server of {pid}")
        agent = next((child for found in server for child in _children(found)), 0)
        found = {"server": next(iter(server), 0), "agent": agent}
        if self.victim == "zygote":
            found["zygote"] = next((state.pid for state in launches.kept_servers()), 0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(found.get(self.victim) or pid, signal.SIGKILL)


def storm(folder: Path, commands: int, at_once: int, seed: int = 1) -> Outcome:
    """Makes one, and waits until it is over."""
    chance, found = random.Random(seed), Outcome()
    os.environ |= {"XDG_RUNTIME_DIR": str(folder), "MLAUNCH_WARM": "20m"}
    os.environ.pop("PYTHONUNBUFFERED", None)  # with it, lines of two ranks may mix
    script = folder / f"storm-{os.getpid()}.py"
    script.write_text(_SCRIPT, encoding="utf-8")
    launches.keep_a_server(1200)
    running: list[_Command] = []
    callers: list[int] = []
    while len(callers) < commands or running:
        while len(running) < at_once and len(callers) < commands:
            running.append(_begin(script, chance))
            callers.append(running[-1].process.pid)
        for command in list(running):
            if _is_over(command, found):
                running.remove(command)
        signal.sigtimedwait([], 0.01)
    found.forks = sum(state.served for state in launches.kept_servers())
    found.left = _left(folder, script, callers)
    launches.end_kept_servers()
    return found


def _begin(script: Path, chance: random.Random) -> _Command:
    victim = chance.choice([*["caller", "server", "agent"] * 6, "zygote"]) if chance.random() < 0.2 else ""
    process = subprocess.Popen([*_COMMAND, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return _Command(process, time.monotonic(), victim, chance.random() * _LONGEST)


def _is_over(command: _Command, found: Outcome) -> bool:
    age = time.monotonic() - command.begun
    if command.process.poll() is None:
        if command.victim and age > command.at:
            command.strike()
            found.killed += 1
            command.victim, command.at = "", -1.0
        elif age > _LIMIT:
            found.late += 1
            command.process.kill()
        return False
    out = command.process.stdout.read() if command.process.stdout else b""
    if command.at >= 0:
        is_right = command.process.returncode == 0 and b"".join(sorted(out.splitlines(keepends=True))) == _RIGHT
        found.right += is_right
        found.wrong += not is_right
    return True


def _left(folder: Path, script: Path, callers: list[int]) -> tuple[str, ...]:
    """Names what is still there after some time."""
    end = time.monotonic() + _TIDY
    names = [f"of {script.name}", *(f"fork server of {pid}" for pid in callers)]
    while (left := [f"pid {pid}: {name}" for name in names for pid in _named(name)]) and time.monotonic() < end:
        signal.sigtimedwait([], 0.1)
    return (*left, *(path.name for path in (folder / "mlaunch").iterdir() if path.suffix != ".warm"))


def _named(name: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if name in (entry / "cmdline").read_bytes().decode(errors="replace").partition("\0")[0]:
                    found.append(int(entry.name))
    return found


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    return []


def main() -> None:
    commands, at_once = (int(word) for word in (*sys.argv[1:], "200", "3")[:2])
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        print(storm(Path(folder), commands, at_once), f"{time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
