"""One rank, from fork to exit: receive the call, run it, answer.

starting -> binding its device -> joining the process group -> receiving -> running -> sending its value
-> waiting for the others to return -> leaving

The answer goes through the result queue, its content through the rank's memfd. Everything here runs in the child.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing.process
import multiprocessing.util
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from mlaunch.base import linux, seeding
from mlaunch.caller import nesting
from mlaunch.protocol import calls, payload, pickling, stack_dump
from mlaunch.protocol.calls import Call
from mlaunch.protocol.messages import Answer, Kind, Phase, RemoteError
from mlaunch.protocol.results import Answers
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.rank import device, process, progress

if TYPE_CHECKING:
    import torch

# What torch says in a rank whose peer has died. Such an error is the other rank's doing.
_CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused",
                 "remote process exited", "NCCL communicator was aborted", "Socket closed")  # fmt: skip

_COMMAND = os.path.join(os.path.dirname(__file__), "command.py")
_OURS = (os.path.dirname(__file__) + os.sep, "<frozen runpy>")

# Groups that were destroyed but must not be destructed: that waits for gloo's threads, 10 to 20 ms, which the
# end of the process takes with it anyway.
_until_exit: list[object] = []


@dataclass(frozen=True)
class Place:
    """Where a rank finds what it needs: itself, the rendezvous, the way back. ``call``: None = read the memfd."""

    spec: LaunchSpec
    local_rank: int
    rendezvous: tuple[str, int]  # address and port
    answers: Answers
    call_fd: int
    memfd: int
    crash_fd: int  # where faulthandler writes when the rank crashes
    stack_fd: int  # where it writes when the agent asks
    call: Call | None


def run(place: Place) -> NoReturn:
    """Lives a rank's life. Never returns: what lies above belongs to the process that was forked."""
    code = 1
    try:
        code = _worker(place).run()
    except BaseException:  # an error of ours, or in reporting theirs: the text must not be lost
        traceback.print_exc()
    finally:
        process.flush()
        os._exit(code)


def _worker(place: Place) -> Worker:
    if place.spec.command is None:
        return Worker(place)
    from mlaunch.rank.script import CommandWorker

    return CommandWorker(place, place.spec.command)


