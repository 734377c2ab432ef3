"""The records that the processes of a launch send each other, each written once. ``server_messages`` has the others.

launcher -> agent     Cancel, Question; Details                 (the launch's own socket; its end means: caller gone)
agent -> launcher     all that begins with Rank, DeadlinePassed, ServerGone, NamesLeft, AgentFailed, Told, Finished
fork server -> launcher   AgentStarted; Reaped                  (the launch's first and last word, on that socket)
agent -> rank         RunCall, AnswerFile, Release              (a channel for each rank)
rank -> agent         Answer                                    (the result queue)
agent -> rank         Question, ForPart                         (a channel to its control thread)
rank -> agent         Told                                      (the answer is in a memfd that came with the question)

A prepared launch gets its ``Details`` when its call comes, and then sends CallBegun; one that ends without CallBegun
has run nothing. Ranks that stay:

launcher -> agent     NextCall, EndCall, EndRanks, MeetAgain
launcher -> rank      DirectCall                                (instead of NextCall, if all ranks are on this machine)
rank -> launcher      DirectAnswer                              (to such a call, if it is a small value)
agent -> launcher     CallOver                                  (over several machines also RanksStand, RanksBack)

The parts of features in these processes send each other ForPart, away from the caller, and PartSays, towards it.
"""

from __future__ import annotations

import enum
import signal
from typing import NoReturn, TypeAlias

from mlaunch.base.exceptions import RankFailure
from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.spec import Details

Frames = tuple[tuple[str, str, str], ...]  # file, line and name, innermost first
Counts = tuple[tuple[int, int], ...]  # messages, by global rank
ANY = -1  # the peer of a rank that receives from any rank
CAUSE_DELAY = 0.1  # seconds by which the cause may arrive after its consequence


@frozen_record
class AgentStarted:
    """The launch's agent was forked.

    Attached: its pidfd, with which the launcher can end an agent that does not answer.
    """

    pid: int


@frozen_record
class Cancel:
    """A request to the agent to stop its ranks, with signal ``number``; ``force`` skips the grace period.

    ``by``: the signal that has ended the caller; 0: none, or unknown.
    """

    force: bool = False
    number: int = signal.SIGTERM
    by: int = 0


class Phase(enum.Enum):
    """The phase that a rank is in. The values are the words of messages."""

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
    INTERRUPTED = "was interrupted"  # on request


class Errand(enum.Enum):
    """The kind of work that a rank receives."""

    RUN = "run the call"
    TELL_NUMBERS = "tell the numbers of operations that it has entered in each process group"
    MEET = "meet the others in each process group"


@frozen_record
class RunCall:
    """A request to a rank to run a call: the one in ``data``, in the attached memfd (``attached``) or in its memory.

    See AnswerFile.
    """

    number: int
    errand: Errand = Errand.RUN
    data: bytes = b""
    attached: bool = False
    details: Details | None = None  # for ranks that were prepared


@frozen_record
class AnswerFile:
    """A memfd for a rank's answers. It replaces the last one, which may be mapped. Attached: the memfd."""


@frozen_record
class Release:
    """The message to a rank that no more calls come: it may end."""


@frozen_record
class Answer:
    """A rank's answer to a call. ``data``: the value or RemoteError; if it is empty, that is in the memfd for answers.

    ``consequence``: the error looks like one of another rank's failure (a peer closed the connection). ``stale``:
    modules of this rank, with commas, each with an @ and the time of change of its file, which is newer than the code
    that the rank runs.
    """

    local_rank: int
    number: int  # of the call
    kind: AnswerKind
    consequence: bool = False
    stale: str = ""
    data: bytes = b""


@frozen_record
class RanksStarting:
    """The ranks are starting. ``at``: the agent's monotonic seconds.

    ``launch_id`` to ``world_size``: what the machines agreed on. ``pid``: the agent's, as this record may overtake
    ``AgentStarted``; 0: an engine's launch. Attached: ``BoardFds``.
    """

    at: float
    launch_id: str
    rank_start: int
    world_size: int
    pid: int = 0


@frozen_record
class RankStarted:
    """A rank was forked. ``at``: the agent's monotonic seconds.

    Attached: the channel to it, if it stays, on which the launcher may send calls; the reading ends of its streams'
    pipes.
    """

    rank: int
    pid: int
    at: float
    channels: int = 0  # how many of the descriptors are channels, not pipes
    host: str = ""  # the engine's machine; "": this one


@frozen_record
class RankAnswered:
    """An Answer that is sent on to the launcher.

    ``at``: agent's monotonic seconds. Attached: its memfd, if without data.
    """

    rank: int
    pid: int
    kind: AnswerKind
    consequence: bool
    at: float
    stale: str = ""
    data: bytes = b""


