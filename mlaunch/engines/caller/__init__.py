"""The caller's side of engines: it asks for machines, receives their members' records, and gives the machines back."""

from __future__ import annotations

from mlaunch.core.records import Note


def noted(news: str, name: str) -> Note:
    """Return the note about a machine that does not answer."""
    return Note(f"{name}: {news}")
