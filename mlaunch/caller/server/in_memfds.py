"""Values on their way to the fork server, each in a memfd beside a record."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mlaunch.base.fds import close_all
from mlaunch.caller import interrupts
from mlaunch.protocol import payload
from mlaunch.protocol.payload import Payload


class in_memfds:
    """Gives memfds with values, by name, to a block; of a Payload, its own.

    No context manager of contextlib's; see ``interrupts``.
    """

    def __init__(self, values: Sequence[tuple[str, object]]) -> None:
        self._values = values
        self._memfds: list[int] = []

    def __enter__(self) -> list[int]:
        try:
            for name, value in self._values:
                if isinstance(value, Payload):
                    self._memfds.append(os.dup(value.memfd))
                    continue
                self._memfds.append(payload.create(name))
                with interrupts.allowed():  # it runs code of the user's, and may take long
                    payload.write(self._memfds[-1], value)
        except BaseException:
            close_all(self._memfds)
            raise
        return self._memfds

    def __exit__(self, *_: object) -> None:
        close_all(self._memfds)
