"""``mlaunch.report``: values of a launch that goes on."""

from __future__ import annotations

import json
import threading

from mlaunch.base.fds import renewed
from mlaunch.protocol.board import REPORT_LIMIT
from mlaunch.rank.for_users import progress

Value = float | int | str | bool | None
_lock = renewed(threading.Lock())


def report(step: int, **values: Value) -> None:
    """Tells who has submitted this launch how far it is: ``mlaunch.report(step, loss=loss.item())``.

    ``Run.reports`` has it there, by rank, and a callback is told (``Run.on_report``). It waits for nobody: the latest
    256 of each rank are kept until somebody looks. In a process that is no rank of a launch it does nothing.

    Args:
        step: A number of your choice.
        **values: Numbers, short strings, None. Of one-element tensors and numpy's numbers their ``item()``.

    Raises:
        TypeError: A value of another type.
        ValueError: The values take more than some 400 characters.
    """
    # JSON, since whoever looks reads it without unpickling anything of a rank's.
    data = json.dumps([_plain("step", step), {name: _plain(name, value) for name, value in values.items()}]).encode()
    if len(data) > REPORT_LIMIT:
        raise ValueError(
            f"report() of {len(data)} bytes; allowed: {REPORT_LIMIT}: a few numbers. Return what is larger"
        )
    here = progress.slot
    if here is not None:
        # The ring has one writer; threads of a rank may report together.
        with _lock:
            here.board.ring(here.local_rank).add(data)


def _plain(name: str, value: object) -> Value:
    item = getattr(value, "item", None)
    plain = item() if callable(item) else value
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    raise TypeError(f"report({name}={type(value).__name__}): allowed: a number, a short string, or None")
