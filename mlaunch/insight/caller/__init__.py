"""Descriptions of what ranks do now, for their caller and for people; and the watch of ``stall=``.

Imports are late: each call that takes longer than a moment has a watch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlaunch.base.frames import without_machinery
from mlaunch.base.text import in_two_units, name_some_ranks, shown
from mlaunch.caller.options.option_values import parse_stall
from mlaunch.caller.report.failure_text import in_words, without_import
from mlaunch.core.parts import CallerPart, Watcher
from mlaunch.core.records import Noticed
from mlaunch.insight.wire import PULSE, STACKS, WHY, StallTerms, terms_of
from mlaunch.protocol import failures

if TYPE_CHECKING:
    from mlaunch.caller.call_log import CallLog
    from mlaunch.caller.launch.handle import WatchedCall
    from mlaunch.caller.options.launch_options import Options
    from mlaunch.core.parts import Spell
    from mlaunch.protocol.messages import RankStacks


_STACKS_TIMEOUT = 5.0  # seconds for a launch to answer


def part(options: Options, _spell: Spell) -> CallerPart:
    made = CallerPart()
    made.section = StallTerms(*parse_stall(options.stall))
    return made


def watch(call: WatchedCall) -> StallWatch | None:
    """Return a watch of the ranks' progress; None: the options want none.

    Nor is there one if each machine has a caller, since none of these sees all ranks.
    """
    terms = terms_of(call.spec.sections)
    if terms.seconds is None or call.spec.cluster is not None:
        return None
    return StallWatch(call, terms.seconds, terms.ends)


def of_deadline(stacks: Sequence[RankStacks], returned: Iterable[int]) -> tuple[list[str], list[int]]:
    """Return who waits for whom among ranks that a deadline has ended, and the ranks that hold up the others."""
    from mlaunch.insight.caller import answers

    return answers.of_stacks(stacks, returned)


def why_launch(launch_id: str) -> str:
    """Return which rank of a launch the others wait for; "" if it does not run."""
    from mlaunch.caller.running_launches import ask, facts_of, whole
    from mlaunch.insight.caller.answers import sentence

    launches = whole(ask(WHY, launch_id))
    return "\n".join(line for launch in launches for line in (sentence(launch["ranks"]), *facts_of(launch)))


def why_call(name: str) -> str:
    """Return a line for each of this process's running calls of that function: the rank that the others wait for."""
    from mlaunch.caller.running_launches import launches_of

    return "\n".join(said for launch_id in launches_of(name) if (said := why_launch(launch_id)))


def watch_calls(name: str, log: CallLog) -> None:
    """Show what each rank of the function's calls does, until none runs."""
    from mlaunch.insight.caller import watching

    watching.watch_calls(name, log)


def stacks_of(name: str | None) -> StacksOfRanks:
    """Return the Python stacks of the ranks of the launch of this name in the registry; none if it does not run."""
    from mlaunch.protocol import registry

    connection = None if name is None else registry.connect(os.environ, name)
    if connection is None:
        return StacksOfRanks()
    with connection:
        status = registry.ask(connection, STACKS, _STACKS_TIMEOUT)
    return StacksOfRanks((status or {}).get("ranks", ()))


class StacksOfRanks(dict[int, str]):
    """The Python stack of each rank's main thread, the innermost call last; its state if that is unknown.

    Printed, and in a notebook, ranks at the same place share an entry, as in ``mlaunch stacks``.

    Attributes:
        states: What each rank does: "running", "joining the process group", "its machine is lost".
        frames: (file, line, function) of each rank's calls, the innermost first.
    """

    def __init__(self, ranks: Iterable[Mapping[str, Any]] = ()) -> None:
        found = list(ranks)
        super().__init__({rank["rank"]: _stack(rank) for rank in found})
        self.states: dict[int, str] = {rank["rank"]: rank["state"] for rank in found}
        self.frames: dict[int, list[tuple[str, int, str]]] = {
            rank["rank"]: [(file, int(line) if str(line).isdigit() else 0, name) for file, line, name in rank["frames"]]
            for rank in found
        }
        self._text = grouped(found) or "no rank runs"

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


def _stack(rank: Mapping[str, Any]) -> str:
    return "\n".join(_lines(rank["frames"])) or rank["state"]


def _lines(frames: Iterable[tuple[str, str, str]]) -> list[str]:
    return [f'File "{file}", line {line}, in {name}' for file, line, name in reversed([*frames])]


