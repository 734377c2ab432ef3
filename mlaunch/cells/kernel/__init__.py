"""``%ranks`` and ``%%ranks`` in IPython: a notebook's ranks, its cells on them, their output, jobs, and errors.

``%load_ext mlaunch`` brings them.
"""

from __future__ import annotations

import re
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

from mlaunch.base.exceptions import is_misuse, report_of
from mlaunch.base.text import in_bytes, in_seconds, last_bytes, name_ranks, ranges
from mlaunch.caller.output.console import harmless
from mlaunch.caller.output.output_plan import STREAMS
from mlaunch.caller.report import notebook
from mlaunch.cells.caller import CellJob, CellResult, CellSource, cell_source
from mlaunch.cells.kernel.magic_words import CellWords, LineWords, RankNames, WordError, cell_words, install, line_words
from mlaunch.cells.wire import Bundle, NamesOfRank
from mlaunch.core.load import module_of, room
from mlaunch.ranks.caller.ranks import Ranks, check

_MAGIC = re.compile(r"\s*(\w+\s*=\s*)?%{1,2}ranks\b")
_HERE = re.compile(r"\s*%%ranks\s+--local\s*$")

_NONE_OPEN = "no ranks are open: %ranks 4 opens four, also with options (%ranks? shows them)"
_SHOWN = 12  # names in the table
_NO_NAMES = "cells have left no names there"


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
        """Open ranks, run cells on them, and exchange names with them.

        %ranks 4 [--backend gloo ...]    opens four ranks, with the options of Ranks
        %ranks                           a table: memory, and the names that cells have left
        %%ranks [0,2-3] [--deadline 60] [--rich all]
                                         runs the cell on all ranks, or on some
        %%ranks --bg job                 runs it in the background; job is its future
        %ranks --cancel job, --stop job  ends it, or asks it to stop: mlaunch.stopping() becomes true there
        %ranks --auto, --local           plain cells run on the ranks from now on, or here again;
                                         %%ranks --local: only this one runs here
        %ranks --pull loss               a list of its values by rank, also as `losses = %ranks --pull loss`
        %ranks --push lr data            sets names of the notebook on the ranks
        %ranks --restart [...]           new ranks, with the same options or others
        %ranks --close                   ends them
        """
        try:
            self.automatic.paused = True
            return self._run_line(line_words(line)) if cell is None else self._run_cell(line, cell)
        except (KeyboardInterrupt, Exception) as error:
            if isinstance(error, WordError):
                from IPython.core.error import UsageError

                raise UsageError(str(error)) from None
            shown: BaseException = error
            with harmless():
                shown = shown_in_cell(error)
            raise shown from error.__cause__
        finally:
            self.automatic.paused = False

    def uninstall(self) -> None:
        """Undo the changes of the shell."""
        for take_out in self._installed:
            take_out()

    def close(self) -> None:
        """End the ranks, if there are any."""
        ranks, self._ranks, self.automatic.on = self._ranks, None, False
        if ranks is not None:
            ranks.terminate()

    @property
    def _open(self) -> Ranks:
        if self._ranks is None or self._ranks.closed:
            raise WordError(_NONE_OPEN)
        return self._ranks

    def _names(self, kind: str, source: str, prefix: str, rank: int) -> Sequence[str]:
        """Return names of a rank for completion; none if no ranks are open."""
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
        # Only once it is queued, which may fail.
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
        print(table(ranks.devices, "idle" if is_idle else "running", ranks.cells.names() if is_idle else []))

    def _open_ranks(self, words: LineWords) -> None:
        if self._ranks is not None and not self._ranks.closed:
            if words.options != self._options:
                raise WordError(f"{self._ranks!r} are open, with other options: %ranks --restart with the new ones "
                                f"ends these first, and loses what they hold")  # fmt: skip
        else:
            self._ranks, self._options = Ranks(**words.options), words.options
            self._ranks.cells.open_shells()
        self._print_table(words)

    def _restart(self, words: LineWords) -> None:
        options = words.options or self._options
        # Before the old ranks end: a mistyped option must not lose what they hold.
        check(options)
        self.close()
        self._open_ranks(LineWords("open", options=options))

    def _jobs(self, words: LineWords) -> list[CellJob]:
        found = {name: self._shell.user_ns.get(name) for name in words.names}
        strange = [name for name, job in found.items() if not isinstance(job, CellJob)]
        if strange:
            raise WordError(f"the notebook has no job {', '.join(strange)}; %%ranks --bg {strange[0]} starts one")
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
    """Add the magics to an IPython shell; if they are there already, they stay, with their ranks."""
    # %load_ext and an import of the extension may both come.
    if getattr(shell, "mlaunch_ranks", None) is None:
        shell.mlaunch_ranks = CellRanks(shell)
        shell.register_magic_function(shell.mlaunch_ranks.magic, "line_cell", "ranks")
        shell.input_transformers_cleanup.append(shell.mlaunch_ranks.automatic)


