"""Hosts of our own: network namespaces on a bridge, each with its own address and name; or, without root, loopback."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests import launches
from tests.conftest import ROOT
from tests.imported import IMPORTED, NAMESPACES
from tests.processes import apart, descendants, wait_gone
from tests.users import users_environ

MACHINE = str(ROOT / "tests" / "system" / "machine.py")


def free_port() -> int:
    """One that nobody has on this machine, below those that the kernel gives to whoever connects."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while launches.is_taken(port := random.SystemRandom().randrange(1024, max(end, 2048))):
        pass
    return port


class Host:
    """``name``, ``address``; ``start`` runs Python there, ``prefix`` any command.

    ``idle``: a calling process that waits for orders.
    """

    def __init__(self, name: str, address: str, prefix: list[str], runtime: str, **environ: str) -> None:
        self.name, self.address = name, address
        self.prefix, self._environ = prefix, {"XDG_RUNTIME_DIR": runtime, **environ}
        self.idle: subprocess.Popen[str] | None = None
        self._inhabitant = _inhabit(prefix) if prefix else None

    def start(self, *args: str, **environ: str) -> subprocess.Popen[str]:
        where = {} if self._inhabitant is None else {NAMESPACES: str(self._inhabitant.pid)}
        return subprocess.Popen(
            [IMPORTED, *args],
            env={**users_environ(), "PYTHONPATH": str(ROOT), **self._environ, **where, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def take(self) -> subprocess.Popen[str]:
        """A calling process of its own."""
        process, self.idle = self.idle or _ready(self.start(MACHINE)), None
        return process

    def close(self) -> None:
        if self._inhabitant is not None:
            self._inhabitant.communicate()
            apart.discard(self._inhabitant.pid)


def _inhabit(prefix: list[str]) -> subprocess.Popen[bytes]:
    """A process that is on a host as long as its standard input is open."""
    process = subprocess.Popen([*prefix, "sh", "-c", "echo; read _"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    apart.add(process.pid)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    return process


def _ready(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Kills them, and waits until nothing that they started is there any more."""
    family = [pid for process in processes for pid in (process.pid, *descendants(process.pid))]
    for process in processes:
        process.kill()
        process.communicate()
    wait_gone(family)


class Network:
    """``real``: its hosts have networks of their own."""

    real: bool
    hosts: list[Host]

    def warm(self) -> None:
        """Gives each host an idle process, as it had at the beginning."""
        started = [(host, host.start(MACHINE)) for host in self.hosts if host.idle is None]
        for host, process in started:
            host.idle = _ready(process)

    def close(self) -> None:
        end([host.idle for host in self.hosts if host.idle is not None])
        for host in self.hosts:
            host.close()


class Loopback(Network):
    """All hosts are this machine. Links and gates use uvloop here, where it is installed."""

    real = False

    def __init__(self, size: int) -> None:
        self._runtime = tempfile.mkdtemp()
        self.hosts = [
            Host(os.uname().nodename, "127.0.0.1", [], self._runtime, **{"MLAUNCH_UVLOOP": "1"}) for _ in range(size)
        ]

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._runtime)


class Namespaces(Network):
    """Needs root, iproute2 and network namespaces."""

    real = True

    def __init__(self, size: int) -> None:
        self._names = [f"mlt{os.getpid()}x{index}" for index in range(size)]
        self._switch = f"mlt{os.getpid()}"
        self._runtime = tempfile.mkdtemp()
        self.hosts: list[Host] = []
        self._run("ip", "netns", "add", self._switch)
        self._in(self._switch, "ip", "link", "add", "br0", "type", "bridge")
        self._in(self._switch, "ip", "link", "set", "br0", "up")
        for index, name in enumerate(self._names):
            self._add(index, name)

    def _add(self, index: int, name: str) -> None:
        address, host = f"10.77.0.{index + 1}", f"h{index + 1}"
        self._run("ip", "netns", "add", name)
        files = Path("/etc/netns") / name
        files.mkdir(parents=True)
        everyone = "".join(f"10.77.0.{i + 1} h{i + 1}\n" for i in range(len(self._names)))
        (files / "hosts").write_text(f"127.0.0.1 localhost\n{everyone}")
        (files / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        self._in(self._switch, "ip", "link", "add", f"p{index}", "type", "veth", "peer", "name", "eth0", "netns", name)
        self._in(self._switch, "ip", "link", "set", f"p{index}", "master", "br0", "up")
        for command in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            self._in(name, "ip", *command.split())
        prefix = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$0" "$@"']
        self.hosts.append(Host(host, address, prefix, self._runtime))

    def cable(self, index: int, state: str) -> None:
        """ "down" pulls a host's cable at the switch, "up" plugs it in."""
        self._in(self._switch, "ip", "link", "set", f"p{index}", state)

    def retransmitted(self, index: int) -> int:
        """How many segments a host has sent again so far, because nobody acknowledged them."""
        rows = self._in(self._names[index], "cat", "/proc/net/snmp").splitlines()
        names, values = (row.split() for row in rows if row.startswith("Tcp:"))
        return int(dict(zip(names, values, strict=True))["RetransSegs"])

    def received(self, index: int) -> int:
        """How many bytes have come to a host so far."""
        return int(self._in(self._names[index], "cat", "/sys/class/net/eth0/statistics/rx_bytes"))

    def rule(self, index: int, hook: str, rule: str) -> None:
        """A rule of nft on a host, in a table of our own."""
        chain = f"add chain inet mlt c {{ type filter hook {hook} priority 0; }}"
        self._in(self._names[index], "nft", f"add table inet mlt; {chain}; add rule inet mlt c {rule}")

    def heal(self) -> None:
        """All cables in, no rules."""
        for index, name in enumerate(self._names):
            self.cable(index, "up")
            self._in(name, "nft", "flush", "ruleset")

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._runtime, ignore_errors=True)
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)

    def _in(self, name: str, *command: str) -> str:
        return self._run("ip", "netns", "exec", name, *command)

    def _run(self, *command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def why_no_namespaces() -> str:
    """Why none can be made here; "" if they can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(program) is None:
            return f"{package} is not installed"
    try:
        Namespaces(1).close()
    except (subprocess.CalledProcessError, OSError) as error:
        return f"no network namespace can be made here: {error}"
    return ""
