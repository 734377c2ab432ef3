"""What of a call could not be unpickled, as a rank tells its caller."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import cloudpickle

from mlaunch.protocol.calls import Call
from mlaunch.protocol.explain import unreadable_part


def refuse(_: object) -> None:
    raise ValueError("not here")


class Refusing:
    def __reduce__(self) -> tuple[Any, ...]:
        return refuse, (1,)


class Taker:
    """Cannot be made of anything but a number."""

    def __init__(self, number: object) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return round, (self.number,)


def test_an_object_that_can_be_unpickled_is_not_blamed() -> None:
    assert unreadable_part(pickle.dumps(Call(len, ([1],), {})), []) == ""


def test_the_place_of_what_cannot_be_unpickled() -> None:
    told = unreadable_part(pickle.dumps({"rates": [1.0], "config": {"model": Refusing()}}), [])
    assert told.startswith("the rank could not unpickle a ")
    assert " at 'config.model', which the call sends: create such an object" in told


class Holder:
    def __init__(self, held: object) -> None:
        self.held = held


def test_the_place_is_told_from_outside() -> None:
    """Of an attribute of an attribute, of what a function made here uses, and beside dictionaries that are empty."""
    config = Holder(Holder([Refusing()]))
    sent = {"empty": {}, "trainer": {"config": config}, "after": {}}
    assert " at 'trainer.config.held.held', which the call sends: create" in unreadable_part(pickle.dumps(sent), [])
    broken = Refusing()
    function = cloudpickle.dumps(((lambda: (broken, sent)), (), {}))
    assert " at 'broken', which the call sends: create" in unreadable_part(function, [])


def test_an_object_that_fails_since_a_part_of_it_is_missing() -> None:
    """The part is told."""
    sent = {"model": functools.partial(len, Refusing()), "other": Taker(Refusing())}
    assert " at 'model" in unreadable_part(pickle.dumps(sent), [])


def test_a_module_that_is_not_there() -> None:
    told = unreadable_part(b"cno_such_module\nThing\n.", [])
    assert told.startswith("the rank could not import no_such_module.Thing, which the call uses: put its directory")
