"""The records that the processes of a launch send each other, each written once. ``server_messages`` has the others.

launcher -> agent     Cancel, Question; Details                 (the launch's own socket; its end means: caller gone)
agent -> launcher     all that begins with Rank, DeadlinePassed, ServerGone, NamesLeft, AgentFailed, Told, Finished
fork server -> launcher   AgentStarted; Reaped                  (the launch's first and last word, on that socket)
agent -> rank         RunCall, AnswerFile, Release              (a channel for each rank)
rank -> agent         Answer                                    (the result queue)
agent -> rank         Question, ForPart                         (a channel to its control thread)
rank -> agent         Told                                      (the answer is in a memfd that came with the question)

A launch that was prepared gets its ``Details`` when its call comes, and says CallBegun; one that ends without that has
run nothing. Ranks that stay:

launcher -> agent     NextCall, EndCall, EndRanks, MeetAgain
launcher -> rank      DirectCall                                (instead of NextCall, if all ranks are on this machine)
rank -> launcher      DirectAnswer                              (to such a call, if it is a small value)
agent -> launcher     CallOver                                  (over several machines also RanksStand, RanksBack)

Features' parts in these processes send each other ForPart, away from the caller, and PartSays, towards it.
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
ANY = -1  # a rank that receives from whoever sends
CAUSE_DELAY = 0.1  # seconds in which the cause may follow its consequence


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
        """True if it ended badly: also with code 0, where nobody may say that all is done (while it unpickles, say)."""
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


@frozen_record
class Waiting:
    """What the launch waits for while machines join, for people."""

    text: str


@frozen_record
class Refused:
    """The machines do not come together, and why. ``late``: because the time for it is over."""

    text: str
    late: bool = False


@frozen_record
class CallBegun:
    """The ranks of a prepared launch were there, and have been sent the call."""


@frozen_record
class ForPart:
    """A word for a feature's part. ``call``: the number of the call that it is about."""

    feature: str
    call: int
    word: object


@frozen_record
class PartSays:
    """What a feature's part has for its part nearer to the caller."""

    feature: str
    news: object


class Ask(enum.Enum):
    """What an agent asks the control thread of a rank."""

    NUMBERS = "the numbers of the operations that it has entered since the call of ``Question.call`` began"
    ENTERED = "the number of the latest operation that it has entered in each of its process groups"
    TURNS = "how often its function has come by what features count: a larger number is progress"
    PLACE = "the Python frames of its main thread, as ``stack_dump.main_frames`` returns them"


@frozen_record
class Question:
    """Asks a rank something, whatever its main thread does; or an agent, as who looks at a launch (``visitors.py``).

    ``number``: as the one who asks counts questions. Attached, for a rank: the memfd for the answer.
    """

    number: int
    about: Ask | ForPart | bytes
    call: int = 0


@frozen_record
class Told:
    """The question of this number is answered. Attached, by an agent: a status in JSON."""

    number: int


# Ranks that stay

# Plain tuples: to find a class for each record would cost processes that wake for a short call too much.

# The call's number, and the call; if it is empty, that is in the attached memfd.
DirectCall = tuple[int, bytes]
# The local rank, the call's number, the modules as in Answer, and the value.
DirectAnswer = tuple[int, int, str, bytes]


@frozen_record
class NextCall:
    """Makes ranks that stay run their next call. ``data``: the call; empty: it is in the attached memfd.

    ``deadline``: seconds, None: no limit.
    """

    number: int
    deadline: float | None
    data: bytes = b""


@frozen_record
class EndCall:
    """Asks to end this call as Ctrl-C would, and to find out whether the ranks can go on. An older one's is over.

    ``late``: seconds of its deadline, which its launcher has kept and which has passed; None: it is ended otherwise.
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
    """Tells where a machine's ranks stand in a call that is to end. ``back``: global ranks that have come back from it.

    Attached: a memfd with the numbers of those that have told them, by global rank. The launcher, who hears all
    machines, finds out whether somebody works in vain.
    """

    number: int
    back: tuple[int, ...]


@frozen_record
class RanksBack:
    """A machine's ranks have come back from a call that did not end by itself. Attached: as of RanksStand, of all.

    It is for the launcher to compare these.
    """

    number: int


@frozen_record
class MeetAgain:
    """Says that the numbers of all machines' ranks agree: they are to meet, after which this call is over."""

    number: int


@frozen_record
class EndRanks:
    """Asks ranks that stay to leave; they are stopped after the grace period."""


# Who sends what. A channel is typed by what comes and what goes: ``Channel[RankSays, RankHears]`` is the agent's end of
# its channel to a rank, ``Channel[RankHears, RankSays]`` the rank's. So a type checker finds a record that is sent to
# somebody who does not take it, and one that a receiver forgets.

# A launcher and the launch's agent. The fork server says the first word and the last one.
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