def unload(shell: Any) -> None:
    """End the ranks and remove the magics."""
    ranks: CellRanks | None = getattr(shell, "mlaunch_ranks", None)
    if ranks is not None:
        shell.mlaunch_ranks = None
        shell.input_transformers_cleanup.remove(ranks.automatic)
        ranks.uninstall()
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop("ranks", None)
        ranks.close()


class Automatic:
    """A transformer of each cell's lines. ``on``: cells go to the ranks; ``paused``: a magic of mlaunch runs."""

    def __init__(self) -> None:
        self.on = False
        self.paused = False

    def __call__(self, lines: Sequence[str]) -> list[str]:
        if lines and _HERE.match(lines[0]):  # the cell is the notebook's
            return ["# %%ranks --local\n", *lines[1:]]
        return ["%%ranks --auto\n", *lines] if self.takes(lines) and not self.paused else list(lines)

    def takes(self, lines: Sequence[str]) -> bool:
        """True if a cell without a magic goes to the ranks."""
        return self.on and any(line.strip() for line in lines) and not any(map(_MAGIC.match, lines))


def table(devices: Sequence[str], state: str, found: Sequence[NamesOfRank]) -> str:
    """Return the table that ``%ranks`` prints. ``found``: by rank; empty if the ranks are busy and cannot be asked."""
    if not found:
        return f"{_head(len(devices), devices, state)}\n(busy ranks cannot be asked for their memory and names)"
    rows = [("rank", "pid", "device", "memory", "on device")]
    for rank, here in enumerate(found):
        device = devices[rank] if rank < len(devices) else ""
        on_device = in_bytes(here.device_memory) if here.device_memory else "-"
        rows.append((str(rank), str(here.pid), device, in_bytes(here.memory), on_device))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([_head(len(found), devices, state), *lines, *_names(found)])


def _head(size: int, devices: Sequence[str], state: str) -> str:
    kinds = ", ".join(dict.fromkeys(device.partition(":")[0] for device in devices))
    return f"{size} rank{'s' if size > 1 else ''} on {kinds}, {state}"


