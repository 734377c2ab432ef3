"""Ctrl-C at random moments of a call's first 20 ms, many times: nothing leaks, nothing hangs, the next call works."""

from __future__ import annotations

import os
import random
import subprocess

import pytest

from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.processes import children, descendants, wait_gone

COUNT = int(os.environ.get("MLAUNCH_INTERRUPTS", "200"))
SEED = int(os.environ.get("MLAUNCH_INTERRUPTS_SEED", str(random.SystemRandom().randrange(1_000_000))))
LIMIT = 60 + 5 * COUNT  # seconds: a call on a busy machine takes one

SCRIPT = """
import os, random, signal, sys, threading
from mlaunch import launcher
from tests import launches
from tests.contract.interrupter import Interrupter, open_files

count, seed = int(sys.argv[1]), int(sys.argv[2])
chance = random.Random(seed)
interrupter = Interrupter()
data = bytes(200_000)  # arguments' memory is easily counted
call = launcher(lambda given: len(given), 2, grace_period=2)
interrupted = sum(interrupter.interrupt(lambda: call(data), chance, 0.02) for _ in range(5))  # of the first call, too
assert call(data) == [200_000] * 2
before = open_files()
interrupted += sum(interrupter.interrupt(lambda: call(data), chance, 0.02) for _ in range(count))
assert call(data) == [200_000] * 2
assert open_files() == before, (before, open_files())
assert threading.enumerate() == [threading.main_thread()]
assert signal.getsignal(signal.SIGINT) == interrupter.take
assert launches.deferred_interrupts() == []
interrupter.close()
print("interrupted", interrupted, flush=True)
sys.stdin.read()
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_many_interrupts() -> None:
    print(f"MLAUNCH_INTERRUPTS={COUNT} MLAUNCH_INTERRUPTS_SEED={SEED}")
    process = subprocess.Popen(
        [IMPORTED, "-c", SCRIPT, str(COUNT), str(SEED)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        said = next((line for line in process.stdout if line.startswith("interrupted ")), "")
        servers = children(process.pid)
        wait_gone([*set(descendants(process.pid)) - set(servers)])  # the last call's agent may be about to end
        _, errors = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert int(said.split()[1]) > COUNT / 2  # else the calls were over before
    assert len(servers) == 1  # the fork server, with nothing below it
    wait_gone(servers)


def test_a_second_interrupt_while_the_launch_ends(run_script) -> None:  # type: ignore[no-untyped-def]
    """It is heard where the launch waits, not where it takes in what came."""
    done = run_script(
        "import os, signal, time\n"
        "from mlaunch import launcher\n"
        "caller = os.getpid()\n"
        "def train():\n"
        "    def again(*_):\n"
        "        os.kill(caller, signal.SIGINT)\n"
        "    signal.signal(signal.SIGTERM, again)\n"
        "    os.kill(caller, signal.SIGINT)\n"
        "    while True:\n"
        "        signal.pause()\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "launcher(lambda: 1, 2)()\n"
        "files = len(os.listdir('/proc/self/fd'))\n"
        "try:\n"
        "    launcher(train, 2, grace_period=1000)()\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', launcher(lambda: 1, 2)(), len(os.listdir('/proc/self/fd')) - files)\n"
    )
    assert done.stdout == "interrupted [1, 1] 0\n", done.stderr
