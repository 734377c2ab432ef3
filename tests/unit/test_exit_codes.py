"""The exit code of a rank whose code calls ``sys.exit``."""

from __future__ import annotations

import pytest

from mlaunch.rank import process


@pytest.mark.parametrize(("given", "code"), [(None, 0), (0, 0), (3, 3), (True, 1), (-9, 247), (259, 3), (2**40 + 3, 3)])
def test_an_exit_code_is_what_the_system_makes_of_it(given: int | None, code: int) -> None:
    """A negative one is no signal, and one too large for ``os._exit`` must not be raised on the way there."""
    assert process.exit_code(SystemExit(given)) == code


def test_a_text_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert process.exit_code(SystemExit("no data")) == 1
    assert capsys.readouterr().err == "no data\n"
