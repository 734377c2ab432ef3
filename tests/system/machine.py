"""Run by tests on each of several hosts: one machine's part in launches. Each line of its input asks for one, as JSON.

It stays for the next, as a notebook does, so that not every test waits for torch to be imported.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from typing import Any

from mlaunch import launcher, progress, warm_up


def train(how: dict[str, Any]) -> Any:
    import socket

    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    total = torch.ones(1)
    dist.all_reduce(total)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if rank == how.get("rank") and attempt < how.get("attempts", 1):
        print("failing", flush=True)
        if how["how"] == "raise":
            raise ValueError(f"no such luck on {socket.gethostname()}" + how.get("word", " and") * how.get("words", 0))
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in progress(range(how.get("steps", 0))):
        dist.all_reduce(total)
    if how.get("wait"):
        if rank == how.get("first", 0):
            print("running", flush=True)
        signal.pause()
    if how.get("reduce") and rank == 0:
        print("running", flush=True)
    while how.get("reduce"):  # until it fails
        dist.all_reduce(total)
    names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_RESTART_COUNT")
    dist.barrier()
    from mlaunch import comm

    assert comm.get_local_process_group().size() == comm.get_local_size() == int(os.environ["LOCAL_WORLD_SIZE"])
    return [rank, total.item(), *(os.environ[name] for name in names)]


def other(_how: dict[str, Any]) -> None:
    """Another function than the others call."""


def answer(options: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    ours = launcher(other if how.get("other") else train, device_type="cpu", **options)
    said: dict[str, Any] = {}
    for _ in range(how.get("calls", 1)):
        try:
            said = {"values": ours(how)}
        except BaseException as error:
            cause = error.__cause__
            said = {"type": type(error).__name__, "text": str(error), "cause": str(cause) if cause else "",
                    "notes": getattr(error, "__notes__", [])}  # fmt: skip
    return said


def main() -> None:
    warnings.simplefilter("ignore")
    warm_up()
    print("ready", flush=True)
    for line in sys.stdin:
        options, how, environ = json.loads(line)
        os.environ.update(environ)
        print(json.dumps(answer(options, how)), flush=True)
        print("over", file=sys.stderr, flush=True)
        for name in environ:
            del os.environ[name]


main()
