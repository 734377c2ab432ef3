"""The cookbook's listings, run as the pages show them: on 2 CPU ranks."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.integration.libraries import needs
from tests.processes import soon
from tests.system import commands, slurm
from tests.users import users_environ

pytestmark = pytest.mark.slow
COOKBOOK = ROOT / "docs" / "cookbook"
LISTINGS = COOKBOOK / "listings"
LIMIT = 120.0
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a listing as a script, in a directory of its own and in this process, and returns what it printed."""

    def run(name: str, *args: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *args])
        runpy.run_path(str(LISTINGS / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_data_parallel(run: Run) -> None:
    *epochs, weights = run("ddp.py").splitlines()
    losses = [float(re.fullmatch(rf"\[0\] epoch {i}: loss (\S+)", line)[1]) for i, line in enumerate(epochs)]  # type: ignore[index]
    assert losses == sorted(losses, reverse=True)
    assert weights == "weights: [1.0, 1.0, 1.0, 1.0]"


def test_the_workers_of_a_loader(run: Run) -> None:
    lines = [line.split(", sum ") for line in run("loader_workers.py").splitlines()]
    assert [line[0] for line in lines] == [f"rank {rank}: 16 items from 2 workers" for rank in (0, 1)]
    assert sum(int(line[1]) for line in lines) == sum(i**2 for i in range(32))


@pytest.mark.nightly
def test_seeds(run: Run) -> None:
    drawn = {}
    for line in run("seeds.py").splitlines():
        seed, ranks = line.split(": ", 1)
        drawn[seed] = ast.literal_eval(ranks.replace("] [", "], ["))
    alike = {seed: [a == b for a, b in zip(*ranks, strict=True)] for seed, ranks in drawn.items()}
    assert alike == {"seed=7": [True] * 4, "seed='per-rank:7'": [False] * 4, "seed=None": [False] * 4}
    assert drawn["seed=7"][0] == drawn["seed='per-rank:7'"][0]  # 7 plus the rank


@pytest.mark.nightly
def test_fully_sharded(run: Run) -> None:
    here, whole = run("fsdp.py").splitlines()
    assert here == "[0-1] (4, 4) of (8, 4) is here"
    assert whole == "{'0.weight': (8, 4), '0.bias': (8,), '2.weight': (1, 8), '2.bias': (1,)}"


@pytest.mark.nightly
def test_checkpoints(run: Run, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="is started again .restart 1 of at most 2."):
        assert run("checkpoints.py", "saved") == "['epochs 3 to 5', 'epochs 3 to 5']\n"
    assert sorted(os.listdir(tmp_path / "saved")) == [f"epoch_000{epoch}.pt" for epoch in range(6)]


@pytest.mark.nightly
@pytest.mark.integration
def test_accelerate(run: Run) -> None:
    needs("accelerate")
    shared, values = run("with_accelerate.py").splitlines()
    assert shared == "[0] 2 processes, 4 batches each"
    assert_alike(ast.literal_eval(values))


@pytest.mark.nightly
@pytest.mark.integration
def test_transformers_trainer(run: Run) -> None:
    needs("transformers", "accelerate")
    assert run("with_trainer.py").endswith("world size 2, 4 steps, ['model.safetensors'] saved\n")


@pytest.mark.nightly
@pytest.mark.integration
@pytest.mark.parametrize("name", ["with_lightning.py", pytest.param("with_fabric.py", marks=pytest.mark.nightly)])
def test_lightning(run: Run, name: str) -> None:
    needs("lightning")
    values = ast.literal_eval(run(name).splitlines()[-1])
    assert_alike(values)
    assert values[0][:2] == (2, 4)  # two ranks, four of eight batches


@pytest.mark.nightly
@pytest.mark.integration
def test_torchmetrics(run: Run) -> None:
    needs("torchmetrics")
    assert run("with_torchmetrics.py") == "[0.5, 0.5]\n"


def assert_alike(values: list[object]) -> None:
    first, second = values
    assert first == second


@pytest.mark.nightly
@pytest.mark.integration
def test_tensorboard(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    run("board.py", "runs")
    assert len(os.listdir(tmp_path / "runs")) == 1  # rank 0's
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(tmp_path / "runs"))
    found.Reload()
    assert [event.step for event in found.Scalars("loss")] == list(range(10))


@pytest.mark.nightly
@pytest.mark.integration
def test_weights_and_biases(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run("weights_and_biases.py")
    assert len(list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))) == 1  # rank 0's


def test_logging(run: Run) -> None:
    assert sorted(run("rank_logging.py").splitlines()) == [
        "[0] INFO begin with 2 ranks", "[1] ERROR the loss of rank 1 is nan",
    ]  # fmt: skip


@pytest.mark.nightly
def test_a_loss_per_epoch(run: Run) -> None:
    losses = ast.literal_eval(run("losses.py"))
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3


@pytest.mark.nightly
def test_remote_calls(run: Run) -> None:
    assert run("remote_calls.py").endswith("[[2.0, 2.0], None]\n")


def test_cpus_of_each_rank(run: Run) -> None:
    first, second = ast.literal_eval(run("numa.py"))
    siblings = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    assert not {*first} & {*second} or len({path.read_text() for path in siblings}) < 2


@pytest.mark.nightly
@pytest.mark.integration
def test_hydra(tmp_path: Path) -> None:
    """In a process of its own, since Hydra sets up the logging of the one that it runs in."""
    needs("hydra")
    done = commands.run(tmp_path, str(LISTINGS / "with_hydra.py"), "lr=0.2", command=[IMPORTED])
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "lr 0.2: loss 0.40"), done.stderr
    assert [path.read_text() for path in tmp_path.rglob("loss.txt")] == ["0.4"]


