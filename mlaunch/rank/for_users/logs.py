"""Logging in ranks."""

from __future__ import annotations

import logging
import os


class RankZeroFilter(logging.Filter):
    """Lets rank 0's records pass, and of the other ranks only what is serious.

    Args:
        level: From here on (``logging.ERROR``) records of all ranks pass.
        per_machine: The first rank of each machine passes as rank 0 does.

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
