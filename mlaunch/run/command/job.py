"""The job of ``mlaunch run``, and where its output goes: flags, read and checked before any process starts."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import string
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.linux import working_directory
from mlaunch.base.log import log
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.output_plan import STREAMS, OutputPlan, Policy
from mlaunch.cli import UsageError, at_least
from mlaunch.protocol import launch_files
from mlaunch.protocol import token as tokens
from mlaunch.protocol.spec import Target
from mlaunch.run.command.flags import options_of
from mlaunch.run.wire import Script

_STATIC_PORT = 29500  # torchrun's
_JOIN_TIMEOUT = 300.0
_NO_ID = "none"  # torchrun's
_BACKENDS = ("static", "c10d")
_STDIN = "-"  # as for python
_FUNCTION = re.compile(r"[\w.]+:[\w.]+")
_LONGEST_ROLE = 255  # characters: it is sent to all machines
_HARDLY_A_SCRIPTS = {"--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-endpoint", "--standalone"}
_SHUTDOWN_TIMEOUT = "30"  # seconds, torchrun's: enough to save a checkpoint
AT_THE_START = "(chosen at the start)"  # in a plan that is only described
COUNTED = ("auto", "gpu", "cpu", "xpu")
_PREFIX = "[${role_name}${local_rank}]:"  # torchrun's
_PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


@frozen_record
class Job:
    """A command to run. ``size``: ranks on this machine, or one of COUNTED."""

    kind: str  # as in Script
    target: str
    args: tuple[str, ...]
    path: tuple[str, ...]  # sys.path of the ranks
    size: int | str
    devices: tuple[int, ...] | None
    nodes: int
    node_rank: int
    host: str
    port: int
    token: str | None = field(repr=False)
    asked: Options  # for, less where the ranks are
    max_preemptions: int
    signals: tuple[int, ...]
    run_id: str
    role: str
    preload: tuple[str, ...]
    virtual_local_rank: bool
    lease: int | None = None  # the number of devices to wait for
    source: bytes | None = field(default=None, repr=False)  # of a script that cannot be read twice

    @property
    def name(self) -> str:
        """The name for people."""
        if self.source is not None:
            return "<stdin>" if self.target == _STDIN else self.target
        return os.path.basename(self.target) if self.kind in {"file", "program"} else self.target

    def options(self, size: int) -> Options:
        """Return the options of the launch, with ``size`` ranks on this machine."""
        return self.asked.replaced(
            {
                "n_gpus": size,
                "world_size": size * self.nodes,
                "rank_start": size * self.node_rank,
                "master_ip": self.host,
                "port": self.port,
                "device_type": "cpu",  # the script binds its device itself
                "token": self.token,
            }
        )


def target_of(job: Job, error_dir: str) -> Target:
    """Return what the ranks of a job run. ``error_dir``: for ``record``'s files, "": a directory of the agent's own."""
    script = Script(job.kind, job.target, job.args, job.virtual_local_rank, job.source)
    return Target("run", script, job.role, job.run_id, error_dir, of_python=job.kind != "program")


def job_of(args: argparse.Namespace, environ: Mapping[str, str]) -> Job:
    """Return the job of the flags; UsageError if they do not fit together, or name what does not exist."""
    kind, target, path = _what(args)
    extra = () if args.use_env else ("--local-rank=${local_rank}",)
    devices = _numbers("--devices", args.devices) if args.devices else None
    nodes = _nodes(args.nnodes or "1")
    conf = _conf(args.rdzv_conf or "")
    host, port, node_rank = _meeting(args, nodes, conf)
    if not 0 <= node_rank < nodes:
        raise UsageError(f"--node-rank {node_rank}: allowed: 0 to {nodes - 1}, since --nnodes is {nodes}")
    return Job(
        kind=kind,
        target=target,
        args=(*extra, *args.training_script_args),
        path=path,
        size=_size(args.nproc_per_node, devices),
        devices=devices,
        nodes=nodes,
        node_rank=node_rank,
        host=host,
        port=port,
        token=_token_of(args.token_file, environ),
        asked=Options(
            join_timeout=_join_timeout_of(conf),
            grace_period=_grace_period_of(args.shutdown_timeout, environ),
            **options_of(args),
        ),
        max_preemptions=_preemptions_of(args.max_preemptions or 0, args.engine),
        signals=_signals_of(args.signals_to_handle),
        run_id="" if args.standalone or (nodes == 1 and args.rdzv_id == _NO_ID) else args.rdzv_id,
        role=_role_of(args.role),
        preload=tuple(name for name in (args.preload or "").split(",") if name),
        virtual_local_rank=args.virtual_local_rank,
    )


# What is run


def _what(args: argparse.Namespace) -> tuple[str, str, tuple[str, ...]]:
    """Return kind, target, and the ranks' sys.path, with the first entry of a fresh interpreter."""
    target: str = args.training_script
    base = tuple(sys.path if getattr(sys.flags, "safe_path", False) else sys.path[1:])
    safe = len(base) == len(sys.path)
    first = () if safe else (working_directory(),)
    if args.module and args.no_python:
        raise UsageError("--module and --no-python: a module is Python; give one of the two")
    if args.no_python and not args.run_path:
        if shutil.which(target) is None:
            raise UsageError(f"{target}: no such program in PATH, or it is not executable")
        return "program", target, (*first, *base)
    if args.module:
        return "module", target, (*first, *base)
    if _FUNCTION.fullmatch(target) and not os.path.exists(target):
        return "function", target, (*first, *base)
    if target == _STDIN or _is_read_once(target):
        return "file", target, (*first, *base)
    if not os.path.exists(target):
        raise UsageError(f"{target}: no such file{_perhaps(target)}")
    if _is_package(target):
        return "file", target, (target, *base)
    return "file", target, (() if safe else (os.path.dirname(os.path.realpath(target)),)) + base


