"""Ctrl-C at the worst moments, and at random ones: nothing leaks, nothing hangs, the next call works."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.processes import children, descendants, wait_gone
from tests.users import users_environ

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


# Once there is a file, the main thread's next wait is interrupted before it begins and after Python's last look for
# signals: no program can choose that moment from outside.
BEFORE_A_WAIT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#define LIBRARY(function) dlsym(RTLD_NEXT, function)
typedef const struct timespec *Until;
static void interrupt(void) {
    const char *caller = getenv("CALLER"), *now = getenv("NOW");
    if (caller && atoi(caller) == getpid() && gettid() == getpid() && !unlink(now)) raise(SIGINT);
}
int poll(struct pollfd *fds, nfds_t count, int timeout) {
    if (timeout) interrupt();
    return ((int (*)(struct pollfd *, nfds_t, int)) LIBRARY("poll"))(fds, count, timeout);
}
int sem_wait(sem_t *lock) {
    interrupt();
    return ((int (*)(sem_t *)) LIBRARY("sem_wait"))(lock);
}
int sem_clockwait(sem_t *lock, clockid_t clock, Until until) {
    interrupt();
    return ((int (*)(sem_t *, clockid_t, Until)) LIBRARY("sem_clockwait"))(lock, clock, until);
}
"""
WAITS = """
import os, pathlib, signal
from mlaunch import Ranks, launcher
os.environ["CALLER"] = str(os.getpid())
now = pathlib.Path(os.environ["NOW"])
def wait():
    print("running", flush=True)  # the caller takes it in, and waits again
    while True:
        signal.pause()
def interrupt():
    now.touch()
    wait()
def waits_for_a_future():
    submitted = launcher(wait, 1).submit()
    now.touch()
    try:
        submitted.result()
    finally:
        submitted.cancel()
def waits_for_ranks():
    with Ranks(n_gpus=1) as ranks:
        ranks.run(interrupt)
for way in launcher(interrupt, 1), waits_for_a_future, waits_for_ranks:
    try:
        way()
    except KeyboardInterrupt:
        print("interrupted", launcher(lambda: 1, 1)(), now.exists(), flush=True)
"""


def test_an_interrupt_just_before_a_wait(tmp_path: Path) -> None:
    """Python does not see it before the wait, and it does not end the wait."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library, script = tmp_path / "before.so", tmp_path / "script.py"
    build = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(build, input=BEFORE_A_WAIT, text=True, check=True)
    script.write_text(WAITS)
    environ = {**users_environ(), "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library), "NOW": str(tmp_path / "now")}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=120)
    assert done.stdout.count("interrupted [1] False\n") == 3, (done.stdout, done.stderr)
