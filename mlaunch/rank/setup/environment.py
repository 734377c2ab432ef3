"""The environment variables by which torch and the libraries on it know a rank, named and valued as torchrun's."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mlaunch.protocol import token
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.rank.other_launchers import OWNER
from mlaunch.rank.setup import device
from mlaunch.rendezvous import tcp_store

# A rank needs no token, and all that it starts would have it. The caller's variable about torchrun's store is about the
# launch that the caller is part of.
_NOT_PASSED_ON = {token.VARIABLE, tcp_store.HOSTED_BY_AGENT}


def identity(
    rank: int, world_size: int, local_rank: int | None, local_world_size: int | None, address: str, port: object
) -> dict[str, str]:
    """Return the variables that every launcher sets, without those that are None."""
    known = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return _strings({name: value for name, value in known.items() if value is not None})


def of_rank(spec: LaunchSpec, local_rank: int, address: str, port: object) -> dict[str, str]:
    """Return the whole environment of a rank that runs a function."""
    rank = spec.rank(local_rank)
    launch = {
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": spec.world_size,
        "GROUP_RANK": spec.nodes.rank,
        "GROUP_WORLD_SIZE": spec.nodes.count,
        "NODE_RANK": spec.nodes.rank,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": spec.restarts.count,
        "TORCHELASTIC_MAX_RESTARTS": spec.restarts.most,
        "TORCHELASTIC_RUN_ID": spec.launch_id,
        OWNER: os.getpid(),  # of RANK: a process that a rank starts inherits these, but is no rank
    }
    own = identity(rank, spec.world_size, local_rank, spec.local_world_size, address, port)
    theirs = {name: value for name, value in spec.context.environ.items() if name not in _NOT_PASSED_ON}
    return {**theirs, **_defaults(spec, local_rank), **own, **_strings(launch)}


def _strings(values: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def _defaults(spec: LaunchSpec, local_rank: int) -> dict[str, str]:
    environ = spec.context.environ
    chosen = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    interface = spec.nodes.interface
    if interface:  # "lo" on one machine: NCCL takes the first interface by itself, where others reach its ranks
        chosen |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    found = {name: value for name, value in chosen.items() if name not in environ}
    if tcp_store.lacks_libuv:  # without this, torch's own store raises in all ranks then
        found[tcp_store.VARIABLE] = "0"
    if spec.devices.visible is not None and device.hides(spec.devices.type):
        runtime = device.runtime_of(spec.devices.type) or spec.devices.type
        found |= device.hiding(runtime, device.seen_by(local_rank, spec.devices.visible), environ)
    return found
