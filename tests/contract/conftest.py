"""For tests that break launches: after whatever they did, the next one works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlaunch import launcher


@pytest.fixture
def the_next_call_works() -> Iterator[None]:
    yield
    assert launcher(lambda: 7, n_gpus=1)() == [7]
