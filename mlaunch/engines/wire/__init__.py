"""Messages between a caller and the members of its launch, over a ``FrameStream`` for each machine.

member -> caller   a line that begins with ``MARK``, then JSON: who it is       (before anything is unpickled)
caller -> member   Heartbeat; AskOffer, Listen, Reach, Start, Cancel, Question; NextCall, EndCall, MeetAgain and
                   EndRanks for ranks that stay; ForPart
member -> caller   Offer or NoOffer, Listens, Reached; then FromAgent, Printed, Rows, Reports, Alive, ServerEnded,
                   PartSays, and MachineDone at last
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mlaunch._version import __version__
from mlaunch.engines.wire.frame_stream import FrameStream
from mlaunch.protocol.messages import (
    AgentSays,
    Cancel,
    EndCall,
    EndRanks,
    ForPart,
    MeetAgain,
    NextCall,
    PartSays,
    Question,
)
from mlaunch.protocol.spec import Details, Target

MARK = b"mlaunch-member "
MODULE = "mlaunch.engines.member.main"
# ``python -m`` and ``-c`` look for modules in the current directory first, which mpirun, srun and flux carry over from
# the caller's shell: other people may have left a module there. Older interpreters have no option against that.
_BOOTSTRAP = "import sys; sys.path[:1] = filter(None, sys.path[:1]); import runpy; "
_BOOTSTRAP += "runpy.run_module(sys.argv[-1], run_name='__main__')"


def command_of(python: str, patience: float | None = None) -> list[str]:
    """Return the command that runs a member. It imports nothing from the current directory, and ends with its module.

    ``patience``: seconds in which the caller's first record must come; None: no limit.
    """
    return [python, "-u", "-c", _BOOTSTRAP, *([] if patience is None else [f"{patience:g}"]), MODULE]


def patience_of(argv: Sequence[str]) -> float | None:
    """Return the ``patience`` that was given to ``command_of``, from the arguments of the process that it runs."""
    return float(argv[-2]) if len(argv) > 2 else None


def versions() -> dict[str, str]:
    """Return the versions that must be the same on both sides, without importing torch; "" if it is not installed."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    return {"mlaunch": __version__, "Python": platform.python_version(), "torch": torch}


@dataclass(frozen=True)
class Heartbeat:
    """A caller's sign of life to a member.

    No stream is closed when a machine loses its network, so a member leaves if no heartbeat comes.

    Attributes:
        timeout: Seconds after which the member leaves if nothing more has come.
        farewell: The command by which it then gives the machines back; () if none is needed.
    """

    timeout: float
    farewell: tuple[str, ...]


@dataclass(frozen=True)
class AskOffer:
    """A question what a machine can give to a launch. ``options``: the launcher's, less those that differ here."""

    options: Mapping[str, Any]
    name: str
    cwd: str  # the caller's; used if it exists there
    sys_path: tuple[str, ...]  # the caller's, put behind the machine's own
    number: int = 0  # of the call, which the answer repeats


@dataclass(frozen=True)
class Offer:
    """A member's answer to ``AskOffer``: what its machine gives. ``clock``: its monotonic seconds now."""

    number: int
    local_world_size: int
    device_type: str
    visible_devices: str | None
    torch_version: str
    addresses: tuple[str, ...]  # at which other machines may find it; first the address of its default route
    identity: str  # of the machine and its network; names will not do: clones and containers may share one
    port: int  # one that is free there
    clock: float


@dataclass(frozen=True)
class NoOffer:
    """A member's answer that its machine can give nothing. ``text``: of the error."""

    number: int
    text: str


@dataclass(frozen=True)
class Listen:
    """An order to listen, so that other machines can try to connect. ``port``: None: stop listening."""

    port: int | None
    number: int = 0  # of the call, which the answer repeats


@dataclass(frozen=True)
class Listens:
    """A member's answer to ``Listen``. ``listens``: whether its machine listens now."""

    number: int
    listens: bool


@dataclass(frozen=True)
class Reach:
    """A question which of another machine's addresses this machine reaches."""

    addresses: tuple[str, ...]
    port: int
    number: int = 0  # of the call, which the answer repeats


@dataclass(frozen=True)
class Reached:
    """A member's answer to ``Reach``. ``failures``: for each address why there is no answer; "" if there is one."""

    number: int
    failures: tuple[str, ...]


MemberAnswer = Offer | NoOffer | Listens | Reached  # with the number of the question


@dataclass(frozen=True)
class Start:
    """An order to start the ranks of this machine. The content: the call; none if they run a command."""

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
    stays: str = ""  # the launch's id if its ranks stay, for their held objects; "": they do not stay


@dataclass(frozen=True)
class FromAgent:
    """A record of the machine's agent. The content: that of the descriptor which came with it."""

    record: AgentSays  # or one that the member sends in the agent's place


@dataclass(frozen=True)
class Printed:
    """Output of a rank; b"": it will print no more."""

    rank: int
    stream: int  # 1 or 2
    data: bytes


@dataclass(frozen=True)
class Rows:
    """The rows of the machine's board, by local rank."""

    rows: tuple[bytes, ...]


@dataclass(frozen=True)
class Reports:
    """The ranks' reports since the last such record, by local rank."""

    found: tuple[tuple[bytes, ...], ...]


@dataclass(frozen=True)
class Alive:
    """A member's answer to a ``Heartbeat``, while ranks run."""


@dataclass(frozen=True)
class MachineDone:
    """A member's last record: nothing of the launch is left on its machine.

    ``error``: what kept the launch from starting; ``late``: it was the deadline.
    """

    error: str = ""
    late: bool = False


@dataclass(frozen=True)
class ServerEnded:
    """A member's record that its fork server has ended, and the launch with it. ``what``: how the server ended."""

    what: str


# A member also receives the records for its launch's agent.
MemberHears = (
    (Heartbeat | AskOffer | Listen | Reach | Start)
    | (Cancel | Question | NextCall | EndCall | MeetAgain | EndRanks | ForPart)
)  # fmt: skip
MemberSays = (
    MemberAnswer
    | (FromAgent | Printed | Rows | Reports | Alive | ServerEnded | PartSays | MachineDone)
)  # fmt: skip
CallersStream: TypeAlias = FrameStream[MemberSays, MemberHears]
MembersStream: TypeAlias = FrameStream[MemberHears, MemberSays]
