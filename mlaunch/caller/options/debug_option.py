"""``debug=``: a prompt where the call is made, or ranks that wait for an IDE; ``inline=``: no ranks."""

from __future__ import annotations

import re

from mlaunch.caller.options.option_values import Switch, option

PROMPT = "pdb"  # the word for a prompt, as a launch has it
_IDE = re.compile(r"debugpy(?::(?P<ranks>\d+(?:,\d+)*))?")


def word_of(value: bool | str, world_size: int) -> str:
    """Returns what a launch of so many ranks is told: "", "pdb", "debugpy", "debugpy:0,2". ValueError: no such rank."""
    if isinstance(value, bool):
        return PROMPT if value else ""
    found = _IDE.fullmatch(value)
    ranks = [int(rank) for rank in (found["ranks"] or "").split(",") if rank] if found else []
    if any(rank >= world_size for rank in ranks):
        raise ValueError(f"debug={value!r} with {world_size} rank(s): allowed: ranks from 0 to {world_size - 1}")
    return "debugpy:" + ",".join(map(str, ranks)) if ranks else "debugpy"


class DebugWay:
    """True, False, or what names an IDE's debugger."""

    def __str__(self) -> str:
        return 'True, False, "debugpy", or with ranks "debugpy:0,2"'

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, bool | str):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        if isinstance(value, str) and not _IDE.fullmatch(value):
            raise ValueError(f"{name}={value!r}: allowed: {self}")


DEBUG = option(
    False,
    DebugWay(),
    "A rank that fails, or calls ``breakpoint()``, opens pdb in this terminal or cell. With "
    '"debugpy:0,2" these ranks wait for an IDE. No ``timeout`` or ``stall`` counts; ``deadline`` waits.',
)
INLINE = option(
    False,
    Switch(),
    "No processes: the function runs in this one, as rank 0 of a world of one, whatever ``n_gpus`` says.",
)
