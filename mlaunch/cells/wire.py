"""What a rank answers to a notebook's cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bundle:
    """Something to show, in several forms: by MIME type, as Jupyter has them. ``update``: of what was shown before."""

    data: Mapping[str, Any]
    metadata: Mapping[str, Any]
    transient: Mapping[str, Any]
    update: bool = False

    @property
    def text(self) -> str:
        """Its plain form."""
        return str(self.data.get("text/plain", ""))

    def plain(self) -> Bundle:
        """Returns the plain form alone."""
        return Bundle({"text/plain": self.text}, {}, {})


@dataclass(frozen=True)
class CellAnswer:
    """What a cell has to show on one rank.

    Attributes:
        last: Its last expression; None where that is None, or is no expression.
        displays: What the cell has displayed, in order.
        without_ipython: There is no IPython on that machine, and so no magics.
    """

    last: Bundle | None = None
    displays: tuple[Bundle, ...] = ()
    without_ipython: bool = False


@dataclass(frozen=True)
class NamesOfRank:
    """What a rank holds for cells: ``names`` with the type and the bytes of each; ``memory`` is that of its process."""

    pid: int
    memory: int
    device_memory: int
    names: Mapping[str, tuple[str, int]]
