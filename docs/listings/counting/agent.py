"""In the launch's agent: counts, and answers ``mlaunch ps``."""

from __future__ import annotations

from collections.abc import Mapping

from mlaunch.counting.wire import Begun

from mlaunch.agent.scene import Scene
from mlaunch.core.parts import AgentPart


class Count(AgentPart):
    """Made when the first ``Begun`` comes."""

    def __init__(self, _scene: Scene) -> None:
        self._calls = 0

    def hear(self, word: object, _call: int) -> None:
        self._calls += isinstance(word, Begun)

    def facts(self) -> Mapping[str, object]:
        return {"calls": self._calls}


part = Count
