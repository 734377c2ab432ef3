"""What a launch's options say of ranks that make no progress, and the words of who asks what they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from mlaunch.base.frozen_record import frozen_record

NAME = "insight"  # of this feature

# What who comes to a launch may say (``protocol/visitors.py``); features.py lists them.
WHY, STACKS, ALL_STACKS = b"why", b"stacks", b"all stacks"
PULSE = b"pulse"  # how far the ranks are
WATCH = b"watch"  # the same, with where they are and what they use


@frozen_record
class StallTerms:
    """The feature's section of a launch's spec.

    Attributes:
        seconds: Without progress, after which the user gets a line; None: never.
        ends: The run ends then.
    """

    seconds: float | None = 300.0
    ends: bool = False


def terms_of(sections: Mapping[str, object]) -> StallTerms:
    """Return what a launch with these sections says; the usual terms where its options say nothing."""
    return cast(StallTerms, sections.get(NAME)) or StallTerms()
