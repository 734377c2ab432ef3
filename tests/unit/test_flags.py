"""The flags of ``mlaunch run``, without starting anything."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import socket
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mlaunch import cli
from mlaunch.caller.options.launch_options import Options, about
from mlaunch.caller.output.output_plan import Policy
from mlaunch.cli import UsageError
from mlaunch.protocol.server_messages import Ready
from mlaunch.run import command as run_command
from mlaunch.run.command import ending, flags, run_job
from mlaunch.run.command.job import Job, job_of, output_flags_of, output_plan, without_output
from mlaunch.run.command.run_job import describe


def parse(*args: str, **environ: str) -> argparse.Namespace:
    parser = flags.parser("mlaunch run", environ)
    parser.set_defaults(use_env=True)
    return parser.parse_args([*args, __file__])


def job(*args: str, **environ: str) -> Job:
    return job_of(parse(*args, **environ), environ)


def refused(capsys: pytest.CaptureFixture[str], *args: str, **environ: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(*args, **environ)
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_both_spellings_and_variables() -> None:
    for given in (["--nproc-per-node", "3"], ["--nproc_per_node=3"]):
        assert job(*given).size == 3
    assert job(PET_NPROC_PER_NODE="3").size == 3
    assert job("--nproc-per-node", "2", PET_NPROC_PER_NODE="3").size == 2
    assert parse(PET_NO_PYTHON="1").no_python
    assert not parse(PET_NO_PYTHON="0").no_python
    assert parse("--rdzv_id=x", PET_ROLE="trainer").role == "trainer"


def test_without_a_script_the_command_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        ([], "the following arguments are required: SCRIPT"),
        (["--error-file"], "argument --error-file/--error_file: expected one argument"),
    ):
        with pytest.raises(SystemExit, match="2"):
            flags.parser("mlaunch run", {}).parse_args(words)
        assert capsys.readouterr().err.splitlines()[-1] == f"mlaunch run: error: {said}"


def test_a_flag_may_be_shortened() -> None:
    """Though each has two spellings."""
    assert job("--nproc", "2") == job("--nproc=2") == job("--nproc_per", "2") == job("--nproc-per-node", "2")


def test_a_shortened_flag_that_fits_two_is_ambiguous(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ambiguous option: --master could match --master-addr, --master-port" in refused(capsys, "--master", "x")


@pytest.mark.parametrize("before", [
    [],
    ["--nproc-per-node", "2", "-r", "3", "-t0:3", "--tee=1", "--log_dir", "x", "--deadline", "-1"],
    ["--nproc", "2", "--standalone", "--pre", "json", "--dry"],
    ["-m", "--profile", "d"],
    ["-mr", "3", "--"],
])  # fmt: skip
@pytest.mark.parametrize("after", [
    ["--r=16"], ["--n=3", "-m"], ["--p", "x", "--t", "1"], ["--stop", "--print", "--prof=1"], ["--no-such"],
    ["x", "--"], ["--nproc-per-node", "3", "-h"],
])  # fmt: skip
def test_what_follows_the_script_is_the_scripts(before: list[str], after: list[str]) -> None:
    """However it looks: none of it is an ambiguous flag of ours."""
    parser = flags.parser("mlaunch run", {})
    found, without = parser.parse_args([*before, "train.py", *after]), parser.parse_args([*before, "train.py"])
    assert (found.training_script, found.training_script_args) == ("train.py", after)
    assert vars(found) | {"training_script_args": []} == vars(without)


def test_a_separator_behind_the_script_is_dropped_as_torchrun_does() -> None:
    parser = flags.parser("mlaunch run", {})
    assert parser.parse_args(["train.py", "--", "-x", "--"]).training_script_args == ["-x", "--"]


def test_help_shows_one_spelling() -> None:
    text = flags.parser("mlaunch run", {}).format_help()
    assert "--nproc-per-node N" in text
    assert "--nproc_per_node" not in text
    assert not re.findall(r"--\w*_\w+", text)


def test_completion(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as caught:
        run_command.main(["--print-completion", "bash"])
    script = capsys.readouterr().out
    assert caught.value.code == 0
    assert "complete -o bashdefault -F _shtab_mlaunch mlaunch\n" in script
    assert re.search(r"^_shtab_mlaunch_run_option_strings=\(.*'?--nproc-per-node'? ", script, re.MULTILINE)
    assert "--print-completion shell: allowed: bash, zsh, tcsh" in refused(capsys, "--print-completion", "shell")


def test_completion_of_the_whole_command(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    scripts = []
    for command in (["run", "--print-completion", "bash"], ["--print-completion", "bash"], ["--print-completion=bash"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(command)
        assert caught.value.code == 0
        scripts.append(capsys.readouterr().out)
    assert scripts[0] == scripts[1] == scripts[2]
    with pytest.raises(SystemExit) as caught:
        cli.main(["--print-completion", "shell"])
    assert caught.value.code == 2
    assert "--print-completion shell: allowed: bash" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (
            ["train.py", "--lr", "a b"],
            "train.py: no command of mlaunch; to run a script: mlaunch run train.py --lr 'a b'",
        ),
        (["--nproc-per-node", "2", "x/train.py"], "to run a script: mlaunch run --nproc-per-node 2 x/train.py"),
    ],
)
def test_a_script_without_the_command(capsys: pytest.CaptureFixture[str], arguments: list[str], meant: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert meant in capsys.readouterr().err


def test_the_command_alone_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    assert all(re.search(rf"^    {name} ", said, re.MULTILINE) for name in ("run", "ps", "why", "stop", "doctor"))


def test_an_id_that_is_empty_stops_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """As of a shell variable that is not set: it is the start of each ID."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["stop", ""])
    assert caught.value.code == 2
    assert "'' is no ID (a shell variable that is not set?)" in capsys.readouterr().err


