"""Launches over several machines: real ones, as far as network namespaces are; and the same on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.processes import agents, children, descendants, listen, wait_gone, wait_until
from tests.system.machines import PORT, launched
from tests.system.network import Loopback, Namespaces, Network, why_no_namespaces

pytestmark = [pytest.mark.slow, pytest.mark.dear("each machine is a caller of its own, with its own fork server")]
WHY_NOT = why_no_namespaces()


@pytest.fixture(scope="module", autouse=True)
def networks() -> Iterator[dict[str, Network]]:
    """There before anything is counted, and for all tests."""
    made: dict[str, Network] = {}
    try:
        made["loopback"] = Loopback(3)
        if not WHY_NOT:
            made["namespaces"] = Namespaces(3)
        for network in made.values():
            network.warm()
        yield made
    finally:
        for network in made.values():
            network.close()


@pytest.fixture
def network(request: pytest.FixtureRequest, networks: dict[str, Network]) -> Network:
    """Namespaces where they can be made, else loopback; tests marked ``both`` run on both."""
    kind = getattr(request, "param", "loopback" if WHY_NOT else "namespaces")
    if kind not in networks:
        pytest.skip(WHY_NOT)
    return networks[kind]


both = pytest.mark.parametrize("network", ["loopback", "namespaces"], indirect=True)


@pytest.fixture
def loopback(networks: dict[str, Network]) -> Network:
    return networks["loopback"]


@pytest.fixture
def namespaces(networks: dict[str, Network]) -> Iterator[Namespaces]:
    """Hosts whose cables may be pulled."""
    made = networks.get("namespaces")
    if not isinstance(made, Namespaces):
        pytest.skip(WHY_NOT)
    yield made
    made.heal()


@pytest.mark.nightly("order1-loopback", "order0-namespaces")
@both
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_machines_of_unequal_size_join_in_any_order(network: Network, order: tuple[int, ...]) -> None:
    with launched(network, 1, 2, 1, token="hush") as machines:
        for index in order:
            machines.start(index)
            if index != order[-1]:
                line = machines.until_waiting(index)
                assert "hush" not in line
        ends = machines.ends()
    lo = "eth0" if network.real else "lo"
    assert [end["values"] for end in ends] == [
        [[0, 4.0, "0", "3", "1", lo, "0"]],
        [[1, 4.0, "1", "3", "2", lo, "0"], [2, 4.0, "1", "3", "2", lo, "0"]],
        [[3, 4.0, "2", "3", "1", lo, "0"]],
    ]


@pytest.mark.nightly
def test_machines_that_are_waited_for_are_named(network: Network) -> None:
    with launched(network, 1, 1) as machines:
        machines.start(1)
        line = machines.until_waiting(1)
        assert f"at {machines.host(0).address}, port {PORT} (" in line
        assert "is the launch started on the machine of rank 0, with this port, and does a firewall let it" in line
        machines.start(0)
        machines.ends()
        machines.start(0)
        line = machines.until_waiting(0)
        assert f"1 machine joined ({machines.host(0).name}); rank 1 missing" in line
        machines.start(1)
        assert [len(end["values"]) for end in machines.ends()] == [1, 1]


@pytest.mark.nightly
def test_calls_one_after_the_other_use_the_same_port(network: Network) -> None:
    with launched(network, 1, 1) as machines:
        machines.start_all({"calls": 6})
        assert [end["values"][0][0] for end in machines.ends()] == [0, 1]


@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("culprit", [0, 2])
def test_one_failure_ends_all(network: Network, how: str, culprit: int) -> None:
    with launched(network, 2, 2) as machines:
        machines.start_all({"rank": culprit, "how": how, "wait": True})
        ends = machines.ends()
        there = machines.host(culprit // 2).name
    words = f"raised ValueError: no such luck on {there}" if how == "raise" else "was killed by SIGKILL"
    for index, end in enumerate(ends):
        report = end["cause"] or end["text"]
        assert f"rank {culprit} of train() {words}" in report
        assert f"host {there}" in report
        assert end["type"] == ("ValueError" if how == "raise" and index == culprit // 2 else "LaunchError")
        assert how == "kill" or "Traceback (most recent call last)" in report


def test_a_failure_with_much_to_say(network: Network) -> None:
    """More than a record between processes may hold: the other machine hears its beginning."""
    with launched(network, 1, 1) as machines:
        machines.start_all({"rank": 0, "how": "raise", "words": 75_000, "wait": True})
        first, second = machines.ends()
    assert len(first["text"]) > 300_000
    assert second["text"].startswith("rank 0 of train() raised ValueError: no such luck on ")


def test_a_failure_in_characters_of_many_bytes(network: Network) -> None:
    """A record is bounded in bytes: 14,000 of these have 56,000, twice, in the message and in the traceback."""
    with launched(network, 1, 1) as machines:
        machines.start_all({"rank": 0, "how": "raise", "word": "\N{GRINNING FACE}", "words": 14_000, "wait": True})
        _, second = machines.ends()
    assert second["text"].startswith("rank 0 of train() raised ValueError: no such luck on ")
    assert "\N{GRINNING FACE}" * 900 in second["text"]


@both
def test_ctrl_c_on_one_machine_ends_all(network: Network) -> None:
    with launched(network, 1, 1) as machines:
        machines.start_all({"wait": True})
        machines.until(0, "running")
        machines.processes[1].send_signal(signal.SIGINT)
        first, second = machines.ends()
        assert second["type"] == "KeyboardInterrupt"
        assert first["text"].startswith(f"the call on host {machines.host(1).name} (rank 1) of train() was interrupted")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_caller_that_is_killed_ends_all(network: Network, victim: int) -> None:
    with launched(network, 1, 1) as machines:
        machines.start_all({"wait": True})
        machines.until(0, "running")
        machines.processes[victim].kill()
        end = machines.end(1 - victim)
        who = f"the calling process on host {machines.host(victim).name} (rank {victim})"
        assert end["text"].startswith(f"{who} of train() is gone")


@both
def test_a_master_that_dies_whole(network: Network) -> None:
    with launched(network, 1, 1) as machines:
        machines.start_all({"wait": True})
        machines.until(0, "running")
        whole = [machines.processes[0].pid, *descendants(machines.processes[0].pid)]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none may tell of another's end
            for pid in whole:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        end = machines.end(1)
        assert (
            f"the master at {machines.host(0).address}, port {PORT}, of train() was lost: its connection was"
            in end["text"]
        )


@pytest.mark.nightly("0")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_pulled_cable_is_noticed_by_both(namespaces: Namespaces, victim: int) -> None:
    with launched(namespaces, 1, 1, heartbeat_timeout=2) as machines:
        machines.start_all({"wait": True})
        machines.until(0, "running")
        namespaces.cable(victim, "down")
        first, second = machines.ends()
        assert first["text"].startswith("host h2 (rank 1) of train() was lost: no heartbeat came for 2 s")
        assert second["text"].startswith(
            f"the master at 10.77.0.1, port {PORT}, of train() was lost: no heartbeat came for 2 s"
        )


def test_the_port_of_the_master_alone_is_cut(namespaces: Namespaces) -> None:
    """Ranks go on, and what gloo says when one machine has given the other up is no cause."""
    # Longer than a busy machine takes from one rule to the other: each rule, and each look, is a process.
    with launched(namespaces, 1, 1, heartbeat_timeout=5) as machines:
        machines.start_all({"reduce": True})
        machines.until(0, "running")
        before = namespaces.retransmitted(1)
        namespaces.rule(1, "input", f"tcp sport {PORT} drop")
        wait_until(lambda: namespaces.retransmitted(1) > before)  # so that it gives the master up before that does
        namespaces.rule(0, "input", f"iifname eth0 tcp dport {PORT} drop")
        first, second = machines.ends()
    assert first["text"].startswith("host h2 (rank 1) of train() was lost: no heartbeat came for 5 s")
    assert second["text"].startswith(
        f"the master at 10.77.0.1, port {PORT}, of train() was lost: no heartbeat came for 5 s"
    )


def test_a_cable_that_is_plugged_in_again_in_time(namespaces: Namespaces) -> None:
    with launched(namespaces, 1, 1, heartbeat_timeout=20) as machines:
        machines.start_all({"wait": True})
        machines.until(0, "running")
        before = namespaces.retransmitted(0)
        namespaces.cable(1, "down")
        deadline = time.monotonic() + 15
        while namespaces.retransmitted(0) == before:  # each look is a process: no busy loop
            assert time.monotonic() < deadline, "nothing was lost on the way"
        namespaces.cable(1, "up")
        machines.processes[0].send_signal(signal.SIGINT)
        _, second = machines.ends()
        assert second["text"].startswith("the call on host h1 (rank 0) of train() was interrupted")


@both
def test_restarts_in_step(network: Network) -> None:
    with launched(network, 1, 1, max_restarts=2) as machines:
        machines.start_all({"rank": 1, "how": "kill", "attempts": 2})
        assert [end["values"][0][-1] for end in machines.ends()] == ["2", "2"]


def test_a_machine_that_comes_back_takes_its_ranks_again(network: Network) -> None:
    with launched(network, 1, 1, max_restarts=1, heartbeat_timeout=2) as machines:
        machines.start_all({"wait": True})
        machines.until(0, "running")
        machines.processes[1].kill()
        machines.processes[1].communicate()
        machines.start(1, {"wait": True})
        machines.until(0, "running")
        machines.processes[1].send_signal(signal.SIGINT)
        first, second = machines.ends()
        assert second["type"] == "KeyboardInterrupt"
        assert "was interrupted" in first["text"]


@pytest.mark.nightly
def test_the_example_with_its_two_commands(network: Network) -> None:
    script, address = str(ROOT / "examples" / "machines.py"), network.hosts[0].address
    processes = [host.start(script, address, str(machine)) for machine, host in enumerate(network.hosts[:2])]
    ends = [process.communicate(timeout=90) for process in processes]
    assert [out for out, _ in ends] == ["[100.0, 100.0]\n"] * 2, ends
    assert ends[0][1] == f"mlaunch: total() has no token: anybody who reaches {address}, port 29500 may join it\n"


@pytest.mark.nightly
def test_packets_are_lost(namespaces: Namespaces) -> None:
    """Every third that reaches one of them: slower, but nothing else."""
    namespaces.rule(1, "input", "iifname eth0 meta l4proto tcp numgen inc mod 3 == 0 drop")
    with launched(namespaces, 1, 1, token="hush") as machines:
        machines.start_all()
        assert [[value[:2] for value in end["values"]] for end in machines.ends()] == [[[0, 2.0]], [[1, 2.0]]]


def test_a_connection_that_is_half_open(namespaces: Namespaces) -> None:
    """One hears the other, who does not hear it."""
    with launched(namespaces, 1, 1, heartbeat_timeout=2) as machines:
        machines.start_all({"wait": True})
        machines.until(0, "running")
        namespaces.rule(0, "input", "ip saddr 10.77.0.2 drop")
        first, second = machines.ends()
    assert first["text"].startswith("host h2 (rank 1) of train() was lost: no heartbeat came for 2 s")
    assert second["type"] == "LaunchError"


def test_a_host_name(namespaces: Namespaces) -> None:
    with launched(namespaces, 1, 1, master_ip="h1") as machines:
        machines.start_all()
        assert [end["values"][0][:2] for end in machines.ends()] == [[0, 2.0], [1, 2.0]]


def test_ipv6(loopback: Network) -> None:
    with launched(loopback, 1, 1, master_ip="::1", token="hush") as machines:
        machines.start_all()
        assert [end["values"][0][:2] for end in machines.ends()] == [[0, 2.0], [1, 2.0]]


async def delaying_proxy(listener: socket.socket, port: int, over: threading.Event) -> None:
    """Passes each piece on after a while, in both directions."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await asyncio.sleep(0.03)
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pump(reader, there[1]), pump(there[0], writer), return_exceptions=True)
        writer.close()

    server = await asyncio.start_server(serve, sock=listener)
    await asyncio.to_thread(over.wait)
    server.close()


