"""Kills and stops each process of a call on an engine's machines, in each stage of it, and looks what is left.

By hand: ``python -m tests.engine_scenes slurm ssh mpirun ray``, with ``--stages``, ``--victims``, ``--signals`` for a
part. A line per scene: what the caller was told, and what was wrong; nothing at its end means that nothing was. Real
daemons, as in ``tests/system/test_engines.py``.

What it gave on 2026-11-26, beside a load of 15 to 45. ssh: 56 scenes in join, run, return and tidy; one left
something, a member that was stopped before it had imported anything, and leaves nothing since its waker is there
first. mpirun: 61 scenes, nothing left. Slurm: 46 scenes (of return and tidy those with kills alone), nothing
left. Ray, on 2026-11-27: 54 scenes in join, run, return and tidy, nothing left. Words that were wrong are mended: an
agent that is killed in join is told at once, a member that is killed behind ssh as such, and what did not answer on a
machine, too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import launches
from tests.processes import alive, children
from tests.system.engine_rigs import Rig, mpirun, ray, slurm_here, ssh
from tests.system.slurm import jobs_left

STAGES = ("queue", "join", "run", "return", "tidy")
VICTIMS = ("caller", "command", "carrier", "member", "fork server", "agent", "link", "gate", "rank")
RIGS = {"slurm": slurm_here, "ssh": ssh, "mpirun": mpirun, "ray": ray}
ANSWER_LIMIT, LEAVE_LIMIT = 120.0, 40.0  # seconds
_LOOK_DELAY = 0.02
_LARGE = 64 << 20  # bytes of a value that is on its way
_HEARTBEAT_TIMEOUT = "4"  # seconds


@dataclass
class Scene:
    """One of them, and what came of it. ``wrong``: what should not be."""

    stage: str
    victim: str
    number: signal.Signals
    told: str = ""
    wrong: list[str] = field(default_factory=list)


class Stage:
    """Plays scenes with a rig; ``folder``: in which all of its processes have their runtime directory."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self._rig = rig
        self._folder = self._ranks = folder
        self._mark = f"XDG_RUNTIME_DIR={os.environ['XDG_RUNTIME_DIR']}".encode()
        self._before = self._marked()

    def note_what_is_there(self) -> None:
        """Counts what runs now as none of what is left."""
        self._before = self._marked()

    def play(self, stage: str, victim: str, number: signal.Signals) -> Scene | None:
        """Returns None where there is no such process then."""
        scene = Scene(stage, victim, number)
        self._ranks = Path(tempfile.mkdtemp(dir=self._folder))
        self._before = self._marked()
        names = shared_names()
        with self._busy() if stage == "queue" else contextlib.nullcontext(lambda: None) as free:
            caller = self.caller()
            try:
                if (pid := self._reach(stage, victim, caller)) is None:
                    return None
                os.kill(pid, number)
                if victim != "caller":
                    free()
                (self._lose if victim == "caller" else self._hear)(scene, caller)
            finally:
                caller.process.send_signal(signal.SIGCONT)
                with contextlib.suppress(BrokenPipeError, AssertionError):  # of one that stays, a look tells more
                    caller.close()
                self._look(scene, names)
        return scene

    def caller(self) -> Rig:
        environ = {**self._rig.environ, "SCENE": str(self._ranks), "SCENE_HEARTBEAT": _HEARTBEAT_TIMEOUT}
        return Rig(self._rig.engine, environ, self._rig._prefix)

    @contextlib.contextmanager
    def _busy(self) -> Iterator[Callable[[], object]]:
        """Has others use the machines until what this yields is called."""
        other = self.caller()
        other.ask("hold")
        self._before |= self._marked()
        try:
            yield lambda: other.ask("close")
        finally:
            other.ask("close")
            other.close()

    def _reach(self, stage: str, victim: str, caller: Rig) -> int | None:
        """Brings a call to this stage; returns the process, None if there is none then."""
        go, size = self._ranks / "go", _LARGE if stage == "return" else 1
        (self._ranks / "size").write_text(str(size))
        if stage == "queue":
            caller.say("waiting")
            assert heard(caller) == {"waits": True}
        elif stage == "tidy":
            assert heard(caller, "hold")
            go.touch()
            assert "value" in heard(caller, "scene held")
            caller.say("close")
        else:
            caller.say("scene")
        if stage in {"run", "return"}:
            wait(lambda: len(list(self._ranks.glob("run-*"))) == 4 + ("ssh" in self._rig.engine))
        if stage == "return":
            go.touch()
            wait(lambda: list(self._ranks.glob("return-*")))
        if stage == "join" and victim != "caller":
            with contextlib.suppress(TimeoutError):
                wait(lambda: self._found(victim, caller) or list(self._ranks.glob("run-*")))
        found = self._found("member" if stage == "join" and victim == "caller" else victim, caller)
        return caller.process.pid if victim == "caller" else max(found, default=None)

    def _found(self, victim: str, caller: Rig) -> list[int]:
        there = self._marked() - self._before
        return [pid for pid in there if role_of(pid) == victim and pid != caller.process.pid]

    def _lose(self, scene: Scene, caller: Rig) -> None:
        """The caller is killed, or falls silent; its machines leave."""
        here = {caller.process.pid}
        if scene.number == signal.SIGSTOP:  # what reaches machines from here waits for it, or guards its job
            here |= {pid for pid in self._marked() if role_of(pid) == "command"}
        scene.wrong += [f"stays: {described(pid)}" for pid in self.leave(here)]
        if scene.number == signal.SIGSTOP:
            caller.process.send_signal(signal.SIGCONT)
            self._hear(scene, caller)
        elif caller.process.wait(LEAVE_LIMIT) != -signal.SIGKILL:
            scene.wrong.append("the caller was not killed")

    def _hear(self, scene: Scene, caller: Rig) -> None:
        found = heard(caller)
        if found is None:
            scene.wrong.append("no answer")
            caller.process.kill()
            return
        closes = scene.stage == "tidy"
        scene.told = "closed" if closes else told(found)
        if not closes and "value" not in found and found["error"] not in {"LaunchError", "LaunchTimeout"}:
            scene.wrong.append("no error of ours")

    def _look(self, scene: Scene, names: set[str]) -> None:
        left = self.leave(set())
        scene.wrong += [f"left: {described(pid)}" for pid in left]
        for number in (signal.SIGCONT, signal.SIGKILL) if left else ():
            for pid in self._marked() - self._before:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number == signal.SIGCONT and not self.leave(set(), 20.0):
                scene.wrong.append("until it goes on")
                break
        if "Slurm" in self._rig.engine and scene.stage != "queue":
            scene.wrong += [f"a job stays: {job}" for job in self.jobs_left()]
        launches.ask("status")  # which removes the name of a caller that was killed
        runtime = Path(os.environ["XDG_RUNTIME_DIR"], "mlaunch")
        with contextlib.suppress(TimeoutError):  # torch removes what ranks have left after some seconds
            wait(lambda: not shared_names() - names, LEAVE_LIMIT)
        temporary = [path for path in (self._folder / "tmp").iterdir() if path.name[:3] not in {"omp", "ray"}]
        files = [*runtime.glob("*"), *temporary, *map(Path, shared_names() - names)]
        scene.wrong += [f"a file stays: {path.name}" for path in files]

    def jobs_left(self) -> list[str]:
        """Returns the jobs of Slurm that stay."""
        return jobs_left(self._rig.environ)

    def leave(self, but: set[int], limit: float = LEAVE_LIMIT) -> set[int]:
        """Waits until all have ended; returns who has not."""
        with contextlib.suppress(TimeoutError):
            wait(lambda: not self._marked() - self._before - but, limit)
        return self._marked() - self._before - but

    def _marked(self) -> set[int]:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return {pid for pid in pids if role_of(pid) and self._is_marked(pid)}

    def _is_marked(self, pid: int) -> bool:
        return pid != os.getpid() and alive(pid) and self._mark in read(pid, "environ").split(b"\0")