class Worker:
    """A rank that runs a function which its launcher sent."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._spec = place.spec
        self._device: torch.device | None = None

    def run(self) -> int:
        """Returns the exit code."""
        try:
            self._start()
            self._join()
            function, call = self._receive()
            self._enter(Phase.RUNNING)
            self._answer(function(*call.args, **call.kwargs))
            del function, call  # and with them what memory they hold, which the others may need
            self._enter(Phase.RETURNED)
            self._place.answers.await_dismissal()
            self._enter(Phase.LEAVING)
            self._leave()
        except SystemExit as leaving:
            atexit._run_exitfuncs()
            return process.exit_code(leaving)
        except BaseException as error:
            self._report(error)
            atexit._run_exitfuncs()
            return 1
        return 0

    def _enter(self, phase: Phase) -> None:
        self._place.answers.board[self._place.local_rank] = phase

    def _start(self) -> None:
        import torch

        process.reset_process()
        self._take_surroundings(device.environment(self._spec, self._place.local_rank, *self._place.rendezvous))
        spec = self._spec
        rank = spec.rank(self._place.local_rank)
        nesting.rank_of = nesting.Rank(spec.name, rank, spec.secret)
        if spec.seed is not None:
            seeding.apply(seeding.of_rank(spec.seed, rank))
        elif self._place.call is None:  # the fork server's generator, the same for all, would be nobody's choice
            torch.default_generator.seed()

    def _take_surroundings(self, environ: dict[str, str]) -> None:
        """Those of the caller, and the handlers by which the agent asks."""
        faulthandler.enable(self._place.crash_fd)
        stack_dump.answer_requests(self._place.stack_fd)
        context = self._spec.context
        process.set_environ(environ)
        os.chdir(context.cwd)
        # Where its children look for a script with a relative path.
        multiprocessing.process.ORIGINAL_DIR = context.cwd  # type: ignore[attr-defined]
        sys.path[:] = context.sys_path
        sys.argv[:] = context.argv
        device.share_cores(self._spec)
        if self._spec.streams(self._place.local_rank):
            linux.print_by_lines()
        progress.slot = progress.Slot(self._place.answers.board, self._place.local_rank)

    def _join(self) -> None:
        import torch.distributed as dist

        spec, place = self._spec, self._place
        self._enter(Phase.BINDING)
        self._device = bound = device.bind(spec, place.local_rank)
        self._enter(Phase.JOINING)
        timeout = device.limit(spec.timeout)
        dist.set_debug_level_from_env()  # torch read it when the fork server imported it
        # Where the ranks' interface is known, no name is looked up for anything that matters.
        with linux.names_from_files_only() if spec.interface else contextlib.nullcontext():
            self._meet_the_others(timeout, None if bound.type == "cpu" else bound)

    def _meet_the_others(self, timeout: timedelta, accelerator: torch.device | None) -> None:
        import torch.distributed as dist

        from mlaunch.rendezvous.store import Meeting

        spec, place = self._spec, self._place
        meeting = Meeting(*place.rendezvous, spec.launch_id, timeout)
        meeting.arrive(spec.rank(place.local_rank))
        try:
            dist.init_process_group(
                spec.backend,
                store=meeting.store,
                rank=spec.rank(place.local_rank),
                world_size=spec.world_size,
                timeout=timeout,
                device_id=accelerator,
            )
            # gloo lets a rank go while others still greet it; one that then returned at once would break their group.
            meeting.meet("mlaunch/joined", spec.world_size)
            if spec.group_size > 1:
                from mlaunch.collectives import local_group

                local_group.make(None)
        except RuntimeError as error:
            missing = meeting.missing(spec.world_size) if "timeout" in str(error).lower() else []
            if not missing:
                raise
            who = stack_dump.name_ranks(missing)
            raise TimeoutError(f"{who} did not come to the process group within {spec.timeout:g} s") from error

    def _receive(self) -> tuple[Callable[..., Any], Call]:
        self._enter(Phase.RECEIVING)
        if self._place.call is not None:  # forked from the caller: everything is here
            return calls.resolve(self._place.call.function), self._place.call
        call = payload.read(self._place.call_fd)
        function = calls.resolve(call.function)
        calls.furnish_main(function, self._spec.context)
        return function, call

    def _answer(self, value: object) -> None:
        if self._device is not None:
            device.synchronize(self._device)
        self._enter(Phase.ANSWERING)
        try:
            payload.write(self._place.memfd, value, to_caller=True)
        except Exception as error:  # whatever a __reduce__ may raise
            found = pickling.unpicklable(value, "value")
            raise _UnpicklableValueError(f"{found} ({type(error).__name__}: {error})") from error
        self._say(Kind.VALUE)

    def _leave(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            _until_exit.append(dist.group.WORLD)
            dist.destroy_process_group()
        # What multiprocessing does at the end of a process of its own, and an interpreter at its end.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]

    def _report(self, error: BaseException) -> None:
        kind = Kind.UNPICKLABLE if isinstance(error, _UnpicklableValueError) else Kind.ERROR
        phase = self._place.answers.board[self._place.local_rank]
        self._enter(Phase.FAILING)
        catchable = kind is Kind.ERROR and isinstance(error, Exception) and self._spec.command is None
        remote = RemoteError(
            type_name=pickling.type_name(error),
            message=_message(error),
            traceback="".join(traceback.format_exception(below_ours(error))),
            phase=phase,
            host=socket.gethostname(),
            device=str(self._device or self._spec.device_type),
            pickled=pickling.pickle_exception(error) if catchable else None,
        )
        payload.write(self._place.memfd, remote)
        self._say(kind, consequence=any(words in remote.message for words in _CONSEQUENCES))
        self._place.answers.await_dismissal()

    def _say(self, kind: Kind, *, consequence: bool = False) -> None:
        self._place.answers.queue.put(Answer(self._place.local_rank, kind, consequence))


class _UnpicklableValueError(TypeError):
    """The function returned what cannot leave the rank."""


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # the user's __str__
        return f"<its __str__ raised {type(broken).__name__}>"


def below_ours(error: BaseException) -> BaseException:
    """The exception with the frames of the runtime taken off the top of its traceback.

    The last stays, lest a fault of ours has no place; but in what runs a command it is always the user's.
    """
    trace = error.__traceback__
    while trace is not None and (file := trace.tb_frame.f_code.co_filename).startswith(_OURS):
        if trace.tb_next is None and file != _COMMAND:
            break
        trace = trace.tb_next
    return error.with_traceback(trace)
