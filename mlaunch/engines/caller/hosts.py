"""Machines that mlaunch reaches by ssh."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from mlaunch.base.exceptions import LaunchError
from mlaunch.engines.caller.engine import OPTIONAL_NAME, Engine, Words
from mlaunch.engines.caller.placement import Ends, Placement, Processes

# Nobody is there to type a password, and a host that does not answer should not take minutes. Keys are checked.
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=5", "-o",
        "ServerAliveCountMax=3")  # fmt: skip


_MOST_RANKS = 1023  # of a machine; a larger number after a colon is a port


class Hosts(Engine):
    """Hosts that the ``ssh`` program reaches, with the user's configuration: aliases, keys, agent, jump hosts.

    Args:
        hosts: Their names, as ``ssh`` takes them; "b:4" for four ranks on b, whatever ``n_gpus`` says, "[::1]:4" for
            an address of IPv6, "ssh://me@b:2222*4" with a port.
        python: The interpreter there; None: the path of this one. mlaunch must be installed for it, in this version.
        cwd: The directory of the ranks there; None: that of this process if it exists there, else the login's.
        ssh: The program and its options, as a list. Without ServerAliveInterval among them, in your configuration or
            here, a call without a deadline waits for ever for a host that is cut off.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        python: str | None = None,
        cwd: str | None = None,
        ssh: Sequence[str] = _SSH,
    ) -> None:
        super().__init__(python)
        if isinstance(hosts, str) or not hosts:
            raise ValueError(f"hosts={hosts!r}: allowed: a list of at least one name")
        Words("a", "b:4").check("hosts", hosts)
        Words("ssh", "-p", "2222").check("ssh", ssh)
        OPTIONAL_NAME.check("cwd", cwd)
        self._hosts = [_parted(host) for host in hosts]
        self._cwd = cwd
        self._ssh = list(ssh)

    def place(self, machines: int | None, command: Sequence[str]) -> Placement:
        """Take the first ``machines`` hosts; None: all."""
        if machines is not None and machines > len(self._hosts):
            raise ValueError(f"machines={machines} with {len(self._hosts)} hosts: allowed: 1 to {len(self._hosts)}")
        wanted = self._hosts[:machines]
        # exec: a shell between ssh and the member would outlive a member that is killed.
        there = " ".join(["exec", shlex.join(command)])
        if self._cwd is not None:
            there = f"cd {shlex.quote(self._cwd)} && {there}"
        return _OnHosts(wanted, [*self._ssh], there)

    def __repr__(self) -> str:
        return f"Hosts({[host for host, _ in self._hosts]})"


def check_name(host: str) -> None:
    """Raise ValueError for a name that ``ssh`` would take for an option: some options run commands here."""
    if host.startswith("-"):
        raise ValueError(f"host {host!r}: allowed: a name as ssh takes it, which does not begin with '-'")


def _parted(host: str) -> tuple[str, int | None]:
    if host.startswith("ssh://"):
        name, star, size = host.partition("*")
    else:
        name, star, size = host.rpartition(":")
        if not star or not name or (":" in name and not name.endswith("]")):  # an IPv6 address has several
            name, star, size = host, "", ""
        name = name.replace("[", "").replace("]", "")  # ssh takes an address without them
    check_name(name)
    if not star:
        return name, None
    if not size.isdecimal() or not 1 <= int(size) <= _MOST_RANKS:
        raise ValueError(
            f"hosts: {host!r}: allowed: a name, or a name and a number of ranks up to {_MOST_RANKS}, 'b:4', '[::1]:4'; "
            f"a port is said as ssh does, 'ssh://me@b:2222', with ranks behind a star, 'ssh://me@b:2222*4'"
        )
    return name, int(size)


class _OnHosts(Placement):
    at_once = 32  # logins: a jump host, or the user's ssh agent, refuses more

    def __init__(self, hosts: Sequence[tuple[str, int | None]], ssh: Sequence[str], command: str) -> None:
        self.sizes = [size for _, size in hosts]
        self._names = [name for name, _ in hosts]
        self._ssh = ssh
        self._command = command
        self._processes = Processes()

    def state(self) -> str:
        return ""

    def start(self, machine: int) -> Ends:
        try:
            return self._processes.start(machine, [*self._ssh, self._names[machine], self._command])
        except OSError as error:
            raise LaunchError(
                f"{self._ssh[0]} cannot be run here: {error.strerror}; install it, or give ssh="
            ) from error

    def fate(self, machine: int) -> str:
        return self._processes.fate(machine, f"ssh to {self._names[machine]}")

    def cancel(self) -> None:
        self._processes.end()
