"""Dictionaries of numbers, reduced over all ranks in one collective.

The collective adds float64, which has 53 bits. So an integer is sent as two halves of 32 bits, whose sums are exact for
two million ranks, and a complex number as two numbers.
"""

from __future__ import annotations

import enum
import hashlib
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mlaunch.base.text import with_article
from mlaunch.comm.rank import exchange, world

_DIGEST = 7  # bytes, so that it fits into an int64 with either sign
_HALF = 32  # bits
_LOW = 2**_HALF - 1
_LARGE = "number of more than 64 bits"


class _NumberKind(enum.IntEnum):
    """The kind of numbers in which a value is added: the highest kind that a rank has."""

    WHOLE = 0
    REAL = 1
    COMPLEX = 2


_DTYPES = {
    _NumberKind.WHOLE: torch.int64,
    _NumberKind.REAL: torch.float64,
    _NumberKind.COMPLEX: torch.complex128,
}
_OF_NUMPY = {_NumberKind.WHOLE: "integer", _NumberKind.REAL: "floating", _NumberKind.COMPLEX: "complexfloating"}


@dataclass(frozen=True)
class _Entry:
    """A value of a dictionary. ``what``: its description, which must be the same on all ranks."""

    name: Hashable
    what: str
    kind: _NumberKind

    @property
    def usable(self) -> bool:
        return not self.what.startswith("unusable")


def reduce_dict(values: Mapping[Any, Any], *, average: bool) -> dict[Any, Any]:
    """Reduce a dictionary, as ``mlaunch.comm.reduce_dict`` describes."""
    # Dicts keep the order of their making, which need not be the same on all ranks.
    mine = [_entry(name, values[name]) for name in sorted(values, key=_order)]
    kinds = _agreed(mine)
    if not mine:
        return {}
    tensors = [_tensor(values[one.name], kind) for one, kind in zip(mine, kinds, strict=True)]
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    device = devices.pop() if devices else torch.device("cpu")
    parts = [_encoded(tensor.to(device).flatten(), kind) for tensor, kind in zip(tensors, kinds, strict=True)]
    total = torch.cat(parts)
    if world.get_world_size() > 1:
        dist.all_reduce(total, group=exchange.cpu_group(None) if device.type == "cpu" else None)
    sums = torch.split_with_sizes(total, [len(part) for part in parts])
    size = world.get_world_size() if average else None
    reduced = {
        one.name: _whole(one.name, values[one.name], found, size)
        if kind is _NumberKind.WHOLE
        else _inexact(values[one.name], found, size, kind)
        for one, kind, found in zip(mine, kinds, sums, strict=True)
    }
    return {name: reduced[name] for name in values}


def _order(name: Any) -> tuple[str, str]:
    return type(name).__qualname__, repr(name)  # keys of different types have no order of their own


