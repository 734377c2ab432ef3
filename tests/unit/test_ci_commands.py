"""What GitHub is to show: one line, escaped as it documents, beside a line of the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlaunch.base.exceptions import failure_of_text
from mlaunch.ci import caller as github


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a file, to which a link leads, and another file beside it."""
    root = tmp_path / "checkout"
    (root / "src").mkdir(parents=True)
    for file in (root / "src" / "a, b.py", tmp_path / "outside.py"):
        file.touch()
    (tmp_path / "link").symlink_to(root)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "link"))
    return root


def test_what_is_escaped(checkout: Path) -> None:
    places = [(str(checkout.parent / "outside.py"), 1), (str(checkout / "src" / "a, b.py"), 7)]
    line = github.error_command("test.py::test, 50%", "one: 100%\r\n::warning::two", places)
    where = "file=src/a%2C b.py,line=7,title=test.py%3A%3Atest%2C 50%25"
    assert line == f"::error {where}::one: 100%25%0D%0A::warning::two"
    assert github.error_command("", "a \x1b[31mred\x1b[0m one", []) == "::error title=::a red one"


def test_where_no_line_of_the_checkout_is_known(checkout: Path) -> None:
    places = [(str(checkout.parent / "outside.py"), 1), (str(checkout / "gone.py"), 2), ("<string>", 3)]
    assert github.error_command("it", "failed", places) == "::error title=it::failed"
    assert github.of_launch(failure_of_text("not_started", "no fork server\n\nmore")) == (
        "::error title=mlaunch%3A not started::no fork server"
    )


def test_a_message_of_any_length_is_shown_in_part() -> None:
    assert len(github.error_command("t" * 9999, "m\n" * 9999, [])) < 9000


def test_only_github_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, asked in (("true", True), ("", False), ("0", False)):
        monkeypatch.setenv("GITHUB_ACTIONS", value)
        assert github.is_asked() is asked
    monkeypatch.delenv("GITHUB_ACTIONS")
    monkeypatch.setenv("CI", "true")
    assert not github.is_asked()
