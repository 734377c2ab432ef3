"""``mlaunch run``: what is run, how it ends, and what is said."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import builds, launches, schema
from tests.imported import IMPORTED
from tests.processes import alive, descendants, wait_until
from tests.sandboxes import memory_group
from tests.system.commands import FRESH, MLAUNCH, environment, run, start, write
from tests.system.network import free_port

pytestmark = pytest.mark.slow
PAIR = ("--nproc-per-node", "2")
REDUCE = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {os.environ['RANK']} of {int(total)}: {sys.argv} {__name__} {__package__} {sys.path[0]}")
dist.destroy_process_group()
"""
FAIL = """
import ctypes, os, sys, signal
import torch.distributed as dist
dist.init_process_group("gloo")
def fail(how):
    if how == "raise": raise ValueError("no such luck")
    if how == "memory": raise MemoryError("no room")
    if how == "text": sys.exit("no such luck")
    if how.isdecimal(): sys.exit(int(how))
    if how == "segfault": ctypes.string_at(0)
    os.kill(os.getpid(), signal.Signals[how])
dist.barrier()  # none is still joining when rank 1 ends
if dist.get_rank() == 1:
    fail(sys.argv[1])
dist.barrier()
"""


def told(text: str) -> list[str]:
    return sorted(text.splitlines())


