"""The hook points: what a feature may do in each process that it takes part in.

A feature is a folder, ``mlaunch/profile``, with a file for each of these processes, and one line in
``mlaunch/features.py``. The file's name says which process runs it::

    caller.py   part(options, spell) -> CallerPart      rank.py     part(section, rank) -> RankPart
    member.py   part(section) -> MachinePart            command.py  add(group), options_of(args)
    wire.py     what these send each other

``core/load.py`` imports a file only where a launch has asked for the feature, and calls its ``part``. What the caller's
part has for the other processes is its ``section``: the launch's spec carries it to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlaunch.caller.launch.settle import Ended
    from mlaunch.protocol.spec import LaunchSpec

Spell = Callable[[str, object], str]  # an option and its value as the user gave them: "profile='a'", "--profile a"
Tell = Callable[[str], None]  # shows the user a sentence


class CallerPart:
    """A feature's part of one call, in the process that calls: made before the call's first attempt, which it refuses
    by an OSError or ValueError.

    Attributes:
        section: What the call's other processes get, pickled; None: nothing, and they have no part.
    """

    section: object = None

    def planned(self, spec: LaunchSpec) -> None:
        """Prepare for an attempt that is about to start. ``profile=`` has a ValueError for ranks that it lacks."""

    def heard(self, news: object) -> None:
        """Take what this feature's part on a machine of an engine has sent, in whatever thread hears that."""

    def settled(self, ended: Ended, tell: Tell) -> None:
        """Act on how the last attempt ended, before the call returns. ``profile=`` writes its file."""

    def close(self) -> None:
        """Give up what the part holds, however the call ends: also by an interrupt, or if another part refuses it."""


class RankPart:
    """A feature's part of one rank, made once the rank has joined the others."""

    def around_call(self) -> contextlib.AbstractContextManager[None]:
        """Return what to hold while the function or script runs. ``profile=`` records its steps."""
        return contextlib.nullcontext()


class MachinePart:
    """A feature's part of a launch on one machine of an engine, made before the launch starts there, which it refuses
    by an OSError.

    Attributes:
        section: What the ranks of this machine get in place of the caller's section.
    """

    def __init__(self, section: object) -> None:
        self.section = section

    def last_words(self, spec: LaunchSpec) -> Iterator[object]:  # noqa: ARG002 - others need it
        """Yield what goes to the caller's part now that this machine's ranks have ended, at the stream's pace."""
        yield from ()

    def close(self) -> None:
        """Give up what the part holds, however the launch has ended."""