def test_a_slow_network(loopback: Network) -> None:
    """Control and store connections are delayed; the joining machine knows the proxy's port alone."""
    over, listener = threading.Event(), listen()
    port = listener.getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(delaying_proxy(listener, PORT, over)))
    thread.start()
    try:
        with launched(loopback, 1, 2, token="hush") as machines:
            machines.start(0)
            machines.start(1, port=port)
            ends = machines.ends()
        assert [[value[:2] for value in end["values"]] for end in ends] == [[[0, 3.0]], [[1, 3.0], [2, 3.0]]]
    finally:
        over.set()
        thread.join()


def link_of(process: subprocess.Popen[str], *, master: bool) -> int:
    """The link is the agent's first child, after the store and gate where that machine has them."""
    server = children(process.pid)[0]
    [agent] = agents(server)
    return sorted(children(agent))[1 if master else 0]


def gate_of(process: subprocess.Popen[str]) -> int:
    """That of the first machine."""
    [agent] = agents(children(process.pid)[0])
    return min(children(agent))


@pytest.mark.parametrize(
    ("place", "words"),
    [(0, "the gate on host HOST (pid PID) was killed by SIGKILL while the machines were joining"),
     (1, "the link on host HOST (pid PID) died while joining")],
)  # fmt: skip
def test_a_process_that_dies_while_joining_is_told_at_once(place: int, words: str, network: Network) -> None:
    with launched(network, 1, 1) as machines:
        process = machines.start(0)
        machines.until_waiting(0)
        victim = (gate_of, functools.partial(link_of, master=True))[place](process)
        os.kill(victim, signal.SIGKILL)
        text = machines.end(0)["text"]
        told = words.replace("HOST", machines.host(0).name).replace("PID", str(victim))
        assert text == f"train() was not started: {told}"


