"""Parse the words behind ``%ranks`` and ``%%ranks``."""

from __future__ import annotations

import ast
import difflib
import keyword
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mlaunch.caller.options.launch_options import Options
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
