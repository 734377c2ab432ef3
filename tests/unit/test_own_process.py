"""An error that a limit of the process caused names the limit."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from mlaunch.base import own_process
from mlaunch.caller.launch.plan import Attempt, ThisMachine, plan
from mlaunch.caller.options.launch_options import Options
from mlaunch.protocol.server_messages import Ready


def test_a_limit_that_was_met_is_named() -> None:
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    own_process.name_limit(error)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert f"Too many open files: the limit is {soft} open files; raise it with ulimit -n" in str(error)
    named = str(error)
    own_process.name_limit(error)  # on its way through another process
    assert str(error) == named


def test_other_errors_keep_their_words() -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    own_process.name_limit(error)
    assert str(error) == "[Errno 28] No space left on device"


def test_a_limit_that_cannot_be_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(32, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _which: limits[0])
    told = "2 ranks need about 34 open files, and this process may have 32: raise ulimit -n, up to 4096"
    assert own_process.too_few_files(2) == told
    limits[0] = (32, 32)
    told = "2 ranks need about 34 open files, and this process may have 32: raise ulimit -n, "
    assert own_process.too_few_files(2) == f"{told}beyond its hard limit of 32, which root can raise"
    limits[0] = (36, resource.RLIM_INFINITY)
    assert own_process.too_few_files(2) == ""
    limits[0] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert own_process.too_few_files(512) == ""


def test_too_few_files_are_told_as_a_launch_is_planned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_process, "too_few_files", lambda ranks: f"{ranks} ranks need more")
    ready = Ready("2.13", None, ("gloo",))
    plan(Options(n_gpus=2, device_type="cpu"), ThisMachine(ready, lambda _environ: 0), "train()", {}, Attempt(0, None))
    assert caplog.messages == ["train(): 2 ranks need more"]
