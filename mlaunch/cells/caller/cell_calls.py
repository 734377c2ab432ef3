"""Calls that run cells on ranks that stay, and the futures of cells in the background."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

from mlaunch.base.exceptions import misuse
from mlaunch.base.text import name_ranks
from mlaunch.caller.ranks.kept_call import KeptCall, RanksFuture
from mlaunch.caller.ranks.rank_set import RankSet
from mlaunch.caller.ranks.ranks_launch import RanksLaunch
from mlaunch.cells.caller.cell_result import CellResult, result_of
from mlaunch.cells.caller.cell_source import CellSource, cell_source
from mlaunch.cells.rank import names_for_completion, names_of_cells
from mlaunch.cells.rank.run_cell import run_cell
from mlaunch.cells.wire import CellAnswer, NamesOfRank
from mlaunch.core.load import room
from mlaunch.protocol.calls import Call

_RICH = ("first", "all")
_PATIENCE = 0.5  # seconds for a completion: a person waits for it


class CellJob(RanksFuture):
    """The future of the ``CellResult`` of a cell that runs in the background.

    Attributes:
        name: Its name in the notebook.
        call: The call that runs the cell, once it is queued.
        sink: Takes what its ranks print. None: that is shown as usual.
        begins: Called when the cell begins, after the cells before it, under the lock of the ranks.
    """

    call: KeptCall | None = None
    sink: Callable[[int, bytes], None] | None = None
    begins: Callable[[], None] | None = None

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def queue(self, call: KeptCall) -> None:
        """Have the ranks' output go to the job's sink."""
        super().queue(call)
        self.call = call
        if self.sink is not None:
            call.plan = dataclasses.replace(call.plan, area=None, sink=self.sink)

    def set_running_or_notify_cancel(self) -> bool:
        """Note that the cell begins; False if it was cancelled."""
        begins = super().set_running_or_notify_cancel()
        if begins and self.begins is not None:
            self.begins()
        return begins

    def set_result(self, result: Sequence[CellAnswer | None]) -> None:
        """Make the cell's result of the ranks' answers."""
        super().set_result(result_of(result))

    def cancel(self) -> bool:
        """Take the cell out of the queue, or end it as the stop button would; False if it is over.

        ``result`` then raises ``CancelledError``.
        """
        if super().cancel():
            return True
        launch = self._launch
        if self.done() or self.call is None or launch is None:
            return False
        launch.interrupt(self.call, CancelledError(f"{self.name} was cancelled"))
        return True

    def stop(self) -> bool:
        """Ask its ranks to stop at a step that they agree on: ``mlaunch.stopping()`` becomes true there. Do not wait.

        False if the cell is over.
        """
        call = self.call
        if self.done() or call is None:
            return False
        room("agreed_stop", "caller", "stop()").ask_to_stop(call, "asked")
        return True

    @property
    def _launch(self) -> RanksLaunch | None:
        found: Any = getattr(self.call, "launch", None)
        return found if isinstance(found, RanksLaunch) else None

    def __repr__(self) -> str:
        state = "done" if self.done() else "running" if self.running() else "waiting"
        return f"<CellJob {self.name}: {state}>"


class Cells:
    """Cells on one set of ranks, for the magics and ``Ranks``."""

    def __init__(self, ranks: RankSet) -> None:
        self._set = ranks
        self._opened = ""  # the launch whose ranks have opened their shells, or soon will

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
        """Open the shells in which cells run, before the first cell."""
        self._opened = self._set.launch.launch_id
        self._ask(_open_shells())

    def _open_shells_first(self) -> None:
        """Have new ranks import what cells need; the deadline of their first cell does not include that."""
        launch = self._set.launch
        if launch.over or self._opened != launch.launch_id:
            # Not waited for: other cells may run, for long, before it.
            self._set.submit(self._set.options, _open_shells())
            self._opened = self._set.launch.launch_id

    def names(self) -> list[NamesOfRank]:
        """Return what cells have left on each rank."""
        return list(self._ask(Call(names_of_cells.describe_names, (), {}, name="%ranks")).values())

    def names_for_completion(self, kind: str, source: str, prefix: str, rank: int) -> list[str]:
        """Return what ``find_names`` finds on that rank; [] at once if the ranks are busy or gone."""
        call = Call(names_for_completion.find_names, (kind, source, prefix, rank), {}, name="completion")
        told = self._set.ask_idle(call, _PATIENCE)
        return [] if told is None or not 0 <= rank < len(told) else told[rank]

    def run_cell(
        self, cell: CellSource, targets: Sequence[int] | None, deadline: float | None, rich: str
    ) -> CellResult:
        """Run a cell that has its name already."""
        options = self._set.options if deadline is None else self._set.options.replaced({"deadline": deadline})
        call = self._cell_call(cell, targets, rich)
        self._open_shells_first()
        _, ended = self._set.run(options, call)
        return result_of(ended.result())

    def submit_cell(
        self, job: CellJob, cell: CellSource, targets: Sequence[int] | None, deadline: float | None, rich: str
    ) -> None:
        """Queue a cell whose job has been made."""
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
        """Make a call; return its values by rank, only of ranks that are targets."""
        _, ended = self._set.run(self._set.options, call)
        return {rank: value for rank, value in enumerate(ended.result()) if value is not None}

    def _checked(self, targets: Sequence[int] | None) -> tuple[int, ...] | None:
        if targets is None:
            return None
        size = self._set.launch.handle.idle_spec.world_size
        wrong = sorted(rank for rank in targets if not 0 <= rank < size)
        if wrong:
            raise misuse(ValueError(f"there is no {name_ranks(wrong)}; these are {name_ranks(range(size))}"))
        if not targets:
            raise misuse(ValueError("targets=(): allowed: at least one rank, or None for all"))
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
