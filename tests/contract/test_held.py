"""What ranks that stay hold for their caller, and what is dealt to them."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlaunch import Ranks, launcher, scatter
from tests import launches


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(n_gpus=2) as opened:
        yield opened


def make(start: int) -> list[int]:
    return [start, dist.get_rank()]


def held_numbers(ranks: Ranks) -> list[list[int]]:
    return ranks.run(launches.held_numbers)


def test_an_object_that_is_here_is_no_function_to_hold(ranks: Ranks) -> None:
    for thing, kind in ((torch.nn.Linear(1, 1), "Linear"), ([1, 2], "list")):
        with pytest.raises(TypeError, match=rf"hold\(\) takes a function that makes the object, not a {kind}; to hold"):
            ranks.hold(thing)  # type: ignore[arg-type]
    assert ranks.hold(lambda: [1, 2]).fetch(0) == [1, 2]
    assert ranks.hold(torch.nn.Linear, 2, 1).fetch(0).weight.shape == (1, 2)  # a class makes objects


def test_a_handle_is_the_same_object_in_each_call(ranks: Ranks) -> None:
    held = ranks.hold(make, 5)
    first = ranks.run(id, held)
    assert ranks.run(id, held) == first
    ranks.run(lambda x: x.append("later"), held)
    assert held.fetch() == [[5, 0, "later"], [5, 1, "later"]]
    assert ranks.run(id, held) == first


def test_a_handle_travels_at_any_depth(ranks: Ranks) -> None:
    held = ranks.hold(make, 5)
    first = ranks.run(id, held)

    class Box:
        def __init__(self, inside: Any) -> None:
            self.inside = inside

    assert ranks.run(lambda x: id(x[0]["deep"][1].inside), [{"deep": (1, Box(held))}]) == first
    assert ranks.run(lambda *, key: id(key), key=held) == first
    assert ranks.run(lambda: id(held)) == first  # in a closure
    assert ranks.run(lambda a, b: a is b, held, [held][0]) == [True, True]
    assert ranks.submit(id, held).result(60) == first
    assert launcher(id).options(ranks=ranks)(held) == first


def test_fetch(ranks: Ranks) -> None:
    held = ranks.hold(make, 7)
    assert held.fetch() == [[7, 0], [7, 1]]
    assert held.fetch(1) == [7, 1]
    assert held.fetch(rank=0) == [7, 0]
    with pytest.raises((ValueError, IndexError)):
        held.fetch(2)
    tensor = ranks.hold(lambda: torch.full((1000,), float(dist.get_rank())))
    fetched = tensor.fetch(1)
    ranks.run(_zero, tensor)
    assert fetched.mean().item() == 1.0  # a copy
    assert tensor.fetch(1).mean().item() == 0.0


def _zero(x: torch.Tensor) -> None:
    x.zero_()


def test_free(ranks: Ranks) -> None:
    held = ranks.hold(make, 1)
    assert held.alive
    assert held_numbers(ranks) != [[], []]
    held.free()
    held.free()
    assert not held.alive
    assert "freed" in repr(held)
    assert held_numbers(ranks) == [[], []]
    with pytest.raises(ValueError, match=r"held value \d+ was freed"):
        ranks.run(id, held)


@pytest.mark.slow
def test_an_object_is_freed_with_its_handle(ranks: Ranks) -> None:
    held = ranks.hold(make, 1)
    kept = ranks.hold(make, 2)
    del held
    gc.collect()
    assert [len(numbers) for numbers in held_numbers(ranks)] == [1, 1]
    assert kept.fetch(0) == [2, 0]


def test_a_handle_in_arguments_that_cannot_be_sent_is_freed_all_the_same(ranks: Ranks) -> None:
    held = ranks.hold(make, 1)
    held.free()
    with pytest.raises(TypeError, match="cannot be pickled"):
        ranks.run(id, sys._getframe())
    assert held_numbers(ranks) == [[], []]


def test_objects_of_a_failed_call_are_let_go(ranks: Ranks) -> None:
    """The next call may have no room beside it; and the collector may be far from its next round."""

    def fail() -> None:
        gc.disable()
        model = {dist.get_rank()}
        sys.left_here = weakref.ref(model)  # type: ignore[attr-defined]
        dist.barrier()  # else the failure of one may end the other before that
        try:
            raise ValueError("no such luck")
        except ValueError as error:
            known = error  # a circle: it knows this frame, which knows it
            raise RuntimeError("no luck at all") from known

    with pytest.raises(RuntimeError, match="no luck at all"):
        ranks.run(fail)
    assert ranks.run(lambda: sys.left_here() is None) == [True, True]  # type: ignore[attr-defined]


def test_repr(ranks: Ranks) -> None:
    held = ranks.hold(lambda: torch.zeros(3, 4))
    assert repr(held).endswith(": torch.Tensor [3, 4], 48 B on ranks 0-1>")
    different = ranks.hold(lambda: torch.zeros(1 + dist.get_rank()))
    assert "torch.Tensor [1], 4 B on rank 0; torch.Tensor [2], 8 B on rank 1" in repr(different)
    assert [found.size for found in ranks.hold(lambda: torch.nn.Linear(2, 3)).descriptions] == [36, 36]


def test_a_handle_of_other_ranks(ranks: Ranks) -> None:
    with Ranks(n_gpus=2) as others:
        held = others.hold(make, 1)
        with pytest.raises(ValueError, match=r"held value \d+ belongs to other ranks than those of id\(\) on 2 ranks"):
            ranks.run(id, held)
        assert held.fetch(0) == [1, 0]
    with pytest.raises(ValueError, match="is lost, since the ranks that held it have ended"):
        ranks.run(id, held)
    with pytest.raises(RuntimeError, match="these ranks were closed"):
        held.fetch()
    assert repr(held).endswith("freed, or its ranks are gone>")


@dataclasses.dataclass
class Setup:
    model: Any
    lr: float


@pytest.mark.parametrize(
    "copied",
    [
        lambda setup: dataclasses.asdict(setup)["model"],
        lambda setup: dataclasses.replace(setup).model,
        lambda setup: copy.deepcopy([setup])[0].model,
        lambda setup: copy.copy(setup.model),
    ],
)
def test_a_copy_of_a_handle_is_the_handle(ranks: Ranks, copied: Callable[[Setup], Any]) -> None:
    """It stands for the same objects, which are freed once."""
    held = ranks.hold(make, 1)
    first = ranks.run(id, held)
    assert ranks.run(id, copied(Setup(held, 0.1))) == first
    assert ranks.run(lambda setup: id(setup["model"]), dataclasses.asdict(Setup(held, 0.1))) == first


class Plain:
    """Travels as the dictionary of what it holds."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return dict, (dataclasses.asdict(Setup(self.model, 0.1)),)


