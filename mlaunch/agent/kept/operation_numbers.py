"""Asks ranks that stay which operations they have entered while they may be inside one, where no call reaches them."""

from __future__ import annotations

from collections.abc import Mapping

from mlaunch.agent.questions import Questions
from mlaunch.protocol.messages.control_messages import TellNumbers
from mlaunch.rank.in_step import Numbers


class NumberRequests:
    """What ranks tell of the present call; a thread of each answers, if the rank lets it run."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        self._asked: set[int] = set()  # numbers of the questions that are open
        self._told: dict[int, Numbers] = {}  # by global rank

    @property
    def pending(self) -> bool:
        """Whether somebody has not answered."""
        return bool(self._asked & self._questions.open)

    def ask(self, call: int) -> None:
        """Asks all ranks."""
        self.clear()
        self._asked = {self._questions.ask(rank, TellNumbers(call), self._take) for rank in self._questions.ranks()}

    def _take(self, rank: int, numbers: Numbers) -> None:
        self._told[rank] = numbers

    @property
    def told(self) -> Mapping[int, Numbers]:
        """What has been told, by global rank."""
        return self._told

    def clear(self) -> None:
        """Forgets what was asked and told."""
        for number in self._asked:
            self._questions.drop(number)
        self._asked, self._told = set(), {}
