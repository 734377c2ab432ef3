"""Launches that wait for each other's devices: a rank of each has launched what waits for the devices of another.

None would ever go on. The circle closes as somebody joins the queue, who is refused then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Said = Mapping[str, Any]  # what a waiter, or a holder, says of itself


def stuck(waiting: Sequence[Said], held: Mapping[str, Said]) -> list[Said]:
    """Return those who would wait for ever, of ``waiting`` in its order; ``held``: who has which device.

    A launch that nobody waits in ends at some time. One in which somebody waits holds its devices until that one has
    had its turn, so these count as free only then.
    """
    left = list(waiting)
    while True:
        kept = {name for one in left for name in one.get("holds", ())} & held.keys()
        for number, one in enumerate(left):
            names = set(one.get("names", ()))
            is_first = names.isdisjoint(name for other in left[:number] for name in other.get("names", ()))
            if is_first and len(names - kept) >= one.get("count", 0):
                break
        else:
            return left
        left.remove(one)


def in_words(mine: Said, others: Sequence[Said], held: Mapping[str, Said]) -> str:
    """Say who waits for whom. ``others``: those who would wait for ever with this one."""
    rest = " and ".join(f"{_name(one)}, {_place(one, held)}" for one in others)
    return (
        f"{mine['who']} would wait for ever: it wants {mine['count']} of {_names(mine)} and waits for {rest}, while "
        f"the launch that it is called in, {_holders(mine, held)}, holds {', '.join(mine['holds'])} until this rank "
        f"has returned. Launch it without a lease, or on other devices"
    )


def _place(one: Said, held: Mapping[str, Said]) -> str:
    """Say where somebody waits who would wait for ever."""
    if not one.get("holds"):
        return f"which came before it and wants {one['count']} of {_names(one)}"
    return f"which is called in {_holders(one, held)}, on {', '.join(one['holds'])}, and wants {_names(one)}"


def _names(one: Said) -> str:
    return ", ".join(one["names"])


def _holders(one: Said, held: Mapping[str, Said]) -> str:
    return ", ".join(dict.fromkeys(_name(held[name]) for name in one["holds"] if name in held)) or "?"


def _name(one: Said) -> str:
    return f"{one.get('who') or '?'} (pid {one.get('pid', '?')})"
