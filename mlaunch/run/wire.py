"""The command, for its ranks."""

from __future__ import annotations

from dataclasses import field

from mlaunch.base.frozen_record import frozen_record


@frozen_record
class Script:
    """A command that each rank runs as a fresh interpreter would.

    ``kind``: "file" (also a directory or zip with a ``__main__``), "module", "function" or "program" (not Python).
    """

    kind: str
    name: str  # the path of a file, the name of a module, "module:function", a program
    args: tuple[str, ...]  # "${local_rank}" in them is replaced
    virtual_local_rank: bool = False  # each rank sees one device, and is its local rank 0
    source: bytes | None = field(default=None, repr=False)  # of a file that cannot be read twice, such as a pipe