def test_a_link_that_is_stopped_while_joining(network: Network) -> None:
    with launched(network, 1, 1, heartbeat_timeout=2) as machines:
        process = machines.start(0)
        machines.until_waiting(0)
        os.kill(link_of(process, master=True), signal.SIGSTOP)
        text = machines.end(0)["text"]
    silence = r"said nothing for 2 s \(was it stopped\?\) and was killed"
    assert re.fullmatch(rf"train\(\) was not started: the link on host \S+ \(pid \d+\) {silence}", text)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_link_that_is_stopped_later(network: Network, victim: int) -> None:
    """Its own agent misses it, as the other machines do."""
    with launched(network, 1, 1, heartbeat_timeout=4) as machines:
        machines.start_all({"wait": True})
        machines.until(0, "running")
        link = link_of(machines.processes[victim], master=victim == 0)
        os.kill(link, signal.SIGSTOP)
        texts = [end["text"] for end in machines.ends()]
        wait_gone([link])
    assert texts[victim].startswith(
        "the process that talks to the other machines of train() said nothing for 4 s (was it stopped?)"
    )
    assert re.search(r"was lost: (no heartbeat came for 4 s|its connection was closed)", texts[1 - victim])


def test_a_link_that_dies_later(network: Network) -> None:
    with launched(network, 1, 1) as machines:
        machines.start_all({"wait": True})
        machines.until(0, "running")
        os.kill(link_of(machines.processes[1], master=False), signal.SIGKILL)
        first, second = machines.ends()
    assert second["text"].startswith("the process that talks to the other machines of train() died")
    assert "(rank 1) of train() was lost: its connection was closed" in first["text"]


