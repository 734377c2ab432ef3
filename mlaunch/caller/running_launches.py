"""This user's running launches, and what they answer at the sockets on which their agents or callers listen."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from mlaunch.base.peer_process import rights_lacking_to_peer
from mlaunch.base.text import in_two_units, shown
from mlaunch.protocol import registry
from mlaunch.protocol.registry import STATUS

ID_SHOWN = 8
_QUEUE_TIMEOUT = 5  # seconds for a launch to accept a connection
_ANSWER_TIMEOUT = 5.0  # seconds for it to answer


def ask(word: bytes, start: str = "", *, patient: bool = False) -> list[dict[str, Any]]:
    """Return the answers of the running launches whose ID has this start, without those that end meanwhile.

    ``patient``: wait for each as long as it takes.
    """
    return [answer for _, answer in ask_by_name(word, start, patient=patient)]


def ask_by_name(word: bytes, start: str = "", *, patient: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """Return the answers, each with its name in the registry, where each part of a launch has its own."""
    answers, timeout = [], None if patient else _ANSWER_TIMEOUT
    for name, connection in registry.connections(os.environ, _QUEUE_TIMEOUT):
        with connection:
            answers.append((name, registry.ask(connection, word, timeout) if name.startswith(start) else None))
    return [(name, answer) for name, answer in answers if answer is not None]


def whole(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return launches, each with the ranks of all its parts: several machines of a launch may be this one."""
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        before = found.get(part["id"], {"ranks": []})["ranks"]
        ranks = sorted([*before, *part["ranks"]], key=lambda rank: rank["rank"])
        found[part["id"]] = {**part, **found.get(part["id"], {}), "ranks": ranks}
    return list(found.values())


def connect(name: str) -> socket.socket:
    """Return a connection to the launch of this name. LookupError: it is over, or in a sandbox."""
    connection = registry.reach(os.environ, name, _QUEUE_TIMEOUT)
    if connection is None:
        raise LookupError(f"the launch {name} has ended, or does not answer")
    # What it sends is unpickled here; a process in a sandbox could have put a socket there.
    if lacking := rights_lacking_to_peer(connection):
        connection.close()
        raise LookupError(f"the launch {name} is not debugged from here: of its process, {lacking}")
    return connection


def launches_of(name: str) -> list[str]:
    """Return the IDs of launches, or sets of ranks, that run this process's calls of that function."""
    ours = [launch for launch in ask(STATUS) if launch["caller"] == os.getpid()]
    named = [launch["id"] for launch in ours if f"{name}()" in {launch["function"], launch.get("call")}]
    return list(dict.fromkeys(named))


def title_of(launch: Mapping[str, Any]) -> str:
    """Return a launch's title: "3f2a6c11  train()  4 ranks, 12 s old, called by pid 4236"."""
    launch = shown(launch)
    size = len(launch["ranks"])
    ranks = f"{size} rank{'s' if size > 1 else ''}" + (f" of {launch['world_size']}" * (launch["world_size"] != size))
    again = f", restart {launch['restart_count']}" if launch["restart_count"] else ""
    name = f"{launch['function'].removesuffix('()')}({launch['given']})" if launch.get("given") else launch["function"]
    return (
        f"{launch['id'][:ID_SHOWN]}  {name}  {ranks}, {in_two_units(launch['age'])} old, "
        f"called by pid {launch['caller']}{again}"
    )


def facts_of(launch: Mapping[str, Any]) -> list[str]:
    """Return a line for each feature with facts about the launch: "counting: calls 3", or its text."""
    return [
        f"{feature}: {facts.get('text') or ', '.join(f'{name} {value}' for name, value in facts.items())}"
        for feature, facts in shown(launch.get("features", {})).items()
    ]


def place_of_rank(rank: Mapping[str, Any]) -> str:
    """Return a rank's device, with its machine if that is another one."""
    return f"{rank['device']} on {rank['host']}" if "host" in rank else str(rank["device"])
