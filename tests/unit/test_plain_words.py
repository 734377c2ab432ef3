"""Plain English: the words that CONTRIBUTING.rst avoids, in pages, help texts, docstrings and messages."""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from mlaunch.cli import mlaunch_parser
from mlaunch.run.command import flags
from tests.conftest import ROOT
from tests.sources import nodes_of

INSTEAD = "CONTRIBUTING.rst, 'Plain English', has what to write instead"


def avoided() -> list[str]:
    """The right column of the table of words."""
    table = (ROOT / "CONTRIBUTING.rst").read_text(encoding="utf-8").partition("Prefer  ")[2].partition("\n\n")[0]
    return [word for line in table.splitlines() for word in re.findall(r"``([^`]+)``", line)]


def pattern_of(words: list[str]) -> re.Pattern[str]:
    """What finds any of them, over the end of a line too, with any number in place of theirs: group 1 the first, ..."""
    parts = [[r"[\d.,]*\d" if part.isdigit() else re.escape(part) for part in one.split()] for one in words]
    groups = "|".join(r"\s+".join(one).join("()") for one in parts)
    return re.compile(rf"\b(?:{groups})\b", re.IGNORECASE)


def prose_of(page: str) -> str:
    """A page without what is quoted in it: literals, and blocks of code and output."""
    page = re.sub(r"(?m)^( *)(\.\. .*|.*::)\n(?:\1 +\S.*\n|[ ]*\n)+", "\n", page)
    return re.sub(r"``.+?``", "", page, flags=re.DOTALL)


def pages() -> Iterator[tuple[str, str]]:
    names = ["README.rst", "CONTRIBUTING.rst", "SECURITY.rst", *(ROOT / "docs").rglob("*.rst")]
    for path in (ROOT / name for name in names):
        yield str(path.relative_to(ROOT)), prose_of(path.read_text(encoding="utf-8"))
    for path in (*(ROOT / "examples").glob("*.py"), *(ROOT / "docs").rglob("listings/**/*.py")):
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    latest = (ROOT / "CHANGELOG.rst").read_text(encoding="utf-8")
    yield "CHANGELOG.rst", prose_of("\n- ".join(re.split(r"\n\S.*\n-{5,}\n", latest)[:2]))


def helps(parser: argparse.ArgumentParser, name: str = "mlaunch") -> Iterator[tuple[str, str]]:
    yield f"{name} --help", parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, one in action.choices.items():
                yield from helps(one, f"{name} {word}")


def strings() -> Iterator[tuple[str, str]]:
    """Docstrings, messages and other texts of the package, and its comments."""
    for path in (ROOT / "mlaunch").rglob("*.py"):
        found = [
            node.value for node in nodes_of(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        yield str(path.relative_to(ROOT)), "\n\n.\n\n".join([*found, *comments(path)])


def comments(path: Path) -> list[str]:
    """Blocks of comments, and each one behind code."""
    found = re.findall(r"(?m)(?:^ *# .*\n)+|  # .*$", path.read_text(encoding="utf-8"))
    return [re.sub(r"(?m)^ *# ", "", one) for one in found]


def found_in(texts: Iterable[tuple[str, str]]) -> dict[str, Counter[str]]:
    """Which avoided words there are, with how many each text has."""
    words = avoided()
    pattern = pattern_of(words)
    found: dict[str, Counter[str]] = {one: Counter() for one in words}
    for name, text in texts:
        for match in pattern.finditer(text):
            found[words[(match.lastindex or 1) - 1]][name] += 1
    return {one: places for one, places in found.items() if places.total()}


def test_pages_have_no_words_that_are_avoided() -> None:
    whole = mlaunch_parser(flags.parser("mlaunch run"))
    assert found_in([*pages(), *helps(whole)]) == {}, INSTEAD


def test_the_code_has_no_words_that_are_avoided() -> None:
    assert found_in(strings()) == {}, INSTEAD


def test_the_table_is_read_and_words_are_found() -> None:
    words = avoided()
    assert len(words) >= 30
    pattern = pattern_of(["mend", "some 30"])
    assert [match.lastindex for match in pattern.finditer("recommend: takes Some\n1.5 ms; Mend")] == [2, 1]
    assert prose_of("A ``lest`` b::\n\n    anew\n\nc\n").split() == ["c"]


CLAUSE = re.compile(r"(What|Who|Whose|Whoever|Whether|Tells|Says|Lets)\b")
VERB = re.compile(
    r"(Runs|Keeps|Finds|Gives|Asks|Watches|Notices|Makes|Reads|Writes|Sends|Holds|Shows)\b (?!of\b|that\b|in\b)"
)
THIRD_PERSON = re.compile(r"(?!This\b|Its\b|As\b|Ranks\b|\w+ss\b)([A-Z][a-z]+s\b|Whether\b|What\b|Who\b)")


def docstrings() -> Iterator[tuple[str, ast.AST, str]]:
    """The place, the owner and the text of each docstring of the package."""
    for path in (ROOT / "mlaunch").rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node, text


def test_docstrings_begin_as_english_ones_do() -> None:
    """Functions in the imperative ("Return", "True if"), modules and classes with a noun."""
    found = []
    for place, node, text in docstrings():
        begins_badly = [CLAUSE, VERB] if isinstance(node, ast.Module | ast.ClassDef) else [THIRD_PERSON]
        if any(one.match(text) for one in begins_badly):
            found.append(f"{place}: {text.splitlines()[0]}")
    assert found == [], INSTEAD
