"""A rank that runs a command: a script, a module, a function or a program, each as under a fresh interpreter.

At its end it takes an interpreter's steps, but does not finalise it: torch's threads make that slow, sometimes fatal.
docs/command.rst lists the differences.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import io
import os
import pkgutil
import runpy
import signal
import string
import sys
import threading
import types
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import Any, TextIO

from mlaunch.base.exceptions import misuse
from mlaunch.protocol import by_value, launch_files
from mlaunch.protocol.messages import Phase
from mlaunch.protocol.spec import LaunchSpec, Target
from mlaunch.rank import device, launcher_variables, process
from mlaunch.rank.base import Rank, RankArgs
from mlaunch.rank.process import Text, WholeLines
from mlaunch.rank.remote_error import below_ours
from mlaunch.rendezvous import tcp_store
from mlaunch.run.wire import Script

_STREAMS = ("stdin", "stdout", "stderr")


class ScriptRank(Rank):
    """A rank that runs a command, and leaves process groups to it."""

    def __init__(self, args: RankArgs, target: Target) -> None:
        super().__init__(args)
        self._target = target
        self._script: Script = target.work

    def live(self) -> int:
        """Become a rank, run the command, leave. Return the exit code."""
        try:
            self._become_rank()
            self._enter(Phase.COMMANDED)
            with contextlib.nullcontext() if self._parts is None else self._parts.around_call():
                if self._script.source is None:
                    _RUN[self._script.kind](self._script.name)
                else:
                    _run_text(self._script.name, self._script.source)
            code = 0
        except SystemExit as leaving:
            code = process.exit_code(leaving)
            self._note_exit(leaving)
        except KeyboardInterrupt as interrupt:
            self._show(interrupt)
            code = -signal.SIGINT
        except BaseException as error:
            if not self._is_fork:
                self._report(error)
            self._show(error)
            code = 1
        if code == 0:
            self._enter(Phase.LEAVING)
        # Then os._exit: taking torch apart costs 0.1 s a rank, and aborts one plain script of 24 on a busy machine.
        _finish()
        if code < 0:
            # The parent sees the signal, as a shell does after Ctrl-C in an interpreter.
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        return code

    def _become_rank(self) -> None:
        if self._spec.sections:
            self._begin_parts()
        process.reset_process(of_a_function=False)
        _open_streams()
        args, script = self._args, self._script
        runtime = device.offered().runtime if script.virtual_local_rank else None
        environ = environ_of(self._spec, self._target, args.local_rank, args.rendezvous, runtime)
        # torch's @record expects the directory of its error file.
        os.makedirs(os.path.dirname(environ[launch_files.ERROR_FILE]), exist_ok=True)
        self._take_surroundings(environ)
        arguments = [string.Template(text).safe_substitute(local_rank=args.local_rank) for text in script.args]
        # After the surroundings, which set the launcher's arguments.
        sys.argv[:] = [script.name, *arguments]
        _seed_afresh()

    def _show(self, error: BaseException) -> None:
        """Show the error to a hook of the script, or in its log. Otherwise the launcher reports it."""
        is_reported = 2 not in self._spec.streams(self._args.local_rank) and not self._is_fork
        if not is_reported or not _is_default(sys.excepthook):
            error = below_ours(error, keep_last=False)
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
            sys.excepthook(type(error), error, error.__traceback__)


rank = ScriptRank  # as the core looks for it


def environ_of(
    spec: LaunchSpec, target: Target, local_rank: int, rendezvous: tuple[str, object], runtime: str | None
) -> dict[str, str]:
    """Return the whole environment of a rank that runs a target. ValueError as ``device.only``."""
    script: Script = target.work
    environ = launcher_variables.of_rank(spec, local_rank, *rendezvous)
    environ |= {"ROLE_NAME": target.role, "TORCHELASTIC_RUN_ID": target.run_id, tcp_store.HOSTED_BY_AGENT: "True"}
    # Several agents may have one role and different numbers of ranks, so a rank's place in the role is not its rank.
    if target.role_start is not None:
        environ |= {"ROLE_RANK": str(target.role_start + local_rank), "ROLE_WORLD_SIZE": str(target.role_size)}
    environ[launch_files.ERROR_FILE] = launch_files.error_file_of(spec, local_rank)
    if script.virtual_local_rank:
        environ["LOCAL_RANK"] = "0"
    if script.virtual_local_rank or (runtime in {"cuda", None} and len(device.instances(environ)) > local_rank):
        # A script takes device LOCAL_RANK; but of MIG instances, a process sees only the first.
        environ |= device.only(local_rank, environ, runtime)
    return environ


def _seed_afresh() -> None:
    """Seed generators that were seeded by imports, once for all ranks. Python's own does so by itself."""
    import torch

    torch.default_generator.seed()
    generators = sys.modules.get("numpy.random")  # which numpy imports at its first use
    if generators is not None:
        generators.seed()