def test_a_script(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    arguments = ("--lr", "0.1", "local ${local_rank}")
    done = run(tmp_path, *PAIR, write(tmp_path, REDUCE), *arguments, TMPDIR=str(tmp_path / "temporary"))
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == [
        f"rank {rank} of 2: ['train.py', '--lr', '0.1', 'local {rank}'] __main__ None {tmp_path}" for rank in (0, 1)
    ]
    assert builds.without_gloo(done.stderr) == ""
    assert os.listdir(tmp_path / "temporary") == []


def test_a_module_with_relative_imports(tmp_path: Path) -> None:
    write(tmp_path, "", "package/__init__.py")
    write(tmp_path, "word = 'word'", "package/other.py")
    write(tmp_path, f"from .other import word\n{REDUCE}", "package/train.py")
    done = run(tmp_path, *PAIR, "-m", "package.train", "a")
    assert done.returncode == 0, done.stderr
    file = tmp_path / "package" / "train.py"
    assert told(done.stdout) == [f"rank {rank} of 2: ['{file}', 'a'] __main__ package {tmp_path}" for rank in (0, 1)]


def test_a_directory_with_a_main(tmp_path: Path) -> None:
    write(tmp_path, REDUCE, "job/__main__.py")
    done = run(tmp_path, *PAIR, "job", "a")
    assert told(done.stdout) == [f"rank {rank} of 2: ['job', 'a'] __main__  job" for rank in (0, 1)], done.stderr


def test_a_function(tmp_path: Path) -> None:
    write(
        tmp_path, "import sys\nclass Train:\n    def main():\n        print(sys.argv[1:])\n        return 3", "job.py"
    )
    done = run(tmp_path, "job:Train.main", "a")
    assert (done.returncode, done.stdout) == (3, "['a']\n"), done.stderr


def test_a_program(tmp_path: Path) -> None:
    done = run(tmp_path, *PAIR, "--no-python", "sh", "-c", 'echo "$RANK of $WORLD_SIZE: $0"', "x")
    assert (done.returncode, told(done.stdout)) == (0, ["0 of 2: x", "1 of 2: x"]), done.stderr
    done = run(tmp_path, "--no-python", "sh", "-c", "exit 7")
    assert done.returncode == 7
    assert done.stderr.splitlines()[0] == "mlaunch: rank 0 of sh exited with code 7"
    ignored = int(run(tmp_path, "--no-python", "grep", "SigIgn", "/proc/self/status").stdout.split()[-1], 16)
    assert not [number for number in (signal.SIGPIPE, signal.SIGXFSZ) if ignored >> (number - 1) & 1]


def test_a_program_that_hangs_is_stopped_without_being_asked(tmp_path: Path) -> None:
    """The signal that asks Python for its stacks would kill it."""
    text = """
if [ $RANK = 1 ]; then read x < ready; exit 4; fi
trap "echo ended; exit 1" TERM
echo > ready
while :; do read x < nothing; done
"""
    os.mkfifo(tmp_path / "ready")
    os.mkfifo(tmp_path / "nothing")
    done = run(tmp_path, *PAIR, "--no-python", "bash", "-c", text)
    assert (done.returncode, done.stdout) == (4, "ended\n"), done.stderr


def test_as_torch_distributed_launch(tmp_path: Path) -> None:
    command = [IMPORTED, "-m", "mlaunch.launch"]
    write(tmp_path, "import os, sys; print(sys.argv, os.environ['LOCAL_RANK'])")
    assert told(run(tmp_path, *PAIR, "train.py", "a", command=command).stdout) == [
        "['train.py', '--local-rank=0', 'a'] 0",
        "['train.py', '--local-rank=1', 'a'] 1",
    ]
    assert run(tmp_path, "--use-env", "train.py", command=command).stdout == "['train.py'] 0\n"
    assert run(tmp_path, "train.py", command=[IMPORTED, "-m", "mlaunch.run"]).stdout == "['train.py'] 0\n"


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("raise", 1, "rank 1 of train.py raised ValueError: no such luck"),
        ("text", 1, "rank 1 of train.py exited with code 1 (sys.exit or os._exit)"),
        ("3", 3, "rank 1 of train.py exited with code 3 (sys.exit or os._exit)"),
        ("SIGKILL", 137, "rank 1 of train.py was killed by SIGKILL"),
        ("SIGTERM", 143, "rank 1 of train.py was killed by SIGTERM"),
        ("memory", 52, "rank 1 of train.py raised MemoryError: no room"),
        ("segfault", 139, "rank 1 of train.py was killed by SIGSEGV"),
        ("0", 0, ""),
    ],
)
def test_how_it_ends(tmp_path: Path, how: str, status: int, words: str) -> None:
    script = FAIL if how != "0" else FAIL.replace("dist.barrier()", "")
    (tmp_path / "why.json").write_text('{\n  "schema": 1')  # what an earlier run has left, cut by a full disk
    done = run(tmp_path, *PAIR, "--error-file", "why.json", write(tmp_path, script), how)
    assert done.returncode == status, done.stderr
    assert (tmp_path / "why.json").exists() == bool(status)
    if status:
        why = json.loads((tmp_path / "why.json").read_text())
        schema.check(why, "failure")
        kinds = {"raise": "raised", "memory": "out_of_memory"} | dict.fromkeys(("text", "3"), "exited")
        kind = kinds.get(how, "killed")
        assert (why["kind"], why["status"], why["rank"], why["function"]) == (kind, status, 1, "train.py")
    assert done.stderr.count("ValueError: no such luck") == (2 if how == "raise" else 0)  # first line and traceback
    lines = done.stderr.splitlines()
    said = next((index for index, line in enumerate(lines) if line.startswith("mlaunch:")), 0)
    if status:
        assert lines[said] == f"mlaunch: {words}"
        assert re.fullmatch(r"  host \S+, pid \d+, while running the command", lines[said + 1])
        # A rank that ends closes its connections first, so another may already be on the way of telling of that.
        places = "barrier" if how == "raise" else r"(barrier|a failed call of torch\.distributed|<module>)"
        leaving = "was running the command, before its first line or after its last"  # its error is out of the script
        told_already = "" if how == "raise" else f"|{leaving}|was reporting an .*|raised RuntimeError: .*"
        assert re.fullmatch(f"  rank 0 (was in {places} at train\\.py:\\d+{told_already})", lines[-1])
    else:
        assert builds.without_gloo(done.stderr) == ""
    if how in {"raise", "segfault"}:
        assert f'File "{tmp_path}/train.py", line' in done.stderr
        assert "mlaunch/rank" not in done.stderr


EVERYDAY = """
import atexit, multiprocessing, os, sys, threading
import torch
from torch.utils.data import DataLoader, TensorDataset

class Held:
    def __del__(self):
        os.write(1, b"destructor\\n")

class Point:
    x = 5

def work(queue, point):
    queue.put((point.x, __name__))

held = Held()
never_closed = open("never_closed.txt", "w")
never_closed.write("kept")
sys.modules["keeper"] = open("kept_elsewhere.txt", "w")
sys.modules["keeper"].write("kept")

if __name__ == "__main__":
    atexit.register(print, "exit handler")
    for method in ("fork", "forkserver", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=work, args=(queue, Point()))
        process.start()
        print(method, queue.get(timeout=60))
        process.join()
        loader = DataLoader(TensorDataset(torch.arange(4)), num_workers=1, multiprocessing_context=method)
        print(sum(int(x) for x, in loader))
    go = threading.Event()
    threading.Thread(target=lambda: (go.wait(), print("thread"))).start()
    threading.Timer(0.01, go.set).start()
    sys.stdout.write("main without an end ")
"""