def test_a_handle_may_be_copied_while_arguments_are_pickled(ranks: Ranks) -> None:
    held = ranks.hold(make, 1)
    assert ranks.run(lambda setup: id(setup["model"]), Plain(held)) == ranks.run(id, held)


def test_a_handle_travels_to_its_ranks_alone(ranks: Ranks) -> None:
    held = ranks.hold(make, 1)
    with pytest.raises(TypeError, match="is a handle to objects in its ranks, and can be sent only to them"):
        pickle.dumps(held)
    with pytest.raises(TypeError, match=r"can be sent only to them|cannot be pickled"):
        launcher(lambda x: x, 1)(held)


def test_a_hold_that_fails_on_one_rank_holds_nothing(ranks: Ranks) -> None:
    def half() -> list[int]:
        if dist.get_rank() == 1:
            raise ValueError("no such luck")
        return [1]

    with pytest.raises(ValueError, match="no such luck"):
        ranks.hold(half)
    assert held_numbers(ranks) == [[], []]


def test_an_object_that_cannot_be_pickled_can_be_held(ranks: Ranks) -> None:
    held = ranks.hold(lambda: (number for number in range(5)))
    assert [ranks.run(next, held) for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]


def test_scatter(ranks: Ranks) -> None:
    assert ranks.run(lambda x: x, scatter([10, 20])) == [10, 20]
    assert ranks.run(lambda *, x: x["in"][0], x={"in": [scatter("ab")]}) == ["a", "b"]
    values = scatter((1, 2))
    assert ranks.run(lambda: values + 0) == [1, 2]
    held = ranks.hold(make, 3)
    assert ranks.run(lambda x: x, scatter([held, 1])) == [[3, 0], 1]


@pytest.mark.parametrize("values", [[], [1], [1, 2, 3]])
def test_scatter_of_another_length(ranks: Ranks, values: list[int]) -> None:
    seen = ranks.last
    with pytest.raises(ValueError, match=rf"scatter\(\) of {len(values)} values to .* on 2 ranks"):
        ranks.run(id, scatter(values))
    assert ranks.last is seen
    assert ranks.run(lambda: 1) == [1, 1]


def test_scatter_is_for_ranks_that_stay() -> None:
    with pytest.raises(TypeError, match=r"scatter\(\) is for the arguments of calls on Ranks|cannot be pickled"):
        launcher(lambda x: x, 2)(scatter([1, 2]))
    with pytest.raises(TypeError, match="is for the arguments of calls on Ranks"):
        pickle.dumps(scatter([1]))
