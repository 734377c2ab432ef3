"""Lines that change on a terminal, and who else writes there: the shell, another program."""

from __future__ import annotations

import os
import re
import signal
import sys
from types import SimpleNamespace

import pytest

from mlaunch.display.caller import areas


@pytest.fixture
def terminal() -> areas.Terminal:
    pytest.importorskip("rich", reason="rich is not installed (extra: watch)")
    return areas.Terminal()


def test_after_a_stop_lines_are_drawn_below_what_the_shell_has_written(terminal: areas.Terminal) -> None:
    before = signal.getsignal(signal.SIGCONT)
    assert "\x1b[?25l" not in terminal.show("first\nsecond")
    assert "\x1b[1A" in terminal.show("first\nthird")
    signal.raise_signal(signal.SIGCONT)
    assert terminal.hide() == "\r\x1b[2K"
    terminal.show("first\nfourth")
    areas.Terminal().close([])  # another one, as that of a start, ends
    signal.raise_signal(signal.SIGCONT)
    assert re.fullmatch(r"\r\x1b\[2Kfirst *\nfifth *", terminal.show("first\nfifth"))
    assert terminal.close([])
    assert signal.getsignal(signal.SIGCONT) == before


def test_lines_of_a_log_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a CI's job may have a terminal."""
    pytest.importorskip("rich", reason="rich is not installed (extra: watch)")
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True, fileno=lambda: 2))
    monkeypatch.setattr(areas, "is_piped", lambda _fd: False)
    monkeypatch.setenv("TERM", "xterm")
    found = []
    for value in ("true", "1", "false", ""):
        monkeypatch.setenv("CI", value)
        found.append(areas.area())
    assert found[:2] == [None, None]
    assert None not in found[2:]


def test_a_handler_of_the_users_for_the_end_of_a_stop_stays(terminal: areas.Terminal) -> None:
    found: list[int] = []
    before = signal.signal(signal.SIGCONT, lambda number, _: found.append(number))
    try:
        terminal.show("first")
        signal.raise_signal(signal.SIGCONT)
        terminal.close([])
        assert found == [signal.SIGCONT]
    finally:
        signal.signal(signal.SIGCONT, before)


def test_nothing_is_drawn_in_the_background(terminal: areas.Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell's prompt is where it would be drawn."""
    monkeypatch.setattr(os, "tcgetpgrp", lambda _fd: os.getpgrp() + 1)
    assert terminal.show("first") == terminal.hide() == ""
    monkeypatch.setattr(os, "tcgetpgrp", lambda _fd: 0)  # of another namespace
    assert "first" in terminal.show("first")
    terminal.close([])


def test_no_lines_that_change_where_a_program_reads_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``less`` does, which draws on the same terminal."""
    pytest.importorskip("rich", reason="rich is not installed (extra: watch)")
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(areas.area(), areas.Terminal)
    before = os.dup(1)
    readable, writable = os.pipe()
    try:
        os.dup2(writable, 1)
        assert areas.area() is None
    finally:
        os.dup2(before, 1)
        for fd in (before, readable, writable):
            os.close(fd)
