"""Completion in cells that run on ranks, with names of a rank in place of the notebook's."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlaunch.base.log import log
from mlaunch.cells.caller import CellJob
from mlaunch.cells.kernel.magic_words import WordError, cell_words, flags_after, verb_of

_LINE = re.compile(r"\s*(?:\w+\s*=\s*)?%ranks(\s.*)")
_NAME = r"[^\W\d]\w*"
_ITEM = r"""\[\s*(?:-?\d+|'[^'\\]*'|"[^"\\]*")\s*\]"""
_OBJECT = rf"""(?<![\w.\])}}'"\\])({_NAME}(?:\.{_NAME}|{_ITEM})*)"""
_ATTRIBUTE = re.compile(rf"{_OBJECT}\.(\w*)$")
_KEY = re.compile(rf"{_OBJECT}\[\s*(['\"])([^'\"\\]*)$")
_WORD = re.compile(rf"(?<![\w.\\])((?:{_NAME})?)$")
_NOTEBOOKS_OWN = re.compile(r"\s*(?:[!%?]|(?:import|from)\s)|.*\\\w*$")  # what IPython completes by itself
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")


@dataclass(frozen=True)
class WordAtCursor:
    """The word to complete.

    ``kind``, ``source``, ``prefix``: as ``find_names`` takes them, or the kind is "file"; ``end``: what follows each
    name.
    """

    kind: str
    source: str = ""
    prefix: str = ""
    end: str = ""


class NoNames(list[Any]):
    """An empty list with a length of 1: IPython respects "suppress" only of a matcher that has found something."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@dataclass
class RankNames:
    """Finds the names for a cursor's place.

    ``ask`` returns names of a rank, as ``find_names`` does; ``goes_to_ranks`` is True for a cell without a magic that
    goes there; ``notebook`` returns the notebook's names.
    """

    ask: Callable[[str, str, str, int], Sequence[str]]
    goes_to_ranks: Callable[[Sequence[str]], bool]
    notebook: Callable[[], Mapping[str, Any]]

    def answer(self, text: str, line_number: int, column: int) -> dict[str, Any] | None:
        """Return the answer of a matcher of IPython's; None: this word is the notebook's."""
        lines = text.split("\n")
        before, after = lines[line_number][:column], lines[line_number][column:]
        first = next((number for number, line in enumerate(lines) if line.strip()), 0)
        if magic := _LINE.fullmatch(before):
            return self._of_line(magic[1], of_cell=False)
        if (begun := re.match(r"\s*%%ranks\b(.*)", lines[first])) is not None:
            if line_number == first:
                return self._of_line(before.partition("%%ranks")[2], of_cell=True) if "%%ranks" in before else None
            return None if begun[1].strip() == "--local" else self._of_code(before, after, first_target(begun[1]))
        return self._of_code(before, after, 0) if self.goes_to_ranks(lines) else None

    def _of_code(self, before: str, after: str, rank: int) -> dict[str, Any] | None:
        wanted = what_is_wanted(before)
        if wanted is None:
            return None
        if wanted.kind == "file":
            return _answer([], "", but={"IPCompleter.file_matcher"})
        names = self.ask(wanted.kind, wanted.source, wanted.prefix, rank) if wanted.kind else ()
        if wanted.end:  # a quote, which no name may contain
            names = [name for name in names if not {wanted.end, "\\", "\n"}.intersection(name)]
        end = "" if after.startswith(wanted.end) else wanted.end
        return _answer([name + end for name in names], wanted.prefix)

    def _of_line(self, line: str, *, of_cell: bool) -> dict[str, Any] | None:
        if not line[:1].isspace():
            return None
        *words, last = line.split(" ")
        words = [word for word in words if word]
        verb = "" if of_cell else verb_of(words)
        if verb and not last.startswith("-"):
            found: Iterable[str] = self._names_for(verb, last)
        else:
            found = flags_after(words, of_cell=of_cell)
        return _answer([name for name in found if name.startswith(last) and name not in words], last)

    def _names_for(self, verb: str, prefix: str) -> Iterable[str]:
        if verb == "pull":
            return self.ask("values", "", prefix, 0)
        found = {name: value for name, value in self.notebook().items() if not name.startswith("_")}
        return [name for name, value in found.items() if verb == "push" or isinstance(value, CellJob)]


def what_is_wanted(before: str) -> WordAtCursor | None:
    """Parse the line up to the cursor. ``kind`` is "" if nothing can be found; None: IPython completes it by itself."""
    if _NOTEBOOKS_OWN.match(before):
        return None
    if key := _KEY.search(before):
        return WordAtCursor("keys", key[1], key[3], key[2])
    if re.search("['\"]", _QUOTED.sub("", before)):
        return WordAtCursor("file")
    if attribute := _ATTRIBUTE.search(before):
        return WordAtCursor("attributes", attribute[1], attribute[2])
    if word := _WORD.search(before):
        return WordAtCursor("names", "", word[1])
    return WordAtCursor("")


def first_target(words: str) -> int:
    """Return the rank whose names a cell gets: the first of its targets."""
    try:
        targets = cell_words(words).targets
    except WordError:  # they may not be complete
        targets = None
    return min(targets) if targets else 0


def _answer(names: Sequence[str], fragment: str, *, but: Collection[str] = ()) -> dict[str, Any]:
    from IPython.core.completer import SimpleCompletion

    found = [SimpleCompletion(name) for name in names] or NoNames()
    return {"completions": found, "matched_fragment": fragment, "suppress": True, "do_not_suppress": set(but)}


def install(shell: Any, names: RankNames) -> Callable[[], None]:
    """Add a matcher to IPython's completer; return a function that removes it."""
    try:
        from IPython.core.completer import context_matcher
    except ImportError:  # before 8.6, whose completer does not tell a matcher the cell
        return lambda: None
    completer = shell.Completer

    def match(context: Any) -> dict[str, Any]:
        try:
            found = names.answer(context.full_text, context.cursor_line, context.cursor_position)
        except Exception:  # somebody types, and wants no traceback in between
            log.debug("completion on ranks failed", exc_info=True)
            found = _answer([], "")
        return {"completions": []} if found is None else found

    matcher: Any = context_matcher(identifier="mlaunch.ranks", priority=1000)(match)
    completer.custom_matchers.append(matcher)
    return lambda: completer.custom_matchers.remove(matcher)
