"""What a debugger in a rank reads and writes: lines that travel to the caller, who has the terminal, and back.

Threads of a rank take turns: whoever has the turn keeps it from its prompt until the rank goes on.
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
        self.how = Onward.RUNS  # it goes on after this turn

    @property
    def prompt(self) -> str:
        """What stands before a command: who is to obey it."""
        thread = threading.current_thread()
        of_thread = "" if thread is threading.main_thread() else f", thread {thread.name}"
        return f"(Pdb, rank {self._rank}{of_thread}) "

    @contextlib.contextmanager
    def turn(self, place: str) -> Iterator[None]:
        """Lets this thread alone talk, and tells the caller at its end how the rank goes on."""
        with self._turn:
            before, self._place = self._place, place
            self._depth += 1
            self.how = Onward.RUNS
            try:
                yield
            finally:
                self._depth -= 1
                self._place = before
                # A prompt may open another one (a breakpoint in what is evaluated); the rank goes on after the
                # outermost.
                if not self._depth:
                    self._leave(place)

    def write(self, text: str) -> int:
        """Sends lines as they become whole."""
        lines, end, self._begun = (self._begun + text).rpartition("\n")
        whole = lines + end
        # A record is one packet of a socket, whose size the kernel bounds.
        for start in range(0, len(whole), _AT_ONCE):
            self._send(PromptSays(whole[start : start + _AT_ONCE]))
        return len(text)

    def readline(self, _size: int | None = -1) -> str:  # type: ignore[override]  # text, not bytes
        """Asks for a line, with what was written last before it. Returns "" if no more come."""
        with contextlib.suppress(Exception):  # what a user's stream raises
            # What the function has printed before its prompt is to stand above it.
            sys.stdout.flush()
        prompt, self._begun = self._begun, ""
        self._send(PromptAsks(prompt[-_AT_ONCE:], self._place))
        text = self._receive().text
        return "" if text is None else f"{text}\n"

    def ask(self, prompt: object = "", /) -> str:
        """Does what ``input`` does, as user code calls it. Raises EOFError if no more lines come."""
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
        # Not even a user's finally: it may enter a collective to which nobody comes.
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
        """Takes in that the caller is gone, or has no more use for us: the agent is about to end this process."""
        os._exit(1)

    def _wait_for_end(self) -> NoReturn:
        """Does nothing any more: no user code runs until the agent ends this process."""
        while True:
            self._receive()
