"""The life of a rank that runs functions which its caller sends.

    becoming a rank      starting -> binding its device -> joining the process group
    answering a call     receiving -> running -> sending its value -> waiting for the others to return
    leaving              shutting down

The answer goes through the result queue; content that is too large for that, through the call's memfd.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing.util
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from mlaunch.base import own_process, seeding
from mlaunch.core import load
from mlaunch.protocol import by_value, calls, explain, late_imports, settings, this_rank
from mlaunch.protocol.calls import Call
from mlaunch.protocol.messages import AnswerKind, Phase
from mlaunch.protocol.payload import Payload
from mlaunch.protocol.spec import Details
from mlaunch.rank import device, for_users, group, launcher_variables, process, rank_imports
from mlaunch.rank.base import Rank, RankArgs, Task
from mlaunch.rank.process import StampedFile
from mlaunch.rendezvous import tcp_store
from mlaunch.torch_parts import process_groups

if TYPE_CHECKING:
    import torch


# Groups that were destroyed but must not be destructed: that waits for gloo's threads, 10 to 20 ms (in torch 2.6 for
# ever, now and then), which the end of the process takes with it anyway.
_until_exit: list[object] = []


class FunctionRank(Rank):
    """A rank whose life is a loop over calls. A launch sends one, unless its ranks stay."""

    # Until all of its machine have answered: with gloo a rank may leave new_group while others still greet it, and
    # the end of one broke their group (1 call of 150 with 4 ranks on 2 busy cores).
    _AFTERWARDS = Phase.RETURNED  # where it waits for what comes next

    def __init__(self, args: RankArgs) -> None:
        super().__init__(args)
        self._bound: torch.device | None = None
        self._is_early = False  # its first call has come already
        self._cores: set[int] = set()  # where it may run, while it waits on one

    def live(self) -> int:
        """Become a rank, answer calls until released, leave. Return the exit code."""
        try:
            self._become_rank()
            if not self._spec.prepared:
                self._take_settings()
            while (task := self._task if self._is_early else self._next_task()) is not None:
                if self._spec.prepared:
                    self._take_settings()
                self._is_early = False
                self._run_task(task)
            self._leave()
        except SystemExit as leaving:
            return self._end_by(leaving)
        except BaseException as error:
            return self._end_failed(error)
        return 0

    def _end_by(self, leaving: SystemExit) -> int:
        """Return the exit code of sys.exit; 0 outside of the function (in a ``__reduce__``, a module) is a failure."""
        code = process.exit_code(leaving)
        if code == 0 and self._phase not in {Phase.RUNNING, Phase.LEAVING}:
            return self._end_failed(leaving)
        self._note_exit(leaving)
        atexit._run_exitfuncs()
        return code

    def _end_failed(self, error: BaseException) -> int:
        if self._is_fork or (self._spec.prepared and self._task is None):  # nobody has asked for anything
            traceback.print_exception(type(error), error, error.__traceback__)
            return 1
        self._report(
            error, kind=AnswerKind.UNPICKLABLE if isinstance(error, UnpicklableValueError) else AnswerKind.ERROR
        )
        atexit._run_exitfuncs()
        return 1

    # Becoming a rank

    def _become_rank(self) -> None:
        if self._spec.sections:
            self._begin_parts()
        import torch

        args, spec = self._args, self._spec
        process.reset_process(open_stream=self._open_stream, own_handlers_only=args.inherited is None)
        process.let_features_stand_in()
        self._take_surroundings(launcher_variables.of_rank(spec, args.local_rank, *args.rendezvous))
        tcp_store.host_all_but(*args.rendezvous)
        self._say_who()
        sys.breakpointhook = process.LateHook(lambda: self._who)
        if self._parts is not None:
            self._parts.before_join()
        late_imports.begin()
        rank_imports.begin_timing(args.results.board, args.local_rank)
        if args.inherited is None:  # the state of the fork server's generator, equal in all ranks, is nobody's choice
            torch.default_generator.seed()
        self._apply_seed()
        if spec.prepared and spec.devices.type != "cpu":  # without a call, no memory of a device may be taken
            self._wait_early()
        self._enter(Phase.BINDING)
        self._bound = device.bind(spec, args.local_rank)
        for_users.note_device(self._bound)
        self._device = spec.device(args.local_rank)
        self._enter(Phase.JOINING)
        group.meet_and_join(spec, args.local_rank, args.rendezvous, self._bound)
        # What differs between two launches of one shape comes with the call (Details), so joining need not wait for it.
        if spec.prepared and not self._is_early:
            self._expect_call()

    def _take_settings(self) -> None:
        """Take over the caller's settings, last: they are not meant for how ranks join."""
        if self._args.inherited is None:
            theirs = self._spec.context.settings
            if self._parts is not None:
                theirs = tuple(one for one in theirs if one[0] not in self._parts.decides)
            settings.apply(theirs)

    def _say_who(self) -> None:
        # Several launches may share a token: what ranks of one have signed must count for nothing in another.
        spec = self._spec
        secret = f"{spec.secret}/{spec.launch_id}"
        this_rank.become(this_rank.ThisRank(spec.call.name, spec.rank(self._args.local_rank), secret))

    def _apply_seed(self) -> None:
        if self._spec.call.seed is not None:
            seeding.apply(seeding.of_rank(self._spec.call.seed, self._spec.rank(self._args.local_rank)))

    def _expect_call(self) -> None:
        """Begin to wait, each rank on a core of its own as far as there are enough: all are woken at once."""
        self._cores = own_process.wait_on_one_core(os.getppid() + self._args.local_rank)
        self._enter(Phase.IDLE)

    def _learn(self, details: Details) -> None:
        own_process.leave_core(self._cores)
        super()._learn(details)
        self._say_who()
        self._apply_seed()

    def _wait_early(self) -> None:
        """Wait for the first call; exit if none comes."""
        self._expect_call()
        self._is_early = True
        if self._next_task() is None:
            raise SystemExit(0)

    def _open_stream(self, fd: int) -> StampedFile:
        return StampedFile(fd, functools.partial(self._args.results.board.stamp, self._args.local_rank, fd))

    # Answering a call

    def _run_task(self, task: Task) -> None:
        self._enter(Phase.RECEIVING)
        function, call = self._receive(task)
        self._enter(Phase.RUNNING)
        value = self._call(function, call)
        rank_imports.note_slowest()
        self._send(self._outcome_of(call, value))
        late_imports.note(leads=self._args.local_rank == 0)
        del function, call, value  # frees their memory, which other ranks may need
        self._enter(self._AFTERWARDS)

    def _call(self, function: Callable[..., Any], call: Call) -> Any:
        if self._parts is None:
            return function(*call.args, **call.kwargs)
        run = self._parts.around_function(function)
        with self._parts.around_call():
            return run(*call.args, **call.kwargs)

    def _outcome_of(self, _call: Call, value: object) -> object:
        """Return the answer for what the function has returned."""
        return value

    def _receive(self, task: Task) -> tuple[Callable[..., Any], Call]:
        inherited = self._args.inherited
        if task.call is None:  # forked from the caller: everything is here
            if inherited is None:
                raise RuntimeError("a call came without its function (a bug in mlaunch)")
            return calls.resolve(inherited.function), inherited
        call = self._unpickle(task.call)
        function = calls.resolve(call.function)
        process.install_main(function, self._spec.context)
        return function, call

    def _unpickle(self, content: Payload) -> Call:
        try:
            with by_value.receiving():
                return self._read(content)
        except Exception as error:  # whatever a __setstate__ may raise
            if found := explain.unreadable_part(*content.parts()):
                BaseException.__setattr__(error, "__notes__", [*getattr(error, "__notes__", []), found])
            raise

    def _read(self, content: Payload) -> Call:
        call: Call = content.read()
        return call

    def _send(self, value: object) -> None:
        if self._bound is not None and self._device != "cpu":
            device.synchronize(self._bound)
        self._enter(Phase.ANSWERING)
        if self._spec.call.rank0_only and self._spec.rank(self._args.local_rank) != 0:
            value = None
        try:
            self._answer(AnswerKind.VALUE, value)
        except Exception as error:  # whatever a __reduce__ may raise
            if own_process.is_limit(error):  # of what has room, not of what can be pickled
                own_process.name_limit(error)
                raise
            found, culprit = explain.culprit(value, "value")
            text = f"{found}{explain.reason(error)}{explain.instead_to_return(culprit)}"
            raise UnpicklableValueError(text) from error

    # Leaving

    def _leave(self) -> None:
        """Do what an interpreter and multiprocessing do at the end of a process.

        Threads end before the group does: one may be saving a checkpoint with it.
        """
        self._enter(Phase.LEAVING)
        threading._shutdown()  # type: ignore[attr-defined]
        leave_groups()
        atexit._run_exitfuncs()
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]