def _plain(value: Any) -> Any:
    """Return Python's number for one of numpy's."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def _entry(name: Hashable, value: Any) -> _Entry:
    if isinstance(value, torch.Tensor):
        what = f"{value.device.type} tensor of shape {tuple(value.shape)}"
        return _Entry(name, what, _kind_of(value.is_floating_point(), value.is_complex()))
    number = _plain(value)
    if not isinstance(number, int | float | complex):
        return _Entry(name, f"unusable {type(value).__name__}", _NumberKind.REAL)
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        return _Entry(name, f"unusable {_LARGE}", _NumberKind.REAL)
    return _Entry(name, "number", _kind_of(isinstance(number, float), isinstance(number, complex)))


def _kind_of(is_real: bool, is_complex: bool) -> _NumberKind:
    return _NumberKind.REAL if is_real else _NumberKind.COMPLEX if is_complex else _NumberKind.WHOLE


def _tensor(value: Any, kind: _NumberKind) -> torch.Tensor:
    return value.detach() if isinstance(value, torch.Tensor) else torch.tensor(_plain(value), dtype=_DTYPES[kind])


def _encoded(numbers: torch.Tensor, kind: _NumberKind) -> torch.Tensor:
    """Return the numbers as float64, one or two for each, to be added."""
    if kind is _NumberKind.COMPLEX:
        return torch.view_as_real(numbers.to(torch.complex128)).flatten()
    if kind is _NumberKind.REAL:
        return numbers.to(torch.float64)
    unsigned = numbers.dtype == torch.uint64
    whole = numbers.view(torch.int64) if unsigned else numbers.to(torch.int64)
    high = (whole >> _HALF) & _LOW if unsigned else whole >> _HALF
    return torch.cat([high, whole & _LOW]).to(torch.float64)


def _inexact(value: Any, total: torch.Tensor, size: int | None, kind: _NumberKind) -> Any:
    """Return a sum, or a mean over ``size``, in the form in which the value was given."""
    # Not as a view: a complex one begins at an even place.
    found = torch.complex(*total.view(-1, 2).unbind(1)) if kind is _NumberKind.COMPLEX else total
    found = found if size is None else found / size
    if not isinstance(value, torch.Tensor):
        return _as_numpy(value, found.item(), kind)
    has_it = value.is_complex() if kind is _NumberKind.COMPLEX else value.is_floating_point()
    default = torch.get_default_dtype()
    other = default.to_complex() if kind is _NumberKind.COMPLEX else default
    return found.view(value.shape).to(value.device, value.dtype if has_it else other)


def _whole(name: Hashable, value: Any, total: torch.Tensor, size: int | None) -> Any:
    """Return a sum or mean of integers. OverflowError if the sum does not fit into the value's type."""
    high, low = total.to(torch.int64).view(2, -1)
    high, low = high + (low >> _HALF), low & _LOW
    if not isinstance(value, torch.Tensor):
        exact = (int(high) << _HALF) + int(low)
        return exact / size if size is not None else _as_numpy(value, exact, _NumberKind.WHOLE, name)
    if size is not None:
        mean = (high.to(torch.float64) * 2**_HALF + low) / size
        return mean.view(value.shape).to(value.device, torch.get_default_dtype())
    dtype = torch.int64 if value.dtype == torch.bool else value.dtype  # how many were True
    limits, whole = torch.iinfo(dtype), (high << _HALF) | low
    fits = (high >= limits.min >> _HALF) & (high <= limits.max >> _HALF)
    if dtype != torch.uint64:
        fits &= (whole >= limits.min) & (whole <= limits.max)
    if not fits.all():
        raise OverflowError(f"reduce_dict: the sum of {name!r} is too large for {dtype}: pass it in a larger type")
    whole = whole.view(dtype) if dtype == torch.uint64 else whole.to(dtype)
    return whole.view(value.shape).to(value.device)


def _as_numpy(value: Any, number: Any, kind: _NumberKind, name: Hashable = "") -> Any:
    """Return the number in the value's numpy type if that is of this kind."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, getattr(numpy, _OF_NUMPY[kind])):
        return number
    if kind is _NumberKind.WHOLE and not (limits := numpy.iinfo(value)).min <= number <= limits.max:
        raise OverflowError(
            f"reduce_dict: the sum of {name!r} is too large for {type(value).__name__}: pass it in a larger type"
        )
    return type(value)(number)


def _agreed(mine: Sequence[_Entry]) -> list[_NumberKind]:
    """Return the kind in which each value is added. Raise on every rank if they differ or cannot be added.

    This takes one small collective, and another one only if they differ.
    """
    usable = all(one.usable for one in mine)
    if world.get_world_size() == 1:
        everyone = [mine]
    else:
        digest = int.from_bytes(hashlib.blake2b(repr(mine).encode(), digest_size=_DIGEST).digest(), "big")
        # The maximum of a number and of its negative: equal on all ranks only if all have the same.
        extremes = torch.tensor([digest, -digest, int(not usable)], dtype=torch.int64)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=exchange.cpu_group(None))
        highest, lowest, any_unusable = extremes.tolist()
        if highest == -lowest and not any_unusable:
            return [one.kind for one in mine]
        everyone = exchange.gather_everywhere(mine, None, "reduce_dict()")
    for rank, theirs in enumerate(everyone):
        for one in theirs:
            if not one.usable:
                refusal = OverflowError if one.what.endswith(_LARGE) else TypeError
                which = f"{one.name!r} of rank {rank}" if len(everyone) > 1 else repr(one.name)
                what = one.what.partition(" ")[2]
                raise refusal(f"reduce_dict: {which} is {with_article(what)}; allowed: tensors and numbers")
    difference = _difference([{one.name: one.what for one in theirs} for theirs in everyone])
    if difference:
        raise ValueError(f"reduce_dict: the ranks passed different things: {difference}")
    return [max(kinds) for kinds in zip(*([one.kind for one in theirs] for theirs in everyone), strict=True)]


def _difference(everyone: list[dict[Hashable, str]]) -> str:
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in sorted(first.keys() | theirs.keys(), key=_order):
            ours, other = first.get(name, "missing"), theirs.get(name, "missing")
            if ours != other:
                return f"{name!r} is {ours} on rank 0 and {other} on rank {rank}"
        if list(map(_order, first)) != list(map(_order, theirs)):
            return f"the same keys in other types on rank {rank}"
    return ""
