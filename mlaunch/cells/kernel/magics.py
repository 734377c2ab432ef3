"""``%ranks`` and ``%%ranks`` in IPython: the notebook's ranks, and its cells on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.core.error import UsageError

from mlaunch.base.text import name_ranks
from mlaunch.caller.output.harmless import harmless
from mlaunch.caller.ranks.ranks import Ranks, check
from mlaunch.cells.caller.cell_job import CellJob
from mlaunch.cells.caller.cell_result import CellResult
from mlaunch.cells.caller.cell_source import CellSource, cell_source
from mlaunch.cells.kernel.job_area import JobArea
from mlaunch.cells.kernel.magic_words import CellWords, LineWords, WordError, cell_words, line_words
from mlaunch.cells.kernel.name_matcher import RankNames, install
from mlaunch.cells.kernel.table import table
from mlaunch.cells.kernel.told import show_syntax_errors, told_in_cell

_MAGIC = re.compile(r"\s*(\w+\s*=\s*)?%{1,2}ranks\b")
_HERE = re.compile(r"\s*%%ranks\s+--local\s*$")

_NONE_OPEN = "no ranks are open: %ranks 4 opens four, %ranks with options others (%ranks? shows them)"


class CellRanks:
    """The ranks of one notebook, which its magics open, use and close."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._ranks: Ranks | None = None
        self._options: Mapping[str, Any] = {}
        self.automatic = Automatic()
        self._installed = [
            install(shell, RankNames(self._names, self.automatic.takes, self._names_here)),
            show_syntax_errors(shell),
        ]

    def magic(self, line: str, cell: str | None = None) -> Any:
        """Opens ranks, runs cells on them, and brings names to and fro.

        %ranks 4 [--backend gloo ...]    opens four ranks, with the options of Ranks
        %ranks                           a table: memory, and the names that cells have left
        %%ranks [0,2-3] [--deadline 60] [--rich all]
                                         runs the cell on all ranks, or on some
        %%ranks --bg job                 runs it while the notebook goes on; job is its future
        %ranks --cancel job, --stop job  ends it, or asks it to stop where mlaunch.stopping() is true
        %ranks --auto, --local           plain cells run on the ranks from now on, or here again;
                                         %%ranks --local: this one here
        %ranks --pull loss               a list of its values by rank, also as `losses = %ranks --pull loss`
        %ranks --push lr data            sets names of the notebook on the ranks
        %ranks --restart [...]           fresh ranks, with the same options or others
        %ranks --close                   ends them
        """
        try:
            self.automatic.paused = True
            return self._run_line(line_words(line)) if cell is None else self._run_cell(line, cell)
        except (KeyboardInterrupt, Exception) as error:
            if isinstance(error, WordError):
                raise UsageError(str(error)) from None
            told: BaseException = error
            with harmless():
                told = told_in_cell(error)
            raise told from error.__cause__
        finally:
            self.automatic.paused = False

    def uninstall(self) -> None:
        """Takes out of the shell what was put there."""
        for take_out in self._installed:
            take_out()

    def close(self) -> None:
        """Ends the ranks, if there are any."""
        ranks, self._ranks, self.automatic.on = self._ranks, None, False
        if ranks is not None:
            ranks.terminate()

    @property
    def _open(self) -> Ranks:
        if self._ranks is None or self._ranks.closed:
            raise WordError(_NONE_OPEN)
        return self._ranks

    def _names(self, kind: str, source: str, prefix: str, rank: int) -> Sequence[str]:
        """Returns names of a rank for completion; of no rank, none."""
        ranks = self._ranks
        return () if ranks is None or ranks.closed else ranks.cells.names_for_completion(kind, source, prefix, rank)

    def _names_here(self) -> Mapping[str, Any]:
        hidden = self._shell.user_ns_hidden
        return {name: value for name, value in self._shell.user_ns.items() if name not in hidden}

    # %%ranks

    def _run_cell(self, line: str, text: str) -> CellResult | None:
        words, ranks = cell_words(line), self._open
        if not text.strip():
            return None
        cell = cell_source(text, magic="" if words.auto else f"%%ranks {line}".rstrip())
        if words.auto:
            print(f"on {name_ranks(range(ranks.world_size))}:")
        if words.bg:
            self._begin_job(words, cell, ranks)
            return None
        result = ranks.cells.run_cell(cell, words.targets, words.deadline, words.rich)
        with harmless():
            result.show_displays()
        return None if result.is_empty else result

    def _begin_job(self, words: CellWords, cell: CellSource, ranks: Ranks) -> None:
        job = CellJob(words.bg)
        area = JobArea(self._shell, job)
        job.sink = area.sink
        ranks.cells.submit_cell(job, cell, words.targets, words.deadline, words.rich)
        # Once it is queued: a name that stands for no job would be worse than none.
        self._shell.user_ns[words.bg] = job
        area.open()

    # %ranks

    def _run_line(self, words: LineWords) -> Any:
        do: dict[str, Callable[[LineWords], Any]] = {
            "table": self._print_table,
            "open": self._open_ranks,
            "restart": self._restart,
            "close": lambda _: self.close(),
            "pull": self._pull,
            "push": self._push,
            "cancel": lambda words: [job.cancel() for job in self._jobs(words)] and None,
            "stop": lambda words: [job.stop() for job in self._jobs(words)] and None,
            "auto": self._begin_auto,
            "local": self._end_auto,
        }
        return do[words.verb](words)

    def _print_table(self, _: LineWords) -> None:
        ranks = self._open
        is_idle = ranks.idle
        told = ranks.cells.names() if is_idle else []
        print(table(ranks.devices, "idle" if is_idle else "running", told))

    def _open_ranks(self, words: LineWords) -> None:
        if self._ranks is not None and not self._ranks.closed:
            if words.options != self._options:
                raise WordError(f"{self._ranks!r} are open, with other options: %ranks --restart with the new ones "
                                f"ends these first, and what they hold is lost then")  # fmt: skip
        else:
            self._ranks, self._options = Ranks(**words.options), words.options
            self._ranks.cells.open_shells()
        self._print_table(words)

    def _restart(self, words: LineWords) -> None:
        options = words.options or self._options
        # Checked before the old ranks end: a mistyped option must not cost what they hold.
        check(options)
        self.close()
        self._open_ranks(LineWords("open", options=options))

    def _jobs(self, words: LineWords) -> list[CellJob]:
        found = {name: self._shell.user_ns.get(name) for name in words.names}
        strange = [name for name, job in found.items() if not isinstance(job, CellJob)]
        if strange:
            raise WordError(f"{', '.join(strange)} is no job of the notebook; %%ranks --bg {strange[0]} begins one")
        return [job for job in found.values() if isinstance(job, CellJob)]

    def _begin_auto(self, _: LineWords) -> None:
        ranks = self._open
        self.automatic.on = True
        print(f"cells run on {name_ranks(range(ranks.world_size))} until %ranks --local; one here: %%ranks --local")

    def _end_auto(self, _: LineWords) -> None:
        self.automatic.on = False
        print("cells run in the notebook")

    def _pull(self, words: LineWords) -> Any:
        found = {name: self._open.pull(name, targets=words.targets) for name in words.names}
        self._shell.user_ns.update(found)
        return found if len(found) > 1 else next(iter(found.values()))

    def _push(self, words: LineWords) -> None:
        ranks, names = self._open, self._shell.user_ns
        missing = [name for name in words.names if name not in names]
        if missing:
            raise WordError(f"the notebook has no names {', '.join(missing)} to push")
        ranks.push({name: names[name] for name in words.names}, targets=words.targets)


