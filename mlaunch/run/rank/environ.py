"""The environment of a rank that runs a target."""

from __future__ import annotations

from mlaunch.protocol import launch_files
from mlaunch.protocol.spec import LaunchSpec, Target
from mlaunch.rank.setup import device, environment
from mlaunch.rendezvous import tcp_store
from mlaunch.run.wire import Script


def environ_of(
    spec: LaunchSpec, target: Target, local_rank: int, rendezvous: tuple[str, object], runtime: str | None
) -> dict[str, str]:
    """Return the whole environment of a rank that runs a target. ValueError as ``device.only``."""
    script: Script = target.work
    environ = environment.of_rank(spec, local_rank, *rendezvous)
    environ |= {"ROLE_NAME": target.role, "TORCHELASTIC_RUN_ID": target.run_id, tcp_store.HOSTED_BY_AGENT: "True"}
    # Several agents may have one role and different numbers of ranks, so a rank's place in the role is not its rank.
    if target.role_start is not None:
        environ |= {"ROLE_RANK": str(target.role_start + local_rank), "ROLE_WORLD_SIZE": str(target.role_size)}
    environ[launch_files.ERROR_FILE] = launch_files.error_file_of(spec, local_rank)
    if script.virtual_local_rank:
        environ["LOCAL_RANK"] = "0"
    if script.virtual_local_rank or (runtime in {"cuda", None} and len(device.instances(environ)) > local_rank):
        # A script takes device LOCAL_RANK; but of MIG instances, a process sees only the first.
        environ |= device.only(local_rank, environ, runtime)
    return environ