def role_of(pid: int) -> str:
    """Says which of the victims this is; "" for none, as an engine's daemons."""
    words, name = read(pid, "cmdline").split(b"\0"), os.fsdecode(read(pid, "comm"))  # of any process on the machine
    program = os.path.basename(os.fsdecode(words[0]))
    if name.startswith("mlaunch"):
        return next((role for role in VICTIMS if role.split()[0] in name), "process of mlaunch")
    guards = program == "sh" and b"sbatch" in b" ".join(words)
    if guards or program in {"ssh", "srun", "mpirun", "sbatch"} or words[0].startswith(b"ray::Pump"):
        return "command"
    if "python" in program and b"mlaunch.engines.member.started_together" in words:
        return "carrier" if any(role_of(child) == "member" for child in children(pid)) else "member"
    if "python" in program and b"mlaunch.engines.member.main" in words:
        return "member"
    return "caller" if any(word.endswith(b"engine_caller.py") for word in words) else ""


def shared_names() -> set[str]:
    """Returns what torch has left of processes that are gone."""
    made = {name: re.match(r"torch_(\d+)_", name) for name in os.listdir("/dev/shm")}
    return {name for name, maker in made.items() if maker is not None and not alive(int(maker[1]))}


def read(pid: int, what: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{what}").read_bytes()
    return b""


def described(pid: int) -> str:
    state = os.fsdecode(read(pid, "stat")).rpartition(")")[2].split()[:1]
    return f"{role_of(pid)} {pid} ({' '.join(state)})"


def heard(caller: Rig, word: str = "") -> Any:
    """Returns the caller's next answer; None if none comes."""
    if word:
        caller.say(word)
    assert caller.process.stdout is not None
    ready = select.select([caller.process.stdout.fileno()], [], [], ANSWER_LIMIT)[0]
    try:
        return caller.hear() if ready else None
    except AssertionError:
        return {"error": "", "text": "the caller has ended"}


def told(found: dict[str, Any]) -> str:
    if "value" in found:
        return f"returned {len(found['value'])} values"
    return f"{found['error']}: {' | '.join(found['text'].splitlines()[:3])}"


def wait(ready: Callable[[], object], limit: float = ANSWER_LIMIT) -> None:
    until = time.monotonic() + limit
    while not ready():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(_LOOK_DELAY)


@contextlib.contextmanager
def stage_of(make: Callable[[Path], contextlib.AbstractContextManager[Rig]]) -> Iterator[Stage]:
    """Builds a rig whose processes are told from all others by their runtime directory."""
    folder = Path(tempfile.mkdtemp(prefix=f"scenes-{make.__name__}-"))
    before = {key: os.environ.get(key) for key in ("XDG_RUNTIME_DIR", "TMPDIR")}
    for key, part in (("XDG_RUNTIME_DIR", "runtime"), ("TMPDIR", "tmp")):
        os.environ[key] = str(folder / part)
        (folder / part).mkdir(mode=0o700, exist_ok=True)
    try:
        with make(folder) as rig:
            yield Stage(rig, folder)
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="*", default=list(RIGS))
    parser.add_argument("--stages", nargs="+", default=STAGES)
    parser.add_argument("--victims", nargs="+", default=VICTIMS)
    parser.add_argument("--signals", nargs="+", default=("KILL", "STOP"))
    args, bad = parser.parse_args(), 0
    for engine in args.engines:
        with stage_of(RIGS[engine]) as stage:
            for what in [(s, v, n) for s in args.stages for v in args.victims for n in args.signals]:
                if what[0] == "queue" and (
                    engine != "slurm" or what[1:] not in {("caller", "KILL"), ("command", "KILL")}
                ):
                    continue
                begun = time.monotonic()
                try:
                    scene = stage.play(what[0], what[1], signal.Signals[f"SIG{what[2]}"])
                except (TimeoutError, AssertionError) as error:
                    scene = Scene(what[0], what[1], signal.Signals[f"SIG{what[2]}"], "", [f"not played: {error!r}"])
                if scene is None:
                    continue
                bad += bool(scene.wrong)
                print(f"{engine:6} {what[0]:6} {what[1]:11} {what[2]} {time.monotonic() - begun:4.0f} s  {scene.told}")
                for line in scene.wrong:
                    print(f"    WRONG {line}")
                sys.stdout.flush()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
