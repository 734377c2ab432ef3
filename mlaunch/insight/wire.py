"""The terms of ``stall=``, and the words by which processes ask what ranks do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from mlaunch.base.frozen_record import frozen_record

NAME = "insight"  # of this feature

# The words that a process may send to a launch (``protocol/registry.py``); features.py lists them.
WHY, STACKS, ALL_STACKS = b"why", b"stacks", b"all stacks"
PULSE = b"pulse"  # how far the ranks are
WATCH = b"watch"  # the same, with where they are and what they use


@frozen_record
class StallTerms:
    """The feature's section of a launch's spec.

    Attributes:
        seconds: The time without progress after which the user gets a line; None: never.
        ends: True: the run ends then.
    """

    seconds: float | None = 300.0
    ends: bool = False


def terms_of(sections: Mapping[str, object]) -> StallTerms:
    """Return a launch's terms; the default ones if its options set none."""
    return cast(StallTerms, sections.get(NAME)) or StallTerms()
