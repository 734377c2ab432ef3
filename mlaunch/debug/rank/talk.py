"""The file that a debugger in a rank reads and writes: its lines come from and go to the caller's terminal.

Threads of a rank take turns: a thread has the turn from its prompt until the rank continues.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from mlaunch.debug.wire import Onward, PromptAsks, PromptLeft, PromptLine, PromptSays

if TYPE_CHECKING:
    from mlaunch.debug.wire import PromptHears, PromptTells, RanksEnd

_AT_ONCE = 8000  # characters in a record


class Talk(io.TextIOBase):
    """A text file to a debugger. ``rank``: its number, for prompts."""

    def __init__(self, channel: RanksEnd, rank: int) -> None:
        self._channel = channel
        self._rank = rank
        self._turn = threading.RLock()
        self._begun = ""  # of a line
        self._place = ""
        self._depth = 0  # of turns that one thread has taken inside each other
        self.how = Onward.RUNS  # after this turn

    @property
    def prompt(self) -> str:
        """The prompt, which says who obeys the command."""
        thread = threading.current_thread()
        of_thread = "" if thread is threading.main_thread() else f", thread {thread.name}"
        return f"(Pdb, rank {self._rank}{of_thread}) "

    @contextlib.contextmanager
    def turn(self, place: str) -> Iterator[None]:
        """Keep other threads from talking; tell the caller at the end how the rank continues."""
        with self._turn:
            before, self._place = self._place, place
            self._depth += 1
            self.how = Onward.RUNS
            try:
                yield
            finally:
                self._depth -= 1
                self._place = before
                # A prompt may open another one (a breakpoint in what it evaluates); the rank continues after the
                # outermost.
                if not self._depth:
                    self._leave(place)

    def write(self, text: str) -> int:
        """Send lines once they are whole."""
        lines, end, self._begun = (self._begun + text).rpartition("\n")
        whole = lines + end
        # A record is one packet of a socket, whose size the kernel limits.
        for start in range(0, len(whole), _AT_ONCE):
            self._send(PromptSays(whole[start : start + _AT_ONCE]))
        return len(text)

    def readline(self, _size: int | None = -1) -> str:  # type: ignore[override]  # text, not bytes
        """Ask for a line, with the last unfinished line as its prompt. Return "" if no more come."""
        with contextlib.suppress(Exception):  # what a user's stream raises
            # So that what the function has printed before comes above the prompt.
            sys.stdout.flush()
        prompt, self._begun = self._begun, ""
        self._send(PromptAsks(prompt[-_AT_ONCE:], self._place))
        text = self._receive().text
        return "" if text is None else f"{text}\n"

    def ask(self, prompt: object = "", /) -> str:
        """Do what ``input`` does for user code. EOFError if no more lines come."""
        with self.turn(""):
            self.write(f"[{self._rank}] {prompt}")
            line = self.readline()
        if not line:
            raise EOFError("no more lines come from the terminal")
        return line[:-1]

    def _leave(self, place: str) -> None:
        if self._begun:
            self.write("\n")
        self._send(PromptLeft(self.how, place))
        # Not even a user's finally may run: it may enter a collective alone.
        if self.how is Onward.QUITS:
            self._wait_for_end()

    def _send(self, record: PromptTells) -> None:
        self._channel.try_send(record)

    def _receive(self) -> PromptHears:
        try:
            return self._channel.receive()[0]
        except EOFError:
            return self._lose()

    def _lose(self) -> PromptLine:
        """End this process: the caller is gone or has closed the channel, and the agent is about to end it anyway."""
        os._exit(1)

    def _wait_for_end(self) -> NoReturn:
        """Run no more user code until the agent ends this process."""
        while True:
            self._receive()