def test_completion_without_shtab(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    said = refused(capsys, "--print-completion", "bash")
    assert said == ("mlaunch run: error: --print-completion needs the package shtab: pip install 'mlaunch[completion]'")


def test_man_page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("argparse_manpage")
    with pytest.raises(SystemExit) as caught:
        run_command.main(["--print-man-page"])
    page = capsys.readouterr().out.replace("\\", "")
    assert caught.value.code == 0
    assert page.startswith(".TH MLAUNCH ")
    shown = [action for action in flags.parser("mlaunch run", {})._actions if action.help != argparse.SUPPRESS]
    assert {name for action in shown for name in action.option_strings if name not in page} == set()
    monkeypatch.setitem(sys.modules, "argparse_manpage.manpage", None)
    said = refused(capsys, "--print-man-page")
    assert said == (
        "mlaunch run: error: --print-man-page needs the package argparse-manpage: pip install 'mlaunch[completion]'"
    )


def test_every_flag_of_torchrun_is_known_or_refused_by_name() -> None:
    get_args_parser = pytest.importorskip("torch.distributed.run").get_args_parser
    ours = {name for action in flags.parser("mlaunch run", {})._actions for name in action.option_strings}
    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    if importlib.util.find_spec("shtab") is None:
        theirs -= {"--print-completion", "--print_completion"}
    assert theirs - ours == set()


@pytest.mark.parametrize(
    "name", ["--start-method", "--event-log-handler", "--logs-specs", "--duplicate-stdout-filters", "--local-addr"]
)
def test_refused_by_name(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert f"{name} is not supported: " in refused(capsys, name, "spawn")
    variable = f"PET_{name[2:].replace('-', '_').upper()}"
    assert refused(capsys, **{variable: "spawn"}).startswith(
        f"mlaunch run: error: {variable} in the environment: {name}"
    )


def test_a_bad_variable(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, PET_MAX_RESTARTS="many")
    assert said == "mlaunch run: error: PET_MAX_RESTARTS='many' in the environment: not a valid value of --max-restarts"
    assert "PET_MODULE='yes' in the environment: allowed: 0 or 1" in refused(capsys, PET_MODULE="yes")
    assert parse(PET_MODULE="-1").module  # as under torchrun, which takes any number


@pytest.mark.parametrize("given", ["two", "2:two", ":2", "1.5"])
def test_words_that_are_no_number_of_machines(given: str) -> None:
    with pytest.raises(UsageError, match=f"--nnodes {given}: allowed: a number of machines"):
        job("--nnodes", given)


def test_a_file_that_holds_no_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(" \n")
    with pytest.raises(UsageError, match="token: the file is empty"):
        job("--token-file", str(tmp_path / "token"))


@pytest.mark.parametrize(
    ("args", "host", "port", "rank"),
    [
        ([], "localhost", 0, 0),
        (["--master-port", "29501"], "localhost", 29501, 0),
        (["--standalone", "--master-port", "29501"], "localhost", 0, 0),
        (["--nnodes", "2", "--node-rank", "1", "--master-addr", "h1"], "h1", 29500, 1),
        (["--nnodes", "2:2", "--rdzv-endpoint", "h1:1234", "--rdzv-conf", "rank=1"], "h1", 1234, 1),
        (["--nnodes", "2", "--rdzv-endpoint", "[::1]:1234"], "::1", 1234, 0),
        (["--nnodes", "2", "--master-addr", "[::1]"], "::1", 29500, 0),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:1234"], "127.0.0.1", 1234, 0),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "192.0.2.1"], "192.0.2.1", 29500, 1),
        (["--nnodes", "3", "--rdzv-backend", "c10d", "--rdzv-conf", "is_host=1"], "127.0.0.1", 29500, 0),
    ],
)
def test_where_the_machines_meet(args: list[str], host: str, port: int, rank: int) -> None:
    found = job(*args)
    assert (found.host, found.port, found.node_rank) == (host, port, rank)
    options = found.options(4)
    assert (options.world_size, options.rank_start) == (4 * found.nodes, 4 * rank)


def test_the_time_to_join() -> None:
    assert job().asked.join_timeout == 300
    assert job("--rdzv-conf", "timeout=9").asked.join_timeout == 9
    assert job("--rdzv-conf", "join_timeout=5,timeout=9").asked.join_timeout == 5
    assert job("--rdzv-conf", "timeout=9,join_timeout=5").asked.join_timeout == 5


def test_a_file_with_a_colon_in_its_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a function's name only where there is no such file."""
    monkeypatch.chdir(tmp_path)
    parser = flags.parser("mlaunch run", {})
    parser.set_defaults(use_env=True)
    assert job_of(parser.parse_args(["job:main"]), {}).kind == "function"
    (tmp_path / "job:main").write_text("")
    assert job_of(parser.parse_args(["job:main"]), {}).kind == "file"


def test_the_grace_period_is_torchruns() -> None:
    assert job().asked.grace_period == 30
    assert job(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").asked.grace_period == 7
    assert job("--shutdown-timeout", "0").asked.grace_period == 0
    assert job("--grace-period", "2.5").asked.grace_period == 2.5


def test_a_grace_period_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("soon", "nan", "inf", "-1"):
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", value)
        with pytest.raises(SystemExit):
            run_command.main([__file__])
        said = f"mlaunch run: TORCH_ELASTIC_SHUTDOWN_TIMEOUT {value}: allowed: seconds, 0 or more\n"
        assert capsys.readouterr().err == said


GIVEN: dict[
    str, tuple[list[str], object]
] = {  # for each option that a flag sets: what is given, and what becomes of it
    "events": (["--events", "events.jsonl"], "events.jsonl"),
    "n_gpus": (["--nproc-per-node", "3"], 3),
    "world_size": (["--nnodes", "2", "--master-port", "1"], 6),
    "rank_start": (["--nnodes", "2", "--node-rank", "1"], 3),
    "master_ip": (["--nnodes", "2", "--master-addr", "h1"], "h1"),
    "port": (["--master-port", "1234"], 1234),
    "grace_period": (["--shutdown-timeout", "7"], 7),
    "deadline": (["--deadline", "9"], 9),
    "max_restarts": (["--max-restarts", "2"], 2),
    "stop_on": (["--stop-on", "TERM,usr1"], "TERM,usr1"),
    "stop_grace": (["--stop-grace", "8"], 8),
    "stall": (["--stall", "60 stop"], "60 stop"),
    "slow": (["--slow", "10%"], "10%"),
    "join_timeout": (["--rdzv-conf", "join_timeout=5"], 5),
    "token": (["--token-file", "token"], "hush"),
    "oversubscribe": (["--oversubscribe"], True),
    "numa": (["--numa-binding", "0-3;4"], "0-3;4"),
    "numa_memory": (["--numa-binding", "node", "--numa-memory", "bind"], "bind"),
    "profile": (["--profile", "t"], "t"),
    "profile_steps": (["--profile", "t", "--profile-steps", "2,4"], (2, 4)),
    "profile_ranks": (["--profile", "t", "--profile-ranks", "0,2"], (0, 2)),
}
# Seen to by the command itself: test_devices, test_engines_by_name, test_flags_of_the_output.
ELSEWHERE = {"lease", "devices", "engine", "log_dir", "max_preemptions"}


def test_the_flags_of_options(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text("hush\n")
    parser = flags.parser("mlaunch run", {})
    known = {name for action in parser._actions for name in action.option_strings}
    assert {name for flag in flags.FLAGS.values() for name in flag.names} <= known
    assert {flag.group for flag in flags.FLAGS.values()} <= {group.title for group in parser._action_groups}
    assert flags.FLAGS.keys() == GIVEN.keys() | ELSEWHERE
    for name, (args, value) in GIVEN.items():
        assert flags.FLAGS[name].names[0] in args
        assert getattr(job(*args).options(3), name) == value


def test_runs_that_are_not_watched() -> None:
    assert job("--stall", "none").options(1).stall is None
    with pytest.raises(UsageError, match="--stall -1: allowed: seconds, more than 0, also as '60 stop', or none"):
        job("--stall=-1")


def test_variables_of_options() -> None:
    stated = {field.name: about(field.name).variable for field in fields(Options) if about(field.name).variable}
    assert stated == {"token": "MLAUNCH_TOKEN"}
    assert job(MLAUNCH_TOKEN="hush").options(1).token == "hush"


def test_flags_that_change_nothing() -> None:
    assert job("--monitor-interval", "5", "--run-path") == job()


class FakeServer:
    """On a machine with two devices."""

    def ready(self, _deadline: float | None = None) -> Ready:
        return Ready("2.13", "cuda", ("gloo", "nccl"))

    def count_devices(self, _environ: object) -> int:
        return 2


def test_devices() -> None:
    def placed(*args: str, **environ: str) -> tuple[int, dict[str, str]]:
        return run_job._on_devices(job(*args), FakeServer(), environ)  # type: ignore[arg-type]

    assert placed("--devices", "1") == (1, {"CUDA_VISIBLE_DEVICES": "1"})
    assert placed("--devices", "1,0", CUDA_VISIBLE_DEVICES="5,7") == (2, {"CUDA_VISIBLE_DEVICES": "7,5"})
    assert placed("--nproc-per-node", "gpu") == placed("--nproc-per-node", "auto") == (2, {})
    assert placed("--nproc-per-node", "8", "--devices", "0")[0] == 8
    with pytest.raises(UsageError, match=r"--devices=\[0, 9\]: \[9\] do not exist; the 2 visible cuda device"):
        placed("--devices", "0,9")


def policies(size: int, *args: str) -> dict[tuple[int, int], Policy]:
    return output_flags_of(parse(*args), {}).policies(size)


def test_flags_of_the_output() -> None:
    kept, seen, gone = Policy(shown=False, kept=True), Policy(shown=True, kept=True), Policy(shown=False)
    assert policies(2) == {}
    assert policies(2, "-r", "1") == {(0, 1): kept, (1, 1): kept}
    assert policies(2, "--tee", "1:3") == {(1, 1): seen, (1, 2): seen}
    assert policies(2, "-r", "2", "-t", "0:3") == {(0, 1): seen, (0, 2): seen, (1, 2): kept}
    assert policies(2, "--local-ranks-filter", "1") == {(0, 1): gone, (0, 2): gone}
    assert policies(2, "-t", "1", "--local-ranks-filter", "1") == {(0, 1): kept, (0, 2): gone, (1, 1): seen}


@pytest.mark.parametrize(
    ("args", "environ", "prefix"),
    [
        ([], {}, "[trainer1]:"),
        ([], {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank} ${local_rank}> "}, "5 1> "),
        ([], {"PET_LOG_LINE_PREFIX_TEMPLATE": "${role_name}> "}, "trainer> "),
        (["--log-line-prefix-template", "${hostname} ${other}> "],
         {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}> "}, f"{socket.gethostname()} ${{other}}> "),
    ],
)  # fmt: skip
def test_the_prefix_is_torchruns(args: list[str], environ: dict[str, str], prefix: str) -> None:
    """On the second machine, whose ranks begin with 4."""
    output_flags = output_flags_of(parse("-t", "3", *args, **environ), environ)
    assert output_plan(output_flags, 4, "trainer", None, lambda: 4).prefix([5]) == prefix


def test_a_token_that_is_no_utf_8_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"^MLAUNCH_TOKEN is not valid UTF-8"):
        job(MLAUNCH_TOKEN=os.fsdecode(b"hush\xff"))


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o604])
def test_a_token_file_that_others_can_read_is_told_of(
    mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "the token"
    file.write_text("hush\n")
    file.chmod(mode)
    assert job("--token-file", str(file)).token == "hush"
    told = [f"--token-file {file}: other users can read the token there; chmod go= '{file}'"] if mode != 0o600 else []
    assert [record.getMessage() for record in caplog.records] == told


def test_a_token_is_not_shown(tmp_path: Any) -> None:
    (tmp_path / "token").write_text("hush\n")
    found = job("--token-file", str(tmp_path / "token"))
    assert found.token == "hush"
    assert "hush" not in repr(found) + describe(found, run_job.spec_to_describe(found, 2, {}), {})


def test_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    environ = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "h1", "--nproc-per-node", "2", "--dry-run"]
    assert run_command.main([*environ, __file__, "--lr", "0.1 or so"]) == 0
    said = capsys.readouterr().out
    for words in (
        f"command     python {__file__} --lr '0.1 or so'\n",
        "ranks       2-3 of 4, if each machine has 2\n",
        "machines    2, this is number 1; they meet at h1, port 29500, to which this one connects, without a token\n",
        "devices     every rank sees all\n",
        "ending      SIGTERM, after 30 s SIGKILL; 0 restarts; no deadline\n",
        "  WORLD_SIZE=4\n",
        "  RANK=3 LOCAL_RANK=1 ROLE_RANK=3 TORCHELASTIC_ERROR_FILE=",
    ):
        assert words in said


def test_the_first_entry_of_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["ours", "base"])
    assert job().path == (__file__.rpartition("/")[0], "base")


def test_a_directory_in_which_nothing_would_be_kept() -> None:
    said = without_output(output_flags_of(parse("--log-dir", "logs"), {}), 2)
    assert said == "--log-dir logs gets no output without --tee 3 (terminal and files) or --redirects 3 (only files)"
    for flags_ in (["--log-dir", "logs", "--tee", "1:3"], []):
        assert without_output(output_flags_of(parse(*flags_), {}), 2) == ""


def test_words_in_a_pipe_command_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A user's exception may be in colours, or worse."""
    ending.say("raised ValueError: \x1b[1;31mno\x1b[0m such luck\x1b]0;title\x07\n\tat train.py:3")
    assert capsys.readouterr().err == ("mlaunch: raised ValueError: no such luck\\x1b]0;title\\x07\n\tat train.py:3\n")