@frozen_record
class RankGone:
    """A rank was reaped. ``exitcode`` is negative for a signal; ``stopped``: the agent had asked it to stop before.

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
    of_python: bool = True  # it was not another program

    @property
    def failed(self) -> bool:
        """True if the rank ended badly: also with code 0 in a phase in which it may not end (unpickling, say)."""
        return self.exitcode != 0 or not (self.answered or self.stopped or self.phase in _MAY_END)


@frozen_record
class GroupNumbers:
    """The operations that a rank has begun with one backend of a process group: ``number`` collectives, and messages.

    ``latest``: the collective of that number; "": unknown. ``completed``: how many of them the device has completed;
    None: torch's flight recorder does not tell.
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
    """The operation that a thread of a rank waits for.

    Attributes:
        thread: Its name; "": the main thread.
        operation: As users call it; "": unknown.
        group: The name of a ``GroupNumbers``; for a group that is being made, its name for torch.
        number: Which collective of the group.
        peer: Of a message: the other rank, or ``ANY``; None: it is no message.
        tag: Of a message.
        members: Of the group.
        frames: Of a thread other than the main one.
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
    """The operations that a rank has begun in each of its process groups, and those that its threads wait for.

    ``made``: how many groups torch has made there.
    """

    groups: tuple[GroupNumbers, ...] = ()
    waits: tuple[RankWait, ...] = ()
    made: int = 0


@frozen_record
class RankStacks:
    """The activity of a rank just before it was stopped. ``text`` is empty if it did not answer in time.

    ``state`` is the kernel's letter for it. ``entered``: the operations that it has begun in its process groups, if
    known.
    """

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
    """Files in /dev/shm that appeared during the launch, and that no process uses any more."""

    paths: tuple[str, ...]
    size: int  # bytes
    host: str


@frozen_record
class AgentFailed:
    """The agent itself failed, for lack of file descriptors, processes or memory: a traceback."""

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
    """An exception that leaves a rank. ``pickled`` is None if it does not survive pickling."""

    type_name: str
    message: str
    traceback: str
    phase: Phase
    host: str
    device: str
    pickled: bytes | None


@frozen_record
class Waiting:
    """A text for people on what the launch waits for while machines join."""

    text: str


@frozen_record
class Refused:
    """The reason why the machines do not come together. ``late``: because the time for it is over."""

    text: str
    late: bool = False


@frozen_record
class CallBegun:
    """The ranks of a prepared launch were ready, and have been sent the call."""


@frozen_record
class ForPart:
    """A message to a feature's part. ``call``: the number of the call that it is about."""

    feature: str
    call: int
    word: object


@frozen_record
class PartSays:
    """A message from a feature's part to its part nearer to the caller."""

    feature: str
    news: object


class Ask(enum.Enum):
    """The questions of an agent to the control thread of a rank."""

    NUMBERS = "the numbers of the operations that it has entered since the call of ``Question.call`` began"
    ENTERED = "the number of the latest operation that it has entered in each of its process groups"
    TURNS = "how often its function has come by what features count: a larger number is progress"
    PLACE = "the Python frames of its main thread, as ``frames.main_frames`` returns them"


@frozen_record
class Question:
    """A question to a rank, whatever its main thread does; or to an agent, as from a visitor (``registry.py``).

    ``number``: the asking process counts its questions. Attached, for a rank: the memfd for the answer.
    """

    number: int
    about: Ask | ForPart | bytes
    call: int = 0


@frozen_record
class Told:
    """The question of this number is answered. Attached, if an agent sends it: a status in JSON."""

    number: int


# Ranks that stay

# Plain tuples: finding a class for each record would cost too much in processes that wake for a short call.

# The call's number, and the call; if it is empty, that is in the attached memfd.
DirectCall = tuple[int, bytes]
# The local rank, the call's number, the modules as in Answer, and the value.
DirectAnswer = tuple[int, int, str, bytes]


@frozen_record
class NextCall:
    """The next call of ranks that stay. ``data``: the call; empty: it is in the attached memfd.

    ``deadline``: seconds, None: no limit.
    """

    number: int
    deadline: float | None
    data: bytes = b""


@frozen_record
class EndCall:
    """A request to end this call as Ctrl-C would, and to find out whether the ranks can continue.

    For an older call it has no effect: that is over. ``late``: seconds of its deadline, which its launcher has kept and
    which has passed; None: the call is ended for another reason.
    """

    number: int
    late: float | None = None


@frozen_record
class CallOver:
    """All ranks that stay have come back from a call, and can take the next one.

    ``answers``: the last ones, up to as many as a record can carry the memfds of. Attached, in this order: those of
    answers without data.
    """

    number: int
    answers: tuple[RankAnswered, ...] = ()


@frozen_record
class RanksStand:
    """The position of a machine's ranks in a call that is to end. ``back``: global ranks that have come back.

    Attached: a memfd with the numbers of the ranks that have sent them, by global rank. The launcher, which receives
    this from all machines, finds out whether a rank works without a chance to finish.
    """

    number: int
    back: tuple[int, ...]


@frozen_record
class RanksBack:
    """A machine's ranks have come back from a call that did not end by itself.

    Attached: as for RanksStand, of all these ranks. The launcher compares them.
    """

    number: int


@frozen_record
class MeetAgain:
    """The message that the numbers of all machines' ranks agree: the ranks must meet, and then this call is over."""

    number: int


@frozen_record
class EndRanks:
    """A request to ranks that stay to leave; they are stopped after the grace period."""


# The records by sender. The type of a channel names what comes and what goes: ``Channel[RankSays, RankHears]`` is the
# agent's end of its channel to a rank, ``Channel[RankHears, RankSays]`` the rank's. So a type checker finds a record
# that is sent to a receiver which does not take it, and one that a receiver does not handle.

# A launcher and the launch's agent. The fork server sends the first word and the last one.
AgentHears = (Details | Cancel | Question) | (NextCall | EndCall | EndRanks | MeetAgain) | ForPart
AgentSays = (
    (AgentStarted | AgentFailed | CallBegun | RanksStarting | RankStarted | RankAnswered | RankStacks | RankGone)
    | (DeadlinePassed | ServerGone | NamesLeft | Finished | Reaped | Told)
    | (CallOver | RanksStand | RanksBack | PartSays)
    | (Waiting | Refused | RankFailure)
)
LaunchersEnd: TypeAlias = Channel[AgentSays, AgentHears]
AgentsEnd: TypeAlias = Channel[AgentHears, AgentSays]
# An agent and one of its ranks, which answers on the result queue; and this rank's control thread.
RankHears = RunCall | AnswerFile | Release | DirectCall
RankSays = NoReturn
ControlHears = Question | ForPart
ControlSays = Told
