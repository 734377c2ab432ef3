"""What the documentation says of messages and variables, held against the source."""

from __future__ import annotations

import ast
import functools
import inspect
import re

import pytest

from mlaunch.rank import launcher_variables
from tests.conftest import ROOT
from tests.sources import nodes_of

BLANK = "…"
# What was given is named first.
OPTION = re.compile(r"(Slurm: )?(--|[\w…]+=|new_group\()(?!… in the|… shows)|PYTHON_EXEC")
PAGE = (ROOT / "docs" / "troubleshooting.rst").read_text()
FOREIGN = {"Gloo connectFullMesh failed", "Connection closed by peer"}  # torch says these
# What nobody sees, since it is caught here, or ends in another message; and what only a defect of ours can bring about.
INTERNAL = (
    "no receiver takes this record",
    "no launch is to be prepared",
    "what came is no ",
    "nobody is left to ask",
    "the connection was closed",
    "its connection was closed",
    "the other end of the ",
    "a record of ",
    "a line that is too long",
    "a request with ",
    "request …",
    "no client of torch's store",
    "a client ",
    "what answers there is no master of mlaunch",
    "the value of rank … has a wrong signature",
    "a … of … bytes; a record holds",
    "a call came without its function (a bug in mlaunch)",
    "sent … where Ready was expected",
    "was not asked what it can give",
    "module 'mlaunch' has no attribute",
    "module 'mlaunch.engines' has no attribute",
    "module 'mlaunch.pytest' has no attribute",
    "__signature__",
    "cannot assign to field",  # dataclasses' own
    "cannot delete field",
    "cannot pickle an open file",
    "it ends too early",
    "it holds what is no JSON",
    "where there should be one",
    "display_id required for update_display",  # IPython's own
)


def said(page: str) -> list[str]:
    """Returns the messages that it explains."""
    titles = re.findall(r"^``.*``.*$(?=\n    )", page, re.MULTILINE)
    return [text for title in titles for text in re.findall(r"``(.+?)``", title) if not text.startswith("ulimit")]


def text_of(node: ast.expr) -> str:
    """Returns a string of the source, with a blank for each value that it holds."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else BLANK for part in node.values)
    return text_of(node.left) + text_of(node.right) if isinstance(node, ast.BinOp) else ""


@functools.cache
def nodes() -> list[ast.AST]:
    return [node for path in (ROOT / "mlaunch").rglob("*.py") for node in nodes_of(path)]


@functools.cache
def texts() -> set[str]:
    """Returns all strings of the source, short ones and docstrings too."""
    return {text_of(node) for node in nodes() if isinstance(node, (ast.Constant, ast.JoinedStr))}


def raised() -> set[str]:
    """Returns the messages of all raise statements."""
    calls = [node.exc for node in nodes() if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    calls = [inner if isinstance(inner := call.args[0], ast.Call) else call for call in calls if call.args]
    found = {text_of(call.args[0]) for call in calls if call.args}
    return {text for text in found if text.strip(f"{BLANK}: ()")}


@functools.cache
def pieces_of(message: str) -> tuple[list[str], re.Pattern[str]]:
    """Returns what stands between its blanks, and what finds them in this order."""
    pieces = [piece.strip() for piece in message.split(BLANK) if piece.strip()]
    return pieces, re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)


def explains(message: str, text: str) -> bool:
    """Tells whether the pieces of the message stand in the text, in this order."""
    pieces, in_order = pieces_of(message)
    return all(piece in text for piece in pieces) and in_order.search(text) is not None  # the first is much cheaper


def test_variables_are_in_the_reference() -> None:
    """Those of our own, and those that a rank gets."""
    page = (ROOT / "docs" / "reference.rst").read_text()
    ours = {name for text in texts() for name in re.findall(r"MLAUNCH_[A-Z]+(?:_[A-Z]+)*", text)}
    made_in = (launcher_variables.identity, launcher_variables.of_rank, launcher_variables._defaults)
    ranks = {text for function in made_in for node in ast.walk(ast.parse(inspect.getsource(function)))
             if re.fullmatch(r"[A-Z]+(_[A-Z]+)+", text := text_of(node))}  # type: ignore[arg-type]  # fmt: skip
    assert {name for name in ours | ranks if name not in page} == set()
    assert len(ours) >= 5
    assert len(ranks) >= 15


def test_explained_messages_are_in_the_source() -> None:
    ours = [message for message in said(PAGE) if message not in FOREIGN]
    assert [message for message in ours if not any(explains(message, text) for text in texts())] == []


def test_raised_messages_are_explained() -> None:
    explained = said(PAGE)
    missing = [
        text
        for text in raised()
        if "allowed" not in text
        and not OPTION.match(text)
        and not any(part in text for part in INTERNAL)
        and not any(explains(message, text) for message in explained)
    ]
    assert sorted(missing) == []
    assert len(explained) > 60


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("stop", "failures"),
        ("kill", "failures"),
        ("hang", "failures"),
        ("rerun", "failures"),
        ("resume", "cookbook/checkpoints"),
        ("sweep", "cookbook/sweeps"),
        ("debug", "debugging"),
        ("loss", "cookbook/losses"),
        ("port", "coming_from/index"),
    ],
)
def test_the_search_finds_a_page_by_its_users_words(word: str, page: str) -> None:
    """The site's search puts main entries of the index first."""
    entries = re.findall(r"^\.\. index:: (.*)$", (ROOT / "docs" / f"{page}.rst").read_text(), re.MULTILINE)
    assert f"! {word}" in ", ".join(entries).split(", ")
