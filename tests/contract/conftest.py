"""For tests that break launches: after whatever they did, the next one works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlaunch import launcher
from tests.contract.preparing import preparing


@pytest.fixture
def the_next_call_works() -> Iterator[None]:
    yield
    assert launcher(lambda: 7, n_gpus=1)() == [7]


@pytest.fixture
def as_users_have_it() -> Iterator[None]:
    """Launches are prepared, as they are by default. Elsewhere they are not: what waits would be counted as left."""
    with preparing():
        yield
