"""Who holds which device, and who waits for which: for people, and ``mlaunch ps``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mlaunch.leases.acquisition import DEVICE, TICKET, device_of
from mlaunch.leases.site import LeaseSite, opened


def standing(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns what is held (device, pid, who, since), and who waits (names, count, pid, who, since) in their order.

    ``since`` is in seconds since 1970. Both are empty where there is no directory.
    """
    if not directory.is_dir():
        return [], []
    with opened(directory) as site, site:
        held = [{"device": device_of(name), **site.said(name)} for name in site.names(DEVICE) if _is_taken(site, name)]
        return held, [site.said(name) for name in site.names(TICKET) if _is_taken(site, name)]


def _is_taken(site: LeaseSite, name: str) -> bool:
    watched = site.watch(name)
    if watched is not None:
        os.close(watched)
    return watched is not None
