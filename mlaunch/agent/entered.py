"""Asks all ranks how far they are: what they have entered in each of their process groups, whatever they wait for."""

from __future__ import annotations

from mlaunch.agent.questions import Questions
from mlaunch.protocol.messages import Ask, Operations


class EnteredRequests:
    """What ranks tell. ``told``: by global rank, of those that have answered; ``turns``: how often their functions have
    come by what features count, in their present call; ``places``: their frames, if these were asked for."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        self._asked: set[int] = set()  # numbers of the questions
        self.with_places = False  # they are asked for
        self.told: dict[int, Operations] = {}
        self.turns: dict[int, int] = {}
        self.places: dict[int, list[tuple[str, str, str]]] = {}

    @property
    def pending(self) -> bool:
        """Whether somebody has not answered."""
        return bool(self._asked & self._questions.open)

    def ask(self, *, place: bool = False) -> None:
        """Asks all, and forgets what was told before. ``place``: also where they are."""
        for number in self._asked:
            self._questions.drop(number)
        self.told, self.turns, self.places, self._asked = {}, {}, {}, set()
        self.with_places = place
        for rank in self._questions.ranks():
            self._asked.add(self._questions.ask(rank, Ask.ENTERED, self.told.__setitem__))
            self._asked.add(self._questions.ask(rank, Ask.TURNS, self.turns.__setitem__))
            if place:
                self._asked.add(self._questions.ask(rank, Ask.PLACE, self.places.__setitem__))
