"""Ranks whose debuggers talk with this process: what they say, and what the user says to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mlaunch.base import linux
from mlaunch.base.text import name_ranks
from mlaunch.caller.report import notebook
from mlaunch.core import load
from mlaunch.debug.caller import words
from mlaunch.debug.caller.prompts import Prompts
from mlaunch.debug.caller.words import ForRanks, TellWho
from mlaunch.debug.wire import PromptLine
from mlaunch.protocol.visitors import STATUS

if TYPE_CHECKING:
    from mlaunch.debug.wire import DebuggersEnd


class StoppedRanks:
    """Of one launch. ``write`` shows a text; ``ask_who`` asks what all ranks do, for ``who``."""

    def __init__(self, name: str, write: Callable[[str], None], ask_who: Callable[[], object]) -> None:
        self._name = name
        self._write = write
        self._ask_who = ask_who
        self.channels: dict[int, DebuggersEnd] = {}
        self.prompts = Prompts(lambda text: write(notebook.short_names(text)))

    def hear(self, rank: int) -> bool:
        """Takes in what a rank has said; False if it says nothing any more."""
        channel = self.channels[rank]
        try:
            while linux.wait_readable([channel.fileno()], 0.0):
                record, _ = channel.receive()
                self.prompts.take(rank, record)
        except EOFError:
            self.prompts.forget(rank)
            return False
        return True

    def obey(self, line: str | None, rank: int) -> None:
        """Does what a line says that was typed at the prompt of a rank. None: no more come."""
        wish = ForRanks((rank,), None) if line is None else words.parse(line, rank)
        if isinstance(wish, ForRanks):
            self._pass_on(wish)
        elif isinstance(wish, TellWho):
            self._ask_who()
        elif self._have_stopped([wish.rank]):
            self.prompts.switch(wish.rank)

    def tell_who(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Says where each rank is, a line each. ``ranks``: as the agent has told of them."""
        stopped = self.prompts.stopped()
        for rank in ranks:
            at = stopped.get(rank["rank"])
            doing = view_of(rank).doing if at is None else f"has stopped at {notebook.short_place(at)}"
            self._write(f"rank {rank['rank']} {doing}\n")

    def close(self) -> None:
        """Lets go of all."""
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()

    def _pass_on(self, command: ForRanks) -> None:
        ranks = command.ranks or tuple(self.prompts.stopped())
        if self._have_stopped(ranks):
            self.prompts.answer(ranks)
            for rank in ranks:
                self.channels[rank].try_send(PromptLine(command.line))

    def _have_stopped(self, ranks: Sequence[int]) -> bool:
        """Tells whether they have; the user, too, if not."""
        stopped = self.prompts.stopped()
        others = [rank for rank in ranks if rank not in stopped]
        if others:
            self._write(f"{name_ranks(others)} of {self._name}: not at a prompt (who says more)\n")
        return not others


def question() -> bytes:
    """Return the word that asks what ranks do, as ``mlaunch why``; their states where that feature is not there."""
    found = load.at_hand("insight", "wire")
    return STATUS if found is None else bytes(found.WHY)


def view_of(rank: Mapping[str, Any]) -> Any:
    """Return what a rank does, as ``mlaunch why`` tells it; its state alone where that feature is not there."""
    try:
        from mlaunch.insight.caller import why_text
    except ModuleNotFoundError:
        return SimpleNamespace(rank=rank["rank"], doing=f"is {rank['state']}", operation="")
    return why_text.view_of(rank)
