"""IPython's shell in a rank: magics, top-level ``await``, rich output. What it shows goes back with the answer.

It has no history, which would open a database and a thread, and no directory; it prints no traceback, since the
exception goes back.
"""

from __future__ import annotations

import builtins
import contextlib
import shutil
import sys
import tempfile
import types
import warnings
from typing import Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from mlaunch.cells.wire import Bundle, CellAnswer
from mlaunch.core import load
from mlaunch.protocol import by_value


class _Collector(DisplayPublisher):
    """The outputs that a cell displays, kept for the answer."""

    shell: Any

    def publish(
        self, data: Any, metadata: Any = None, *_: Any, transient: Any = None, update: bool = False, **__: Any
    ) -> None:
        self.shell.displays.append(Bundle(dict(data), dict(metadata or {}), dict(transient or {}), update))

    def clear_output(self, *_: Any, **__: Any) -> None:
        self.shell.displays.clear()


class _LastExpression(DisplayHook):
    """The forms of a cell's last expression."""

    shell: Any

    def quiet(self) -> bool:
        ends_silently: Any = self.semicolon_at_end_of_expression
        return bool(ends_silently(self.shell.source))

    def update_user_ns(self, result: Any) -> None:
        """Keep only the latest value, as ``_``: values may be large. Keep none if the cells have their own ``_``."""
        names = self.shell.user_ns
        if names.get("_", self._) is self._ and not hasattr(builtins, "_"):
            self._ = names["_"] = result

    def start_displayhook(self) -> None: ...

    def write_output_prompt(self) -> None: ...

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        self.shell.last = Bundle(dict(format_dict), dict(md_dict or {}), {})

    def log_output(self, format_dict: Any) -> None: ...

    def finish_displayhook(self) -> None: ...


class _NamedByNotebook(CachingCompiler):
    """A compiler that gives a cell's code the name that it has in the notebook."""

    file = ""

    def get_code_name(self, *_: Any, **__: Any) -> str:
        return self.file


class CellShell(InteractiveShell):
    """A runner of cells with IPython."""

    compile: Any
    compiler_class = Type(_NamedByNotebook)
    display_pub_class = Type(_Collector)
    displayhook_class = Type(_LastExpression)
    source = ""  # of the cell that runs
    last: Bundle | None = None
    displays: list[Bundle] = []  # noqa: RUF012  # each instance gets its own
    _lines_above = 0

    def run(self, source: str, file: str, number: int, lines_above: int, /, *, collects: bool = False) -> CellAnswer:
        """Run a cell; raise what the cell raises. ``collects``: what it displays goes back with the answer."""
        self.source, self._lines_above, self.compile.file, self.execution_count = source, lines_above, file, number
        self.last, self.displays = None, []
        run_cell: Any = self.run_cell  # untyped, as what it calls
        with self._displaying(collects=collects):
            done = run_cell(source)
        error = done.error_before_exec or done.error_in_exec
        try:
            if error is not None:
                raise _below_ipython(error, file)
            return CellAnswer(self.last, tuple(self.displays))
        finally:
            by_value.note_source(file)
            # IPython keeps the latest result for %debug and the like, with a user's model in its frames.
            self.last, self.displays, self.last_execution_result = None, [], None
            del done, error  # with what the frames of the error hold

    def _displaying(self, *, collects: bool) -> contextlib.AbstractContextManager[None]:
        """Return what to hold while the cell runs; without mlaunch/display this shell always collects."""
        rank = load.at_hand("display", "rank")
        if rank is None:
            return contextlib.nullcontext()
        held: contextlib.AbstractContextManager[None] = rank.in_cell(
            self.display_formatter, self.display_pub if collects else None
        )
        return held

    def transform_cell(self, raw_cell: str) -> str:
        """Shift the cell so that its lines have the same numbers as in the notebook."""
        above, self._lines_above = self._lines_above, 0
        transform: Any = super().transform_cell
        return "\n" * above + str(transform(raw_cell))

    def showtraceback(self, *args: Any, running_compiled_code: bool = False, **kwargs: Any) -> None:
        """Print the traceback of a magic (``%run``); a cell's own exception goes back."""
        if not running_compiled_code and not isinstance(sys.exc_info()[1], SystemExit):
            super().showtraceback(*args, **kwargs)

    def showsyntaxerror(self, *args: Any, **kwargs: Any) -> None: ...

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing: ranks have no event loop, and ``%matplotlib inline`` needs none."""

    def ask_exit(self) -> None:
        """End the cell, as ``sys.exit`` does."""
        raise SystemExit

    def init_virtualenv(self) -> None: ...

    def atexit_operations(self) -> None: ...


def open_shell(module: types.ModuleType) -> CellShell:
    """Make the one shell of this rank, whose namespace is the module's."""
    if InteractiveShell.initialized():  # a rank that was forked from a kernel has the kernel's
        type(InteractiveShell.instance()).clear_instance()
    warnings.filterwarnings("ignore", message="To exit: use 'exit'")
    config = Config()
    # It would open a thread, and a database in the user's directory that ranks would lock each other out of.
    config.HistoryManager.enabled = False
    config.InteractiveShell.cache_size = 0  # otherwise each value that was shown would stay in memory
    # The caller shows tracebacks, and knows what its terminal or notebook can show.
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.display_page = True
    before = sys.modules.get("__main__")
    directory = tempfile.mkdtemp(prefix="mlaunch-cells-")
    try:
        config.InteractiveShell.ipython_dir = directory
        shell: CellShell = CellShell.instance(config=config, user_module=module, user_ns=vars(module))
    finally:
        # IPython needs a directory only while it starts.
        shutil.rmtree(directory, ignore_errors=True)
        if before is not None:
            sys.modules["__main__"] = before
    return shell


def _below_ipython(error: BaseException, file: str) -> BaseException:
    """Remove all frames above the cell from the traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)
