"""What the package says by its logger, with and without a set-up of logging."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable

import pytest

from mlaunch.base.log import is_heard, log


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """To be called in the test: pytest has handlers of its own at the root, or where records do not come so far."""
    return lambda: monkeypatch.setattr(log, "propagate", False)


def test_alone_its_name_is_in_front(alone: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    alone()
    assert not is_heard()
    log.warning("%s has no token", "train()")
    log.info("nobody asked")
    try:
        raise ValueError("no such luck")
    except ValueError:
        log.exception("a callback raised")
    first, second, *trace = capsys.readouterr().err.splitlines()
    assert (first, second) == ("mlaunch: train() has no token", "mlaunch: a callback raised")
    assert trace[-1] == "ValueError: no such luck"


def test_a_handler_hears_a_warning_as_it_is(alone: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    alone()
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    log.addHandler(handler)
    try:
        assert is_heard()
        log.warning("%s has no token", "train()")
    finally:
        log.removeHandler(handler)
    assert text.getvalue() == "train() has no token\n"
    assert capsys.readouterr().err == ""


def test_a_null_handler_makes_silence(alone: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    alone()
    handler = logging.NullHandler()
    log.addHandler(handler)
    try:
        log.warning("train() has no token")
    finally:
        log.removeHandler(handler)
    assert capsys.readouterr().err == ""
