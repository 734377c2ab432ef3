"""``mlaunch why``: which rank of a running launch the others wait for, in one sentence, and where each rank is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlaunch.base.frames import is_library
from mlaunch.caller.report.failure_text import in_words, operation_of
from mlaunch.caller.wait_graph import RankView, why

_RUNNING = "running"
_SILENT = "where its control thread does not answer (C code may hold the interpreter lock)"


def sentence(launch: Mapping[str, Any]) -> str:
    """Says it of a launch that was asked by the word ``why``."""
    return why([view_of(rank) for rank in launch["ranks"]])


def view_of(rank: Mapping[str, Any]) -> RankView:
    """Makes a rank's view of what its agent has told."""
    frames = [tuple(frame) for frame in rank["frames"]]
    told, children = rank.get("entered"), rank.get("children", [])
    entered = None if told is None else {name: (tuple(members), number) for name, members, number in told}
    place = next((i for i, frame in enumerate(frames) if not is_library(frame[0])), len(frames))
    doing = in_words(frames) if frames and rank["state"].startswith(_RUNNING) else rank["state"]
    if "(it " in rank["state"] and doing != rank["state"]:  # the kernel holds it, or a signal has stopped it
        doing += f" ({rank['state'].partition('(')[2]}"
    elif entered is None and frames:
        doing += f", {_SILENT}"
    if children:
        doing += "".join(f"; its child {child}" for child in children[:2])
    inside = any("/torch/" in file for file, _, _ in frames[:place])
    return RankView(rank["rank"], doing, operation_of(frames), inside, entered)
