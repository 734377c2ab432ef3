"""In the process that calls: machines are asked for, their members are heard, and given back."""

from __future__ import annotations

from mlaunch.core.notes import Note


def noted(news: str, name: str) -> Note:
    """Return what to tell of a machine that does not answer."""
    return Note(f"{name}: {news}")