def _names(found: Sequence[NamesOfRank]) -> list[str]:
    """Return a line for each name: once if all ranks have it alike, else by rank. The largest come first."""
    having: dict[tuple[str, str, int], list[int]] = {}
    for rank, here in enumerate(found):
        for name, (kind, size) in here.names.items():
            having.setdefault((name, kind, size), []).append(rank)
    rows = sorted(having.items(), key=lambda row: (-row[0][2], row[0][0]))
    lines = []
    for (name, kind, size), ranks in rows[:_SHOWN]:
        where = "" if len(ranks) == len(found) else f"[{ranges(ranks, ',')}] "
        lines.append(f"{where}{name}: {kind}, {in_bytes(size)}")
    more = [f"and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return [*lines, *more] or [_NO_NAMES]


# Exceptions: the cause, with the lines of the cell, and no frame of mlaunch


def shown_in_cell(error: BaseException) -> BaseException:
    """Return an exception for which IPython shows the ranks' report in place of the frames of the magic.

    IPython calls the ``_render_traceback_`` of an exception that has one.
    """
    lines = traceback_lines(error)
    if not lines:
        return error
    BaseException.__setattr__(error, "_render_traceback_", lambda: lines)  # a class may refuse attributes
    return error.with_traceback(None)


def traceback_lines(error: BaseException) -> list[str]:
    """Return the lines to show for an exception; none if it did not come from ranks."""
    report = report_of(error)
    notes = [str(note) for note in getattr(error, "__notes__", [])]
    if report is None and isinstance(error, SyntaxError) and is_misuse(error):
        return notebook.complete("".join(traceback.format_exception_only(error))).splitlines()
    if report is not None:
        first = str(report) if report is not error else f"{type(error).__name__}: {report}"
        return [first, *(note for note in notes if not note.startswith("raised by "))]
    if is_misuse(error) or isinstance(error, KeyboardInterrupt):
        return [f"{type(error).__name__}: {error}".removesuffix(": "), *notes]
    return []


def show_syntax_errors(shell: Any) -> Callable[[], None]:
    """Have IPython use the ``_render_traceback_`` of a SyntaxError, too; return a function that undoes this.

    Otherwise it would be shown below the frames of the magic.
    """
    original = shell.showsyntaxerror

    def show(*args: Any, **options: Any) -> None:
        error = sys.exc_info()[1]
        render = getattr(error, "_render_traceback_", None)
        if render is None:
            original(*args, **options)
        else:
            shell._showtraceback(type(error), error, render())

    shell.showsyntaxerror = show

    def restore() -> None:
        shell.showsyntaxerror = original

    return restore


# Cells in the background

_MOST = 64 * 1024  # bytes that it shows, from the end of the output
# A frontend draws the whole at each update, and would fall behind ranks that print in a loop.
_PERIOD = 0.1  # seconds between two updates


class _OfOwnCell:
    """Publishes in the cell that made it, whichever cell runs now."""

    def __init__(self, display_pub: Any) -> None:
        self._pub, self._parent = display_pub, getattr(display_pub, "parent_header", None)

    def publish(
        self, data: Mapping[str, Any], metadata: Any = None, *, transient: Any = None, update: bool = False
    ) -> None:
        if self._parent is None or not hasattr(self._pub, "pub_socket"):  # another kernel than ipykernel
            self._pub.publish(data, metadata or {}, transient=transient or {}, update=update)
            return
        content = {"data": dict(data), "metadata": dict(metadata or {}), "transient": dict(transient or {})}
        kind = "update_display_data" if update else "display_data"
        self._pub.session.send(self._pub.pub_socket, kind, content, parent=self._parent, ident=self._pub.topic)


class JobArea:
    """The output of a job in the cell that began it, replaced as the job continues. At a terminal's prompt, lines."""

    def __init__(self, shell: Any, job: CellJob) -> None:
        self._publisher = _OfOwnCell(shell.display_pub)
        self._in_kernel = getattr(shell, "kernel", None) is not None
        self._job, self._id = job, uuid.uuid4().hex
        self._text = ""
        self._begun, self._shown_at = time.monotonic(), 0.0
        self._lock = threading.Lock()
        self._turn = threading.RLock()  # held while something is shown
        self._timer: threading.Timer | None = None  # shows what came too soon after the last update
        self._is_open = self._is_over = False
        job.begins = self._show_beginning

    @property
    def sink(self) -> Any:
        """The function that takes the output of the ranks; None at a prompt, where that is shown as usual."""
        return self._take if self._in_kernel else None

    def open(self) -> None:
        """Create the output."""
        head = self._head()
        self._show(head, update=False)
        self._is_open = True
        if self._head() != head:
            self._show_beginning()
        self._job.add_done_callback(self._close)

    def _head(self) -> str:
        has_begun = self._job.running() or self._job.done()
        return f"{self._job.name}: {'running' if has_begun else 'waits for the cells before it'}"

    def _show_beginning(self) -> None:
        """Show that the cell runs: in another thread, since this one holds a lock of the ranks."""
        with self._lock:
            if self._is_open and self._in_kernel and self._timer is None:
                self._start_timer(0.0)

    def _start_timer(self, wait: float) -> None:
        self._timer = threading.Timer(wait, self._show_text)
        self._timer.daemon = True
        self._timer.start()

    def _take(self, stream: int, data: bytes) -> None:
        if stream not in STREAMS:
            self._take_display(data)
            return
        with self._lock:
            self._text = last_bytes(self._text + data.decode(errors="replace"), _MOST)
            wait = self._shown_at + _PERIOD - time.monotonic()
            if wait > 0 and self._timer is None:  # the next output may be far off
                self._start_timer(wait)
        if wait <= 0:
            self._show_text()

    def _take_display(self, line: bytes) -> None:
        display = module_of("display", "caller")  # which has planned this pipe
        if display.clears(line):  # clear this output, not that of the cell that runs
            with self._lock:
                self._text = ""
            self._show_text()
        elif text := display.publish(line, self._publisher):
            self._take(1, text.encode(errors="backslashreplace"))

    def _show_text(self) -> None:
        with self._turn:
            with self._lock:
                self._timer = None
            if not self._is_over:
                self._show(self._head())

    def _close(self, job: Any) -> None:
        took = in_seconds(time.monotonic() - self._begun)
        error = CancelledError() if job.cancelled() else job.exception()
        if error is None:
            how, lines = "done", [job.result().text]
        elif isinstance(error, CancelledError):
            how, lines = "cancelled", []
        else:
            how, lines = "failed", traceback_lines(error) or [f"{type(error).__name__}: {error}"]
        if error is None and self._in_kernel:
            for label, bundle in job.result().displays():
                self._show_display(label, bundle)
        with self._turn:
            self._is_over = True
            with self._lock:
                self._text = "\n".join(part for part in (self._text.rstrip("\n"), *lines) if part)
                if self._timer is not None:
                    self._timer.cancel()
            self._show(f"{job.name}: {how} after {took}")

    def _show_display(self, label: str, bundle: Bundle) -> None:
        with harmless():
            if label and not bundle.update:
                self._publisher.publish({"text/plain": label})
            display = room("display", "caller", "what cells display")
            # Through JSON, as from the pipe: a picture may be bytes.
            sent = display.line_of({"data": bundle.data, "metadata": bundle.metadata,
                                        "transient": bundle.transient, "update": bundle.update})  # fmt: skip
            if sent is not None:
                display.publish(sent.strip(), self._publisher)

    def _show(self, head: str, *, update: bool = True) -> None:
        with self._lock:
            self._shown_at = time.monotonic()
            text = f"{head}\n{self._text}".rstrip()
        with harmless():
            if self._in_kernel:
                data = {"text/plain": text}
                self._publisher.publish(data, {}, transient={"display_id": self._id}, update=update)
            else:
                print(text, flush=True)