# Refusals


@pytest.mark.parametrize(
    ("options", "how", "words"),
    [
        ({"rank_start": 0}, {}, None),
        ({"world_size": 4}, {}, "host {} has world_size=3, host {} has world_size=4"),
        ({"rank_start": 1, "n_gpus": 1}, {}, "rank 1 would be on host {} and on host {}: give each its own rank_start"),
        ({}, {"other": True}, "host {} has train() to run, host {} has other() to run"),
    ],
)
def test_machines_that_do_not_fit(network: Network, options: dict[str, Any], how: dict[str, Any], words: str) -> None:
    with launched(network, 2, 1) as machines:
        machines.start(0, token=options.get("token"))
        machines.until_waiting(0)
        machines.start(1, how, **options)
        first, second = machines.ends() if words else ({}, machines.end(1))
        names = (machines.host(0).name, machines.host(1).name)
    if words is None:  # two masters: the second cannot have the port, or is another machine's address
        assert "was not started: this machine cannot be the master at master_ip='" in second["text"]
        return
    for end, name in ((first, "train"), (second, "other" if how else "train")):
        assert end["text"] == f"{name}() was not started: {words.format(*names)}"


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (("right", "wrong"), "(wrong token: this machine's and the master's differ): give both the same token= or "
                             "MLAUNCH_TOKEN, unless another launch has this port; join_timeout=3 s has passed"),
        (("right", None), "train() was not started: the master asks for a token, and this machine has none; give "
                          "token= or MLAUNCH_TOKEN"),
        ((None, "right"), "(the master has no token, and this machine has one): give both the same token= or "
                          "MLAUNCH_TOKEN"),
    ],
)  # fmt: skip
def test_a_machine_with_another_token(network: Network, tokens: tuple[Any, Any], words: str) -> None:
    """It alone is turned away: whoever knows no token must not be able to end a launch."""
    with launched(network, 1, 1) as machines:
        machines.start(0, token=tokens[0])
        machines.until_waiting(0)
        machines.start(1, token=tokens[1], join_timeout=3)
        assert words in machines.end(1)["text"]
        machines.start(1, token=tokens[0])
        ends = machines.ends()
        assert [len(end["values"]) for end in ends] == [1, 1]
        told = ends[0]["stderr"]
        for came, turned_away in (("with another token", "wrong"), ("without a token", None)):
            said = f"{came} was turned away; if that is a machine"
            assert told.count(said) == (tokens == ("right", turned_away))


