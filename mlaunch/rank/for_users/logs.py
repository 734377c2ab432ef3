"""Logging in ranks."""

from __future__ import annotations

import logging
import os


class RankZeroFilter(logging.Filter):
    """A filter that passes rank 0's records, and of the other ranks only serious ones.

    Args:
        level: From this level on, records of all ranks pass.
        per_machine: Records of the first rank of each machine pass as rank 0's do.

    Example:
        >>> import logging
        >>> handler = logging.StreamHandler()
        >>> handler.addFilter(RankZeroFilter())
    """

    def __init__(self, level: int = logging.ERROR, *, per_machine: bool = False) -> None:
        super().__init__()
        self._level = level
        self._variable = "LOCAL_RANK" if per_machine else "RANK"

    def filter(self, record: logging.LogRecord) -> bool:
        # At each record, not once: the handler may be made before this process is a rank.
        return record.levelno >= self._level or os.environ.get(self._variable, "0") == "0"
