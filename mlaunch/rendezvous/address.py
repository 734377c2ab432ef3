"""Addresses of this machine, and sockets that listen."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

LOOPBACK = "127.0.0.1"
# By ioctl: the standard library names interfaces, but not their addresses.
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_FLAGS, _UP = 16, 0x1  # where the kernel puts an interface's flags; the flag of an interface that is up
_CONNECT_TIMEOUT = 5.0  # seconds
_loopback_works = False
_NAME = 256  # bytes for the name in the ioctl's argument
_ADDRESS = slice(20, 24)  # where the kernel puts the address into it


def lacks_loopback() -> str:
    """Return why processes of this machine cannot meet at its loopback address; "" if they can.

    After one success, neither this process nor its forks try again, even if the interface goes down later.
    """
    global _loopback_works  # noqa: PLW0603 - a fact about this machine
    try:
        if not _loopback_works:
            # create_connection would look up a name, which imports a codec into this process.
            with listen() as there, socket.socket() as client:
                client.settimeout(_CONNECT_TIMEOUT)
                client.connect(there.getsockname())
                _loopback_works = True
    except OSError as error:
        return (
            f"the ranks of a machine meet at {LOOPBACK}, which cannot be reached ({error.strerror or error}): its "
            f"loopback interface is down (ip link set lo up), or a firewall is in between"
        )
    return ""


def listen(address: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Return a listening socket; port 0: the kernel chooses a port.

    Its connections send at once. Otherwise the kernel would hold a second small record until the first is acknowledged,
    which takes 40 ms if the other side has nothing to send. asyncio sets this option only on sockets that it creates.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # The kernel cuts the backlog to net.core.somaxconn; a client that finds it full tries again after 1 s.
    listener = socket.create_server((address, port), family=family, backlog=4096)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    return listener


def listen_as_master(name: str, port: int) -> socket.socket:
    """Return a socket where other machines find this one under ``name``. It listens only on that address.

    A host name that means loopback on this machine (as Debian's entry for its own name does) means another address to
    other machines: then the socket listens on all interfaces.

    Raises:
        OSError: The name does not resolve, is not this machine's, or the port is taken.
    """
    family, _, _, _, found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
    address = str(found[0])
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback and not _means_loopback(name):
        address = "::" if family == socket.AF_INET6 else "0.0.0.0"
    return listen(address, port)


def is_taken(port: int) -> bool:
    """True if any process of this machine listens at the port, on any address."""
    dual = socket.has_dualstack_ipv6()
    try:
        # On all addresses at once, as rank 0 will listen: a port that is free on one may be taken on another.
        family = socket.AF_INET6 if dual else socket.AF_INET
        socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _means_loopback(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost"


def interface_of(address: str) -> str:
    """Return the name of the network interface that has this address of the machine; "" if none has it."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(wanted, ipaddress.IPv6Address):
        if wanted.ipv4_mapped is None:
            return _interface6(wanted)
        wanted = wanted.ipv4_mapped
    if wanted.is_loopback:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack(f"{_NAME}s", name.encode()))
                if answer[_ADDRESS] == wanted.packed:
                    return name
    return ""


def identity() -> str:
    """Return an id of this process's network: processes with the same id can meet on loopback."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    # With the namespace, because containers share their machine's boot_id, but each has its own loopback.
    return f"{machine} {os.stat('/proc/self/ns/net').st_ino}"


def _is_up(probe: socket.socket, name: str) -> bool:
    answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack(f"{_NAME}s", name.encode()))
    flags: int = struct.unpack_from("H", answer, _FLAGS)[0]
    return bool(flags & _UP)


def addresses() -> list[str]:
    """Return this machine's IPv4 addresses, that of the default route's interface first.

    Addresses of loopback and of interfaces that are down are left out.
    """
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack(f"{_NAME}s", name.encode()))
                if _is_up(probe, name):
                    found[name] = socket.inet_ntoa(answer[_ADDRESS])
    usual = _usual_interface()
    # If there are several networks, other machines are most likely on that of the default route.
    ordered = sorted(found, key=lambda name: name != usual)
    return [found[name] for name in ordered if not ipaddress.ip_address(found[name]).is_loopback]


def _usual_interface() -> str:
    """Return the name of the default route's interface; "" if there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/route").read_text(encoding="utf-8").splitlines()[1:]:
            name, destination, *_ = line.split()
            if int(destination, 16) == 0:
                return name
    return ""


def _interface6(address: ipaddress.IPv6Address) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines():
            digits, *_, name = line.split()
            if bytes.fromhex(digits) == address.packed:
                return name
    return ""