@pytest.mark.nightly
def test_ranks_do_what_a_fresh_interpreter_does(tmp_path: Path) -> None:
    done = run(tmp_path, write(tmp_path, EVERYDAY))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line != "destructor"] == [
        "fork (5, '__main__')", "6", "forkserver (5, '__mp_main__')", "6", "spawn (5, '__mp_main__')", "6",
        "main without an end thread", "exit handler",
    ]  # fmt: skip
    assert done.stdout.endswith("destructor\n")
    assert [(tmp_path / name).read_text() for name in ("never_closed.txt", "kept_elsewhere.txt")] == ["kept", "kept"]
    assert done.stderr == ""


def test_an_exception_runs_exit_handlers_and_the_scripts_own_hook(tmp_path: Path) -> None:
    done = run(tmp_path, write(tmp_path, """
import atexit, sys
atexit.register(print, "exit handler")
sys.excepthook = lambda kind, error, trace: print("hook:", kind.__name__, error, trace.tb_lineno)
raise KeyError("x")
"""))  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "hook: KeyError 'x' 5\nexit handler\n")


def test_lines_are_written_whole(tmp_path: Path) -> None:
    """Each write into this kind of pipe is a packet."""
    write(tmp_path, "import sys; sys.stdout.reconfigure(line_buffering=True); print('a\\nb'); print('c\\nd', 'e')")
    packets = _packets([*MLAUNCH, *PAIR, "train.py"], tmp_path)
    assert sorted(packets) == sorted([b"a\n", b"b\n", b"c\n", b"d e\n"] * 2)


def test_lines_are_written_whole_by_functions_on_the_callers_streams(tmp_path: Path) -> None:
    write(
        tmp_path,
        "from mlaunch import launcher; launcher(lambda: print('a\\nb'), 2, device_type='cpu', output='raw')()",
    )
    assert sorted(_packets([IMPORTED, "train.py"], tmp_path)) == sorted([b"a\n", b"b\n"] * 2)


def test_unbuffered_streams_are_asked_for(tmp_path: Path) -> None:
    write(tmp_path, "print('a', end='', flush=False); print('b')")
    packets = _packets([*MLAUNCH, "train.py"], tmp_path, PYTHONUNBUFFERED="1")
    assert packets == [b"a", b"b", b"\n"]


def _packets(command: list[str], cwd: Path, **environ: str) -> list[bytes]:
    """Returns what was written to the standard output of a command, write by write."""
    reading, writing = os.pipe2(os.O_DIRECT)
    surroundings = environment(**environ)
    if not environ:
        surroundings.pop("PYTHONUNBUFFERED", None)
    try:
        subprocess.run(command, cwd=cwd, env=surroundings, stdout=writing, timeout=120, check=True)
    finally:
        os.close(writing)
    with open(reading, "rb", buffering=0) as packets:
        return list(iter(lambda: packets.read(65536), b""))


def test_input_reaches_the_ranks(tmp_path: Path) -> None:
    assert run(tmp_path, write(tmp_path, "print(input()[::-1])"), stdin="abc\n").stdout == "cba\n"