def test_a_gate_that_is_stopped_while_joining(network: Network) -> None:
    with launched(network, 1, 1) as machines:
        process = machines.start(0)
        machines.until_waiting(0)
        gate = gate_of(process)
        os.kill(gate, signal.SIGSTOP)
        machines.start(1, join_timeout=3)
        text = machines.end(1)["text"]
        assert "(it takes connections and says nothing): was its gate stopped (SIGSTOP, a debugger), or does " in text
        os.kill(gate, signal.SIGCONT)
        machines.start(1)
        assert [len(end["values"]) for end in machines.ends()] == [1, 1]


def test_a_token_from_the_environment(network: Network) -> None:
    with launched(network, 1, 1) as machines:
        machines.start(0, environ={"MLAUNCH_TOKEN": "hush"})
        machines.start(1, token="hush")
        for end, source in zip(machines.ends(), ("MLAUNCH_TOKEN", "token="), strict=True):
            assert len(end["values"]) == 1
            assert "hush" not in end["stderr"]
            assert f"train(): {source} has 4 characters, which others may guess; draw one: python -c" in end["stderr"]


def test_a_second_launch_at_the_same_port(network: Network) -> None:
    with launched(network, 1, 1) as machines:
        machines.start_all({"wait": True})
        machines.until(0, "running")
        running = machines.processes.pop(1)
        machines.start(1)
        late = machines.end(1)
        host = machines.host(1).name
        assert late["text"] == (
            f"train() was not started: the launch at this port has begun, without host {host} (rank 1): "
            f"a second launch needs another port"
        )
        machines.processes[1] = running
        running.send_signal(signal.SIGINT)
        assert [end["type"] for end in machines.ends()] == ["LaunchError", "KeyboardInterrupt"]


def test_a_master_that_never_comes(network: Network) -> None:
    with launched(network, 1, 1) as machines:
        machines.start(1, join_timeout=1)
        end = machines.end(1)
    assert end["type"] == "LaunchTimeout"
    assert end["text"].startswith("train() was not started: after 1 s no master answers at ")
    assert end["text"].endswith("does a firewall let it through?; join_timeout=1 s has passed")


