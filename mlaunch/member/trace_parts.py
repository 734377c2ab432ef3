"""What torch.profiler writes of a machine's ranks: in a directory there, and then on its way to the caller."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import replace

from mlaunch.base import own_files
from mlaunch.protocol.messages.member_messages import TracePart
from mlaunch.protocol.spec import LaunchSpec

_READ = 1 << 20  # bytes
_LEVEL = 1  # of compression, for the way
_GZIP = 31  # zlib's name of the format


class TraceParts:
    """Holds while a launch runs here; does nothing for one without a profile. ``spec``: with the directory in it.

    The directory is where temporary files are. OSError, which says so, where none can be made.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec
        if spec.profile is not None:
            try:
                # Here, as a machine knows no path of its caller's; not in memory: profiles have hundreds of
                # megabytes.
                directory = tempfile.mkdtemp(prefix="mlaunch-profile-")
            except OSError as error:
                text = f"the parts of profile= cannot be written to {tempfile.gettempdir()}: {error.strerror or error}"
                raise type(error)(error.errno, f"{text}; TMPDIR can name another place") from None
            self.spec = replace(spec, profile=replace(spec.profile, directory=directory))

    def __enter__(self) -> LaunchSpec:
        return self.spec

    def __exit__(self, *_: object) -> None:
        if self.spec.profile is not None:
            own_files.remove_directory(self.spec.profile.directory)


def pieces(spec: LaunchSpec) -> Iterator[TracePart]:
    """Yields what is there of this machine's ranks, which have ended."""
    for rank in range(spec.rank_start, spec.rank_start + spec.local_world_size):
        path = spec.profile.written_by(rank) if spec.profile is not None else ""
        if path:
            yield from _pieces_of(path, rank)


def _pieces_of(path: str, rank: int) -> Iterator[TracePart]:
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
    with open(path, "rb") as file:
        while data := file.read(_READ):
            # In pieces, and not as one value, which would be a memory file.
            if packed := packer.compress(data):
                yield TracePart(rank, packed)
    yield TracePart(rank, packer.flush())
