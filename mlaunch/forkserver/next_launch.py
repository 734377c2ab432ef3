"""The launch that the fork server is to prepare: one like the last, over a socket that the launcher has given."""

from __future__ import annotations

import os

from mlaunch.base import linux
from mlaunch.base.fds import close_all
from mlaunch.protocol.server_messages import LaunchFds, LikeFds


class NextLaunch:
    """Owns the descriptors that it is given."""

    def __init__(self) -> None:
        self._like: LikeFds | None = None  # of the last launch, or of one that was announced
        self._socket = -1
        self.soon = False  # and may, while others run

    @property
    def wanted(self) -> bool:
        """Whether there is one to prepare: the launcher has neither dropped it since, nor ended."""
        if self._socket >= 0 and linux.wait_readable([self._socket], 0.0):  # its end: nothing comes before the call
            self.drop()
        return self._socket >= 0

    def fds(self) -> list[int]:
        """Returns the descriptors, which are no other process's business."""
        return [*(self._like or ()), *([self._socket] if self._socket >= 0 else [])]

    def remember(self, like: LikeFds) -> None:
        """Takes what the last launch was made of, or one that is announced."""
        self.forget()
        self._like = like

    def want(self, socket: int, *, soon: bool = False) -> None:
        """Takes the socket of the launch that is to be prepared; closes it if none can be."""
        # The launcher waits for one prepared launch at a time; it sees from the socket that the last is none any
        # more.
        self.drop()
        self.soon = soon
        if self._like is not None:
            self._socket = socket
        else:
            os.close(socket)

    def take(self) -> LaunchFds:
        """Returns what one that is wanted begins with; gives only the socket away."""
        if self._like is None:
            raise AssertionError("no launch is to be prepared")
        socket, self._socket = self._socket, -1
        return LaunchFds(self._like.spec, None, socket, self._like.stdout, self._like.stderr)

    def drop(self) -> None:
        """Prepares none after all, which the launcher sees by the socket's end."""
        if self._socket >= 0:
            os.close(self._socket)
        self._socket = -1

    def forget(self) -> None:
        """Closes everything."""
        self.drop()
        close_all(self._like or ())
        self._like = None
