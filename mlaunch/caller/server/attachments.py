"""Descriptors sent to the fork server with a record: values, each in a memfd, and this process's standard streams.

These are no context managers of contextlib's; see ``interrupts``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mlaunch.base import linux
from mlaunch.base.fds import close_all, memory_file
from mlaunch.caller import interrupts
from mlaunch.protocol import payload
from mlaunch.protocol.payload import Payload


class in_memfds:
    """A block with a memfd for each of the named values; for a Payload, its own."""

    def __init__(self, values: Sequence[tuple[str, object]]) -> None:
        self._values = values
        self._memfds: list[int] = []

    def __enter__(self) -> list[int]:
        try:
            for name, value in self._values:
                if isinstance(value, Payload):
                    self._memfds.append(os.dup(value.memfd))
                    continue
                # Added before the write: an interrupt in a __reduce__ must not lose the descriptor.
                self._memfds.append(memory_file(name))
                with interrupts.allowed():  # pickling runs user code, and may take long
                    payload.write(self._memfds[-1], value)
        except BaseException:
            close_all(self._memfds)
            raise
        return self._memfds

    def __exit__(self, *_: object) -> None:
        close_all(self._memfds)


class standard_streams:
    """A block with the present descriptors 1 and 2, or /dev/null for one that is closed.

    If this process started without one (under cron, for example), any file may have its number now.
    """

    def __enter__(self) -> list[int]:
        self._null = null = os.open(os.devnull, os.O_WRONLY)
        streams = ((1, sys.__stdout__), (2, sys.__stderr__))
        return [null if stream is None or linux.identity(fd) is None else fd for fd, stream in streams]

    def __exit__(self, *_: object) -> None:
        os.close(self._null)