def leave_groups() -> None:
    """Destroy this rank's process groups, if it has any."""
    import torch.distributed as dist

    if dist.is_initialized():
        _until_exit.extend(process_groups.everyone())
        dist.destroy_process_group()


class UnpicklableValueError(TypeError):
    """The function returned a value that cannot be pickled."""


def run(args: RankArgs) -> NoReturn:
    """Run a rank of any kind, and end the process: the frames above belong to the fork server."""
    code = 1  # an error in the lines below must not look like success
    try:
        code = _rank(args).live()
    except BaseException:  # an error of mlaunch, or in reporting the user's: its text must not be lost
        traceback.print_exc()
    finally:
        try:
            process.flush()
            # The last thread of a process frees its memory; gloo's threads, which slept on other cores, did so for one
            # rank after the other.
            if args.spec.local_world_size <= device.usable_cpus():  # with more ranks no core is idle
                own_process.end_on_one_core(os.getppid() + args.local_rank)
        finally:
            os._exit(code)


def _rank(args: RankArgs) -> Rank:
    if args.spec.stays:
        kept: Rank = load.module_of("ranks", "rank.kept").KeptRank(args)
        return kept
    if args.spec.target is None:
        return FunctionRank(args)
    rank: Rank = load.module_of(args.spec.target.feature, "rank").rank(args, args.spec.target)
    return rank
