"""The output of cells on ranks: exceptions, and what a cell in the background prints."""

from __future__ import annotations

import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from typing import Any

from mlaunch.base.exceptions import is_misuse, report_of
from mlaunch.base.text import in_seconds, last_bytes
from mlaunch.caller.output.console import harmless
from mlaunch.caller.output.output_plan import STREAMS
from mlaunch.caller.report import notebook
from mlaunch.cells.caller import CellJob
from mlaunch.cells.wire import Bundle
from mlaunch.core import load

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
        display = load.module_of("display", "caller")  # which has planned this pipe
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
            display = load.room("display", "caller", "what cells display")
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
