"""Plain cells that run on the ranks: a transformer of IPython's, which puts the magic above them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_MAGIC = re.compile(r"\s*(\w+\s*=\s*)?%{1,2}ranks\b")
_HERE = re.compile(r"\s*%%ranks\s+--local\s*$")


class Automatic:
    """Called with the lines of each cell. ``on``: they go to the ranks; ``paused``: a magic has come so far."""

    def __init__(self) -> None:
        self.on = False
        self.paused = False

    def __call__(self, lines: Sequence[str]) -> list[str]:
        if lines and _HERE.match(lines[0]):  # the cell is the notebook's
            return ["# %%ranks --local\n", *lines[1:]]
        is_plain = any(line.strip() for line in lines) and not any(map(_MAGIC.match, lines))
        if self.on and not self.paused and is_plain:
            return ["%%ranks --auto\n", *lines]
        return list(lines)