def _is_read_once(path: str) -> bool:
    """True for a pipe, a terminal, a socket."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def with_source(job: Job) -> Job:
    """Read a script that comes through a pipe or from a terminal, which only one process can read.

    UsageError if it cannot be read.
    """
    if job.kind != "file" or not (job.target == _STDIN or _is_read_once(job.target)):
        return job
    try:
        with open(0 if job.target == _STDIN else job.target, "rb", closefd=job.target != _STDIN) as file:
            text = file.read()
    except OSError as error:
        raise UsageError(f"{job.target}: {error.strerror}") from None
    return dataclasses.replace(job, source=text)


def _is_package(path: str) -> bool:
    """True for a directory or archive that Python runs by its ``__main__``."""
    import pkgutil

    return pkgutil.get_importer(path) is not None


def _perhaps(target: str) -> str:
    """Return a hint about what the author may have meant."""
    try:
        module = importlib.util.find_spec(target)
    except (ImportError, ValueError):
        module = None
    return f"; to run the module {target}, put -m in front of it" if module is not None else ""


# How many, and where


def _size(text: str | None, devices: tuple[int, ...] | None) -> int | str:
    if text is None:
        return 1 if devices is None else len(devices)
    if text in COUNTED:
        return text
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--nproc-per-node {text}: allowed: a number from 1, {', '.join(COUNTED)}")
    return int(text)


def _nodes(text: str) -> int:
    low, _, high = text.partition(":")
    if not low.isdecimal() or (high and not high.isdecimal()):
        raise UsageError(f"--nnodes {text}: allowed: a number of machines")
    if high and int(low) != int(high):
        raise UsageError(f"--nnodes {text}: a launch has a fixed number of machines; give one number")
    return at_least(1, "--nnodes", int(low))


def _meeting(args: argparse.Namespace, nodes: int, conf: Mapping[str, str]) -> tuple[str, int, int]:
    """Return address and port of rank 0, and the number of this machine."""
    if args.standalone:
        if nodes > 1:
            raise UsageError(f"--standalone with --nnodes {nodes}: --standalone is for one machine")
        return "localhost", 0, 0
    if args.rdzv_backend not in _BACKENDS:
        raise UsageError(f"--rdzv-backend {args.rdzv_backend} is not supported: allowed: {', '.join(_BACKENDS)}")
    host, port = _endpoint(args.rdzv_endpoint)
    host = host or (args.master_addr or "").strip("[]") or ("localhost" if nodes == 1 else "127.0.0.1")
    port = port if port is not None else args.master_port
    if port is None:
        port = 0 if nodes == 1 else _STATIC_PORT
    if not 0 <= port <= 65535 or (port == 0 and nodes > 1):
        raise UsageError(f"port {port} of the master: allowed: 1 to 65535")
    rank = args.node_rank
    if rank is None and "rank" in conf:
        rank = _numbers("--rdzv-conf rank", conf["rank"])[0]
    if rank is None:
        rank = 0 if nodes == 1 or args.rdzv_backend == "static" else _guess_rank(host, nodes, conf)
    return ("localhost" if nodes == 1 else host), port, rank


def _endpoint(text: str) -> tuple[str, int | None]:
    """Read "host:29400", "host", "[::1]:29400"."""
    match = re.fullmatch(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:]*))(?::(?P<port>\d+))?", text)
    if match is None:
        raise UsageError(f"--rdzv-endpoint {text}: allowed: HOST:PORT, with an IPv6 address in brackets")
    return match["six"] or match["host"] or "", int(match["port"]) if match["port"] else None


def _guess_rank(host: str, nodes: int, conf: Mapping[str, str]) -> int:
    """Guess this machine's number, which c10d does not give: the machine at the endpoint's address is the first."""
    here = conf["is_host"].lower() in {"1", "true", "yes"} if "is_host" in conf else _is_here(host)
    if here:
        return 0
    if nodes == 2:
        return 1
    raise UsageError(
        f"--nnodes {nodes} without --node-rank: with more than two machines, each needs its number, beginning with 0 "
        f"on the one at {host} (under Slurm: --node-rank $SLURM_NODEID)"
    )


def _conf(text: str) -> dict[str, str]:
    known = {"join_timeout", "timeout", "rank", "is_host"}
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    for key, _, _ in pairs:
        if key.strip() not in known:
            raise UsageError(f"--rdzv-conf {key}: not supported; allowed: {', '.join(sorted(known))}")
    return {key.strip(): value.strip() for key, _, value in pairs}


# Values of single flags


def _numbers(name: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"{name} {text}: allowed: numbers with commas between them")
    return tuple(map(int, parts))


def _number(value: float | str) -> float:
    """Return the number; NaN, which is in no range, for other texts and infinities."""
    try:
        number = float(value)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _join_timeout_of(conf: Mapping[str, str]) -> float:
    given = conf.get("join_timeout", conf.get("timeout", _JOIN_TIMEOUT))
    seconds = _number(given)
    if not seconds > 0:
        raise UsageError(f"--rdzv-conf {given}: allowed: seconds, more than 0")
    return seconds


def _grace_period_of(given: float | None, environ: Mapping[str, str]) -> float:
    name, value = "--shutdown-timeout", str(given)
    if given is None:
        name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        value = environ.get(name, _SHUTDOWN_TIMEOUT)
    seconds = _number(value)
    if not seconds >= 0:
        raise UsageError(f"{name} {value}: allowed: seconds, 0 or more")
    return seconds


def _role_of(text: str) -> str:
    if not text.isprintable() or len(text) > _LONGEST_ROLE:
        raise UsageError(f"--role {text!r}: allowed: at most {_LONGEST_ROLE} printable characters")
    return text


def _signals_of(text: str) -> tuple[int, ...]:
    found = []
    for name in filter(None, (part.strip().upper() for part in text.split(","))):
        known = getattr(signal.Signals, name if name.startswith("SIG") else f"SIG{name}", None)
        if known is None or known in {signal.SIGKILL, signal.SIGSTOP}:
            raise UsageError(f"--signals-to-handle {name}: no signal of this name can be handled")
        found.append(int(known))
    return tuple(found)


def _is_here(host: str) -> bool:
    """True if an address of ``host`` belongs to this machine: only such can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"the master's name {host} does not resolve: {error}") from None
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def _token_of(file: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the token from ``--token-file``, or from the environment; None if there is none."""
    if file is None:
        try:
            tokens.check(environ.get(tokens.VARIABLE), tokens.VARIABLE)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return environ.get(tokens.VARIABLE)
    try:
        with open(file, encoding="utf-8") as opened:
            readable = os.fstat(opened.fileno()).st_mode & (stat.S_IRGRP | stat.S_IROTH)
            token = opened.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {file}: {error}") from None
    if not token:
        raise UsageError(f"--token-file {file}: the file is empty")
    if readable:
        log.warning("--token-file %s: other users can read the token there; chmod go= %s", file, shlex.quote(file))
    return token


def _preemptions_of(most: int, engine: str | None) -> int:
    """Return ``--max-preemptions``, checked."""
    if most and engine is None:
        raise UsageError(f"--max-preemptions {most} without --engine: only an engine can place the ranks again")
    return at_least(0, "--max-preemptions", most)


def behind_the_script(words: Sequence[str]) -> str:
    """Return the first of a script's arguments that looks like a flag of mlaunch run; "" if none does."""
    return next((word for word in words if word.partition("=")[0].replace("_", "-") in _HARDLY_A_SCRIPTS), "")


# Where the output goes


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
        only = frozenset(_numbers("--local-ranks-filter", args.local_ranks_filter))
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
        return launch_files.new_directory(output_flags.log_dir or tempfile.mkdtemp(prefix="mlaunch-logs-"), run_id)
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
