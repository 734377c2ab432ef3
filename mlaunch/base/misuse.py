"""Marks errors that are the doing of whoever called this package: our own frames do not help their reader."""

from __future__ import annotations

from typing import TypeVar

from mlaunch.base.exceptions import report_of

E = TypeVar("E", bound=BaseException)

_MARK = "_mlaunch_misuse"


def misuse(error: E) -> E:
    """Marks the error, which is to be raised as if from the line that called."""
    BaseException.__setattr__(error, _MARK, True)  # a class may refuse by a __setattr__ of its own
    return error


def hides_our_frames(error: BaseException) -> bool:
    """Tells whether the error says where it comes from, so that our own frames would only stand before that."""
    return report_of(error) is not None or isinstance(error, KeyboardInterrupt) or is_misuse(error)


def is_misuse(error: BaseException) -> bool:
    """Tells whether the error is so marked."""
    return bool(getattr(error, _MARK, False))
