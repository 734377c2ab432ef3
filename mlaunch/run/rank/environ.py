"""The environment of a rank that runs a command."""

from __future__ import annotations

from mlaunch.protocol import error_file
from mlaunch.protocol.spec import LaunchSpec, ScriptTarget
from mlaunch.rank.setup import device, environment
from mlaunch.rendezvous import tcp_store


def environ_of(
    spec: LaunchSpec, command: ScriptTarget, local_rank: int, rendezvous: tuple[str, object], runtime: str | None
) -> dict[str, str]:
    """Return the whole environment of a rank that runs a command. ValueError as ``device.only``."""
    environ = environment.of_rank(spec, local_rank, *rendezvous)
    environ |= {"ROLE_NAME": command.role, "TORCHELASTIC_RUN_ID": command.run_id, tcp_store.HOSTED_BY_AGENT: "True"}
    # Several agents may have one role and different numbers of ranks, so a rank's place in the role is not its rank.
    if command.role_start is not None:
        environ |= {"ROLE_RANK": str(command.role_start + local_rank), "ROLE_WORLD_SIZE": str(command.role_size)}
    environ[error_file.VARIABLE] = error_file.path_of(spec, local_rank)
    if command.virtual_local_rank:
        environ["LOCAL_RANK"] = "0"
    if command.virtual_local_rank or (runtime in {"cuda", None} and len(device.instances(environ)) > local_rank):
        # A script takes device LOCAL_RANK, of which a process sees the first alone where they are MIG instances.
        environ |= device.only(local_rank, environ, runtime)
    return environ