def grouped(ranks: Iterable[Mapping[str, Any]]) -> str:
    """Return the stacks of ranks, once for those at the same place."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for rank in shown([*ranks]):
        frames = tuple(tuple(frame) for frame in rank["frames"])
        where = f", {words}" if (words := in_words(frames)) else ""
        innermost = tuple(without_machinery(without_import(frames)))
        groups.setdefault((rank["state"], where, innermost), []).append(rank["rank"])
    blocks = []
    for (state, where, frames), members in sorted(groups.items(), key=lambda group: min(group[1])):
        stack = [f"    {line}" for line in _lines(frames)]
        blocks.append("\n".join([f"  {name_some_ranks(members)}: {state}{where}", *stack]))
    return "\n".join(blocks)


# The watch of ``stall=``: while a call runs, it reports when the ranks have made no progress for long.
#
#     watching --no progress for that long--> asking twice --no rank works--> stalled --progress--> watching
#                                             (or more often, while a rank waits for something outside)
#         ^                                       |
#         +---------- a rank works ---------------+
#
# It asks the launch's agent a few times in each such stretch, and never in a short call.

_QUESTIONS = 4  # in a stretch without progress: its end is known to a quarter, and they cost nothing
_NEVER = float("inf")

Ranks = Sequence[Mapping[str, Any]]


@dataclass
class StallWatch(Watcher):
    """The watch of one call. ``limit``: seconds."""

    call: WatchedCall
    limit: float
    ends: bool  # True: end a stalled call

    def __post_init__(self) -> None:
        self.due = self.call.begun + self.limit / _QUESTIONS
        self._moved_at = self.call.begun
        self._moves = False  # True: its ranks show progress at all
        self._known: Ranks = ()
        self._first: Ranks | None = None  # the first of several answers, and the last
        self._last: Ranks = ()
        self._first_at = 0.0
        self._asks_twice = False
        self._stalled = False

    def take_steps(self) -> None:
        """Ask the agent."""
        self.due = _NEVER  # until the answer is there
        self.call.ask(WHY if self._asks_twice else PULSE, self._take)

    def _take(self, ranks: Ranks) -> None:
        from mlaunch.insight.caller import answers  # after a quarter of the time: few calls take so long

        now = self.call.clock()
        if not answers.run(ranks) or answers.moved(self._known, ranks):
            self._note_progress(now)
        self._moves = self._moves or answers.counted(self._known, ranks)
        self._known = ranks
        if self._asks_twice:
            self._compare(ranks, now)
        elif not self._stalled and now >= self._moved_at + self.limit:
            self._asks_twice, self.due = True, now
            return
        if not self._asks_twice:
            left = _NEVER if self._stalled else max(0.0, self._moved_at + self.limit - now)
            self.due = now + min(self.limit / _QUESTIONS, left)

    def _note_progress(self, now: float) -> None:
        if self._stalled:
            self._tell([], f"makes progress again, after {in_two_units(now - self._moved_at)}")
        self._moved_at, self._stalled, self._asks_twice, self._first = now, False, False, None

    def _tell(self, blamed: Sequence[int], what: str) -> None:
        self.call.found(Noticed("stall", what, {"waited_for": list(blamed)}))

    def _compare(self, ranks: Ranks, now: float) -> None:
        """Keep the first answer, or compare it with later ones."""
        from mlaunch.insight.caller import answers

        if self._first is None:
            self._first, self._last, self._first_at, self.due = ranks, ranks, now, now + answers.APART
            return
        # One answer says where a rank is, and not whether it moves.
        works = answers.work(self._last, ranks) or answers.stirred(self._first, ranks)
        works = works or not (self._moves or answers.has_begun(ranks))
        patience = answers.patience(ranks, self.limit)
        if not works and now < self._first_at + patience:
            self._last, self.due = ranks, now + max(answers.APART, patience / 5)
            return
        self._asks_twice, self._first = False, None
        if works:
            self._moved_at = now
        else:
            self._stalled = True
            self._accuse(answers.stalled(now - self._moved_at, ranks), answers.places(ranks), answers.blamed(ranks))

    def _accuse(self, what: str, places: Sequence[str], blamed: Sequence[int]) -> None:
        if self.ends:
            failure = failures.of_run(what, "stalled", final=False, waited_for=blamed)
            self.call.found(Noticed("stall", what, {"waited_for": list(blamed)}), failure)
            return
        lines = [f"has {what}", *(f"  {place}" for place in places)]
        self._tell(
            blamed, "\n".join([*lines, "  the run continues; stall= (--stall of mlaunch run) decides what happens"])
        )
