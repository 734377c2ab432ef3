"""A rank's answers to a notebook's cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bundle:
    """Something to show, in several forms by MIME type, as Jupyter has them. ``update``: it replaces an earlier one."""

    data: Mapping[str, Any]
    metadata: Mapping[str, Any]
    transient: Mapping[str, Any]
    update: bool = False

    @property
    def text(self) -> str:
        """The plain form."""
        return str(self.data.get("text/plain", ""))

    def plain(self) -> Bundle:
        """Return only the plain form."""
        return Bundle({"text/plain": self.text}, {}, {})


@dataclass(frozen=True)
class CellAnswer:
    """The output of a cell on one rank.

    Attributes:
        last: Its last expression; None if that is None or not an expression.
        displays: What the cell has displayed, in order.
        without_ipython: True if that machine has no IPython, and so no magics.
    """

    last: Bundle | None = None
    displays: tuple[Bundle, ...] = ()
    without_ipython: bool = False


@dataclass(frozen=True)
class NamesOfRank:
    """The names that cells have left on a rank, each with type and bytes. ``memory``: bytes of the process."""

    pid: int
    memory: int
    device_memory: int
    names: Mapping[str, tuple[str, int]]