def load(shell: Any) -> None:
    """Brings the magics into an IPython shell; those that are there stay, with their ranks."""
    # %load_ext and an import of the extension may both come.
    if getattr(shell, "mlaunch_ranks", None) is None:
        shell.mlaunch_ranks = CellRanks(shell)
        shell.register_magic_function(shell.mlaunch_ranks.magic, "line_cell", "ranks")
        shell.input_transformers_cleanup.append(shell.mlaunch_ranks.automatic)


def unload(shell: Any) -> None:
    """Ends the ranks and takes the magics away."""
    ranks: CellRanks | None = getattr(shell, "mlaunch_ranks", None)
    if ranks is not None:
        shell.mlaunch_ranks = None
        shell.input_transformers_cleanup.remove(ranks.automatic)
        ranks.uninstall()
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop("ranks", None)
        ranks.close()


class Automatic:
    """Called with the lines of each cell. ``on``: they go to the ranks; ``paused``: a magic has come so far."""

    def __init__(self) -> None:
        self.on = False
        self.paused = False

    def __call__(self, lines: Sequence[str]) -> list[str]:
        if lines and _HERE.match(lines[0]):  # the cell is the notebook's
            return ["# %%ranks --local\n", *lines[1:]]
        return ["%%ranks --auto\n", *lines] if self.takes(lines) and not self.paused else list(lines)

    def takes(self, lines: Sequence[str]) -> bool:
        """Tells whether a cell goes to the ranks though it does not say so."""
        return self.on and any(line.strip() for line in lines) and not any(map(_MAGIC.match, lines))
