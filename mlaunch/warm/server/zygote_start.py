"""The start of a zygote: it detaches from its starter, imports, and reports that it is ready."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mlaunch.base import linux
from mlaunch.base.own_process import name_process
from mlaunch.base.text import both_ends
from mlaunch.core import load
from mlaunch.forkserver import imports
from mlaunch.protocol import payload
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.server_messages import NotReady
from mlaunch.rank.setup import device
from mlaunch.warm.server.import_record import ImportRecord
from mlaunch.warm.server.loaded_files import LoadedFiles
from mlaunch.warm.server.zygote import Zygote
from mlaunch.warm.wire import import_facts

if TYPE_CHECKING:
    from mlaunch.warm.wire.zygote_messages import ZygoteHears, ZygoteSays

_STDIN = 0  # a file with the variables that the imports may read, and nothing after them
_REASON = 8192  # bytes of a traceback that a person is shown


def main(word_fd: int, lock_fd: int, directory: str, idle: float, preload: Sequence[str], *, awaited: bool) -> NoReturn:
    """Run a zygote in a fresh interpreter.

    ``lock_fd``: the lock of its place, until it listens. ``awaited``: its starter waits for the report that it is
    ready; it ends if the starter has left.
    """
    if os.fork() > 0:
        os._exit(0)  # the starter waits for its child
    linux.open_standard_streams()
    code = 1
    try:
        name_process("warm fork server")
        os.chdir("/")
        for number in (signal.SIGTERM, signal.SIGHUP):  # at a logout, or on request
            signal.signal(number, lambda *_: sys.exit(0))
        word: Channel[ZygoteHears, ZygoteSays] = Channel.adopt(word_fd)
        zygote = _import(Path(directory), idle, tuple(preload), word)
        if zygote is not None:
            zygote.open()
            # One that was left at its starter's exit has nobody to report to.
            zygote.ending = not _tell(word, zygote) and awaited
            word.close()
            # Only now that it listens: a process that waits for the lock finds it, and starts no second one.
            os.close(lock_fd)
            linux.leave_standard_streams()
            zygote.run()
        code = 0
    except OSError as error:
        word.try_send(NotReady(str(error)))
    finally:
        os._exit(code)


def _usual() -> tuple[str, ...]:
    """Return the modules that ranks of functions and of scripts import."""
    return ("mlaunch.caller.launcher", *(["mlaunch.run.rank"] if load.is_there("run") else []))


def _import(
    directory: Path, idle: float, preload: tuple[str, ...], word: Channel[ZygoteHears, ZygoteSays]
) -> Zygote | None:
    """Import all; None, with a report, if an import fails, or leaves something behind that no fork may have."""
    if sys.path[:1] == [""]:
        del sys.path[0]  # the working directory
    # Before the imports, since libraries change variables as they are loaded.
    facts, record = import_facts.of_this_process(os.environ), ImportRecord()
    try:
        with record.reading():
            offered, asked = imports.load(_usual())
        imports.finish(asked, collect=False)
        with _with_variables(payload.read(_STDIN)), record.reading(), record.drawing():
            imports.load_for_user(preload)
    except (device.TooOldError, imports.PreloadError) as error:
        word.try_send(NotReady(str(error)))
        return None
    except ModuleNotFoundError as error:
        lacks = next((name for name in preload if error.name in {name, name.partition(".")[0]}), None)
        at_all = f"--preload {lacks}: there is no module of this name in {sys.prefix}"
        word.try_send(NotReady(at_all if lacks else both_ends(traceback.format_exc(), _REASON)))
        return None
    except (Exception, SystemExit):
        word.try_send(NotReady(both_ends(traceback.format_exc(), _REASON)))
        return None
    gc.collect()
    imports.share()
    imports.settle()  # once for all forks
    files = LoadedFiles(record.missed)
    return Zygote(offered, preload, idle, facts, directory, import_facts.key_of(facts), files, record)


@contextlib.contextmanager
def _with_variables(rest: Mapping[str, str]) -> Iterator[None]:
    """Set the starter's variables while modules are imported that may read them, and remove them afterwards."""
    os.environ.update(rest)
    try:
        yield
    finally:
        for name in rest:
            os.environ.pop(name, None)


def _tell(word: Channel[ZygoteHears, ZygoteSays], zygote: Zygote) -> bool:
    """Report that it is ready; False if the starter is gone."""
    try:
        word.send(zygote.state())
    except OSError:
        return False
    return True
