"""What mlaunch asks of a torch, and does where that lacks it."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlaunch import launcher
from mlaunch.base import linux
from mlaunch.caller.launch.plan import Attempt, ThisMachine, plan
from mlaunch.caller.options.launch_options import Options
from mlaunch.protocol.server_messages import Ready
from mlaunch.rank import device, launcher_variables
from mlaunch.rendezvous import store_client, tcp_store
from mlaunch.rendezvous.address import LOOPBACK, listen
from mlaunch.rendezvous.store_client import StoreClient


def test_where_torch_lacks_libuv_clients_do_without_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs: Any = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of this name
    theirs = torchs.TCPStore
    monkeypatch.setattr(torchs, "TCPStore", theirs)
    monkeypatch.setenv("USE_LIBUV", "1")
    for _ in range(2):
        tcp_store._do_without()
    assert (torchs.TCPStore.func, torchs.TCPStore.keywords) == (theirs, {"use_libuv": False})
    assert os.environ["USE_LIBUV"] == "0"


def test_a_store_without_libuv_wakes_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ``compare_set`` alone wakes nobody. Which of two ranks comes first is chance, so they meet often."""
    monkeypatch.setenv("USE_LIBUV", "0")

    def meet() -> int:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        client = StoreClient(address, port, "here", timedelta(seconds=60))
        for number in range(50):
            client.meet(f"here {number}", 2)
        client.connection = None  # as with a torch whose stores have no ``barrier``
        for _ in range(50):
            client.meet("there", 2)
        return dist.get_rank()

    assert launcher(meet, 2)() == [0, 1]


class WithoutLibuv:
    """torch's store as Linux distributions build it."""

    refusals = 0

    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(self, *place: object, use_libuv: bool = True, **options: Any) -> Any:
        if use_libuv:
            WithoutLibuv.refusals += 1
            raise dist.DistStoreError("use_libuv was requested but PyTorch was built without libuv support")
        return self._make(*place, use_libuv=False, **options)


@pytest.fixture
def without_libuv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "TCPStore", WithoutLibuv(dist.TCPStore))
    monkeypatch.setattr(WithoutLibuv, "refusals", 0)
    monkeypatch.delenv("USE_LIBUV", raising=False)


@pytest.mark.usefixtures("without_libuv")
def test_a_torch_without_libuv_serves_and_connects() -> None:
    with listen() as listener:
        port = listener.getsockname()[1]
        store = tcp_store.serve(listener.dup())
    client = tcp_store.connect(LOOPBACK, port, timedelta(seconds=60))
    client.set("key", "value")
    assert store.get("key") == b"value"
    assert WithoutLibuv.refusals == 2


@pytest.mark.usefixtures("without_libuv")
def test_other_errors_of_the_store_are_told() -> None:
    with listen() as listener:
        port = listener.getsockname()[1]
    with pytest.raises(dist.DistNetworkError):
        tcp_store.connect(LOOPBACK, port, timedelta(seconds=0.001))
    assert WithoutLibuv.refusals == 1


@pytest.mark.usefixtures("without_libuv")
def test_torch_own_rendezvous_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as a client of a store that an agent hosts, where torch heeds no variable."""
    monkeypatch.setattr(sys.modules["torch.distributed.rendezvous"], "TCPStore", dist.TCPStore)
    with listen() as listener:
        port = listener.getsockname()[1]
        store = tcp_store.serve(listener.dup())
    place = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**place, "USE_LIBUV": "1"}.items():
        monkeypatch.setenv(name, value)
    client = tcp_store.rendezvous("env://", 1, 2, timedelta(seconds=60))
    client.set("key", "value")
    assert store.get("key")
    assert os.environ["USE_LIBUV"] == "0"  # for what this process starts


def test_ranks_of_a_torch_without_libuv_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """For scripts and libraries that make stores of their own, which would all raise."""
    environ = {"USE_LIBUV": "1"}
    machine = ThisMachine(Ready("2.6", None, ("gloo",)), lambda _environ: 0)
    spec = plan(Options(n_gpus=1), machine, "train()", environ, Attempt(0, None))
    assert launcher_variables.of_rank(spec, 0, LOOPBACK, 1)["USE_LIBUV"] == "1"
    monkeypatch.setattr(tcp_store, "lacks_libuv", True)
    assert launcher_variables.of_rank(spec, 0, LOOPBACK, 1)["USE_LIBUV"] == "0"


def test_whether_this_torch_has_libuv_is_found_without_leaving_anything() -> None:
    def look() -> tuple[list[str], list[str], bool]:
        before = os.listdir("/proc/self/fd")
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "0"}
        tcp_store.hear_of_libuv(tcp_store.ask_for_libuv())
        return before, os.listdir("/proc/self/fd"), tcp_store.lacks_libuv

    def wait() -> bool:
        """The question has no answer."""
        module: Any = tcp_store
        module._refuses, module._ANSWER_TIMEOUT = signal.pause, 0.0
        tcp_store.hear_of_libuv(tcp_store.ask_for_libuv())
        return tcp_store.lacks_libuv or linux.has_children()

    assert launcher(wait, 1)() == [False]

    def use() -> None:
        dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, use_libuv=True)

    # With it, torch makes a client of a server that cannot listen, which waits for five minutes.
    [(before, after, lacks)] = launcher(look, 1)()
    assert before == after
    with pytest.raises(RuntimeError, match="libuv") if lacks else contextlib.nullcontext():
        launcher(use, 1)()


class Unclonable:
    """A store as before torch 2.8."""

    def __init__(self, store: dist.Store) -> None:
        self.check = store.check


def test_waiting_at_a_store_that_cannot_be_cloned() -> None:
    store = dist.HashStore()
    unclonable: Any = Unclonable(store)
    assert not store_client.wait_for(unclonable, "key", 0.01)
    threading.Timer(0.01, store.set, ("key", "value")).start()
    assert store_client.wait_for(unclonable, "key", 60)


@pytest.mark.parametrize(("release", "refused"), [("2.5.1", True), ("2.6.0+debian", False), ("3.0.0a0", False)])
def test_which_torch_is_too_old(monkeypatch: pytest.MonkeyPatch, release: str, refused: bool) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    with pytest.raises(device.TooOldError) if refused else contextlib.nullcontext():
        device.check_version()


@pytest.mark.parametrize(
    ("cuda", "xpu", "given", "kind"),
    [
        (False, False, "privateuseone", None),
        (True, False, "privateuseone", "cuda"),
        (False, True, "privateuseone", "xpu"),
        (True, False, "npu", "npu"),
    ],
)
def test_torch_2_6_is_not_asked_for_its_accelerator(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, xpu: bool, given: str, kind: str | None
) -> None:
    """Its own answer wakes the driver, and raises where there is no device."""
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: pytest.fail("it was asked"))
    monkeypatch.setattr(torch._C, "_has_cuda", cuda)
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: xpu)
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: given)
    assert device.accelerator() == kind
