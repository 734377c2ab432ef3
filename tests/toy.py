"""An accelerator without hardware: torch's device type "toy", for torch 2.9 and later.

torch finds it by its entry point, in every process that imports torch with ``install``'s folder on its path. It has no
tensors; but its devices are counted, chosen and waited for, and who did that is written down. The environment says how
it behaves:

- ``TOY_DEVICES``: how many there are (2).
- ``TOY_LOG``: a file, to which each process writes what it does: lines of "pid deed".
- ``TOY_FAILS``: what waiting for a device raises, as an error of what ran there would.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any


class Toy:
    """What torch has as ``torch.toy``."""

    def __init__(self) -> None:
        self._current = 0
        self._initialised = False

    def device_count(self) -> int:
        _note("counts")
        return int(os.environ.get("TOY_DEVICES", "2"))

    def is_available(self) -> bool:
        return self.device_count() > 0

    def is_initialized(self) -> bool:
        return self._initialised

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: Any) -> None:
        import torch

        self._current = device if isinstance(device, int) else torch.device(device).index
        self._initialised = True
        _note(f"takes {self._current}")

    def synchronize(self, _device: Any = None) -> None:
        _note("waits")
        if "TOY_FAILS" in os.environ:
            raise RuntimeError(os.environ["TOY_FAILS"])

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, _seed: int) -> None:
        """Is called by torch's own seeding."""


def load() -> None:
    """Is called by torch, as it is imported."""
    import torch
    from torch.utils import backend_registration

    toy = Toy()
    backend_registration._setup_privateuseone_for_python_backend("toy", backend_module=toy)
    # torch's C code knows of one device of a backend in Python, so these ask the backend itself.
    torch.accelerator.set_device_index = toy.set_device
    torch.accelerator.current_device_index = toy.current_device
    torch.accelerator.synchronize = toy.synchronize


def is_possible() -> bool:
    """Tells whether this torch takes a backend that is written in Python."""
    from torch.utils import backend_registration

    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def install(folder: Path) -> None:
    """Makes it a package in this folder, as pip would."""
    shutil.copy(__file__, folder / "toy.py")
    described = folder / "toy-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
    (described / "entry_points.txt").write_text("[torch.backends]\ntoy = toy:load\n")


def _note(deed: str) -> None:
    if "TOY_LOG" in os.environ:
        with open(os.environ["TOY_LOG"], "a") as log:
            log.write(f"{os.getpid()} {deed}\n")
