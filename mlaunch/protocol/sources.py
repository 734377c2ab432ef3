"""Source text that no file holds, such as a notebook's cells. It is sent with the code that was compiled from it.

``inspect.getsource``, and with it ``torch.jit.script`` and ``triton.jit``, ask ``linecache`` for it.
"""

from __future__ import annotations

import linecache
from types import CodeType

Source = tuple[str, str]  # a file name without a file, and its text
_MOST = 1_000  # texts that are kept: of older cells a traceback has no lines
_known: dict[str, None] = {}  # names, the latest last


def of_code(code: CodeType, told: set[str]) -> Source | None:
    """Return the source of code that no file holds, and add its name to ``told``.

    None if there is none, or if it is in ``told`` already.
    """
    file = code.co_filename
    entry = linecache.cache.get(file)
    if entry is None or len(entry) != 4 or entry[1] is not None or file in told:  # with a time, it is read from a file
        return None
    told.add(file)
    return file, "".join(entry[2])


def take(source: Source) -> None:
    """Make the source known in this process."""
    file, text = source
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    know(file)


def know(file: str) -> None:
    """Note that a source was made known, and forget the oldest: ranks that stay run cells for days."""
    _known.pop(file, None)
    _known[file] = None
    if len(_known) > _MOST:
        oldest = next(iter(_known))
        del _known[oldest]
        linecache.cache.pop(oldest, None)
