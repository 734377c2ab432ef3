"""Cells on ranks that stay, in the process that calls the ranks: their text, calls, futures and results."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from types import FrameType
from typing import Any

from mlaunch.base.exceptions import misuse
from mlaunch.base.text import name_ranks, ranges
from mlaunch.caller.report import notebook
from mlaunch.caller.report.user_frames import warn_caller
from mlaunch.cells.rank import describe_names, find_names, open_shell_early, pull, push, run_cell
from mlaunch.cells.wire import Bundle, CellAnswer, NamesOfRank
from mlaunch.core.load import room
from mlaunch.protocol import by_value
from mlaunch.protocol.calls import Call
from mlaunch.ranks.caller.kept_call import KeptCall, RanksFuture
from mlaunch.ranks.caller.rank_set import RankSet
from mlaunch.ranks.caller.ranks_launch import RanksLaunch

_MAGIC = re.compile(r"^\s*[!%?]|\?\s*$", re.MULTILINE)
_COMMAND = re.compile(r"\s*(\w+)(\s|$)")
_numbers = itertools.count(1)


@dataclass(frozen=True)
class CellSource:
    """The text of a cell.

    ``name``: for messages ("cell In[7]"); ``file``: for tracebacks; ``lines_above``: the magic, and empty lines.
    """

    text: str
    name: str
    file: str
    number: int
    lines_above: int


def cell_source(text: str, *, magic: str = "") -> CellSource:
    """Return a cell that runs now; register its lines for tracebacks. ``magic``: the line above the text, if any.

    Raises:
        SyntaxError: The text is not Python, nor what IPython turns into Python.
    """
    shell = notebook.shell()
    lines = text.splitlines(keepends=True)
    body = list(itertools.dropwhile(str.isspace, lines))  # IPython drops these lines, too
    above, text = len(lines) - len(body) + (1 if magic else 0), "".join(body)
    whole = "\n" * above + text
    if shell is None:
        number = next(_numbers)
        found = CellSource(text, f"cell {number}", f"<cell {number}>", number, above)
        by_value.take_source((found.file, whole))
    else:
        number = _number_of_cell(shell)
        # IPython and Jupyter name a file, and find breakpoints, by a hash of raw_code: it includes the magic's line.
        file = shell.compile.cache(whole, number, raw_code=f"{magic}{whole}")
        found = CellSource(text, f"cell In[{number}]", file, number, above)
    _check_syntax(found, shell)
    return found


def _number_of_cell(shell: Any) -> int:
    """Return the number of the cell that runs; IPython's own count is ahead by one in some releases."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        _, name = shell.compile.format_code_name(frame.f_code.co_filename) or ("", "")
        if number := re.fullmatch(r"In\[(\d+)\]", name):
            return int(number[1])
        frame = frame.f_back
    return int(shell.execution_count)


def _check_syntax(cell: CellSource, shell: Any) -> None:
    """Raise SyntaxError here, before ranks have run a part of the cell.

    What IPython knows as a command (``ls``) is left to the ranks.
    """
    try:
        text = cell.text if shell is None else shell.input_transformer_manager.transform_cell(cell.text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks' compiler warns, too
            whole = "\n" * cell.lines_above + text
            compile(whole, cell.file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        if not (_MAGIC.search(cell.text) if shell is None else _is_command(cell.text, shell)):
            raise misuse(error.with_traceback(None)) from None


def _is_command(text: str, shell: Any) -> bool:
    """True if the text is one line that IPython runs as a magic, such as ``ls -l``."""
    word = _COMMAND.match(text)
    one_line = len(text.strip().splitlines()) == 1
    return one_line and word is not None and shell.find_line_magic(word[1]) is not None


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
        """Yield what the cell displayed, with the rank as a label if several ranks displayed something."""
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
        """Note the call, and send its ranks' output to the job's sink."""
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
        """Set the result of the cell: that of the ranks' answers."""
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
        """Ask its ranks to stop at a step that they agree on, where ``mlaunch.stopping()`` becomes true; do not wait.

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
        found = self._ask(Call(pull, ([name], self._checked(targets)), {}, name=f"pull of {name}"))
        _check_name(name, found)
        return [values[name] for values in found.values()]

    def push(self, values: Mapping[str, Any], targets: Sequence[int] | None) -> None:
        """Set names; see ``Ranks.push``."""
        name = f"push of {', '.join(values)}"
        self._ask(Call(push, (dict(values), self._checked(targets)), {}, name=name))

    def open_shells(self) -> None:
        """Open the shells in which cells run, before the first cell."""
        self._opened = self._set.launch.launch_id
        self._ask(_open_shells())

    def _open_shells_first(self) -> None:
        """Have new ranks import what cells need, before the deadline of their first cell begins."""
        launch = self._set.launch
        if launch.over or self._opened != launch.launch_id:
            # Not waited for: other cells may run, for long, before it.
            self._set.submit(self._set.options, _open_shells())
            self._opened = self._set.launch.launch_id

    def names(self) -> list[NamesOfRank]:
        """Return the names that cells have left on each rank."""
        return list(self._ask(Call(describe_names, (), {}, name="%ranks")).values())

    def names_for_completion(self, kind: str, source: str, prefix: str, rank: int) -> list[str]:
        """Return the names for completion on a rank; [] at once if the ranks are busy or gone."""
        call = Call(find_names, (kind, source, prefix, rank), {}, name="completion")
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
        """Queue a cell. ``job``: its future."""
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
        """Make a call; return its values by rank, without ranks that are not targets."""
        _, ended = self._set.run(self._set.options, call)
        return {rank: value for rank, value in enumerate(ended.result()) if value is not None}

    def _checked(self, targets: Sequence[int] | None) -> tuple[int, ...] | None:
        if targets is None:
            return None
        size = self._set.launch.handle.idle_spec.world_size
        wrong = sorted(rank for rank in targets if not 0 <= rank < size)
        if wrong:
            raise misuse(ValueError(f"no {name_ranks(wrong)} here; these are {name_ranks(range(size))}"))
        if not targets:
            raise misuse(ValueError("targets=(): allowed: at least one rank, or None for all"))
        return tuple(sorted(set(targets)))


def _open_shells() -> Call:
    return Call(open_shell_early, (), {}, name="%ranks")


def _check_name(name: str, found: Mapping[int, Mapping[str, Any]]) -> None:
    without = [rank for rank, values in found.items() if name not in values]
    having = [rank for rank in found if rank not in without]
    if having and without:
        raise misuse(NameError(f"name {name!r} is not on {name_ranks(without)}, but on {name_ranks(having)}; pull it "
                               f"from there (targets=)"))  # fmt: skip
    if without:
        raise misuse(NameError(f"name {name!r} is not on {name_ranks(without)}; cells have not set it there"))
