"""The parts that features have in an agent, and what they may do there.

A part is made when the first word for it comes, or with the launch if it has a section for it and the hook
``agent.part``: for most launches there is none.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.agent.questions import EnteredRequests
from mlaunch.agent.rank_process import RankProcess, StackRequests
from mlaunch.base.deadline import NEVER
from mlaunch.base.exceptions import RankFailure
from mlaunch.base.fds import close_all
from mlaunch.features import FEATURES, with_hook
from mlaunch.protocol.board import Board
from mlaunch.protocol.messages import ForPart, PartSays

if TYPE_CHECKING:
    from mlaunch.agent.launch_state import LaunchState
    from mlaunch.core.parts import AgentPart, TellLooker
    from mlaunch.protocol.spec import LaunchSpec


class Scene:
    """A launch as a feature's part in its agent sees it.

    Attributes:
        sections: Of the launch's spec, by feature.
        clock: Returns monotonic seconds.
        call: The number of the call that runs, or ran last.
        machines_agree: Other machines take part that have callers of their own.
        is_alone: No other machine takes part.
    """

    def __init__(self, feature: str, parts: AgentParts) -> None:
        self._feature, self._parts, self._launch = feature, parts, parts.launch
        self.sections, self.clock = parts.launch.sections, parts.launch.clock
        self.machines_agree, self.is_alone = parts.launch.peers.agree, parts.launch.peers.alone

    @property
    def call(self) -> int:
        return self._launch.call.number

    @property
    def ranks(self) -> Sequence[RankProcess]:
        """All ranks of this agent, also those that have ended."""
        return self._launch.by_local_rank

    @property
    def board(self) -> Board:
        """Where its ranks write how far they are."""
        return self._launch.board

    @property
    def stacks(self) -> StackRequests:
        """The requests to ranks, by a signal, for their stacks; true while some have not answered."""
        return self._launch.stopping.asked

    def status(self) -> dict[str, Any]:
        """Return what ``mlaunch ps`` shows of the launch."""
        return self._launch.inspection.status()

    def entered(self) -> EnteredRequests:
        """Return an object that asks all ranks what they have entered, and where they are."""
        return EnteredRequests(self._launch.questions)

    @property
    def spec(self) -> LaunchSpec:
        """The launch, as far as its agent knows it."""
        return self._launch.inspection.launch()

    def known(self) -> Sequence[int]:
        """Return the global ranks that can be told something, whatever they do."""
        return self._launch.questions.ranks()

    def working(self) -> Sequence[int]:
        """Return the global ranks that have not answered the call, and can be asked."""
        known = set(self._launch.questions.ranks())
        return [rank.rank for rank in self._launch.by_local_rank if rank.working and rank.rank in known]

    def ask(self, rank: int, about: object, take: Callable[[int, Any], None]) -> None:
        """Ask the feature's part of a rank; ``take`` gets the rank and what that returns, if it does."""
        self._launch.questions.ask(rank, ForPart(self._feature, 0, about), take)

    def tell(self, rank: int, word: object, fds: Sequence[int] = ()) -> None:
        """Send the feature's part of a rank something that it does not answer."""
        self._launch.questions.tell(rank, ForPart(self._feature, self.call, word), fds)

    def say(self, news: object) -> None:
        """Send the caller news, which the feature's ``noted`` gets there."""
        self._launch.launcher.try_send(PartSays(self._feature, news))

    def tell_machines(self, word: object) -> None:
        """Send a word to where the launch's machines meet.

        A dict of JSON values is passed on from there: to the part on the machine of rank 0, or from that one's to
        all others.
        """
        self._launch.peers.say(PartSays(self._feature, word))

    def hold_deadline(self, *, held: bool) -> None:
        """Hold the call's deadline, until this is called with False."""
        self._launch.call.deadline.hold(self.clock(), held=held)

    def fail(self, failure: RankFailure, *, whole: bool = False) -> None:
        """End the call by this failure, which is no rank's; with ``whole`` the launch."""
        self._parts.fail(failure, whole)


class AgentParts:
    """The parts of the features in the agent of one launch. ``fail`` ends the call, or (True) the launch."""

    def __init__(self, launch: LaunchState, fail: Callable[[RankFailure, bool], None]) -> None:
        self.launch, self.fail = launch, fail
        self._parts: dict[str, AgentPart] = {}
        for feature in with_hook("agent.part"):
            if feature.name in launch.sections:
                self._part(feature.name)

    def hear(self, record: object, fds: Collection[int] = ()) -> bool:
        """Pass on a word of the caller's; False if the record is something else."""
        if not isinstance(record, ForPart):
            return False
        self._part(record.feature).hear(record.word, record.call, *fds)
        close_all(fds)
        return True

    def welcome(self, feature: str, visitor: socket.socket, word: str) -> None:
        """Pass on a visitor to a feature."""
        self._part(feature).welcome(visitor, word)

    def fds(self) -> Iterator[int]:
        """Yield what wakes the agent for ``take_steps``."""
        for part in self._parts.values():
            yield from part.fds()

    def hear_machines(self, record: ForPart) -> None:
        """Pass on a word from the gate, where machines meet."""
        self._part(record.feature).hear_machines(record.word)

    def visited(self, feature: str, pid: int) -> None:
        """Tell a feature that a command, by its pid, has asked it to act."""
        self._part(feature).visited(pid)

    def asked(self, word: bytes, tell: TellLooker) -> None:
        """Pass a visitor's question on to a feature, or answer that the feature is missing."""
        from mlaunch.core.load import at_hand  # which most launches do not need

        [feature] = [feature.name for feature in FEATURES if word in feature.words]
        if at_hand(feature, "agent") is None:
            tell({"refused": f"the launch's installation of mlaunch lacks mlaunch/{feature}, which answers that"})
        else:
            self._part(feature).asked(word, tell)

    def facts(self) -> dict[str, dict[str, object]]:
        """Return what there is to know of features, by their names."""
        found = {feature: dict(part.facts()) for feature, part in self._parts.items()}
        return {feature: facts for feature, facts in found.items() if facts}

    def due(self, *, ends: bool) -> float:
        """Return when ``take_steps`` is due even if nothing comes. ``ends``: the launch is being ended."""
        due = NEVER
        for part in self._parts.values():
            if part.until_the_end or not ends:
                due = min([due, *part.due()])
        return due

    def take_steps(self, *, ends: bool) -> None:
        for part in self._parts.values():
            if part.until_the_end or not ends:
                part.take_steps()

    def over(self) -> None:
        for part in self._parts.values():
            part.over()

    def close(self) -> None:
        for part in self._parts.values():
            part.close()

    @property
    def look_for_answers(self) -> bool:
        """True if a feature must soon learn of answers that bypass this process."""
        return any(part.looks_for_answers for part in self._parts.values())

    def _part(self, feature: str) -> AgentPart:
        if feature not in self._parts:
            from mlaunch.core.load import module_of  # which most launches do not need

            self._parts[feature] = module_of(feature, "agent").part(Scene(feature, self))
        return self._parts[feature]
