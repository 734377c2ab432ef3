"""Calls on ranks that stay which run cells, in a namespace of the ranks' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlaunch.base.misuse import misuse
from mlaunch.base.text import name_ranks
from mlaunch.caller.ranks.idle_question import ask_idle
from mlaunch.caller.ranks.rank_set import RankSet
from mlaunch.cells.caller.cell_job import CellJob
from mlaunch.cells.caller.cell_result import CellResult, result_of
from mlaunch.cells.caller.cell_source import CellSource, cell_source
from mlaunch.cells.rank import guarded_names, names_of_cells
from mlaunch.cells.rank.run_cell import run_cell
from mlaunch.cells.wire import NamesOfRank
from mlaunch.protocol.calls import Call

_RICH = ("first", "all")
_PATIENCE = 0.5  # seconds for a completion, for which a person waits


class Cells:
    """What a notebook's magics do with ranks, and ``Ranks`` for who has none."""

    def __init__(self, ranks: RankSet) -> None:
        self._set = ranks
        self._opened = ""  # the launch whose ranks have opened their shells, or are about to

    def cell(self, source: str, targets: Sequence[int] | None, deadline: float | None, rich: str) -> CellResult:
        """Run source text; see ``Ranks.cell``."""
        return self.run_cell(cell_source(source), targets, deadline, rich)

    def pull(self, name: str, targets: Sequence[int] | None) -> list[Any]:
        """Return a name's values; see ``Ranks.pull``."""
        found = self._ask(Call(names_of_cells.pull, ([name], self._checked(targets)), {}, name=f"pull of {name}"))
        _check_name(name, found)
        return [values[name] for values in found.values()]

    def push(self, values: Mapping[str, Any], targets: Sequence[int] | None) -> None:
        """Set names; see ``Ranks.push``."""
        name = f"push of {', '.join(values)}"
        self._ask(Call(names_of_cells.push, (dict(values), self._checked(targets)), {}, name=name))

    def open_shells(self) -> None:
        """Opens the shells in which cells run, so that the first cell need not."""
        self._opened = self._set.session.launch_id
        self._ask(_open_shells())

    def _open_shells_first(self) -> None:
        """Let fresh ranks import what cells need before the first, whose deadline and failure are not about that."""
        session = self._set.session
        if session.over or self._opened != session.launch_id:
            # Not waited for: other cells may run, for long, before it.
            self._set.submit(self._set.options, _open_shells())
            self._opened = self._set.session.launch_id

    def names(self) -> list[NamesOfRank]:
        """Returns what cells have left on each rank."""
        return list(self._ask(Call(names_of_cells.describe_names, (), {}, name="%ranks")).values())

    def names_for_completion(self, kind: str, source: str, prefix: str, rank: int) -> list[str]:
        """Returns what ``guarded_names.find_names`` finds on that rank; [] at once if the ranks are busy, or gone."""
        call = Call(guarded_names.find_names, (kind, source, prefix, rank), {}, name="completion")
        told = ask_idle(self._set, call, _PATIENCE)
        return [] if told is None or not 0 <= rank < len(told) else told[rank]

    def run_cell(
        self, cell: CellSource, targets: Sequence[int] | None, deadline: float | None, rich: str
    ) -> CellResult:
        """Runs one that has its name already."""
        options = self._set.options if deadline is None else self._set.options.replaced({"deadline": deadline})
        call = self._cell_call(cell, targets, rich)
        self._open_shells_first()
        _, ended = self._set.run(options, call)
        return result_of(ended.result())

    def submit_cell(
        self, job: CellJob, cell: CellSource, targets: Sequence[int] | None, deadline: float | None, rich: str
    ) -> None:
        """Queues one whose job is made already."""
        options = self._set.options if deadline is None else self._set.options.replaced({"deadline": deadline})
        call = self._cell_call(cell, targets, rich)
        self._open_shells_first()
        self._set.submit(options, call, job)
        job.add_done_callback(self._set.note)

    def _cell_call(self, cell: CellSource, targets: Sequence[int] | None, rich: str) -> Call:
        if rich not in _RICH:
            raise misuse(ValueError(f"rich={rich!r}: allowed: {', '.join(map(repr, _RICH))}"))
        place = cell.number, cell.lines_above
        return Call(run_cell, (cell.text, cell.file, place, self._checked(targets), rich == "all"), {}, name=cell.name)

    def _ask(self, call: Call) -> dict[int, Any]:
        """Makes a call; returns its values by rank, without those of ranks that are no targets."""
        _, ended = self._set.run(self._set.options, call)
        return {rank: value for rank, value in enumerate(ended.result()) if value is not None}

    def _checked(self, targets: Sequence[int] | None) -> tuple[int, ...] | None:
        if targets is None:
            return None
        size = self._set.session.handle.idle_spec.world_size
        wrong = sorted(rank for rank in targets if not 0 <= rank < size)
        if wrong:
            raise misuse(ValueError(f"there is no {name_ranks(wrong)}; these are {name_ranks(range(size))}"))
        if not targets:
            raise misuse(ValueError("targets=(): allowed: ranks, at least one, or None for all"))
        return tuple(sorted(set(targets)))


def _open_shells() -> Call:
    return Call(names_of_cells.get_ready_for_cells, (), {}, name="%ranks")


def _check_name(name: str, found: Mapping[int, Mapping[str, Any]]) -> None:
    without = [rank for rank, values in found.items() if name not in values]
    having = [rank for rank in found if rank not in without]
    if having and without:
        raise misuse(NameError(f"name {name!r} is not on {name_ranks(without)}, but on {name_ranks(having)}; pull it "
                               f"from there (targets)"))  # fmt: skip
    if without:
        raise misuse(NameError(f"name {name!r} is not on {name_ranks(without)}; cells have not set it there"))
