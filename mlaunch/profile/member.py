"""The traces of a machine's ranks: in a directory there, and then on their way to the caller."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import replace

from mlaunch.base import own_files
from mlaunch.core.parts import MachinePart
from mlaunch.profile.wire import ProfileOrder, TracePart
from mlaunch.protocol.spec import LaunchSpec

_READ = 1 << 20  # bytes
_LEVEL = 1  # of compression, for the network
_GZIP = 31  # zlib's name of the format


class TraceParts(MachinePart):
    """The parts of this machine's ranks, in a temporary directory. OSError if none can be made.

    They are not kept in memory: traces have hundreds of megabytes.
    """

    section: ProfileOrder

    def __init__(self, order: ProfileOrder) -> None:
        try:
            directory = tempfile.mkdtemp(prefix="mlaunch-profile-")  # paths of the caller mean nothing here
        except OSError as error:
            text = f"the parts of profile= cannot be written to {tempfile.gettempdir()}: {error.strerror or error}"
            raise type(error)(error.errno, f"{text}; TMPDIR can name another place") from None
        super().__init__(replace(order, directory=directory))

    def last_words(self, spec: LaunchSpec) -> Iterator[TracePart]:
        """Yield the parts of this machine's ranks, in pieces."""
        for rank in range(spec.rank_start, spec.rank_start + spec.local_world_size):
            if path := self.section.written_by(rank):
                yield from _pieces_of(path, rank)

    def close(self) -> None:
        own_files.remove_directory(self.section.directory)


def part(section: ProfileOrder) -> TraceParts:
    """Make a machine's part."""
    return TraceParts(section)


def _pieces_of(path: str, rank: int) -> Iterator[TracePart]:
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
    with open(path, "rb") as file:
        while data := file.read(_READ):
            # In pieces: one value would be a file in memory.
            if packed := packer.compress(data):
                yield TracePart(rank, packed)
    yield TracePart(rank, packer.flush())
