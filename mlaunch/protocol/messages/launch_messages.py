"""The records that cross process boundaries, each written once.

launcher -> fork server   see server_messages.py
fork server -> launcher   Ready or NotReady
launcher -> agent         Cancel                                (the launch's own socket; its end means: caller gone)
launcher and agent        see kept_messages.py                  (ranks that stay between calls)
agent -> rank             RunCall, AnswerFile, Release          (a channel for each rank)
rank -> agent             Answer                                (the result queue)
agent -> launcher         all that begins with Rank, DeadlinePassed, ServerGone, NamesLeft, AgentFailed, Finished
link and agent            see machine_messages.py               (launches over several machines)
fork server -> launcher   AgentStarted; Reaped                  (the launch's last word)
"""

from __future__ import annotations

import enum
import signal

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.messages.prepared_messages import Details

Frames = tuple[tuple[str, str, str], ...]  # file, line and name, innermost first
Counts = tuple[tuple[int, int], ...]  # messages, by global rank
ANY = -1  # a rank that receives from whoever sends
CAUSE_DELAY = 0.1  # seconds in which the cause may follow its consequence


@frozen_record
class Ready:
    """What the fork server's torch offers. ``accelerator`` is the kind it was built for, None for a CPU build.

    ``lacks``: what mlaunch takes of it and it has not, in a sentence.
    """

    torch_version: str
    accelerator: str | None
    backends: tuple[str, ...]
    own_backend: str | None = None  # the one that torch takes for tensors of that kind
    runtime: str | None = None  # whose variables hide devices: "rocm" where the kind is "cuda"
    lacks: str = ""


@frozen_record
class NotReady:
    """Why the fork server cannot serve: the traceback of an import that failed, or one line that says it all."""

    reason: str


@frozen_record
class AgentStarted:
    """The launch's agent was forked. Attached: its pidfd, with which the launcher can end it if it does not answer."""

    pid: int


@frozen_record
class Cancel:
    """Asks the agent to stop its ranks, with signal ``number``; ``force`` skips the grace period.

    ``by``: the signal that has ended the caller; 0: none, or not known.
    """

    force: bool = False
    number: int = signal.SIGTERM
    by: int = 0


class Phase(enum.Enum):
    """Where in its life a rank is. The values are the words of messages."""

    STARTING = "starting"
    BINDING = "binding its device"
    JOINING = "joining the process group"
    RECEIVING = "receiving the function and its arguments"
    RUNNING = "running the function"
    COMMANDED = "running the command"
    ANSWERING = "sending its value"
    FAILING = "reporting an exception"
    RETURNED = "waiting for the others to return"
    SEVERED = "unable to answer: its function closed mlaunch's file descriptors"
    LEAVING = "shutting down"
    IDLE = "waiting for a call"


_MAY_END = frozenset({Phase.RUNNING, Phase.COMMANDED, Phase.RETURNED, Phase.LEAVING, Phase.IDLE})  # with code 0


class AnswerKind(enum.Enum):
    """How a rank answered."""

    VALUE = "returned"
    ERROR = "raised"
    UNPICKLABLE = "returned a value that cannot be pickled"
    INTERRUPTED = "was interrupted"  # because somebody asked for that


class Errand(enum.Enum):
    """What a rank is to do with what it is sent."""

    RUN = "run the call"
    TELL_NUMBERS = "tell the numbers of operations that it has entered in each process group"
    MEET = "meet the others in each process group"


@frozen_record
class RunCall:
    """Asks a rank to run a call: that in ``data``, the attached memfd (``attached``) or in memory. See AnswerFile."""

    number: int
    errand: Errand = Errand.RUN
    data: bytes = b""
    attached: bool = False
    details: Details | None = None  # for ranks that were prepared


@frozen_record
class AnswerFile:
    """Gives a rank a memfd for its answers, instead of the last one, which may be mapped. Attached: it."""


@frozen_record
class Release:
    """Tells a rank that nothing more comes: it may end."""


@frozen_record
class Answer:
    """A rank's answer to a call. ``data``: the value or RemoteError; if it is empty, that is in the memfd for answers.

    ``consequence``: it looks like one of another rank's failure (a peer closed the connection). ``stale``: modules of
    this rank, with commas, each with an @ and its file's time of change, which is newer than what it runs.
    """

    local_rank: int
    number: int  # of the call
    kind: AnswerKind
    consequence: bool = False
    stale: str = ""
    data: bytes = b""


