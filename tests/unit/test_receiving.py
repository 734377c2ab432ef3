"""What of a call could not be unpickled, as a rank tells its caller."""

from __future__ import annotations

import pickle
from typing import Any

from mlaunch.protocol.calls import Call
from mlaunch.protocol.receiving import culprit


def refuse(_: object) -> None:
    raise ValueError("not here")


class Refusing:
    def __reduce__(self) -> tuple[Any, ...]:
        return refuse, (1,)


def test_what_can_be_unpickled_is_not_blamed() -> None:
    assert culprit(pickle.dumps(Call(len, ([1],), {})), []) == ""


def test_the_place_of_what_cannot_be_unpickled() -> None:
    told = culprit(pickle.dumps({"rates": [1.0], "config": {"model": Refusing()}}), [])
    assert told.startswith("of what the call sends, the rank could not unpickle a ")
    assert "model': create such an object inside the function" in told


def test_a_module_that_is_not_there() -> None:
    told = culprit(b"cno_such_module\nThing\n.", [])
    assert told.startswith("of what the call sends, the rank could not import no_such_module.Thing: put its directory")
