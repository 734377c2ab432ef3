"""Values of the flags of ``mlaunch run`` alone: read, or refused with what is allowed."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import stat
from collections.abc import Mapping, Sequence

from mlaunch.base.log import log
from mlaunch.cli.checks import UsageError, at_least, number, numbers
from mlaunch.protocol import token as tokens

_LONGEST_ROLE = 255  # characters: all machines hear it
_HARDLY_A_SCRIPTS = {"--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-endpoint", "--standalone"}
_SHUTDOWN_TIMEOUT = "30"  # seconds, torchrun's: enough to save a checkpoint


def optional(name: str, text: str | None) -> int | None:
    return None if text is None else numbers(name, text)[0]


def grace_period_of(given: float | None, environ: Mapping[str, str]) -> float:
    name, value = "--shutdown-timeout", str(given)
    if given is None:
        name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        value = environ.get(name, _SHUTDOWN_TIMEOUT)
    seconds = number(value)
    if not seconds >= 0:
        raise UsageError(f"{name} {value}: allowed: seconds, 0 or more")
    return seconds


def role_of(text: str) -> str:
    if not text.isprintable() or len(text) > _LONGEST_ROLE:
        raise UsageError(f"--role {text!r}: allowed: at most {_LONGEST_ROLE} printable characters")
    return text


def signals_of(text: str) -> tuple[int, ...]:
    found = []
    for name in filter(None, (part.strip().upper() for part in text.split(","))):
        known = getattr(signal.Signals, name if name.startswith("SIG") else f"SIG{name}", None)
        if known is None or known in {signal.SIGKILL, signal.SIGSTOP}:
            raise UsageError(f"--signals-to-handle {name}: no signal of this name can be handled")
        found.append(int(known))
    return tuple(found)


def is_here(host: str) -> bool:
    """Tells whether an address of ``host`` is this machine's: only such can be bound."""
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


def token_of(file: str | None, environ: Mapping[str, str]) -> str | None:
    """Returns the token of ``--token-file``, else of the environment; None if there is none."""
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


def preemptions_of(most: int, engine: str | None) -> int:
    """Reads ``--max-preemptions``."""
    if most and engine is None:
        raise UsageError(f"--max-preemptions {most} without --engine: nobody would place the ranks anew")
    return at_least(0, "--max-preemptions", most)


def behind_the_script(words: Sequence[str]) -> str:
    """Returns the first of a script's arguments that looks like a flag of ours; "" if none does."""
    return next((word for word in words if word.partition("=")[0].replace("_", "-") in _HARDLY_A_SCRIPTS), "")
