"""How a launch came out, and what its caller gets of that: values or an exception."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from dataclasses import dataclass, field
from typing import Any

from mlaunch.base.errors import LaunchError, LaunchTimeout, RankFailure, Report, in_order, meanwhile, warn_caller
from mlaunch.caller import notebook
from mlaunch.caller.output import files
from mlaunch.protocol import payload, stack_dump
from mlaunch.protocol.messages import RankStacks, Refused, RemoteError
from mlaunch.protocol.spec import LaunchSpec


@dataclass
class Outcome:
    """Grows while the launch is heard; ``settle`` decides."""

    spec: LaunchSpec
    log_dir: str | None = None
    values: dict[int, int] = field(default_factory=dict)  # rank -> memfd
    failures: list[RankFailure] = field(default_factory=list)
    raised: dict[int, RemoteError] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)  # ranks that ended well without a value
    broken: str = ""  # what ended the launch outside its ranks
    refused: Refused | None = None
    stopped: list[int] = field(default_factory=list)  # ranks that the agent ended
    late: bool = False  # the deadline passed before any failure
    stacks: dict[int, RankStacks] = field(default_factory=dict)

    def settle(self) -> list[Any]:
        """The values; or raises why there are none."""
        if self.refused is not None:
            kind = LaunchTimeout if self.refused.late else LaunchError
            raise kind(f"{self.spec.name} was not started: {self.refused.text}")
        if self.late and self.stopped:
            self._raise_timeout()
        if self.broken and not self.failures:
            raise self._error(LaunchError, f"{self.spec.name} was ended: {self.broken}")
        if self.failures:
            self._raise()
        return self._return()

    def doing(self) -> list[str]:
        """What ranks were doing that were stopped."""
        return stack_dump.summarise(self.stacks.values())

    def _results(self) -> dict[int, Any]:
        results = {}
        for rank, memfd in self.values.items():
            with contextlib.suppress(Exception):  # what a __setstate__ may raise; the failure itself is told
                results[rank] = payload.read(memfd)
        return results

    def _return(self) -> list[Any]:
        if self.silent and self.spec.command is None:
            ranks = ", ".join(map(str, sorted(self.silent)))
            warn_caller(
                f"{len(self.silent)} of {self.spec.local_size} ranks of {self.spec.name} exited with code 0 "
                f"without returning a value (ranks {ranks}); their results are None"
            )
        wanted = range(self.spec.world_size) if self.spec.gather_all else self._ranks_here()
        return [self._value(rank) if rank in self.values else None for rank in wanted]

    def _value(self, rank: int) -> Any:
        try:
            return payload.read(self.values[rank])
        except Exception as error:
            raise LaunchError(
                f"the value that rank {rank} of {self.spec.name} returned cannot be unpickled here: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _stack_texts(self) -> dict[int, str]:
        return {rank: dump.text for rank, dump in self.stacks.items() if dump.text}

    def _raise_timeout(self) -> None:
        silent = [rank for rank in self.stopped if rank not in self.values]
        who = f"{stack_dump.name_ranks(silent)} had not returned"
        if not silent:
            who = f"{stack_dump.name_ranks(self.stopped)} had returned but not ended"
        lines = [
            f"{self.spec.name} did not finish within its deadline of {self.spec.deadline:g} s; {who}",
            *meanwhile(self.doing()),
        ]
        raise self._error(LaunchTimeout, "\n".join(lines))

    def _with_output(self, cause: RankFailure) -> RankFailure:
        """With the place of what it has printed, if it was kept here."""
        spec = self.spec
        if self.log_dir is None or cause.rank is None or not 0 <= cause.rank - spec.rank_start < spec.local_size:
            return cause
        name = cause.rank if spec.command is None else cause.rank - spec.rank_start
        where = files.directory_of(self.log_dir, spec.restart_count, name)
        return dataclasses.replace(cause, hints=(*cause.hints, f"its output is in {where}"))

    def _error(self, kind: type[LaunchError], text: str) -> LaunchError:
        error = kind(text, self.failures, self._results(), self._stack_texts())
        error.log_dir = self.log_dir
        return error

    def _ranks_here(self) -> range:
        return range(self.spec.rank_start, self.spec.rank_start + self.spec.local_size)

    def _raise(self) -> None:
        self.failures = [_completed(failure) for failure in in_order(self.failures)]
        cause = self.failures[0] = self._with_output(self.failures[0])
        text = Report(self.spec.name, self.failures, self.doing())
        report = self._error(LaunchError, str(text))
        remote = self.raised.get(cause.rank) if cause.rank is not None else None
        if remote is None or remote.pickled is None:
            raise report
        try:
            error: BaseException = pickle.loads(remote.pickled)
        except Exception:  # its class does not exist here, or cannot be made: the text must do
            raise report from None
        note(error, f"raised by {cause.who} of {self.spec.name} ({cause.place})")
        raise error from report


def _completed(failure: RankFailure) -> RankFailure:
    return dataclasses.replace(failure, traceback=notebook.complete(failure.traceback))


def note(error: BaseException, text: str) -> None:
    """As ``add_note``, which an exception with a ``__setattr__`` of its own may refuse, and Python 3.10 lacks."""
    BaseException.__setattr__(error, "__notes__", [*getattr(error, "__notes__", []), text])
