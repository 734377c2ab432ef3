"""The hook points: what a feature may do in each process that it takes part in.

A feature is a folder, ``mlaunch/profile``, with a file for each of these processes, and one line in
``mlaunch/features.py``. The file's name says which process runs it::

    caller.py   part(options, spell) -> CallerPart      rank.py     part(section, rank) -> RankPart
                noted(news, name) -> Note                           answer(about), hear(word, *fds), turns() -> int
    agent.py    part(scene) -> AgentPart                member.py   part(section) -> MachinePart
    command.py  findings(), for ``mlaunch doctor``
    kernel.py   in a notebook's kernel
    plugin.py   what pytest loads                       server.py   in a fork server
    wire.py     what these send each other

``core/load.py`` imports a file if a launch has asked for the feature, and calls its ``part``. The caller's part has a
``section``, which the launch's spec carries to the processes that make a part of it (``Feature.hooks``). A feature that
no option asks for has no part: methods take its module from ``core/load.py`` (``cells``), users name it (``engines``),
or its ``caller.py`` has ``server(environ, like)``, a fork server for this process or None (``warm``). A command of its
own is added by ``add_command(commands)``, and ``rows(environ)`` are its lines in ``mlaunch ps``. If ranks run something
in place of a function, the spec has a ``Target``, whose feature has ``rank(args, target) -> Rank`` in ``rank.py``
(``run``).

While a call runs, the parts talk. The caller's ``tell`` reaches ``AgentPart.hear``; ``Scene.ask`` and ``Scene.tell``
reach ``answer`` and ``hear`` of ``rank.py``, in the rank's control thread; ``Scene.say`` reaches ``noted``. The files
are imported with the first word for them. ``turns`` returns how many steps the rank's function has made, as the feature
counts them: a larger number is progress, which ``stall=`` sees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

    from mlaunch.caller.fork_server import ForkServer
    from mlaunch.caller.launch.settle import Ended
    from mlaunch.core.records import Grant, Need
    from mlaunch.protocol.spec import LaunchSpec

Spell = Callable[[str, object], str]  # an option and its value as the user gave them: "profile='a'", "--profile a"
Tell = Callable[[str], None]  # shows the user a sentence
TellLooker = Callable[[Mapping[str, Any]], None]  # sends a process that looks at a launch its status


class CallerPart:
    """A feature's part of one call, in the process that calls.

    Made before the call's first attempt. It refuses the call by an OSError or ValueError.
    """

    # The section for the call's other processes, pickled; None: nothing. The signals in its ``signals`` are for this
    # part, so ranks do not end by them.
    section: object = None

    @property
    def is_last(self) -> bool:
        """True if no attempt follows the present one, however that ends: for ``stop_on=``, once a signal has come."""
        return False

    def around(self) -> contextlib.AbstractContextManager[object]:
        """Return what to hold around a call that this thread waits for. ``stop_on=`` takes its signals over."""
        return contextlib.nullcontext()

    def attach(self, tell: Callable[[object], None]) -> None:
        """Receive the way to this feature's part in the agent of a new attempt. Signal handlers may use it, too."""

    def acquire(self, grant: Grant, server: ForkServer, name: str) -> Generator[Need, None, Grant]:  # noqa: ARG002
        """Wait for what an attempt of ``name()`` needs; return what it may use. Closed, it gives up its place."""
        return grant
        yield

    def planned(self, spec: LaunchSpec) -> None:
        """Prepare for an attempt that is about to start. ``profile=`` raises ValueError for ranks that do not exist."""

    def heard(self, news: object) -> None:
        """Receive what this feature's part on a machine of an engine has sent, in the thread that reads it."""

    def noticed(self, word: object) -> None:
        """Receive a ``Noticed`` of an attempt's agent, and at last an ``Ended``. ``events=`` reports them."""

    def settled(self, ended: Ended, tell: Tell) -> None:
        """Act on how the last attempt ended, before the call returns. ``profile=`` writes its file."""

    def close(self) -> None:
        """Release what the part holds, however the call ends: also by an interrupt, or if another part refuses it."""


