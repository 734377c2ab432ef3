"""Seeds of the random generators that training uses: Python's, numpy's, torch's on all devices."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

PER_RANK = "per-rank"
_DEFAULT = 1024  # ColossalAI's
_LARGEST = 2**32  # numpy takes no more
ALLOWED = "a whole number from 0 to 4294967295, 'per-rank', 'per-rank:NUMBER', or None"


def check(seed: object) -> None:
    """Raise TypeError or ValueError unless ``seed`` is a seed for ``of_rank``, or None."""
    allowed = f"allowed: {ALLOWED}"
    if isinstance(seed, str):
        word, colon, number = seed.partition(":")
        if word != PER_RANK or (colon and not (number.isdecimal() and int(number) < _LARGEST)):
            raise ValueError(f"seed={seed!r}: {allowed}")
    elif seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise TypeError(f"seed={seed!r}: {allowed}")
    elif isinstance(seed, int) and not 0 <= seed < _LARGEST:
        raise ValueError(f"seed={seed!r}: {allowed}")


def of_rank(seed: int | str, rank: int) -> int:
    """Return the seed of one rank: the number itself, or for "per-rank:7" 7 plus the rank ("per-rank": 1024)."""
    if isinstance(seed, int):
        return seed
    return (int(seed.partition(":")[2] or _DEFAULT) + rank) % _LARGEST


def apply(seed: int) -> None:
    """Seed Python's generator, torch's on all devices, and numpy's if numpy is imported or can be."""
    import torch

    torch.manual_seed(seed)
    apply_on_cpu(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed as ``apply`` does, and restore the generators after the block."""
    import torch

    python, cpu, numpys = random.getstate(), torch.get_rng_state(), _state_of_numpy()
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices: Any = None if there is None else torch.get_device_module(there.type)
    # Asking a device for its state would initialize it.
    states = devices.get_rng_state_all() if devices is not None and devices.is_initialized() else None
    apply(seed)
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpys is not None:
            sys.modules["numpy"].random.set_state(numpys)
        if states is not None:
            devices.set_rng_state_all(states)
        elif devices is not None:
            devices.seed_all()


def _state_of_numpy() -> Any:
    """Return the state of numpy's generator; None without numpy."""
    if "numpy" not in sys.modules and not _numpy_exists():
        return None
    import numpy

    return numpy.random.get_state()


def apply_on_cpu(seed: int) -> None:
    """Seed as ``apply`` does, except torch's generators on accelerators."""
    import torch

    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    # Imported here if it exists: the function may import it later, and would find a random seed.
    if "numpy" in sys.modules or _numpy_exists():
        import numpy

        numpy.random.seed(seed)


def _numpy_exists() -> bool:
    import importlib.util

    return importlib.util.find_spec("numpy") is not None