@pytest.mark.nightly
@pytest.mark.integration
def test_multirun(tmp_path: Path) -> None:
    needs("hydra")
    done = commands.run(tmp_path, str(LISTINGS / "with_hydra.py"), "-m", "lr=0.1,0.2", command=[IMPORTED])
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("lr ")] == [
        "lr 0.1: loss 0.20", "lr 0.2: loss 0.40",
    ]  # fmt: skip
    assert sorted(path.read_text() for path in tmp_path.rglob("loss.txt")) == ["0.2", "0.4"]


@pytest.mark.integration
def test_optuna(run: Run) -> None:
    needs("optuna")
    assert run("with_optuna.py").startswith("4 trials, the best with lr 0.")


@pytest.mark.nightly
@pytest.mark.integration
def test_optuna_asks_and_is_told(run: Run) -> None:
    needs("optuna")
    found = dict(re.findall(r"lr (\d\.\d\d): (\w+)", run("optuna_ask_tell.py")))
    assert len(found) == 6
    assert {state for rate, state in found.items() if float(rate) > 1} == {"pruned"}
    assert {state for rate, state in found.items() if float(rate) < 1} == {"complete"}


@pytest.mark.nightly
@pytest.mark.integration
def test_optunas_threads_wait_for_devices(run: Run) -> None:
    needs("optuna")
    assert run("optuna_n_jobs.py").startswith("6 trials, the best with lr 0.")


@pytest.mark.nightly
@pytest.mark.integration
def test_joblibs_threads(tmp_path: Path) -> None:
    """In a process of its own, since joblib's threads stay."""
    needs("joblib")
    done = commands.run(tmp_path, str(LISTINGS / "joblib_threads.py"), command=[IMPORTED])
    assert (done.returncode, done.stdout) == (0, "[[2, 2], [4, 4], [6, 6], [8, 8]]\n"), done.stderr


WANDB = """
import contextlib, types

@contextlib.contextmanager
def init():
    yield types.SimpleNamespace(config=types.SimpleNamespace(lr=rate), log=lambda values: None)

def agent(sweep, function, count):
    global rate
    for number in range(count):
        rate = float(sweep) + number
        function()
"""


@pytest.mark.nightly
def test_agents_of_a_sweep_take_turns(tmp_path: Path) -> None:
    """wandb's agents ask its server; a module of that name stands in for both."""
    (tmp_path / "wandb.py").write_text(WANDB)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    script = str(LISTINGS / "wandb_agent.py")
    both = [commands.start(tmp_path, script, rate, command=[IMPORTED], PYTHONPATH=path) for rate in ("0.1", "2.1")]
    told = [agent.communicate(timeout=LIMIT) for agent in both]
    assert [out for out, _ in told] == [
        "lr 0.1: loss 0.00\nlr 1.1: loss 1.00\n", "lr 2.1: loss 4.00\nlr 3.1: loss 9.00\n",
    ], told  # fmt: skip


