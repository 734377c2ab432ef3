"""What a launch notes of news from a feature's part in its agent, as the feature's ``noted`` returns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from mlaunch.base.frozen_record import frozen_record


@frozen_record
class Note:
    """``words``: for the user; ``facts``: for its report, by field.

    ``holds``: no limit of the launch counts from now on; False: they count on; None: as before.
    """

    words: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
    holds: bool | None = None
