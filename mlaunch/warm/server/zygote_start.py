"""The beginning of a zygote: away from whoever starts it, its imports, and the word that it is there."""

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
from mlaunch.base.process_name import name_process
from mlaunch.base.text import both_ends
from mlaunch.core import load
from mlaunch.forkserver import imports, preloads
from mlaunch.forkserver.huge_pages import settle
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
_REASON = 8192  # bytes that a person is shown


def main(word_fd: int, lock_fd: int, directory: str, idle: float, preload: Sequence[str], *, awaited: bool) -> NoReturn:
    """Lives the life of a zygote in a fresh interpreter.

    ``lock_fd``: that of its place, until it listens. ``awaited``: somebody waits for the word that it is there, and
    wants none any more if he has left.
    """
    if os.fork() > 0:
        os._exit(0)  # for whoever waits for the process that it started
    linux.open_standard_streams()
    code = 1
    try:
        name_process("warm fork server")
        os.chdir("/")
        for number in (signal.SIGTERM, signal.SIGHUP):  # at a logout, and by who wants it gone
            signal.signal(number, lambda *_: sys.exit(0))
        word: Channel[ZygoteHears, ZygoteSays] = Channel.adopt(word_fd)
        zygote = _import(Path(directory), idle, tuple(preload), word)
        if zygote is not None:
            zygote.open()
            # Not if it was started ahead: whoever did so need not be there any more.
            zygote.ending = not _tell(word, zygote) and awaited
            word.close()
            # Only now that it listens: whoever waits for the lock finds a zygote, and starts no second one.
            os.close(lock_fd)
            linux.leave_standard_streams()
            zygote.run()
        code = 0
    except OSError as error:
        word.try_send(NotReady(str(error)))
    finally:
        os._exit(code)


def _usual() -> tuple[str, ...]:
    """Return what ranks of functions import, and those of scripts."""
    return ("mlaunch.caller.launcher", *(["mlaunch.run.rank"] if load.is_there("run") else []))


def _import(
    directory: Path, idle: float, preload: tuple[str, ...], word: Channel[ZygoteHears, ZygoteSays]
) -> Zygote | None:
    """Imports all; None if something cannot be, or leaves behind what no fork may have, which is told."""
    if sys.path[:1] == [""]:
        del sys.path[0]  # the directory of the moment
    # Before the imports: what counts is what they have read, and libraries change variables as they are loaded.
    facts, record = import_facts.of_this_process(os.environ), ImportRecord()
    try:
        with record.reading():
            offered, asked = imports.load(_usual())
        imports.finish(asked, collect=False)
        with _with_variables(payload.read(_STDIN)), record.reading(), record.drawing():
            preloads.load(preload)
    except (device.TooOldError, preloads.PreloadError) as error:
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
    # Once for all forks; each of them would have a heap of its own to move.
    settle()
    files = LoadedFiles(record.missed)
    return Zygote(offered, preload, idle, facts, directory, import_facts.key_of(facts), files, record)


@contextlib.contextmanager
def _with_variables(rest: Mapping[str, str]) -> Iterator[None]:
    """Hold while modules are imported that may read the variables of who starts this; none of them stays."""
    os.environ.update(rest)
    try:
        yield
    finally:
        for name in rest:
            os.environ.pop(name, None)


def _tell(word: Channel[ZygoteHears, ZygoteSays], zygote: Zygote) -> bool:
    """Says that it is there; False if nobody hears it."""
    try:
        word.send(zygote.state())
    except OSError:
        return False
    return True
