"""The directory of a launch for multiprocessing's files, such as sockets of a data loader's workers.

Without it, each process would make a directory of its own (``pymp-...``), which is left behind when a signal ends the
process. The launch's directory is made when a rank or a child of a rank first needs it, and is removed with the launch.
TMPDIR stays as it is: it has caches, torch.compile's too, and files that the next launch must find.
"""

from __future__ import annotations

import multiprocessing.process
import os
from typing import Any

from mlaunch.base import own_files
from mlaunch.protocol.spec import LaunchSpec


def directory_of(spec: LaunchSpec) -> str:
    """Return the path of the directory, which may not exist."""
    place = spec.context.environ.get("TMPDIR") or "/tmp"
    return os.path.join(place, f"mlaunch-{spec.launch_id}-{spec.rank_start}")


def remove(spec: LaunchSpec) -> None:
    """Remove the directory, if a rank has made it."""
    own_files.remove_directory(directory_of(spec))


def share(spec: LaunchSpec) -> None:
    """Make this process, a rank, and what multiprocessing starts from it use the directory."""
    process: Any = multiprocessing.process.current_process()
    process._config = _Config(process._config, directory_of(spec))


class _Config(dict[str, Any]):
    """The data of multiprocessing about this process. Each child gets a copy."""

    def __init__(self, known: dict[str, Any], path: str) -> None:
        super().__init__(known)
        self._path = path

    def get(self, key: str, default: Any = None) -> Any:
        if key == "tempdir":
            self._make()
        return super().get(key, default)

    def copy(self) -> dict[str, Any]:
        self._make()
        return dict(self)

    def _make(self) -> None:
        if "tempdir" in self:
            return
        try:
            os.mkdir(self._path, 0o700)
        except FileExistsError:  # another rank has made it
            if not own_files.is_own_directory(self._path):
                return
        except OSError:  # multiprocessing makes a directory of its own, or says why it cannot
            return
        self["tempdir"] = self._path
