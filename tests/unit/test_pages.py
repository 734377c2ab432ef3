"""What people ask first, and the words by which they search: the documentation answers in two clicks."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

DOCS = ROOT / "docs"
QUESTIONS = (
    "How do I move my script here?",
    "How do I get a loss per epoch back?",
    "How do I use several machines?",
    "How do I limit which devices it uses?",
    "How do I run a sweep?",
    "Why does it hang?",
    "How do I debug?",
    "How do I end a run from another terminal?",
    "What happens when a machine dies?",
    "What does it leave on a machine?",
)
WORDS = ("stop", "sweep", "hang", "kill", "resume", "rerun", "debug", "loss", "migrate", "uninstall", "background")


def answers() -> dict[str, str]:
    """Returns what the page of questions says, by question, in its order."""
    parts = re.split(r"^(.+)\n-{3,}\n", (DOCS / "faq.rst").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_front_page_leads_to_the_ten_questions() -> None:
    assert ":doc:`faq`" in (DOCS / "index.rst").read_text().partition(".. toctree")[0]
    assert tuple(answers())[: len(QUESTIONS)] == QUESTIONS


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_leads_to_a_page_that_is_there(question: str) -> None:
    pages = re.findall(r":doc:`(?:[^`<]*<)?([^`>]+)>?`", answers()[question])
    assert pages
    assert all((DOCS / f"{page}.rst").exists() for page in pages)


@pytest.mark.parametrize("page", ["how", "design"])
def test_files_that_a_page_names_are_there(page: str) -> None:
    house = [f"/{path.relative_to(ROOT)}" for room in ("mlaunch", "tests") for path in (ROOT / room).rglob("*.py")]
    named = re.findall(r"``([\w/]+\.py)``", (DOCS / f"{page}.rst").read_text())
    assert named
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in house)]


def test_what_a_change_begins_at_is_where_the_page_says() -> None:
    named = re.findall(r"``(\w+)`` in\s+``([\w/]+\.py)``", (DOCS / "how.rst").read_text().partition("To change\n")[2])
    assert len(named) >= 24
    bound = r"^ *(?:def|class) {0}\b|^{0}(?::| =)|^    {0}: "
    texts = {file: (ROOT / "mlaunch" / file).read_text() for _, file in named}
    assert not [(name, file) for name, file in named if not re.search(bound.format(name), texts[file], re.MULTILINE)]


def test_pages_are_found_by_the_words_that_users_have() -> None:
    entries = [
        word.strip(" !")
        for page in DOCS.rglob("*.rst")
        for line in re.findall(r"^\.\. index:: (.+)$", page.read_text(), re.MULTILINE)
        for word in line.split(",")
    ]
    assert not set(WORDS) - set(entries)


WIDTH = 90  # characters that a page shows of a line of code on a screen of 1440 pixels


def listings() -> Iterator[tuple[str, str]]:
    """The lines of code that pages show, with their places."""
    for path in (*(ROOT / "examples").glob("*.py"), *DOCS.rglob("listings/**/*.py")):
        yield from ((f"{path}:{number}", line) for number, line in enumerate(path.read_text().splitlines(), 1))
    for path in (ROOT / "README.rst", ROOT / "CONTRIBUTING.rst", *DOCS.rglob("*.rst")):
        for block in re.findall(r"(?m)(?:::\n| code-block:: .*\n)\n((?: +\S.*\n|\n)+)", path.read_text()):
            yield from ((str(path), line) for line in textwrap.dedent(block).splitlines())


def test_no_comment_is_outside_its_box() -> None:
    assert not [(place, line) for place, line in listings() if re.search(r"(^|\s)# ", line) and len(line) > WIDTH]


def test_a_number_and_its_unit_are_in_one_line() -> None:
    found = re.search(r'UNIT = re.compile\(r"(.+)"\)', (DOCS / "units.py").read_text())  # which imports Sphinx
    assert found is not None
    units = re.compile(found[1])
    assert units.sub("_", "150 ms, 2.8\nGB, 3 cats, 20\nminutes") == "150_ms, 2.8_GB, 3 cats, 20_minutes"