class Watcher:
    """A feature's watcher of a call that takes longer than a moment, in the process that has made the call.

    Made by ``watch(call)`` of its ``caller.py`` (the hook ``caller.watch``), which may return None. ``stall=`` has one.
    """

    due: float = float("inf")  # when ``take_steps`` is called, in monotonic seconds

    def take_steps(self) -> None:
        """Ask the call's agent, or tell what was found: see ``caller/launch/handle.py``."""


class RankPart:
    """A feature's part of one rank, made as the first thing in its process."""

    place: str = ""  # where it has placed the rank, for ``mlaunch ps`` and reports
    pipes: Mapping[int, int]  # the rank's streams other than stdout and stderr, by number (``OutputPlan``)
    decides: tuple[str, ...] = ()  # settings (``protocol/settings.py``) that the rank does not take from its caller

    def begin(self, spec: LaunchSpec, local_rank: int) -> Mapping[str, str]:  # noqa: ARG002 - others need them
        """Act before the rank has a thread, takes its surroundings or imports anything. ``numa=`` binds it.

        Return environment variables, used if the user has not set them. An exception here is the rank's failure.
        """
        return {}

    def before_join(self) -> None:
        """Act with the rank's surroundings in place, before it binds a device: ``debug=`` takes ``input`` over."""

    def around_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call in place of the function. ``debug=`` opens a prompt where it fails."""
        return function

    def around_call(self) -> contextlib.AbstractContextManager[None]:
        """Return what to hold while the function or script runs. ``profile=`` records its steps."""
        return contextlib.nullcontext()


class AgentPart:
    """A feature's part of a launch, in its agent: made as ``part(scene)`` with the launch, or by the first word."""

    until_the_end: bool = False  # its steps are taken while the launch is being ended, too

    @property
    def looks_for_answers(self) -> bool:
        """True if it must soon learn of answers that ranks which stay send to their caller past the agent."""
        return False

    def hear(self, word: object, call: int, *fds: int) -> None:
        """Receive a word from the caller's part about this call, which may be over: see ``Scene.call``.

        ``fds``: the descriptors that came with it; they are closed afterwards.
        """

    def hear_machines(self, word: object) -> None:
        """Receive a word from the meeting of the machines: see ``Scene.tell_machines``."""

    def visited(self, pid: int) -> None:
        """Do what the command in that process has asked for; it waits for the call's end. ``mlaunch stop`` does."""

    def asked(self, word: bytes, tell: TellLooker) -> None:
        """Answer a process that has sent one of ``Feature.words``, and waits. ``mlaunch why`` does."""

    def welcome(self, visitor: socket.socket, word: str) -> None:  # noqa: ARG002
        """Take over the connection of a process that has a word for this feature. ``mlaunch debug`` does."""
        visitor.close()

    def fds(self) -> Sequence[int]:
        """Return descriptors that wake the agent for ``take_steps`` when they can be read."""
        return ()

    def facts(self) -> Mapping[str, object]:
        """Return what ``mlaunch ps`` shows of this feature, by name; numbers and texts."""
        return {}

    def due(self) -> Sequence[float]:
        """Return when ``take_steps`` is due even if nothing has come, on the scene's clock."""
        return ()

    def take_steps(self) -> None:
        """Take the steps that are due. Called whenever anything has come; see ``until_the_end``."""

    def over(self) -> None:
        """Forget what was about a call: it is over, or the next one begins."""

    def close(self) -> None:
        """Release what the part holds: the launch is over."""


class MachinePart:
    """A feature's part of a launch on one machine of an engine.

    Made before the launch starts there. It refuses the launch by an OSError.

    Attributes:
        section: What the ranks of this machine get in place of the caller's section.
    """

    def __init__(self, section: object) -> None:
        self.section = section

    def last_words(self, spec: LaunchSpec) -> Iterator[object]:  # noqa: ARG002 - others need it
        """Yield the words for the caller's part now that this machine's ranks have ended, at the stream's pace."""
        yield from ()

    def close(self) -> None:
        """Release what the part holds, however the launch has ended."""
