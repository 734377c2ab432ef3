"""In the process that calls: says of each call that it has begun."""

from __future__ import annotations

from collections.abc import Callable

from mlaunch.counting.wire import Begun

from mlaunch.caller.options.launch_options import Options
from mlaunch.core.parts import CallerPart, Spell


class CountsCalls(CallerPart):
    """One for each call; several calls on ranks that stay have the same agent."""

    def attach(self, tell: Callable[[object], None]) -> None:
        tell(Begun())


def part(_options: Options, _spell: Spell) -> CountsCalls:
    return CountsCalls()
