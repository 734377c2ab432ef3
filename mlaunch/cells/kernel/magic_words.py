"""Parse the words behind ``%ranks`` and ``%%ranks``; complete them, and cells that run on ranks."""

from __future__ import annotations

import ast
import difflib
import keyword
import math
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mlaunch.base.log import log
from mlaunch.caller.options.launch_options import Options
from mlaunch.cells.caller import CellJob
from mlaunch.core import load

_RUNS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_OF_RANKS = {"restart": "bool", "idle_timeout": "float | None"}
_TYPES = {one.name: str(one.type) for one in fields(Options)} | _OF_RANKS
_WITH_NAMES = ("pull", "push", "cancel", "stop")
_ALONE = ("close", "auto", "local")
_OF_CELLS = ("targets", "deadline", "rich", "bg")


class WordError(ValueError):
    """The magic cannot do what the words ask for."""


@dataclass(frozen=True)
class LineWords:
    """The parsed words of ``%ranks``.

    ``verb``: "table", "open", or a flag's: "pull"; ``names``: to pull or push, or of jobs; ``options``: of the ranks.
    """

    verb: str
    names: tuple[str, ...] = ()
    targets: tuple[int, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CellWords:
    """The parsed words of ``%%ranks``, as the parameters of ``Ranks.cell``.

    ``bg``: the name of its job, if it runs in the background; ``auto``: ``%ranks --auto`` has added the magic.
    """

    targets: tuple[int, ...] | None = None
    deadline: float | None = None
    rich: str = "first"
    bg: str = ""
    auto: bool = False


def line_words(line: str) -> LineWords:
    """Parse the words behind ``%ranks``. WordError: what is wrong with them."""
    words = _split(line)
    verbs = [word[2:] for word in words if word[:2] == "--" and word[2:] in {*_WITH_NAMES, *_ALONE, "restart"}]
    if len(verbs) > 1:
        raise WordError(f"--{verbs[0]} and --{verbs[1]} do two things: use one line for each")
    verb = verbs[0] if verbs else "open" if words else "table"
    rest = [word for word in words if word != f"--{verb}"]
    if verb in _WITH_NAMES:
        return _naming(verb, rest)
    if verb in _ALONE and rest:
        raise WordError(f"--{verb} takes nothing else: leave out {rest[0]}")
    return LineWords(verb, options=_options(rest))


def cell_words(line: str) -> CellWords:
    """Parse the words behind ``%%ranks``. WordError: what is wrong with them."""
    given: dict[str, Any] = {}
    words = _split(line)
    if words == ["--auto"]:
        return CellWords(auto=True)
    while words:
        word = words.pop(0)
        name, text = _flag(word, words) if word.startswith("--") else ("targets", word)
        if name not in _OF_CELLS:
            raise WordError(f"{word}: allowed for a cell: ranks (0,2-3), {_flags(_OF_CELLS)}; options of the ranks "
                            f"belong to %ranks")  # fmt: skip
        if name in given:
            raise WordError(f"{name} is given twice: allowed: once")
        given[name] = _targets(text) if name == "targets" else _seconds(name, text) if name == "deadline" else text
    if given.get("rich", "all") not in {"all", "first"}:
        raise WordError(f"--rich {given['rich']}: allowed: first (of the ranks), all")
    if not _is_name(given.get("bg", "job")):
        raise WordError(f"--bg {given['bg']}: allowed: a name for the job")
    return CellWords(**given)


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise WordError(f"{line.strip()}: {error}") from None


def _flag(word: str, rest: list[str]) -> tuple[str, str]:
    """Return the name of a flag and its value, which may be the next word."""
    name, has_value, text = word[2:].partition("=")
    if not has_value:
        if rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        elif name.replace("-", "_") in {*_TYPES, *_OF_CELLS}:
            raise WordError(f"{word} has no value: allowed: {word} VALUE")
    return name.replace("-", "_"), text


def _naming(verb: str, words: list[str]) -> LineWords:
    names, targets = [], None
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, text = _flag(word, words)
            if name != "targets" or verb not in {"pull", "push"}:
                raise WordError(f"{word}: allowed with --{verb}: names, and --targets")
            targets = _targets(text)
        elif _is_name(word):
            names.append(word)
        else:
            raise WordError(f"{word}: allowed with --{verb}: names, as in %ranks --{verb} loss")
    if not names:
        raise WordError(f"--{verb} has no names: allowed: names, as in %ranks --{verb} loss")
    return LineWords(verb, tuple(names), targets)


def _targets(text: str) -> tuple[int, ...]:
    if not _RUNS.fullmatch(text):
        raise WordError(f"{text}: allowed: ranks and ranges of ranks with commas between them, as in 0,2-3")
    found: list[int] = []
    for run in text.split(","):
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    if not found:
        raise WordError(f"{text}: allowed: ranges that count up, as in 2-3")
    return tuple(found)


def _is_name(word: str) -> bool:
    return word.isidentifier() and not keyword.iskeyword(word)


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise WordError(f"--{name} {text}: allowed: a number of seconds") from None
    if not 0 < seconds < math.inf:
        raise WordError(f"--{name} {text}: allowed: a number of seconds above 0; without it the ranks' own limit "
                        f"holds")  # fmt: skip
    return seconds


def _options(words: list[str]) -> dict[str, Any]:
    """Parse the options of ``Ranks``; the first word may be the number of ranks."""
    found: dict[str, Any] = {}
    if words and words[0].isdecimal():
        found["n_gpus"] = int(words.pop(0))
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise WordError(f"{word}: allowed: a number of ranks, then options, as in %ranks 4 --backend gloo")
        name = word[2:].replace("-", "_")
        if _TYPES.get(name, "").startswith("bool"):
            has_word = _TYPES[name] != "bool" and words and not words[0].startswith("--")
            found[name] = words.pop(0) if has_word else True
        elif _TYPES.get(name.removeprefix("no_"), "").startswith("bool"):
            found[name.removeprefix("no_")] = False
        else:
            name, text = _known(*_flag(word, words))
            found[name] = _value(name, text)
    return found


def _known(name: str, text: str) -> tuple[str, str]:
    if name in _TYPES:
        return name, text
    close = difflib.get_close_matches(name, [*_TYPES, "pull", "push", "close"], 1)
    hint = f"; did you mean --{close[0].replace('_', '-')}?" if close else ""
    raise WordError(f"Ranks have no option --{name.replace('_', '-')}{hint}")


def _value(name: str, text: str) -> Any:
    """Return an option's value by its type; ``Options`` checks it."""
    kind = _TYPES[name]
    if name == "engine":
        return load.room("engines", "caller", f"--engine {text}").engine_named(text)
    if "None" in kind and text.lower() == "none":
        return None
    if "Mapping" in kind:
        return dict(pair.partition("=")[::2] for pair in text.split(","))
    if "Sequence" in kind:
        return list(_targets(text))
    return _number(text) if "int" in kind or "float" in kind else text


def _number(text: str) -> Any:
    """Return the number; the text itself if it is not one."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _flags(names: Sequence[str]) -> str:
    return ", ".join(f"--{name}" for name in names)


def verb_of(words: Sequence[str]) -> str:
    """Return the verb behind ``%ranks`` that names follow; "" if there is none."""
    return next((word[2:] for word in words if word[:2] == "--" and word[2:] in _WITH_NAMES), "")


def flags_after(words: Sequence[str], *, of_cell: bool) -> list[str]:
    """Return the flags that may follow these words."""
    if of_cell:
        names: Sequence[str] = (*_OF_CELLS, "local")
    elif verb := verb_of(words):
        names = ("targets",) if verb in {"pull", "push"} else ()
    else:
        negated = [f"no_{name}" for name, kind in _TYPES.items() if kind == "bool" and name not in _OF_RANKS]
        names = (*_WITH_NAMES, *_ALONE, *_TYPES, *negated)
    found = (f"--{name.replace('_', '-')}" for name in names)
    return [flag for flag in found if flag not in words]


# Completion in cells that run on ranks, with names of a rank in place of the notebook's

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
    """A finder of the names for a cursor's place.

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
