"""What callers are told of the objects that ranks hold."""

from __future__ import annotations

from typing import Any

import torch

from mlaunch.ranks.rank import held_objects as on_ranks


def test_descriptions() -> None:
    assert on_ranks.describe({"a": torch.zeros(2), "b": [b"123"]}).size == 11
    assert on_ranks.describe(5).type_name == "int"


class Raises:
    """Whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    __class__ = property(lambda self: self.anything)  # type: ignore[assignment]
    __sizeof__ = shape = nbytes = property(lambda self: self.anything)  # type: ignore[assignment]


class Shared(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a collective")


def test_descriptions_run_no_code_and_end() -> None:
    ring: list[Any] = [torch.zeros(2)]
    ring.append(ring)
    deep: list[Any] = [b"123"]
    for _ in range(10**5):
        deep = [deep]
    found = [on_ranks.describe(value) for value in (ring, deep, Raises(), torch.zeros(3).as_subclass(Shared))]
    assert [one.size for one in found if one.type_name == "list"] == [8, 3]
    assert found[2].type_name.endswith("Raises")
    assert (found[3].size, found[3].shape) == (12, (3,))