def test_a_name_that_does_not_resolve(network: Network) -> None:
    with launched(network, 1, 1) as machines:
        machines.start(1, join_timeout=1, master_ip="no-such-host.invalid")
        text = machines.end(1)["text"]
        assert "no master answers at no-such-host.invalid, port" in text
        assert "is this the name of the machine of rank 0" in text
        assert "firewall" not in text  # which a connection has to come to first
        machines.start(0, master_ip="no-such-host.invalid")
        assert "this machine cannot be the master at master_ip='no-such-host.invalid'" in machines.end(0)["text"]


def test_a_machine_that_is_missing(network: Network) -> None:
    with launched(network, 1, 1) as machines:
        machines.start(0, join_timeout=1)
        end = machines.end(0)
    assert f"1 machine joined ({machines.host(0).name}); rank 1 missing; join_timeout=1 s has passed" in end["text"]


def test_a_deadline_of_another_machine_is_one_here(network: Network) -> None:
    with launched(network, 1, 1) as machines:
        machines.start(0, {"wait": True}, deadline=5)
        machines.start(1, {"wait": True})
        first, second = machines.ends()
        name = machines.host(0).name
    assert (first["type"], second["type"]) == ("LaunchTimeout", "LaunchTimeout")
    assert first["text"].startswith("train() did not finish within its deadline of 5 s; ")
    assert second["text"].startswith(f"the call on host {name} of train() passed its deadline of 5 s")


def test_the_deadline_counts_while_joining(network: Network) -> None:
    with launched(network, 1, 1) as machines:
        machines.start(0, deadline=0.5)
        end = machines.end(0)
    assert (end["type"], end["text"]) == (
        "LaunchTimeout",
        "train() was not started: its deadline of 0.5 s passed while the machines were joining",
    )


def test_ctrl_c_while_joining(network: Network) -> None:
    with launched(network, 1, 1) as machines:
        machines.start(0)
        machines.until_waiting(0)
        machines.processes[0].send_signal(signal.SIGINT)
        assert machines.end(0)["type"] == "KeyboardInterrupt"


def test_only_the_address_of_the_master_listens(namespaces: Namespaces) -> None:
    """The gate on the interface of master_ip, the store on loopback."""
    with launched(namespaces, 1, 1) as machines:
        machines.start(0)
        machines.until_waiting(0)
        name = namespaces._names[0]
        shown = subprocess.run(["ip", "netns", "exec", name, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
                               capture_output=True, text=True, check=True).stdout  # fmt: skip
        listening = {line.split()[1].split(":")[0] for line in shown.splitlines() if line.split()[3:4] == ["0A"]}
        assert listening == {"0100007F", "01004D0A"}  # 127.0.0.1, 10.77.0.1


@pytest.mark.nightly
def test_each_machine_writes_a_profile_of_its_ranks(network: Network, tmp_path: Path) -> None:
    """In a file of its own, here on a file system that both have, with numbers that fit together."""
    path = str(tmp_path / "trace.json.gz")
    with launched(network, 1, 2, profile=path, profile_steps=(1, 3), profile_ranks=(0, 2)) as machines:
        machines.start_all({"steps": 4})
        assert ["values" in end for end in machines.ends()] == [True, True]
    assert sorted(os.listdir(tmp_path)) == ["trace-from-rank-1.json.gz", "trace.json.gz"]
    names = ("trace.json.gz", "trace-from-rank-1.json.gz")
    files = [json.loads(gzip.decompress((tmp_path / name).read_bytes())) for name in names]
    events = [event for file in files for event in file["traceEvents"]]
    steps = {(event["pid"], event["name"]) for event in events if event["name"].startswith("ProfilerStep#")}
    assert steps == {(pid, f"ProfilerStep#{number}") for pid in (1000, 3000) for number in (1, 2)}
    assert all(event["ts"] >= 0 for event in events if "ts" in event)
