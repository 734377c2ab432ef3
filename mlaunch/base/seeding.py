"""Seeds of the random generators that training uses: Python's, numpy's, torch's on all devices."""

from __future__ import annotations

import random
import sys

PER_RANK = "per-rank"
_DEFAULT = 1024  # ColossalAI's
_LARGEST = 2**32  # numpy takes no more
ALLOWED = "a whole number from 0 to 4294967295, 'per-rank', 'per-rank:NUMBER', or None"


def check(seed: object) -> None:
    """Raises TypeError or ValueError unless ``seed`` is what ``of_rank`` takes, or None."""
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
    """Returns the seed of one rank: the number itself, or for "per-rank:7" 7 plus the rank ("per-rank": 1024)."""
    if isinstance(seed, int):
        return seed
    return (int(seed.partition(":")[2] or _DEFAULT) + rank) % _LARGEST


def apply(seed: int) -> None:
    """Seeds Python's generator, torch's on all devices, and numpy's if numpy is imported or can be."""
    import torch

    torch.manual_seed(seed)
    apply_on_cpu(seed)


def apply_on_cpu(seed: int) -> None:
    """Seeds as ``apply`` does, but for torch's generators on accelerators."""
    import torch

    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    # Imported if it can be: the function may import it later, and would find it as each process seeds it.
    if "numpy" in sys.modules or _numpy_exists():
        import numpy

        numpy.random.seed(seed)


def _numpy_exists() -> bool:
    import importlib.util

    return importlib.util.find_spec("numpy") is not None