def test_a_profile_of_each_rank(run: Run, tmp_path: Path) -> None:
    assert run("profiling.py", "traces").endswith("[2, 2] steps were recorded\n")
    files = ["launch.json", "rank_0.json", "rank_1.json"]
    assert sorted(os.listdir(tmp_path / "traces")) == files
    for name in files:
        assert json.loads((tmp_path / "traces" / name).read_text())["traceEvents"]


def test_a_debugger_in_a_rank(run: Run) -> None:
    with ThreadPoolExecutor(1) as pool:
        session = pool.submit(debug, "here", ["p scale", "scale = 5.0", "c"])
        assert run("debugger.py", "here") == "[1] waiting at here\n[6.0, 6.0]\n"
    assert session.result()[1] == "2.0\n(Pdb) "


def debug(path: str, commands: list[str]) -> list[str]:
    """Does what ``nc -U`` and a person do; returns what comes before each prompt."""
    with socket.socket(socket.AF_UNIX) as connection:
        assert soon(lambda: connection.connect_ex(path) == 0, LIMIT), "no debugger listens"
        connection.settimeout(LIMIT)
        with connection.makefile("rw") as stream:
            said = [answer(stream.read)]
            for command in commands:
                print(command, file=stream, flush=True)
                said.append(answer(stream.read))
    return said


def answer(read: Callable[[int], str]) -> str:
    """Reads until the prompt, or the end."""
    text = ""
    while not text.endswith("(Pdb) ") and (more := read(1)):
        text += more
    return text


@pytest.mark.nightly
def test_a_batch_script(tmp_path: Path) -> None:
    """As it is, but for the number of tasks, and the address: two daemons on one host have nodes without names."""
    if (why := slurm.why_not()) or shutil.which("sbatch") is None:
        pytest.skip(f"Slurm: {why or 'without sbatch'}")
    folder = tmp_path / "slurm"
    folder.mkdir()
    changes = {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with slurm.running(folder) as environ:
        subprocess.run(
            ["sbatch", "--wait", "--ntasks-per-node=1", f"--output={tmp_path}/out", LISTINGS / "train.sbatch"],
            env={**users_environ(), **environ, **changes, "PATH": path},
            cwd=LISTINGS,
            capture_output=True,
            check=True,
            timeout=LIMIT,
        )
    assert (tmp_path / "out").read_text().splitlines()[-1] == "2 ranks, total 1.5"


def test_the_dockerfile() -> None:
    """No Docker is here. What it copies and installs is there, and is what the README says."""
    steps = [line.split(" ", 1) for line in (LISTINGS / "Dockerfile").read_text().splitlines() if line]
    assert [step for step, _ in steps] == ["FROM", "WORKDIR", "COPY", "RUN", "CMD"]
    said = dict(steps)
    version = re.fullmatch(r"python:(3\.\d+)-slim", said["FROM"])
    assert version is not None
    assert f"Python :: {version[1]}\n" in (ROOT / "setup.cfg").read_text()
    assert said["RUN"].replace(" --no-cache-dir", "") in (ROOT / "README.rst").read_text()
    assert (ROOT / json.loads(said["CMD"])[1]).is_file()


def test_the_answers() -> None:
    failed, tried = doctest.testfile(str(ROOT / "docs" / "faq.rst"), module_relative=False)
    assert (failed, tried > 0) == (0, True)


def test_every_listing_is_shown_and_run() -> None:
    names = {path.name for path in LISTINGS.iterdir() if path.is_file()}
    pages = {path.stem: path.read_text() for path in COOKBOOK.glob("*.rst")}
    shown = re.findall(r"^\.\. literalinclude:: listings/(\S+)$", "\n".join(pages.values()), re.MULTILINE)
    assert sorted(shown) == sorted(names)
    ours = Path(__file__).read_text()
    assert [name for name in sorted(names) if f'"{name}"' not in ours and name != "sbatch_train.py"] == []
    listed = set(re.findall(r"^   (\w+)$", pages.pop("index"), re.MULTILINE))
    assert listed == set(pages)
