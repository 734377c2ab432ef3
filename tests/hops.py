"""Counts the functions and files of mlaunch that a plain call runs, in each kind of process: what a reader has to open.

    python -m tests.hops [--list | --order]

``--list`` prints them by process and file, ``--order`` as they are first called, each below its caller.

It counts what runs from the second call of a function (the first one starts the fork server) until its agent has ended.
Nothing is prepared, so that no earlier call helps. Of the ranks, both count as one. It also counts the modules of
mlaunch that are loaded after the call, in the caller and in a rank, and names the folders that these are in.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import mlaunch
from tests import hop_trace
from tests.processes import children, wait_until

ROLES = ("caller", "fork server", "agent", "rank")


@dataclass(frozen=True)
class Function:
    """One that ran; ``depth``: how many of ours had called it."""

    file: str
    line: int
    name: str
    depth: int = field(compare=False)


@dataclass
class Counted:
    """What ran, in the order of the first calls, by role; how many modules were loaded, from which folders."""

    functions: dict[str, dict[Function, None]]
    modules: dict[str, int]
    folders: dict[str, list[str]]

    def row(self, role: str) -> str:
        found = self.functions[role] if role in self.functions else _union(self.functions)
        loaded = f", {self.modules[role]} modules loaded" if role in self.modules else ""
        loaded += f" from {' '.join(self.folders[role])}" if loaded else ""
        return f"{role}: {len(found)} functions in {len({one.file for one in found})} files{loaded}"


def modules_loaded() -> int:
    return sum(name.partition(".")[0] == "mlaunch" for name in sys.modules)


def folders_loaded() -> list[str]:
    return sorted({name.split(".")[1] for name in sys.modules if name.startswith("mlaunch.") and name.count(".") > 1})


def counted() -> Counted:
    """Make the calls and count."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/hops"
        os.environ[hop_trace.VARIABLE] = f"{os.getpid()}:{path}"
        mlaunch.warm_up(preload=[hop_trace.__name__])
        call = mlaunch.launcher(_in_a_rank, n_gpus=2, device_type="cpu")
        call()
        _until_over()
        hop_trace.start(path)
        Path(path).touch()
        ranks = call()
        hop_trace.stop()
        modules = {"caller": modules_loaded(), "rank": max(number for _, _, number, _ in ranks)}
        folders = {"caller": folders_loaded(), "rank": ranks[0][3]}
        _until_over()
        text = Path(path).read_text()
        [server] = children(os.getpid())
        roles = {os.getpid(): "caller", server: "fork server", **{ranks[0][1]: "agent"}}
        return Counted(_by_role(text, {**roles, **{pid: "rank" for pid, *_ in ranks}}), modules, folders)


def _in_a_rank() -> tuple[int, int, int, list[str]]:
    return os.getpid(), os.getppid(), modules_loaded(), folders_loaded()


def _until_over() -> None:
    """Wait until only the fork server is left."""
    [server] = children(os.getpid())
    wait_until(lambda: not children(server))


def _by_role(text: str, roles: dict[int, str]) -> dict[str, dict[Function, None]]:
    found: dict[str, dict[Function, None]] = {role: {} for role in ROLES}
    for row in text.splitlines():
        pid, depth, file, line, name = row.split(" ")
        if int(pid) in roles:  # else a process of the server's own, such as one that prepares
            found[roles[int(pid)]].setdefault(Function(file, int(line), name, int(depth)))
    return found


def _union(functions: dict[str, dict[Function, None]]) -> dict[Function, None]:
    return {one: None for role in ROLES for one in functions[role]}


def main() -> None:
    os.environ["MLAUNCH_PREPARE"] = "0"
    found = counted()
    for role in ROLES:
        print(found.row(role))
        if "--order" in sys.argv[1:]:
            for one in found.functions[role]:
                print(f"    {'  ' * one.depth}{one.name}  {one.file}:{one.line}")
        if "--list" in sys.argv[1:]:
            files = defaultdict(list)
            for one in found.functions[role]:
                files[one.file].append(f"{one.name}:{one.line}")
            for file, names in sorted(files.items()):
                print(f"    {file}", *sorted(names))
    print(found.row("all"))


if __name__ == "__main__":
    main()
