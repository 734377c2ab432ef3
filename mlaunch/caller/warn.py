"""Warnings that point at the user's line."""

from __future__ import annotations

import contextlib
import sys
import warnings

from mlaunch.base.frames import is_ours

_CONTEXTLIB = contextlib.__file__


def warn_caller(message: str) -> None:
    """Issue a RuntimeWarning that points at the line that called into this package."""
    frame, level = sys._getframe(1), 2  # level 1 is this function
    while frame.f_back is not None and _is_between(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def _is_between(file: str) -> bool:
    return is_ours(file) or file == _CONTEXTLIB
