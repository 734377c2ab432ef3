"""Dictionaries of numbers, reduced over all ranks in one collective."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from mlaunch.collectives import exchange, world

_DIGEST = 7  # bytes, so that it fits into an int64 with either sign


def reduce_dict(values: Mapping[str, Any], *, average: bool) -> dict[str, Any]:
    """Does what ``mlaunch.comm.reduce_dict`` says."""
    if world.get_world_size() == 1:
        return {name: _shaped(_tensor(name, value).to(torch.float64), value, average) for name, value in values.items()}
    # Dicts keep the order of their making, which need not be the same on all ranks.
    names = sorted(values)
    signature = [_describe(values[name]) for name in names]
    _check_alike(list(zip(names, signature, strict=True)))
    tensors = [_tensor(name, values[name]) for name in names]
    if not tensors:
        return {}
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    device = devices.pop() if devices else torch.device("cpu")
    # One collective for all values, in float64: sums of counts stay exact up to 2**53.
    total = torch.cat([tensor.to(device, torch.float64).flatten() for tensor in tensors])
    dist.all_reduce(total, group=exchange.cpu_group(None) if device.type == "cpu" else None)
    if average:
        total /= dist.get_world_size()
    parts = torch.split_with_sizes(total, [tensor.numel() for tensor in tensors])
    reduced = {
        name: _shaped(part.view(tensor.shape), values[name], average)
        for name, part, tensor in zip(names, parts, tensors, strict=True)
    }
    return {name: reduced[name] for name in values}


def _tensor(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.float64)
    raise TypeError(f"reduce_dict: {name!r} is a {type(value).__name__}; allowed: tensors and numbers")


def _shaped(total: torch.Tensor, value: Any, average: bool) -> Any:
    """Returns the reduced value in the form in which it was given."""
    if isinstance(value, torch.Tensor):
        dtype = value.dtype if value.is_floating_point() or not average else torch.get_default_dtype()
        return total.to(value.device, dtype)
    return total.item() if average or isinstance(value, float) else round(total.item())


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.device.type} tensor of shape {tuple(value.shape)}"
    return "number" if isinstance(value, int | float) else f"unusable {type(value).__name__}"


def _check_alike(mine: list[tuple[str, str]]) -> None:
    """Raises on every rank unless all passed the same. One small collective, more words only if they differ."""
    digest = int.from_bytes(hashlib.blake2b(repr(mine).encode(), digest_size=_DIGEST).digest(), "big")
    unusable = any(what.startswith("unusable") for _, what in mine)
    # The maximum of a number and of its negative: equal on all ranks only if all have the same.
    extremes = torch.tensor([digest, -digest, int(unusable)], dtype=torch.int64)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=exchange.cpu_group(None))
    highest, lowest, any_unusable = extremes.tolist()
    if highest == -lowest and not any_unusable:
        return
    everyone = [dict(theirs) for theirs in exchange.gather_everywhere(mine, None, "reduce_dict()")]
    for rank, theirs in enumerate(everyone):
        for name, what in theirs.items():
            if what.startswith("unusable"):
                raise TypeError(
                    f"reduce_dict: {name!r} of rank {rank} is a {what.partition(' ')[2]}; allowed: tensors and numbers"
                )
    raise ValueError(f"reduce_dict: the ranks passed different things: {_difference(everyone)}")


def _difference(everyone: list[dict[str, str]]) -> str:
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in sorted(first.keys() | theirs.keys()):
            ours, other = first.get(name, "missing"), theirs.get(name, "missing")
            if ours != other:
                return f"{name!r} is {ours} on rank 0 and {other} on rank {rank}"
    return "the same keys in other types"
