"""The fork server: it imports torch once, forks an agent per launch, and cleans up after each. ::

    launcher --StartLaunch: spec, call, socket--> fork server --fork--> agent --fork--> ranks
       ^ ^--AgentStarted, then Reaped, the last record, on the launch's socket--+
       +--all else of the launch, on the same socket: the agent itself

    importing --Ready--> serving --20 ms without a launch--> improving, preparing the next launch --> serving

The same code serves as the warm server of a caller, as a fresh interpreter that serves one launch
(``start_method="spawn"``) and as a fork of the caller that serves one (``"fork"``). It never touches an accelerator,
runs no user code and has one Python thread, so its forks are clean.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from mlaunch.base import linux, orphans
from mlaunch.base.fds import OwnedFds, close_all
from mlaunch.base.own_process import name_process
from mlaunch.base.text import both_ends
from mlaunch.forkserver import imports
from mlaunch.forkserver.children import Child, Children, Launch, NextLaunch, begin_count, begin_launch
from mlaunch.forkserver.imports import LateImports
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import Channel, assert_never
from mlaunch.protocol.server_messages import (
    CountDevices,
    LikeFds,
    NotReady,
    PrepareNext,
    Ready,
    Retire,
    ServerHears,
    ServerSays,
    StartFds,
    StartLaunch,
)
from mlaunch.rank import device

_REASON = 8192  # bytes of the error of an import that a person is shown
_IDLE = 0.02  # seconds after a launch without another
_SOON_ENOUGH = 3  # launches in a row without such a pause


def main(control_fd: int, caller: int, preload: Sequence[str] = ()) -> NoReturn:
    """Serve in a fresh interpreter; ``caller`` is the pid that started it, ``preload`` modules to import, too."""
    linux.open_standard_streams()
    linux.die_with_peer(control_fd)
    serve(Channel.adopt(control_fd), caller, preload=preload)


def serve(
    control: Channel[ServerHears, ServerSays],
    caller: int,
    call: Call | None = None,
    preload: Sequence[str] = (),
    offered: Ready | None = None,
    caller_fd: int = -1,
) -> NoReturn:
    """Serve until the caller closes its end or dies. ``call``: the call, in a fork of the caller.

    The standard streams are open. ``offered``: what torch offers, if it is imported already. ``caller_fd``: the
    caller's pidfd, if the caller is not our parent.
    """
    code = 1
    try:
        name_process("fork server", str(caller))
        # A scheduler sends it to all processes of a job; this one cleans up and ends with the caller. Ranks unblock it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        # From a terminal or a scheduler: the caller decides what they mean. Ranks get the defaults.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would make waiting for children fail
        # This process adopts what agents leave, as agents adopt what ranks leave.
        linux.adopt_orphans()
        # SIGCONT when the caller dies: a stopped server would not notice it.
        linux.wake_with(caller)
        if call is None:
            os.chdir("/")  # not to keep a file system busy
        _ForkServer(control, caller, call, preload, offered, caller_fd).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        orphans.end_children()
        os._exit(code)


@dataclass
class _ForkServer:
    control: Channel[ServerHears, ServerSays]
    caller: int
    call: Call | None
    preload: Sequence[str] = ()
    offered: Ready | None = None
    caller_fd: int = -1
    children: Children = field(default_factory=Children)
    retiring: bool = False
    launched: int = 0  # launches that have ended
    settled: bool = False
    next: NextLaunch = field(default_factory=NextLaunch)
    late: LateImports = field(default_factory=LateImports)

    def __post_init__(self) -> None:
        self.settled = self.offered is not None  # True: the parent of this process has settled

    def run(self) -> None:
        try:
            caller = os.pidfd_open(self.caller) if self.caller_fd < 0 else self.caller_fd
        except ProcessLookupError:
            return
        if not self._prepare():
            return
        while self.children or not self.retiring:
            if self.retiring:
                self.children.dismiss()
            ready = set(linux.wait_readable(self._sources(caller), self._timeout()))
            self._turn(ready, caller)
            if caller in ready:
                break
            if self.control.fileno() in ready and not self._obey(caller):
                break
        self.children.outlive_caller()

    def _turn(self, ready: Collection[int], caller: int) -> None:
        """React to children, or use a pause."""
        if not ready:
            self._use_pause(caller)
        if self.late.hears(ready):
            self._try_late(caller)
        for child in self.children.ended(ready):
            self._finish(child, caller)
        for _ in self.children.hear_free(ready):
            self._count_launch(caller)

    def _prepare(self) -> bool:
        """Import, and send the first record; False if that fails."""
        asked: int | None = None
        first: Ready | NotReady
        # An import cannot be interrupted, and takes seconds on a slow machine.
        linux.die_with_peer(self.control.fileno())
        try:
            if self.offered is not None:
                imports.add(self.preload)
                first = self.offered
            else:
                first, asked = imports.load(self.preload)
        except (Exception, SystemExit) as error:
            told = isinstance(error, (device.TooOldError, imports.PreloadError))
            first = NotReady(str(error) if told else both_ends(traceback.format_exc(), _REASON))
        linux.outlive_peer(self.control.fileno())  # before the record, after which the caller may send
        self.control.try_send(first)
        if asked is not None:
            imports.finish(asked, collect=self.call is None)
        return isinstance(first, Ready)

    def _sources(self, caller: int) -> list[int]:
        control = [] if self.late.holds() else [self.control.fileno()]
        return [caller, *control, *self.late.fds(), *self.children.sources()]

    def _timeout(self) -> float | None:
        """Return the seconds until a pause begins; None if there is nothing to do in it, or nothing was launched."""
        idle = (self.launched > 0 or self.next.wanted) and not self.children.busy and not self.retiring
        wanted = not self.settled or self.next.wanted or self.late.wanted()
        soon = self.next.wanted and self.next.soon and not self.retiring
        pause = _IDLE if self.children.resting or soon or (idle and wanted and self.call is None) else None
        holds = self.late.holds()
        return min(pause or holds, holds) if holds else pause

    def _use_pause(self, caller: int) -> None:
        self.children.dismiss()
        may_prepare = self.next.soon if self.children.busy else not self._improve(caller)
        if may_prepare and self.next.wanted:
            self._prepare_next(caller)

    def _improve(self, caller: int) -> bool:
        """Make later launches faster, if there is a way left; else False."""
        if self._try_late(caller):
            return True
        if not self.settled:  # a fork takes 1 ms after it, and 3.5 before
            imports.settle()
            self.settled = True
            self.children.dismiss()  # a new agent has it, too
            return True
        return False

    def _try_late(self, caller: int) -> bool:
        """Try an import that ranks had to do, if there is one, beside running launches."""
        if not self.late.wanted() or self.call is not None or self.retiring:
            return False
        child = self.late.begin(self._owned(caller))
        if child is not None:
            self.children.add(child)
        return True

    def _obey(self, caller: int) -> bool:
        """Do what the caller asks for; False if it is gone."""
        record, fds = self.control.hear()
        match record:
            case None:
                return False
            case StartLaunch():
                self._start(fds, caller, record)
            case PrepareNext():
                if fds[1:]:
                    self.next.remember(LikeFds(*fds[1:]))
                self.next.want(fds[0], soon=record.soon)
                # By the agent of the trial that has just ended: a new one costs a fork, 1,700 page faults and an end,
                # on cores that other trials want.
                if record.soon and self.next.wanted and self.children.resting and not self.retiring:
                    self._prepare_next(caller)
            case CountDevices():
                if (child := begin_count(*fds, named=record.named)) is not None:
                    self.children.add(child)
            case Retire():
                self.retiring = True
            case _:
                assert_never(record)
        return True

    def _start(self, fds: list[int], caller: int, order: StartLaunch) -> None:
        own, following, held = StartFds.of(fds, order.held)
        self.next.forget()
        self.children.longest_grace = max(self.children.longest_grace, order.grace_period)
        launch = Launch(own, self.call, more=order.more, directory=order.directory, held=tuple(held))
        self._launch(launch, caller)  # agent and ranks inherit what is held, under the same numbers
        close_all([*([] if own.call is None else [own.call]), *held])
        self.next.remember(LikeFds(own.spec, own.stdout, own.stderr))
        if following is not None:
            self.next.want(following, soon=bool(held))
        else:
            self.next.forget()

    def _prepare_next(self, caller: int) -> None:
        self._launch(Launch(self.next.take(), more=True), caller)

    def _launch(self, launch: Launch, caller: int) -> None:
        begin_launch(launch, self.children, lambda: self._owned(caller, spare=launch.fds.there))

    def _owned(self, caller: int, spare: Sequence[int] = ()) -> OwnedFds:
        ours = {caller, self.control.fileno(), *self.next.fds()} | self.children.fds()
        return OwnedFds(*ours - set(spare))

    def _finish(self, child: Child, caller: int) -> None:
        """Reap a child and all that it left, then send its last record."""
        self.children.remove(child)
        os.close(child.pidfd)
        status = child.reap()
        # Before the last record, which means that nothing is left.
        orphans.end_children(spare={other.pid for other in self.children})
        child.say_last(os.waitstatus_to_exitcode(status))
        if child.is_trial:
            self.late.end(status)
            self.settled = False
            self.children.dismiss()
        elif child.is_agent and not child.rests:
            self._count_launch(caller)

    def _count_launch(self, caller: int) -> None:
        self.launched += 1
        if self.late.wanted_now():  # noted by a rank that did not finish its import
            self._try_late(caller)
        if self.launched >= _SOON_ENOUGH and self.call is None and not self.retiring:
            self._improve(caller)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