# Kinds of commands


def _run_file(path: str) -> None:
    main = _new_main()
    if pkgutil.get_importer(path) is None:
        _run_source(main, os.path.abspath(path))
    else:  # a directory or zip archive that holds a __main__
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]


def _run_source(main: types.ModuleType, path: str) -> None:
    try:
        code = _compiled(path)
    except (OSError, SyntaxError, ValueError) as error:  # it cannot be read, or is no Python
        misuse(error)
        raise
    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    exec(code, main.__dict__)


def _compiled(path: str) -> types.CodeType:
    with io.open_code(path) as file:
        code: types.CodeType | None = pkgutil.read_code(file)
    if code is not None:
        return code
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _run_text(name: str, text: bytes) -> None:
    """Run a script that came through a pipe, as ``python -`` and ``python /dev/stdin`` do."""
    main, file = _new_main(), "<stdin>" if name == "-" else name
    try:
        code = compile(text, file, "exec", dont_inherit=True)
        by_value.take_source((file, importlib.util.decode_source(text)))
    except (SyntaxError, ValueError) as error:  # it is no Python
        misuse(error)
        raise
    main.__dict__.update(__file__=file, __cached__=None)
    exec(code, main.__dict__)


def _run_module(name: str) -> None:
    _new_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_function(target: str) -> None:
    # Not the module itself: the function is imported by its name, as torchrun's entry points are.
    _new_main()
    module_name, _, names = target.partition(":")
    module = importlib.import_module(module_name)
    sys.argv[0] = getattr(module, "__file__", None) or module_name
    function: Any = module
    try:
        for name in names.split("."):
            function = getattr(function, name)
    except AttributeError as error:
        misuse(error)
        raise
    sys.exit(function())


def _run_program(name: str) -> None:
    # An ignored signal stays ignored in the program: `head` at the end of its pipe would not end it.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these
        signal.signal(number, signal.SIG_DFL)
    os.execvp(name, sys.argv)


_RUN: dict[str, Callable[[str], None]] = {
    "file": _run_file,
    "module": _run_module,
    "function": _run_function,
    "program": _run_program,
}


def _new_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    return main


# Beginning and end


def _open_streams() -> None:
    """Open standard streams with the encodings of this interpreter, on the descriptors of this rank."""
    for fd, name in enumerate(_STREAMS):
        stream = _stream(fd, getattr(sys, f"__{name}__"))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _stream(fd: int, like: TextIO | None) -> TextIO:
    encoding, errors = ("utf-8", "strict") if like is None else (like.encoding, like.errors)
    mode = "r" if fd == 0 else "w"
    raw = io.FileIO(fd, mode, closefd=False)
    raw.name = f"<{_STREAMS[fd]}>"  # as the interpreter's own, which code compares
    stream: io.TextIOWrapper
    if fd == 0:
        stream = io.TextIOWrapper(io.BufferedReader(raw), encoding=encoding, errors=errors)
    elif os.environ.get("PYTHONUNBUFFERED"):
        stream = io.TextIOWrapper(raw, encoding=encoding, errors=errors, write_through=True)
    else:
        # By lines, since ranks share a terminal. Python's line_buffering splits a print of several lines: of 80,000
        # lines of two ranks, it mixed 360 to 8,500. A print costs 9 us with this, and 4 with that.
        stream = Text(WholeLines(raw), encoding=encoding, errors=errors, write_through=True)
    stream.mode = mode  # type: ignore[misc]
    return stream


def _is_default(hook: Any) -> bool:
    """True if the hook only prints. torch wraps a hook in its own, which adds the rank."""
    if getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
        cells = [cell.cell_contents for cell in hook.__closure__ or ()]
        return all(_is_default(held) for held in cells if callable(held))
    return hook is sys.__excepthook__


def _finish() -> None:
    """End as an interpreter does: threads, exit handlers, then the script's objects."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if threading.active_count() == 1:  # a daemon thread would miss what is gone
        sys.modules.pop("__main__", None)
        sys.last_type = sys.last_value = sys.last_traceback = None
        gc.collect()  # it runs all destructors before it clears their objects
    # os._exit flushes nothing; an interpreter closes files that a script has left open.
    for stream in [held for held in gc.get_objects() if isinstance(held, io.TextIOWrapper | io.BufferedWriter)]:
        try:
            stream.flush()
        except (OSError, ValueError):  # full, closed, detached
            continue
