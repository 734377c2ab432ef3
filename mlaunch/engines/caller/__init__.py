"""The caller's side of engines: it asks for machines, receives their members' records, and gives the machines back.

Here are engines by name, as on a command line, and the note about a machine that does not answer.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mlaunch.core.records import Note

if TYPE_CHECKING:
    from mlaunch.engines.caller.engine import Engine

_PART = re.compile(r"""(?:[^,'"\[]|'[^']*'|"[^"]*"|\[[^\]]*\])+""")
_ALLOWED = "slurm[:NAME=VALUE,...], ssh:HOST[:RANKS],..., ray[:CPU=N,GPU=N,...], command:PROGRAM with its options"


def noted(news: str, name: str) -> Note:
    """Return the note about a machine that does not answer."""
    return Note(f"{name}: {news}")


def engine_named(text: str) -> Engine:
    """Return an engine for a text: "slurm:partition=gpu,time=1:00:00", "ssh:a,b:4", "ray:GPU=4", "command:mpirun -N 1".

    Put a value that contains a comma into quotes or brackets: "slurm:nodelist='n1,n2'".

    Raises:
        ValueError: There is no such engine, or it has no such option.
    """
    from mlaunch.engines.caller.command_engine import Command  # late: they are in this package
    from mlaunch.engines.caller.hosts import Hosts
    from mlaunch.engines.caller.ray import Ray
    from mlaunch.engines.caller.slurm import Slurm

    name, _, rest = text.partition(":")
    try:
        if name == "slurm":
            options: dict[str, Any] = {key: value or True for key, value in _pairs(rest)}
            return Slurm(**options)
        if name == "ssh":
            return Hosts(_parts(rest))
        if name == "ray":
            return Ray(resources={key: float(value) for key, value in _pairs(rest)} or None)
        if name == "command":
            return Command(rest)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text}: {error}") from None
    raise ValueError(f"{text}: allowed: {_ALLOWED}")


def _parts(text: str) -> list[str]:
    """Split a text at its commas, except those in quotes or brackets: "nodelist='n1,n2'", "nodelist=n[1,3]"."""
    return [re.sub("['\"]", "", part) for part in _PART.findall(text)]


def _pairs(text: str) -> list[tuple[str, str]]:
    parts = [part.partition("=") for part in _parts(text)]
    return [(key.strip().lstrip("-").replace("-", "_"), value.strip()) for key, _, value in parts]
