"""Deadlocks: a rank of each launch has started one that waits for devices of another.

The circle closes when a launch joins the queue, which is refused then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Said = Mapping[str, Any]  # the record of a waiter or holder


def stuck(waiting: Sequence[Said], held: Mapping[str, Said]) -> list[Said]:
    """Return those of ``waiting``, in its order, that would wait for ever; ``held``: the holder of each device.

    A launch without a waiting rank ends at some time. One with a waiting rank holds its devices until that one has had
    its turn, so they count as free only then.
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
    """Return the error: who waits for whom. ``others``: the others of the circle."""
    rest = " and ".join(f"{_name(one)}, {_place(one, held)}" for one in others)
    return (
        f"{mine['who']} would deadlock: it wants {mine['count']} of {_names(mine)} and waits for {rest}, while the "
        f"launch that it runs inside, {_holders(mine, held)}, holds {', '.join(mine['holds'])} until this rank "
        f"returns. Launch it without a lease, or on other devices"
    )


def _place(one: Said, held: Mapping[str, Said]) -> str:
    """Return where another one of the circle waits."""
    if not one.get("holds"):
        return f"which came before it and wants {one['count']} of {_names(one)}"
    return f"which is called in {_holders(one, held)}, on {', '.join(one['holds'])}, and wants {_names(one)}"


def _names(one: Said) -> str:
    return ", ".join(one["names"])


def _holders(one: Said, held: Mapping[str, Said]) -> str:
    return ", ".join(dict.fromkeys(_name(held[name]) for name in one["holds"] if name in held)) or "?"


def _name(one: Said) -> str:
    return f"{one.get('who') or '?'} (pid {one.get('pid', '?')})"
