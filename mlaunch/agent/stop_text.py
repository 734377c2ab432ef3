"""Says why ranks that were asked to stop have not, for people. A pure function on counts."""

from __future__ import annotations

from collections.abc import Mapping

from mlaunch.base.text import name_some_ranks


def why_not(look: int | None, looks: Mapping[int, int | None]) -> str:
    """Says what is known of ranks that still work.

    ``look``: where all were to stop; None: they have not agreed. ``looks``: how often each has asked
    ``mlaunch.stopping()``; None: its control thread does not answer.
    """
    silent = [rank for rank, count in looks.items() if count is None]
    counts = {rank: count for rank, count in looks.items() if count is not None}
    never = [rank for rank, count in counts.items() if count == 0]
    behind = {rank: count for rank, count in counts.items() if look is not None and 0 < count < look}
    heard = [rank for rank, count in counts.items() if look is not None and count >= look]
    parts = []
    if silent:
        parts.append(f"{name_some_ranks(silent)} cannot answer (C code holds the interpreter lock, or the process is "
                     f"stopped)")  # fmt: skip
    if never:
        parts.append(f"{name_some_ranks(never)} never asked mlaunch.stopping()")
    if behind and max(behind.values()) - min(behind.values()) > 1:
        counted = ", ".join(f"rank {rank} {count} times" for rank, count in list(behind.items())[:8])
        parts.append(f"the ranks ask unequally often ({counted}; all stop at time {look})")
    elif behind:
        parts.append(f"{name_some_ranks(list(behind))} did not ask mlaunch.stopping() again")
    if heard:
        parts.append(f"{name_some_ranks(heard)} got the answer and went on")
    return "; ".join(parts)
