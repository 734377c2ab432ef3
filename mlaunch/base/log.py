"""The package's logger, and what it says where nobody has set up logging."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

_CURIOUS = "MLAUNCH_DEBUG"


class _LastResort(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints as logging's own last resort does, with whose words they are in front; silent where others listen."""

    def __init__(self) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self.setFormatter(logging.Formatter("mlaunch: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not is_heard():
            self.stream = sys.stderr  # as it is now
            super().emit(record)


log = logging.getLogger("mlaunch")
_last_resort = _LastResort()
# A handler of our own, not a NullHandler: what is worth a warning is seen without any configuration, too.
log.addHandler(_last_resort)


def is_heard() -> bool:
    """Tells whether the user has set up logging for what this package says."""
    logger: logging.Logger | None = log
    while logger is not None:
        if any(handler is not _last_resort for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def is_curious() -> bool:
    """True if somebody wants to know what is usually nobody's business: why a server was used, or was not."""
    return os.environ.get(_CURIOUS, "0") not in {"", "0"}


def tell_curious(text: str) -> None:
    """Say a text to those who want to know."""
    if is_curious():
        with contextlib.suppress(OSError, AttributeError):
            print(f"mlaunch: {text}", file=sys.stderr, flush=True)
