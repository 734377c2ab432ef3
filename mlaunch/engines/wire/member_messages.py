"""What a caller and the members of its launch say to each other, over a ``Stream`` for each machine.

member -> caller   a line that begins with ``MARK``, then JSON: who it is       (before anything is unpickled)
caller -> member   Heartbeat; AskOffer, Listen, Reach, Start, Cancel, Question; NextCall, EndCall, MeetAgain and
                   EndRanks for ranks that stay; ForPart
member -> caller   Offer or NotPrepared, Listens, Reached; then FromAgent, Printed, Rows, Reports, Alive, ServerEnded,
                   PartSays, and MachineDone at last
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlaunch._version import __version__
from mlaunch.protocol.spec import Details, Target

if TYPE_CHECKING:
    from mlaunch.protocol.messages import AgentSays

MARK = b"mlaunch-member "
MODULE = "mlaunch.engines.member.main"
# ``python -m`` and ``-c`` look for modules in the current directory first, which mpirun, srun and flux carry over from
# the caller's shell: there others may have left one. Older interpreters have no option against that.
_BOOTSTRAP = "import sys; sys.path[:1] = filter(None, sys.path[:1]); import runpy; "
_BOOTSTRAP += "runpy.run_module(sys.argv[-1], run_name='__main__')"


def command_of(python: str, patience: float | None = None) -> list[str]:
    """Return what runs a member, with nothing imported from the current directory. Its module comes last.

    ``patience``: seconds in which the caller's first word must have come; None: it may take for ever.
    """
    return [python, "-u", "-c", _BOOTSTRAP, *([] if patience is None else [f"{patience:g}"]), MODULE]


def patience_of(argv: Sequence[str]) -> float | None:
    """Return what ``command_of`` was given, in the process that it runs."""
    return float(argv[-2]) if len(argv) > 2 else None


def versions() -> dict[str, str]:
    """Return those of what must be alike on both sides, without importing torch; "" for one that is not installed."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    return {"mlaunch": __version__, "Python": platform.python_version(), "torch": torch}


@dataclass(frozen=True)
class Heartbeat:
    """Tells a member that its caller lives. A machine that is cut off closes nothing, so a member leaves if none comes.

    Attributes:
        timeout: Seconds after which it leaves if nothing more has come.
        farewell: The command by which it gives the machines back then; () if that needs none.
    """

    timeout: float
    farewell: tuple[str, ...]


@dataclass(frozen=True)
class AskOffer:
    """Asks what a machine can give to a launch. ``options``: as the launcher takes them, less what differs."""

    options: Mapping[str, Any]
    name: str
    cwd: str  # of the caller; used if it exists there
    sys_path: tuple[str, ...]  # of the caller, behind the machine's own
    number: int = 0  # of the call, which the answer repeats


@dataclass(frozen=True)
class Offer:
    """What a member gives. ``clock``: its monotonic seconds now."""

    number: int
    local_world_size: int
    device_type: str
    visible_devices: str | None
    torch_version: str
    addresses: tuple[str, ...]  # at which other machines may find it, that of its way to everywhere else first
    identity: str  # of the machine and its network, which a name is not: clones and containers may have one name
    port: int  # that is free there
    clock: float


@dataclass(frozen=True)
class NotPrepared:
    """Why it can give nothing: text of the error."""

    number: int
    text: str


@dataclass(frozen=True)
class Listen:
    """Makes a machine listen where others are to find it, and for them to try. ``port``: None: no more."""

    port: int | None
    number: int = 0  # of the call, which the answer repeats


@dataclass(frozen=True)
class Listens:
    """Whether it does."""

    number: int
    listens: bool


@dataclass(frozen=True)
class Reach:
    """Asks which of another machine's addresses this one reaches."""

    addresses: tuple[str, ...]
    port: int
    number: int = 0  # of the call, which the answer repeats


@dataclass(frozen=True)
class Reached:
    """Why there is no answer at each; "" if there is."""

    number: int
    failures: tuple[str, ...]


MemberAnswer = Offer | NotPrepared | Listens | Reached  # with the number of the question


@dataclass(frozen=True)
class Start:
    """Starts the ranks of this machine. The content: the call; none if they run a command."""

    world_size: int
    rank_start: int
    master_ip: str
    port: int
    token: str = field(repr=False)
    restart_count: int
    details: Details
    target: Target | None = None
    node_rank: int = 0
    num_nodes: int = 1
    sections: Mapping[str, object] = field(default_factory=dict)  # of the launch's spec
    stays: str = ""  # the launch's id, if its ranks stay: they know by it what they hold; "": they do not


@dataclass(frozen=True)
class FromAgent:
    """A record of the machine's agent. The content: what was in the descriptor beside it."""

    record: AgentSays  # or what a member says in its place


@dataclass(frozen=True)
class Printed:
    """What a rank has printed; b"": it will print no more."""

    rank: int
    stream: int  # 1 or 2
    data: bytes


@dataclass(frozen=True)
class Rows:
    """The rows of the machine's board, by local rank."""

    rows: tuple[bytes, ...]


@dataclass(frozen=True)
class Reports:
    """What ranks have reported since the last, by local rank."""

    found: tuple[tuple[bytes, ...], ...]


@dataclass(frozen=True)
class Alive:
    """Answers a Heartbeat, while ranks run."""


@dataclass(frozen=True)
class MachineDone:
    """Nothing of the launch is left on this machine. ``error``: what kept it from starting; ``late``: its deadline."""

    error: str = ""
    late: bool = False


@dataclass(frozen=True)
class ServerEnded:
    """The machine's fork server has ended, and the launch with it. ``what``: how."""

    what: str
