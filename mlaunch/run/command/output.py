"""The output of ``mlaunch run``, by its flags ``--redirects``, ``--tee``, ``--local-ranks-filter``, ``--log-dir``."""

from __future__ import annotations

import argparse
import re
import socket
import string
import tempfile
from collections.abc import Callable, Mapping, Sequence

from mlaunch.base.frozen_record import frozen_record
from mlaunch.caller.output import log_files
from mlaunch.caller.output.output_plan import STREAMS, OutputPlan, Policy
from mlaunch.cli import UsageError, numbers

_PREFIX = "[${role_name}${local_rank}]:"  # torchrun's
_PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


@frozen_record
class OutputFlags:
    """The flags of output. ``redirects``, ``tee``: streams of a local rank (bits 1, 2). ``only``: None shows all."""

    redirects: Callable[[int], int]
    tee: Callable[[int], int]
    only: frozenset[int] | None
    log_dir: str | None
    prefix: str  # a template

    @property
    def own_prefix(self) -> bool:
        """True if the prefix is not torchrun's."""
        return self.prefix != _PREFIX

    def prefix_of(self, role: str, rank: int, local_rank: int, host: str) -> str:
        """Return the prefix of a rank's lines."""
        template = string.Template(self.prefix)
        return template.safe_substitute(role_name=role, rank=rank, local_rank=local_rank, hostname=host)

    def policies(self, size: int) -> dict[tuple[int, int], Policy]:
        """Return the policies of streams that pass through this process."""
        found = {}
        for local_rank in range(size):
            hidden = self.only is not None and local_rank not in self.only
            for stream in STREAMS:
                teed = bool(self.tee(local_rank) & stream)
                if teed or self.redirects(local_rank) & stream:
                    found[local_rank, stream] = Policy(shown=teed and not hidden, kept=True)
                elif hidden:
                    found[local_rank, stream] = Policy(shown=False)
        return found


def output_flags_of(args: argparse.Namespace, environ: Mapping[str, str]) -> OutputFlags:
    only = None
    if args.local_ranks_filter:
        only = frozenset(numbers("--local-ranks-filter", args.local_ranks_filter))
    redirects, tee = _of_rank("--redirects", args.redirects), _of_rank("--tee", args.tee)
    prefix = args.log_line_prefix_template or environ.get(_PREFIX_VARIABLE) or _PREFIX
    return OutputFlags(redirects, tee, only, args.log_dir, prefix)


def _of_rank(name: str, text: str) -> Callable[[int], int]:
    """Read "3" or "0:3,1:2"."""
    if re.fullmatch("[0-3]", text):
        return lambda _local_rank: int(text)
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise UsageError(f"{name} {text}: allowed: 0, 1, 2 or 3, for all ranks or by local rank, such as 0:3,1:2")
    pairs = (pair.split(":") for pair in text.split(","))
    wanted = {int(local_rank): int(streams) for local_rank, streams in pairs}
    return lambda local_rank: wanted.get(local_rank, 0)


def directory_of(output_flags: OutputFlags, size: int, run_id: str) -> str | None:
    """Return a new directory for the files of this run; None if it writes none. UsageError if it cannot be made."""
    if output_flags.log_dir is None and not any(policy.kept for policy in output_flags.policies(size).values()):
        return None
    try:
        return log_files.new_directory(output_flags.log_dir or tempfile.mkdtemp(prefix="mlaunch-logs-"), run_id)
    except OSError as error:
        raise UsageError(f"--log-dir {output_flags.log_dir or tempfile.gettempdir()}: {error.strerror}") from None


def without_output(output_flags: OutputFlags, size: int) -> str:
    """Return a message if no output is kept in the given directory; else ""."""
    if output_flags.log_dir is None or any(policy.kept for policy in output_flags.policies(size).values()):
        return ""
    directory = f"--log-dir {output_flags.log_dir}"
    return f"{directory} gets no output without --tee 3 (terminal and files) or --redirects 3 (only files)"


def output_plan(
    output_flags: OutputFlags, size: int, role: str, directory: str | None, rank_start: Callable[[], int]
) -> OutputPlan:
    """Make the plan. ``rank_start`` is called when ranks print: a machine gets its first rank from the others."""
    host = socket.gethostname()

    def prefix(ranks: Sequence[int]) -> str:
        (rank,) = ranks
        return output_flags.prefix_of(role, rank, rank - rank_start(), host)

    return OutputPlan(output_flags.policies(size), prefix, directory, by_local_rank=True, merge=False)
