"""The package's logger, and its output where logging is not set up."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

_CURIOUS = "MLAUNCH_DEBUG"


class _LastResort(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler like logging's own last resort, with "mlaunch: " in front; silent where the user has a handler."""

    def __init__(self) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self.setFormatter(logging.Formatter("mlaunch: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not is_heard():
            self.stream = sys.stderr  # the present one
            super().emit(record)


log = logging.getLogger("mlaunch")
_last_resort = _LastResort()
# Not a NullHandler: warnings are shown without any configuration, too.
log.addHandler(_last_resort)


def is_heard() -> bool:
    """True if the user has set up logging for this package."""
    logger: logging.Logger | None = log
    while logger is not None:
        if any(handler is not _last_resort for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def is_curious() -> bool:
    """True if the user wants to know details (``MLAUNCH_DEBUG``), such as why a server was not used."""
    return os.environ.get(_CURIOUS, "0") not in {"", "0"}


def tell_curious(text: str) -> None:
    """Print a text for those who want details."""
    if is_curious():
        with contextlib.suppress(OSError, AttributeError):
            print(f"mlaunch: {text}", file=sys.stderr, flush=True)
