"""The result of a cell: what it has shown on its ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlaunch.base.text import name_ranks, ranges
from mlaunch.caller.warn import warn_caller
from mlaunch.cells.wire import Bundle, CellAnswer


class CellResult:
    """The output of a cell: once if it is the same on all ranks, else by rank.

    Attributes:
        answers: By rank, of the ranks on which the cell ran.
    """

    def __init__(self, answers: Mapping[int, CellAnswer]) -> None:
        self.answers = dict(sorted(answers.items()))

    @property
    def text(self) -> str:
        """The last expression as text; "" if no rank has one to show."""
        alike: dict[str, list[int]] = {}
        for rank, answer in self.answers.items():
            alike.setdefault("" if answer.last is None else answer.last.text, []).append(rank)
        if len(alike) < 2:
            return next(iter(alike), "")
        return "\n".join(_labelled(ranks, text) for text, ranks in alike.items())

    @property
    def is_empty(self) -> bool:
        """True if no rank has a last expression to show."""
        return all(answer.last is None for answer in self.answers.values())

    @property
    def _is_equal(self) -> bool:
        return len({answer.last and answer.last.text for answer in self.answers.values()}) < 2

    def show_displays(self) -> None:
        """Display what the cell displayed, one rank after the other; without IPython, print it."""
        for label, bundle in self.displays():
            _display(bundle, label)

    def displays(self) -> Iterator[tuple[str, Bundle]]:
        """Yield what the cell displayed, with a label of its rank if several ranks did."""
        several = sum(1 for answer in self.answers.values() if answer.displays) > 1
        for rank, answer in self.answers.items():
            for bundle in answer.displays:
                yield f"[{rank}]" if several else "", bundle
            if answer.last is not None and not self._is_equal and len(answer.last.data) > 1 and several:
                yield f"[{rank}]", answer.last

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return all forms if the ranks' are equal; else the text."""
        if self.is_empty or not self._is_equal:
            return {"text/plain": self.text}, {}
        last = next(answer.last for answer in self.answers.values() if answer.last is not None)
        return last.data, last.metadata


def result_of(values: Sequence[CellAnswer | None]) -> CellResult:
    """Make a cell's result of the ranks' answers; warn if some ranks have no IPython."""
    answers = {rank: answer for rank, answer in enumerate(values) if answer is not None}
    bare = [rank for rank, answer in answers.items() if answer.without_ipython]
    if bare:
        warn_caller(f"{name_ranks(bare)} ran this without magics: IPython is not installed there")
    return CellResult(answers)


def _labelled(ranks: list[int], text: str) -> str:
    label = f"[{ranges(ranks, ',')}] "
    return label + text.replace("\n", "\n" + " " * len(label))


def _display(bundle: Bundle, label: str) -> None:
    ipython: Any = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        print(f"{label} {bundle.text}".strip())
        return
    if label and not bundle.update:
        print(label)
    ipython.get_ipython().display_pub.publish(
        dict(bundle.data), dict(bundle.metadata), transient=dict(bundle.transient), update=bundle.update
    )
