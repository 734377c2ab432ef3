"""Real engines with two machines each, and a calling process that uses them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.processes import apart, descendants, wait_gone
from tests.system import slurm
from tests.system.network import Host, free_port
from tests.users import users_environ

_CALLER = ("-m", "tests.system.engine_caller")  # of the tree, where its processes run
_TIMEOUT = 60.0  # seconds
_RAY = str(ROOT / "tests" / "system" / "ray_cluster.py")
MPIRUN = "mpirun --allow-run-as-root --oversubscribe --bind-to none --mca oob_tcp_if_include lo -np 2"


class Rig:
    """``engine``: how it is made; ``prefix``: what runs a command where its caller belongs."""

    def __init__(self, engine: str, environ: Mapping[str, str], prefix: Sequence[str] = ()) -> None:
        self.engine = engine
        self.environ = {**users_environ(), **environ}
        self._prefix = list(prefix)
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*self._prefix, sys.executable, *_CALLER, self.engine, "2"],
            env=self.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        apart.add(process.pid)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the caller has ended"
        return json.loads(line)

    def ask(self, line: str) -> Any:
        self.say(line)
        return self.hear()

    def kill(self) -> None:
        """Kills the caller."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        family = descendants(self.process.pid)
        self.process.communicate()
        apart.discard(self.process.pid)
        wait_gone(family)


def ssh_files(folder: Path, hosts: Mapping[str, str]) -> list[str]:
    """Writes what a server and a client need, ``hosts`` being addresses by name; returns the server's command."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    port = free_port()
    known = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text("".join(f"[{address}]:{port} {known}\n" for address in set(hosts.values())))
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700, exist_ok=True)
    (folder / "sshd.conf").write_text(
        f"Port {port}\n"
        + "".join(f"ListenAddress {address}\n" for address in ["127.0.0.1"] if address in hosts.values())
        + f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nStrictModes no\nUsePAM no\nPidFile none\n"
        f"PermitRootLogin yes\nMaxStartups 100\nSetEnv XDG_RUNTIME_DIR={runtime}\n"
    )
    (folder / "ssh.conf").write_text(
        "".join(f"Host {name}\n  HostName {address}\n" for name, address in hosts.items())
        + f"Host *\n  Port {port}\n  User root\n  IdentityFile {folder}/user\n"
        f"  UserKnownHostsFile {folder}/known\n  IdentitiesOnly yes\n  BatchMode yes\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)  # where it shuts its children in; Debian's service makes it
    return [str(shutil.which("sshd")), "-D", "-e", "-f", str(folder / "sshd.conf")]


@contextlib.contextmanager
def serving(commands: Sequence[Sequence[str]]) -> Iterator[None]:
    """Runs daemons."""
    daemons = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]
    apart.update(daemon.pid for daemon in daemons)
    try:
        yield
    finally:
        family = [pid for daemon in daemons for pid in descendants(daemon.pid)]
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
            apart.discard(daemon.pid)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def ssh_server(folder: Path) -> Iterator[None]:
    """A daemon on loopback, under two names."""
    _need_sshd()
    with serving([ssh_files(folder, {"a": "127.0.0.1", "b": "127.0.0.1"})]):
        wait_for_ssh(folder, ["a", "b"])
        yield


@contextlib.contextmanager
def ssh(folder: Path) -> Iterator[Rig]:
    with ssh_server(folder):
        rig = Rig(f"Hosts(['a', 'b:3'], ssh=['ssh', '-T', '-F', '{folder}/ssh.conf'])", {})
        yield rig
        rig.close()


@contextlib.contextmanager
def ssh_between(hosts: Sequence[Host], folder: Path) -> Iterator[Rig]:
    """A daemon on all of these hosts but the first, where the caller is; the third is reached through the second."""
    _need_sshd()
    caller, *others = hosts
    command = ssh_files(folder, {host.name: host.address for host in others})
    conf = folder / "ssh.conf"
    conf.write_text(f"Host {others[1].name}\n  ProxyJump {others[0].name}\n{conf.read_text()}")
    with serving([[*host.prefix, *command] for host in others]):
        names = [host.name for host in others]
        wait_for_ssh(folder, names, caller.prefix)
        rig = Rig(f"Hosts({names}, ssh=['ssh', '-T', '-F', '{folder}/ssh.conf'])", {}, caller.prefix)
        yield rig
        rig.close()


def wait_for_ssh(folder: Path, names: Sequence[str], prefix: Sequence[str] = ()) -> None:
    """Waits until servers answer."""
    until = time.monotonic() + _TIMEOUT
    for name in names:
        command = [*prefix, "ssh", "-T", "-F", str(folder / "ssh.conf"), name, "true"]
        while subprocess.run(command, check=False, capture_output=True).returncode != 0:
            assert time.monotonic() < until, f"{name} does not answer"


def _need_sshd() -> None:
    if shutil.which("sshd") is None or os.geteuid() != 0:
        pytest.skip("openssh-server is not installed, or this is not root")


@contextlib.contextmanager
def slurm_here(folder: Path) -> Iterator[Rig]:
    """Two nodes of a Slurm of our own; the caller has an outer job's variables around it."""
    if why := slurm.why_not():
        pytest.skip(f"Slurm: {why}")
    with slurm.running(folder) as environ:
        rig = Rig(
            "Slurm(time='10:00', exclusive=True)",
            {**environ, "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_NTASKS": "7"},
        )
        yield rig
        rig.close()


def jobs(rig: Rig) -> str:
    return subprocess.run(["squeue", "-h"], env=rig.environ, capture_output=True, text=True, check=True).stdout


def wait_for_jobs(rig: Rig, most: int) -> None:
    """Waits until Slurm has no more than that many."""
    until = time.monotonic() + _TIMEOUT
    while len((left := jobs(rig)).splitlines()) > most:
        assert time.monotonic() < until, left


@contextlib.contextmanager
def mpirun(_folder: Path) -> Iterator[Rig]:
    if shutil.which("mpirun") is None:
        pytest.skip("openmpi-bin is not installed")
    rig = Rig(f"Command({MPIRUN!r})", {})
    yield rig
    rig.close()


@contextlib.contextmanager
def ray(_folder: Path) -> Iterator[Rig]:
    """Two nodes, and their head, in a network namespace of their own."""
    if importlib.util.find_spec("ray") is None or os.geteuid() != 0:
        pytest.skip("ray is not installed, or this is not root, who can make a network namespace")
    environ = {**users_environ(), "RAY_USAGE_STATS_ENABLED": "0"}
    inside = ["unshare", "-n", "sh", "-c", 'ip link set lo up; exec "$0" "$@"']
    cluster = subprocess.Popen(
        [*inside, sys.executable, _RAY],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    apart.add(cluster.pid)
    assert cluster.stdout is not None
    address = cluster.stdout.readline().strip()
    assert address, "Ray did not start"
    family = descendants(cluster.pid)
    try:
        made = f"Ray(address={address!r}, resources={{'CPU': 2}})"
        rig = Rig(made, {"RAY_USAGE_STATS_ENABLED": "0"}, ["nsenter", f"--net=/proc/{cluster.pid}/ns/net", "--"])
        yield rig
        rig.close()
    finally:
        cluster.communicate()
        apart.discard(cluster.pid)
        wait_gone(family)
