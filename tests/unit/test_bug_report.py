"""``mlaunch doctor --report``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlaunch.cli import doctor, main

ENVIRON = {
    "HOME": "/home/ada",
    "MLAUNCH_TOKEN": "hushhush",
    "HF_API_KEY": "hf_hidden",
    "SLURM_JWT": "eyJhbGci",
    "NCCL_DEBUG": "INFO",
    "MY_NOTES": "private matters",
    "PYTHONPATH": "/home/ada/lib:/home/adam",
}


def report(environ: dict[str, str], failure: str | None = None) -> str:
    return "\n".join(doctor.report_lines(iter(["ok cpus"]), environ, failure))


def test_a_report_holds_what_helps_and_no_secret() -> None:
    told = report(ENVIRON)
    for wanted in (
        "\nmlaunch ",
        "\nok cpus\n",
        "\nopen files: ",
        "\nNCCL_DEBUG=INFO\n",
        "\nPYTHONPATH=~/lib:/home/adam\n",
        "\nMLAUNCH_TOKEN is set, and not shown\n",
        "print(train.last)",
    ):
        assert wanted in told
    for hidden in ("hushhush", "hf_hidden", "eyJhbGci", "private matters"):
        assert hidden not in told


def test_output_of_a_call_is_added_without_secrets(tmp_path: Path) -> None:
    failure = tmp_path / "failure.txt"
    failure.write_text("ValueError: hf_hidden in /home/ada/x.py at https://ada:pw@host/x\n" + "x\n" * 100_000 + "end")
    told = report(ENVIRON, str(failure))
    assert "\nValueError: (HF_API_KEY) in ~/x.py at https://(login)@host/x\n" in told
    assert "\nend\n" in told
    assert len(told) < 80_000


KEY = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqh\nBKcwggSjAgEAAoIB\n-----END KEY-----"
# By name: how it stands in what a call has printed is below.
SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAPLANTED01", "AWS_SECRET_ACCESS_KEY": "planted02/+x=", "AWS_SESSION_TOKEN": "planted03",
    "AZURE_CLIENT_SECRET": "planted04", "AZURE_STORAGE_CONNECTION_STRING": "Account=planted05;Key=planted06",
    "GH_PAT": "planted07", "GITHUB_TOKEN": "planted08", "GITLAB_PRIVATE_TOKEN": "planted09", "HF_TOKEN": "planted10",
    "HUGGING_FACE_HUB_TOKEN": "planted11", "WANDB_API_KEY": "planted12", "COMET_API_KEY": "planted13",
    "NEPTUNE_API_TOKEN": "planted14", "OPENAI_API_KEY": "planted15", "ANTHROPIC_API_KEY": "planted16",
    "MYSQL_PWD": "planted17", "PGPASSWORD": "planted18", "PGPASSFILE": "/x/planted19", "REDISCLI_AUTH": "planted20",
    "SLURM_JWT": "planted21", "SNYK_PAT": "planted22", "VAULT_TOKEN": "planted23", "CI_JOB_JWT": "planted24",
    "SENTRY_DSN": "https://planted25@sentry/1", "SLACK_WEBHOOK": "https://hooks/planted26", "COOKIE": "planted27",
    "WIFI_PSK": "planted28", "STORE_SAS": "sv=1&sig=planted29", "SMTP_PW": "planted30", "CARD_PIN": "planted31",
    "A_TOKEN": "planted32", "B_TOKEN": "planted32-planted33", "SHORT_PASS": "pl34", "TLS_CERT": "planted35",
    "DOCKER_AUTH_CONFIG": '{"auths": "planted36"}', "KEY_PHRASE": "two planted37 words", "DEPLOY_KEY": KEY,
    "TRAILING_SECRET": "planted38\n", "QUOTED_SECRET": "planted/39 &", "A_KEY_PASSPHRASE": "planted40",
}  # fmt: skip
TEXTS = {
    "https://ada:planted41@host/x": "planted41", "https://ada:p@planted42@host/x": "planted42",
    "git+ssh://ada:pl/planted43@host": "planted43", "https://planted44@host/": "planted44",
    "postgres://u:planted45@db:5432/x?sslmode=on": "planted45", "GET /x?token=planted46&y=1": "planted46",
    "https://api/?pat=planted47": "planted47", "Authorization: Bearer planted48": "planted48",
    "Authorization: Basic planted49==": "planted49", "password=planted50": "planted50", "'password': 'pl51'": "pl51",
    "passwd: planted52": "planted52", "api_key='planted53'": "planted53", 'api-key="planted54"': "planted54",
    "ghp_planted55abcdef": "planted55", "hf_planted56abcdef": "planted56", "sk-planted57abcdef": "planted57",
    "glpat-planted58abc": "planted58", "xoxb-planted59-abc": "planted59", "eyJhbGciOi.planted60.c": "planted60",
    "-----BEGIN RSA PRIVATE KEY-----\nplanted61\n-----END RSA PRIVATE KEY-----": "planted61",
    "access_token=planted62": "planted62", "AccountKey=planted63==": "planted63",
}  # fmt: skip


@pytest.mark.parametrize("before", [0, 480])
def test_planted_secrets_are_in_no_report(tmp_path: Path, before: int) -> None:
    """However long the line is in which they stand, which is cut."""
    quoted = ["planted%2F39%20%26", repr(KEY), *KEY.split("\n")]
    lines = [f"{'.' * before} failed with {text} in train" for text in [*SECRETS.values(), *TEXTS, *quoted]]
    failure = tmp_path / "failure.txt"
    failure.write_text("\n".join([*lines, "x\n" * 35_000]))
    environ = {**ENVIRON, **SECRETS, "NCCL_HOST": "https://ada:planted64@host/x"}
    assert len(SECRETS) + len(TEXTS) >= 60
    told = report(environ, str(failure))
    assert not re.search(r".*(planted|pl34|pl51|MIIEvQ|BKcwgg).*", told)


def test_what_is_no_secret_stays(tmp_path: Path) -> None:
    failure = tmp_path / "failure.txt"
    failure.write_text("KeyError: 'lr'\nloss = 0.5 at file:///x/y, tcp://10.0.0.1:29500, ada@host: true story\n")
    environ = {**ENVIRON, "PWD": "/x/y", "SECRET_MODE": "true", "PATTERN": "loss", "A_PIN": "0"}
    assert failure.read_text() in report(environ, str(failure))


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: iter([doctor.Finding("launch", doctor.PROBLEM, "no torch")]))
    assert main(["doctor", "--report"]) == 1
    assert "\nproblem  launch       no torch\n" in capsys.readouterr().out
    assert main(["doctor", "--report", str(tmp_path / "none")]) == 1
    told = capsys.readouterr()
    assert (told.out, "No such file" in told.err) == ("", True)
