"""Descriptions of what ranks do now, for their caller and for people.

Imports are late: each call that takes longer than a moment has a watch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.base.frames import without_machinery
from mlaunch.base.text import name_some_ranks, shown
from mlaunch.caller.options.option_values import parse_stall
from mlaunch.caller.report.failure_text import in_words, without_import
from mlaunch.core.parts import CallerPart
from mlaunch.insight.wire import STACKS, WHY, StallTerms, terms_of

if TYPE_CHECKING:
    from mlaunch.caller.call_log import CallLog
    from mlaunch.caller.launch.handle import WatchedCall
    from mlaunch.caller.options.launch_options import Options
    from mlaunch.core.parts import Spell
    from mlaunch.insight.caller.stall_watch import StallWatch
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
    from mlaunch.insight.caller.stall_watch import StallWatch

    return StallWatch(call, terms.seconds, terms.ends)


def of_deadline(stacks: Sequence[RankStacks], returned: Iterable[int]) -> tuple[list[str], list[int]]:
    """Return who waits for whom among ranks that a deadline has ended, and the ranks that hold up the others."""
    from mlaunch.insight.caller import why_text

    return why_text.of_stacks(stacks, returned)


def why_launch(launch_id: str) -> str:
    """Return which rank of a launch the others wait for; "" if it does not run."""
    from mlaunch.caller.running_launches import ask, facts_of, whole
    from mlaunch.insight.caller.why_text import sentence

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
    from mlaunch.protocol import registry, visitors

    connection = None if name is None else registry.connect(os.environ, name)
    if connection is None:
        return StacksOfRanks()
    with connection:
        status = visitors.ask(connection, STACKS, _STACKS_TIMEOUT)
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
