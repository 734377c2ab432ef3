"""Asks all ranks what they have entered in each of their process groups, whatever they wait for."""

from __future__ import annotations

from mlaunch.agent.questions import Questions
from mlaunch.protocol.messages.control_messages import TellEntered
from mlaunch.protocol.messages.launch_messages import EnteredGroups


class EnteredRequests:
    """What ranks tell. ``told``: by global rank, of those that have answered."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        self._asked: set[int] = set()  # numbers of the questions
        self.told: dict[int, EnteredGroups] = {}

    @property
    def pending(self) -> bool:
        """Whether somebody has not answered."""
        return bool(self._asked & self._questions.open)

    def ask(self) -> None:
        """Asks all, and forgets what was told before."""
        for number in self._asked:
            self._questions.drop(number)
        self.told = {}
        self._asked = {
            self._questions.ask(rank, TellEntered(), self.told.__setitem__) for rank in self._questions.ranks()
        }
