"""What an exception from outside must not come into, since it would be broken ever after.

An import that is interrupted leaves some modules complete and others out. What they registered stays, and in the next
import they meet in another order ("partially initialized module").
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import ParamSpec, TypeVar

from mlaunch.base.frames import is_import

P = ParamSpec("P")
R = TypeVar("R")
_marked: set[CodeType] = set()


def whole(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function, written in Python, that has to come to its end once it has begun."""
    _marked.add(function.__code__)
    return function


def is_inside(frame: FrameType | None, below: CodeType) -> bool:
    """True if the frame is part of an import, or of a marked function. ``below``: who looks no further down."""
    # By the frames, since they are right at each moment; a counter would itself have moments in between.
    while frame is not None and frame.f_code is not below:
        if frame.f_code in _marked or is_import(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
