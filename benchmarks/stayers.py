"""The peers of ranks that stay: each is started, and gives what measures one empty call on all its workers."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

from benchmarks.measure import seconds

_MESSAGE = 64  # bytes
_IN_A_NAMESPACE = 'ip link set lo up && exec "$0" -c "$1" "$2"'

# Ray listens on all addresses, so it runs in a network of its own. Each line on standard input asks for one call.
_RAY = """
import os, sys, time
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_IMPORT_WARNING="1")
answers, sys.stdout = sys.stdout, sys.stderr
import ray
size = int(sys.argv[1])
ray.init(address="local", num_cpus=size, include_dashboard=False, logging_level="ERROR", log_to_driver=False)

@ray.remote(num_cpus=1)
class Worker:
    def nothing(self):
        pass

workers = [Worker.remote() for _ in range(size)]
ray.get([worker.nothing.remote() for worker in workers])
print("ready", file=answers, flush=True)
for _ in sys.stdin:
    start = time.perf_counter()
    ray.get([worker.nothing.remote() for worker in workers])
    print(time.perf_counter() - start, file=answers, flush=True)
"""


def _nothing() -> None:
    """The empty function."""


@contextlib.contextmanager
def ray(size: int) -> Iterator[Callable[[], float]]:
    """Actors of Ray."""
    command = ["unshare", "-n", "sh", "-c", _IN_A_NAMESPACE, sys.executable, _RAY, str(size)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    ) as process:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise RuntimeError("it has no pipes")
        try:
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(process.stderr.read()[-500:])
            asks, answers = process.stdin, process.stdout
            yield lambda: (asks.write("\n"), asks.flush(), float(answers.readline()))[-1]  # type: ignore[func-returns-value]
            asks.close()
            process.wait(60)
        finally:
            process.kill()


@contextlib.contextmanager
def ipyparallel(size: int) -> Iterator[Callable[[], float]]:
    """Engines of ipyparallel."""
    from ipyparallel import Cluster

    with contextlib.redirect_stderr(io.StringIO()), Cluster(n=size, log_level=40) as client:
        client.wait_for_engines(size, interactive=False)
        view = client[:]
        yield lambda: seconds(lambda: view.apply_sync(_nothing))


@contextlib.contextmanager
def nbdistributed(size: int) -> Iterator[Callable[[], float]]:
    """Workers of nbdistributed, which run code."""
    from nbdistributed.communication import CommunicationManager
    from nbdistributed.process_manager import ProcessManager

    processes = ProcessManager()
    with contextlib.redirect_stdout(io.StringIO()):
        port = processes.start_workers(size)
        channel = CommunicationManager(size, port)
    try:
        yield lambda: seconds(lambda: channel.send_to_all("execute", "None"))
    finally:
        with contextlib.redirect_stdout(io.StringIO()):
            channel.shutdown()
            processes.shutdown()


@contextlib.contextmanager
def floor(size: int) -> Iterator[Callable[[], float]]:
    """Forks that read one message and write one answer: what no call on so many processes can do without."""
    answers, write = os.pipe()
    ends = []
    for _ in range(size):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            while message := theirs.recv(_MESSAGE):
                os.write(write, message)
            os._exit(0)
        theirs.close()
        ends.append(ours)

    def call() -> None:
        for end in ends:
            end.send(b"x" * _MESSAGE)
        left = size * _MESSAGE
        while left:
            left -= len(os.read(answers, left))

    yield lambda: seconds(call)
    for end in ends:
        end.close()


ALL = {"ray actors": "ray", "ipyparallel engines": "ipyparallel", "nbdistributed workers": "nbdistributed"}
