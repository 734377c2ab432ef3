"""The notes of a launch on news from a feature's part in its agent, as the feature's ``noted`` returns them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from mlaunch.base.frozen_record import frozen_record


@frozen_record
class Noticed:
    """A fact that a feature has found out about a call that continues.

    Attributes:
        kind: Of its event.
        what: For people.
        facts: For programs, by field of the event.
    """

    kind: str
    what: str
    facts: Mapping[str, object] = field(default_factory=dict)


@frozen_record
class Note:
    """The content of a note.

    Attributes:
        words: For the user.
        facts: For the launch's report, by field.
        holds: No limit of the launch counts from now on; False: they continue to count; None: as before.
        event: For ``events=``.
    """

    words: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
    holds: bool | None = None
    event: Noticed | None = None
