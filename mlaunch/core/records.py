"""The records that the core and the features' parts give each other.

``Need`` and ``Grant`` are of a call that waits for something. Its steps are a generator that yields each ``Need`` and
returns how they ended. ``interrupts.carry_out`` drives one in its thread; another loop may drive many in one thread.
``Note`` and ``Noticed`` are of a call that runs: a feature's ``noted`` returns a Note of news from its agent's part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from mlaunch.base.frozen_record import frozen_record

if TYPE_CHECKING:
    from mlaunch.caller.options.launch_options import Options


@frozen_record
class Grant:
    """The resources that an attempt may use, once it need not wait any more.

    Attributes:
        options: The options of the launch, with what was chosen for it.
        environ: The environment of its ranks.
        of_call: Variables in ``environ`` that only this call knows: a launch that was prepared gets them with it.
        held: Descriptors that the launch's processes hold as long as they live, so that they keep what these stand for.
        give_back: Closes this process's copies of what is held.
        more: True if other launches wait for the same.
    """

    options: Options
    environ: Mapping[str, str]
    of_call: tuple[str, ...] = ()
    held: Sequence[int] = ()
    give_back: Callable[[], object] = bool
    more: bool = False


@frozen_record
class Need:
    """A condition that steps wait for: one of the descriptors, or the seconds; neither: another process wakes them.

    Attributes:
        text: Who waits for what, for people: "train() waits for 2 of devices 0-7, after ...". In a thread that drives
            many, the others go first: one that ends may say that this one must be given up.
        row: The names of what it is about to wait for. If calls of one process want the same, they continue from here
            one at a time.
        firm: True while something happens that cannot be given up.
    """

    text: str = ""
    fds: Sequence[int] = ()
    timeout: float | None = None
    row: tuple[str, ...] = ()
    firm: bool = False


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
        holds: True stops the clocks of the launch's limits, False starts them again, None changes nothing.
        event: For ``events=``.
    """

    words: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
    holds: bool | None = None
    event: Noticed | None = None