@frozen_record
class RanksStarting:
    """``at``: the agent's monotonic seconds. The rest is what machines agreed on. Attached: ``BoardFds``."""

    at: float
    launch_id: str
    rank_start: int
    world_size: int


@frozen_record
class RankStarted:
    """A rank was forked. ``at``: the agent's monotonic seconds. Attached: the channel to it, if it stays, on which the
    launcher may send calls; the reading ends of its streams' pipes.
    """

    rank: int
    pid: int
    at: float
    channels: int = 0  # how many of the descriptors are no pipes
    host: str = ""  # an engine's machine; "": this one


@frozen_record
class RankAnswered:
    """An Answer on its way to the launcher, attached its memfd if it has no data. ``at``: agent's monotonic seconds."""

    rank: int
    pid: int
    kind: AnswerKind
    consequence: bool
    at: float
    stale: str = ""
    data: bytes = b""


@frozen_record
class RankGone:
    """A rank was reaped. ``exitcode`` is negative for a signal; ``stopped``: we had told it to stop before.

    Attached: the memfd with the Python stacks that faulthandler wrote if the rank crashed.
    """

    rank: int
    pid: int
    exitcode: int
    phase: Phase
    answered: bool
    stopped: bool
    at: float
    hints: tuple[str, ...] = ()
    peak_memory: int = 0  # bytes
    of_python: bool = True  # it was no other program

    @property
    def failed(self) -> bool:
        """Whether it ended badly: also with code 0, where nobody may say that all is done (while it unpickles, say)."""
        return self.exitcode != 0 or not (self.answered or self.stopped or self.phase in _MAY_END)


@frozen_record
class GroupNumbers:
    """What a rank has begun with one backend of a process group: ``number`` collectives, and messages.

    ``latest``: the collective of that number; "": not known. ``completed``: how many of them the device has done; None:
    torch's flight recorder does not tell.
    """

    name: str
    members: tuple[int, ...]
    number: int
    latest: str = ""
    sent: Counts = ()
    received: Counts = ()
    completed: int | None = None


@frozen_record
class RankWait:
    """What a thread of a rank waits for.

    Attributes:
        thread: Its name; "": the main thread.
        operation: As users call it; "": not known.
        group: Names a ``GroupNumbers``; of a group that is being made, its name for torch.
        number: Which collective of the group.
        peer: Of a message: the other rank, or ``ANY``; None: it is no message.
        tag: Of a message.
        members: Of the group.
        frames: Of another thread than the main one.
    """

    thread: str
    operation: str
    group: str = ""
    number: int = 0
    peer: int | None = None
    tag: int = 0
    members: tuple[int, ...] = ()
    frames: Frames = ()


@frozen_record
class Operations:
    """What a rank has begun in each of its process groups, and what its threads wait for. ``made``: how many groups
    torch has made there."""

    groups: tuple[GroupNumbers, ...] = ()
    waits: tuple[RankWait, ...] = ()
    made: int = 0


@frozen_record
class RankStacks:
    """What a rank was doing when it was about to be stopped. ``text`` is empty if it did not answer in time;
    ``state`` is the kernel's letter for it. ``entered``: what it has begun in its process groups, if known."""

    rank: int
    phase: Phase
    state: str
    text: str
    entered: Operations | None = None


@frozen_record
class DeadlinePassed:
    """The call's deadline passed while ranks were running."""


@frozen_record
class ServerGone:
    """The rendezvous server died while ranks were running."""

    pid: int
    exitcode: int
    at: float


@frozen_record
class NamesLeft:
    """Files in /dev/shm that came during the launch, and that no process uses any more."""

    paths: tuple[str, ...]
    size: int  # bytes
    host: str


@frozen_record
class AgentFailed:
    """The agent itself could not go on, for lack of file descriptors, processes or memory: a traceback."""

    traceback: str


@frozen_record
class Finished:
    """Nothing of the launch is left but its agent, which exits: its launcher need not wait for that."""


@frozen_record
class Reaped:
    """Every process of the launch is gone. ``exitcode`` is the agent's."""

    exitcode: int


@frozen_record
class RemoteError:
    """An exception on its way out of a rank. ``pickled`` is None if it does not survive pickling."""

    type_name: str
    message: str
    traceback: str
    phase: Phase
    host: str
    device: str
    pickled: bytes | None