def test_a_script_that_can_be_read_once(tmp_path: Path) -> None:
    """All ranks of all attempts run what the command has read."""
    script = """
import os, sys
print(os.environ["RANK"], sys.argv, sys.path[0])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" or os.environ["RANK"] == "1":
    raise ValueError("no such luck")
"""
    os.mkfifo(tmp_path / "fifo")
    for name, told_of in (("-", "<stdin>"), ("/dev/stdin", "/dev/stdin"), ("fifo", "fifo")):
        process = subprocess.Popen(
            [*MLAUNCH, "--nproc-per-node", "2", "--max-restarts", "1", name, "--r=16"],
            cwd=tmp_path,
            env=environment(TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if name == "fifo":
            (tmp_path / name).write_text(script)
        out, err = process.communicate("" if name == "fifo" else script, timeout=90)
        assert process.returncode == 1, err
        assert f"0 {[name, '--r=16']} {tmp_path}" in out.splitlines()
        assert "is started again (restart 1 of at most 1)" in err
        assert f"rank 1 of {told_of} raised ValueError: no such luck" in err
        assert f'File "{told_of}", line 5, in <module>\n      raise ValueError("no such luck")\n' in err
        assert json.loads((tmp_path / "error.json").read_text())["message"]["errorCode"] == 1


def test_a_script_in_a_pipe_that_is_no_python(tmp_path: Path) -> None:
    done = run(tmp_path, "-", stdin="x = (\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert "rank 0 of <stdin> raised SyntaxError: '(' was never closed (<stdin>, line 1)" in done.stderr
    assert "mlaunch/rank" not in done.stderr


def test_modules_imported_once(tmp_path: Path) -> None:
    write(tmp_path, "import os\npid = os.getpid()\nprint('imported', file=__import__('sys').stderr)", "costly.py")
    write(tmp_path, "import costly; print(costly.pid)")
    done = run(tmp_path, *PAIR, "--preload", "costly,json", "train.py")
    assert len(set(done.stdout.split())) == 1, done.stderr
    assert done.stderr == "imported\n"
    done = run(tmp_path, "--preload", "nowhere", "train.py")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "ModuleNotFoundError: No module named 'nowhere'")


def test_a_module_that_fails_with_much_to_say(tmp_path: Path) -> None:
    write(tmp_path, "raise ValueError('in short ' + chr(0x1F600) * 25_000 + ' in the end')", "loud.py")
    done = run(tmp_path, "--preload", "loud", write(tmp_path, "print('never')"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback (most recent call last):" in done.stderr
    assert "ValueError: in short" in done.stderr
    assert done.stderr.rstrip().endswith(" in the end")
    assert len(done.stderr) < 10_000


def test_a_flag_that_stands_behind_the_script(tmp_path: Path) -> None:
    """Whose parser refuses it, mostly; one that has such a flag is let alone."""
    done = run(tmp_path, write(tmp_path, "raise SystemExit(2)"), "--lr", "1", "--nproc_per_node=2")
    assert done.returncode == 2
    said = "comes after train.py, so the script got it: put flags of mlaunch run before the script\n"
    assert done.stderr.endswith(f"mlaunch: --nproc_per_node=2 {said}")
    done = run(tmp_path, write(tmp_path, ""), "--nproc_per_node=2")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_restart(tmp_path: Path) -> None:
    script = write(tmp_path, """
import os, sys
print(os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"])
sys.exit(5 if os.environ["TORCHELASTIC_RESTART_COUNT"] < "2" else 0)
""")  # fmt: skip
    done = run(tmp_path, "--max-restarts", "2", script)
    assert (done.returncode, done.stdout) == (0, "0 2\n1 2\n2 2\n"), done.stderr
    assert done.stderr.splitlines()[0] == (
        "mlaunch: train.py is started again (restart 1 of at most 2): rank 0 of train.py exited with code 5 "
        "(sys.exit or os._exit)"
    )
    assert run(tmp_path, "--max-restarts", "1", script).returncode == 5


def test_attempts_that_come_no_further(tmp_path: Path) -> None:
    """The third attempt is the last one, and a scheduler hears that it need not try."""
    script = write(tmp_path, "import mlaunch\nmlaunch.report(20, loss=0.1)\nraise ValueError('no such luck')")
    done = run(tmp_path, "--max-restarts", "9", "--error-file", "why.json", script)
    assert done.returncode == 93, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("mlaunch: train.py ")]
    assert len(said) == 3
    stuck = "train.py is not started again: two attempts in a row have not got beyond step 20 of mlaunch.report"
    assert said[2] == f"mlaunch: {stuck}"
    why = json.loads((tmp_path / "why.json").read_text())
    schema.check(why, "failure")
    assert (why["kind"], why["retry"], why["failures"][0]["kind"]) == ("no_progress", False, "raised")


def test_a_run_that_mlaunch_stop_ends(tmp_path: Path) -> None:
    """A program takes its own, by the pid of the command that it has started."""
    process = start(tmp_path, "--error-file", "why.json", write(tmp_path, "import signal\nwhile True: signal.pause()"))
    wait_until(lambda: any(launch["caller"] == process.pid for launch in launches.ask("status")))
    assert launches.command("stop", "--caller", str(process.pid)) == 0
    _, err = process.communicate(timeout=90)
    assert process.returncode == 143, err
    why = json.loads((tmp_path / "why.json").read_text())
    assert (why["kind"], why["retry"], why["status"]) == ("stopped", False, 143)


def test_a_run_that_has_too_little_memory(tmp_path: Path) -> None:
    """Which the kernel ends, not Python: 52 and not 137, so that a scheduler can tell it from other kills."""
    script = write(tmp_path, "hoard = []\nwhile True: hoard.append(b'x' * 2**24)")
    with memory_group(2**30) as procs:
        inside = ["sh", "-c", f'echo $$ >{procs}; exec "$@"', "sh", *FRESH]
        done = run(tmp_path, "--error-file", "why.json", script, command=inside)
    assert done.returncode == 52, done.stderr
    why = json.loads((tmp_path / "why.json").read_text())
    schema.check(why, "failure")
    known = ("out_of_memory", 0, -signal.SIGKILL, 52)
    assert (why["kind"], why["rank"], why["exitcode"], why["status"]) == known
    assert "it was probably killed for lack of memory" in why["hints"][0]


def test_a_run_that_does_not_stop_when_it_is_asked_to(tmp_path: Path) -> None:
    script = write(tmp_path, "import os, signal\nos.write(1, b'running\\n')\nwhile True: signal.pause()")
    flags = ("--stop-on", "USR1", "--stop-grace", "0.5", "--max-restarts", "1", "--error-file", "why.json")
    process = start(tmp_path, *flags, script)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 124, err
    why = json.loads((tmp_path / "why.json").read_text())
    schema.check(why, "failure")
    assert (why["kind"], why["retry"], why["status"], why["waited_for"]) == ("stop_overdue", False, 124, [0])
    assert "did not stop within 0.5 s of being asked to" in why["text"]


def test_a_deadline(tmp_path: Path) -> None:
    # A loop: what asks for its stack is a signal, after which pause() returns.
    done = run(tmp_path, "--deadline", "0.3", write(tmp_path, "import signal\nwhile True: signal.pause()"))
    assert done.returncode == 124
    assert "mlaunch: train.py did not finish within its deadline of 0.3 s; rank 0 had not returned" in done.stderr


def test_the_deadline_of_a_second_attempt(tmp_path: Path) -> None:
    """It has less time, and the words are of the time that was given."""
    script = write(tmp_path, "import os, signal\nos.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os._exit(5)\n"
                   "while True: signal.pause()")  # fmt: skip
    done = run(tmp_path, "--deadline", "2", "--max-restarts", "1", script)
    assert done.returncode == 124
    assert "is started again" in done.stderr
    assert "mlaunch: train.py did not finish within its deadline of 2 s; rank 0 had not returned" in done.stderr


STUBBORN = """
import os, signal, sys
def save(number, frame):
    print("saved at", signal.Signals(number).name)
    sys.exit(0)
number = signal.Signals[sys.argv[1]]
if os.environ["RANK"] == "0":
    signal.signal(number, save)
elif len(sys.argv) > 2:
    signal.signal(number, signal.SIG_IGN)
said = []
while True: signal.pause() if said else said.append(os.write(1, b"running\\n"))  # no stream is in use
"""


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_signals_are_passed_on(tmp_path: Path, name: str, status: int) -> None:
    for grace_period in ("0.5", "5", "30"):
        words = (*PAIR, "--grace-period", grace_period, write(tmp_path, STUBBORN), name, "stubborn")
        process = start(tmp_path, *words, TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["running\n"] * 2
        family = descendants(process.pid)
        assert len(family) >= 4  # fork server, agent, ranks
        process.send_signal(signal.Signals[name])
        out, err = process.communicate(timeout=90)
        if out and "did not show its stack" not in err:
            break  # else the machine is so busy that a rank could not do in time what it was asked to
    assert (process.returncode, out) == (status, f"saved at {name}\n"), err
    first, second = err.splitlines()
    assert first == f"mlaunch: ended by {name}"
    assert re.fullmatch(r"train\.py was interrupted; ranks 0-1 were in <module> at train\.py:\d+", second)
    assert not [pid for pid in family if alive(pid)]
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert (message["message"], message["errorCode"]) == (f"ended by {name}", -signal.Signals[name])
    assert message["extraInfo"]["py_callstack"].endswith(second)


def test_a_signal_that_is_not_handled_by_default(tmp_path: Path) -> None:
    process = start(tmp_path, "--signals-to-handle", "SIGUSR1", write(tmp_path, STUBBORN), "SIGUSR1")
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + signal.SIGUSR1, "saved at SIGUSR1\n")


def test_ctrl_c_at_a_terminal(tmp_path: Path) -> None:
    script = write(tmp_path, STUBBORN)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-m", "mlaunch", "run", script, "SIGINT"])
    said = b""
    while b"running" not in said:
        said += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    try:
        while data := os.read(terminal, 4096):
            said += data
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert b"saved at SIGINT" in said
    assert b"Traceback" not in said


def test_a_recorded_error(tmp_path: Path) -> None:
    script = write(tmp_path, """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("recorded")
main()
""")  # fmt: skip
    done = run(tmp_path, "--no-python", sys.executable, script, TORCHELASTIC_ERROR_FILE=str(tmp_path / "ours.json"))
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("mlaunch: rank 0 of") :]
    assert "ValueError: recorded" in report
    message = json.loads((tmp_path / "ours.json").read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("ValueError: recorded", 1)
    assert "ValueError: recorded" in message["extraInfo"]["py_callstack"]


def test_the_ranks_record_is_handed_on_as_it_is(tmp_path: Path) -> None:
    """With its exit code, as torchrun does; of a rank that wrote none, what the launch knows."""
    record = {"message": {"message": "mine", "extraInfo": {"py_callstack": "here", "timestamp": "5"}, "more": [1]}}
    script = write(tmp_path, f"""
import os, sys
if len(sys.argv) > 1:
    open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write({json.dumps(record)!r})
sys.exit(3)
""")  # fmt: skip
    ours = tmp_path / "deep" / "ours.json"
    done = run(tmp_path, script, "record", TORCHELASTIC_ERROR_FILE=str(ours))
    assert done.returncode == 3
    assert "  here\n" in done.stderr
    assert json.loads(ours.read_text()) == {"message": {**record["message"], "errorCode": 3}}
    run(tmp_path, script, TORCHELASTIC_ERROR_FILE=str(ours))
    message = json.loads(ours.read_text())["message"]
    said = "rank 0 of train.py exited with code 3 (sys.exit or os._exit)"
    assert (message["message"], message["errorCode"]) == (said, 3)


def test_a_fork_server_that_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between its start and the launch."""

    def kill(server: Any) -> None:
        os.kill(server.pid, signal.SIGKILL)
        while server.alive():
            os.sched_yield()

    launches.once_devices_are_chosen(monkeypatch, kill)
    assert launches.command("run", str(tmp_path / write(tmp_path, ""))) == 1
    said = capsys.readouterr().err
    words = r"mlaunch: the fork server \(pid \d+\) was killed by SIGKILL before it could start train\.py\n"
    assert re.fullmatch(words, said)


def test_an_interpreter_that_is_stopped_before_it_is_ready(tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\nkill -STOP $$\n")
    interpreter.chmod(0o700)
    done = run(tmp_path, "--deadline", "2", write(tmp_path, ""), PYTHON_EXEC=str(interpreter))
    assert done.returncode == 124
    assert "had not imported torch when the deadline had passed (was it stopped?) and was killed" in done.stderr


def test_few_file_descriptors(tmp_path: Path) -> None:
    done = subprocess.run(
        [*MLAUNCH, "--nproc-per-node", "20", write(tmp_path, "")],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 50)),
    )  # fmt: skip
    assert done.returncode == 1
    assert "Too many open files: the limit is 40 open files; raise it with ulimit -n, up to 50" in done.stderr


@pytest.mark.nightly
def test_development_mode_has_nothing_to_complain_of(tmp_path: Path) -> None:
    script = write(tmp_path, f"""
from mlaunch import launcher
for method in ("forkserver", "fork", "spawn"):
    assert launcher(lambda: 1, 2, device_type="cpu", start_method=method)() == [1, 1]
try:
    options = dict(device_type="cpu", world_size=2, port={free_port()}, join_timeout=0.2)
    launcher(lambda: 1, 1, start_method="spawn", **options)()
except RuntimeError as error:
    print("join_timeout=0.2 s has passed" in str(error))
""")  # fmt: skip
    done = run(tmp_path, script, command=[sys.executable, "-X", "dev"])
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert "ResourceWarning" not in done.stderr


def test_a_rank_that_is_done_takes_nothing_from_the_others(tmp_path: Path) -> None:
    """Where the others may note their errors is still there."""
    os.mkfifo(tmp_path / "first")
    done = run(tmp_path, *PAIR, write(tmp_path, """
import os
if os.environ["RANK"] == "0":
    os.open("first", os.O_WRONLY)  # open until this process is gone
else:
    open("first").read()
    print(os.path.isdir(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])))
"""))  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_inside_a_rank(tmp_path: Path) -> None:
    """A decorated function joins, comm works, and what a rank starts is no rank."""
    done = run(tmp_path, *PAIR, write(tmp_path, """
from mlaunch import comm, launcher
@launcher(n_gpus=7)
def train(): return comm.get_rank(), comm.all_gather(comm.get_rank()), comm.get_local_size()
print(train())
"""))  # fmt: skip
    assert told(done.stdout) == ["[(0, [0, 1], 2)]", "[(1, [0, 1], 2)]"], done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["job:nowhere"], "AttributeError: module 'job' has no attribute 'nowhere'"),
        (["wrong.py"], "SyntaxError: "),
        (["-m", "nowhere"], "No module named nowhere"),
    ],
)
def test_a_target_that_cannot_be_run(tmp_path: Path, args: list[str], words: str) -> None:
    write(tmp_path, "", "job.py")
    write(tmp_path, "def f(:", "wrong.py")
    done = run(tmp_path, *args)
    assert done.returncode == 1
    assert words in done.stderr
    assert "mlaunch/rank" not in done.stderr


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    script = write(tmp_path, "")
    for name, module in (("mlaunch run", ["mlaunch", "run"]), ("python -m mlaunch.run", ["mlaunch.run"])):
        done = run(tmp_path, script, command=[sys.executable, "-m", *module], PYTHON_EXEC="/nowhere/python")
        said = f"{name}: PYTHON_EXEC /nowhere/python: no such program, or it is not executable\n"
        assert (done.returncode, done.stderr) == (2, said)


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    script = tmp_path / write(tmp_path, "")
    command = [*FRESH, str(script)]
    code = f"import os; os.rmdir(os.getcwd()); os.execv({sys.executable!r}, {command!r})"
    done = run(tmp_path / "gone", "-c", code, command=[sys.executable])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "mlaunch: the working directory of this process no longer exists, so ranks cannot start in it; change to "
        "another one first"
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere.py"], "nowhere.py: no such file\n"),
        (["json"], "json: no such file; to run the module json, put -m in front of it\n"),
        (["--no-python", "nowhere"], "nowhere: no such program in PATH, or it is not executable\n"),
        (["--nproc-per-node", "many", "x.py"], "--nproc-per-node many: allowed: a number from 1, auto, gpu, cpu, "
         "xpu\n"),
        (["--nnodes", "1:4", "x.py"], "--nnodes 1:4: a launch has a fixed number of machines; give one number\n"),
        (["--nnodes", "2", "--node-rank", "2", "x.py"], "--node-rank 2: allowed: 0 to 1, since --nnodes is 2\n"),
        (["--nnodes", "2", "--master-port", "0", "x.py"], "port 0 of the master: allowed: 1 to 65535\n"),
        (["--token-file", "empty", "x.py"], "--token-file empty: the file is empty\n"),
        (["--role", "a\nb", "x.py"], r"--role 'a\nb': allowed: at most 255 printable characters" "\n"),
        (["--rdzv-backend", "etcd", "x.py"], "--rdzv-backend etcd is not supported: allowed: static, c10d\n"),
        (["--rdzv-conf", "last_call_timeout=3", "x.py"], "--rdzv-conf last_call_timeout: not supported; allowed: "
         "is_host, join_timeout, rank, timeout\n"),
        (["--token-file", "nowhere", "x.py"], "--token-file nowhere: [Errno 2] No such file or directory: 'nowhere'\n"),
        (["--signals-to-handle", "SIGKILL", "x.py"], "--signals-to-handle SIGKILL: no signal of this name can be "
         "handled\n"),
        (["--numa-binding", "near", "x.py"], "--numa-binding near: allowed: node, socket, exclusive, core-complex, or "
         "CPUs of each local rank such as '0-7;8-15'\n"),
        (["--numa-memory", "bind", "x.py"], "--numa-memory bind without --numa-binding: memory goes with the CPUs that "
         "a rank is bound to; allowed: with --numa-binding\n"),
        (["--numa-binding", "node", "--numa-memory", "near", "x.py"], "--numa-memory near: allowed: preferred, bind\n"),
        (["--error-file", "nowhere/why.json", "x.py"], "--error-file nowhere/why.json: allowed: the path of a file, in "
         "a directory that is there\n"),
        (["--error-file", "full.py", "x.py"], "--error-file full.py: this file is there, and is not the error file of "
         "an earlier run; give another path\n"),
        (["--redirects", "4", "x.py"], "--redirects 4: allowed: 0, 1, 2 or 3, for all ranks or by local rank, such "
         "as 0:3,1:2\n"),
        (["--standalone", "--nnodes", "2", "x.py"], "--standalone with --nnodes 2: --standalone is for one machine\n"),
        (["--nnodes", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "192.0.2.1", "x.py"], "--nnodes 3 without "
         "--node-rank: with more than two machines, each needs its number, beginning with 0 on the one at 192.0.2.1 "
         "(under Slurm: --node-rank $SLURM_NODEID)\n"),
    ],
)  # fmt: skip
def test_a_wrong_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "", "x.py")
    write(tmp_path, " \n", "empty")
    write(tmp_path, "a script", "full.py")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as caught:
        launches.command("run", "--error-file", "why.json", *args)
    why = json.loads((tmp_path / "why.json").read_text())
    schema.check(why, "failure")
    assert (why["kind"], why["text"], why["status"]) == ("misuse", f"mlaunch run: {words.rstrip()}", 2)
    assert (caught.value.code, capsys.readouterr().err) == (2, f"mlaunch run: {words}")
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert (message["message"], message["errorCode"]) == (f"mlaunch run: {words.rstrip()}", 2)
    assert (tmp_path / "full.py").read_text() == "a script"


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_more_ranks_than_this_machine_may_have(tmp_path: Path, dry: list[str]) -> None:
    """What only the plan finds is a wrong command line, too. And a file that is not ours stays, if its flag has it."""
    done = run(tmp_path, *dry, "--nproc-per-node", "100000", write(tmp_path, "a script"))
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"mlaunch run: n_gpus=100000 \(--nproc-per-node\) on \d+ CPU\(s\): more than .*\n", done.stderr)
    assert run(tmp_path, "--error-file", "train.py").returncode == 2
    assert (tmp_path / "train.py").read_text() == "a script"


def test_fewer_devices_than_ranks(tmp_path: Path) -> None:
    done = run(tmp_path, *PAIR, "--virtual-local-rank", write(tmp_path, ""), CUDA_VISIBLE_DEVICES="5")
    words = "--virtual-local-rank with 2 ranks: CUDA_VISIBLE_DEVICES=5 shows no device to local rank 1"
    assert (done.returncode, done.stderr) == (2, f"mlaunch run: {words}\n")


def test_an_attempt_leaves_no_descriptor_to_the_next(tmp_path: Path) -> None:
    script = write(tmp_path, """
import os
def parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
print(len(os.listdir(f"/proc/{parent(parent(os.getppid()))}/fd")))
raise SystemExit(1)
""")  # fmt: skip
    first, *others = run(tmp_path, "--max-restarts", "3", script).stdout.split()
    assert others == [first] * 3


def test_a_dry_run_of_as_many_ranks_as_there_are_cores(tmp_path: Path) -> None:
    done = run(tmp_path, "--dry-run", "--nproc-per-node", "cpu", write(tmp_path, "print('it runs')"))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"  LOCAL_WORLD_SIZE={len(os.sched_getaffinity(0))}\n" in done.stdout
    assert "it runs" not in done.stdout


def test_devices_that_are_not_there(tmp_path: Path) -> None:
    import torch

    if torch.accelerator.is_available():
        pytest.skip("this machine has devices")
    for args in (["--devices", "0"], ["--nproc-per-node", "gpu"]):
        done = run(tmp_path, *args, write(tmp_path, ""))
        assert done.returncode == 2
        assert re.search(r"mlaunch run: --\S+.*: (torch \S+ is built for CPUs only|no device is visible)", done.stderr)
    assert run(tmp_path, "--nproc-per-node", "auto", write(tmp_path, "print(1)")).stdout == "1\n" * len(
        os.sched_getaffinity(0)
    )
