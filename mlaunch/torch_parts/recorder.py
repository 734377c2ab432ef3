"""torch's flight recorder: the number of collectives that were begun and that their device has not completed.

NCCL returns before the device has done anything, so all ranks may have begun the same operations while one device is
behind. NCCL's old backend fills the recorder by itself; for others torch does, from 2.15 on. gloo's is not read: a
thread waits for each operation that gloo has not completed. ``TORCH_FR_BUFFER_SIZE=0`` switches the recorder off.
"""

from __future__ import annotations

import json
from typing import Any

from mlaunch.torch_parts import process_groups

_OF_OLD_NCCL = "_dump_nccl_trace_json"
_OF_ANY = "_dump_fr_trace_json"
_COMPLETED = "completed"


def lacks() -> str:
    """Return what this torch lacks, and the consequence; "" if it lacks nothing."""
    from torch._C import _distributed_c10d as c10d

    if hasattr(c10d, _OF_ANY) or hasattr(c10d, _OF_OLD_NCCL):
        return ""
    return f"{_OF_ANY}: mlaunch why does not say which device is behind in what all ranks have begun"


def pending_of(name: str, group: Any) -> dict[str, int]:
    """Return how many collectives of a group are not completed, by the kind of device.

    Backends without a recorder are left out.
    """
    found = {}
    for backend, devices in process_groups.backends(group):
        kind = process_groups.backend_name(backend)
        record = None if kind == "gloo" else _read(kind)
        if record is not None:
            device = "cpu" if "cpu" in devices else devices[0]
            found[device] = sum(_is_pending(entry, name) for entry in record)
    return found


def _read(kind: str) -> list[dict[str, Any]] | None:
    """Return the entries that are not completed; None if no recorder is known to be this backend's."""
    from torch._C import _distributed_c10d as c10d

    try:
        if kind == "nccl":
            text = getattr(c10d, _OF_OLD_NCCL)(includeCollectives=True, onlyActive=True)
        else:
            text = getattr(c10d, _OF_ANY)(includeCollectives=True, onlyActive=True, backend=kind)
        found: list[dict[str, Any]] = json.loads(text).get("entries", [])
    except (AttributeError, TypeError, ValueError, RuntimeError):  # older releases know no backend=
        return None
    return found


def _is_pending(entry: dict[str, Any], name: str) -> bool:
    is_over = entry.get("retired") or entry.get("state") == _COMPLETED
    return not (is_over or entry.get("is_p2p")) and entry.get("process_group", [""])[0] == name
