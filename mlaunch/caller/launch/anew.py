"""Says which package each call imports anew, with the line that has the fork server import it once."""

from __future__ import annotations

from mlaunch.caller.output.console import Console
from mlaunch.protocol.board import Board

_TOLD_AT = 2  # calls
_calls: dict[str, int] = {}  # by package: how many have imported it


def tell(name: str, board: Board | None) -> None:
    """Says it after the second call of this process that had to import a package for long; once for each package."""
    package, seconds = board.imported(0) if board is not None else ("", "")
    if not package:
        return
    _calls[package] = _calls.get(package, 0) + 1
    if _calls[package] == _TOLD_AT:
        console = Console()
        console.say(
            f"{name} imports {package} anew in the ranks of each call, {seconds} s in this one; to import it once: "
            f"mlaunch.warm_up(preload=[{package!r}]) before the first call, provided that it starts no thread and uses "
            f"no device"
        )
        console.close()
