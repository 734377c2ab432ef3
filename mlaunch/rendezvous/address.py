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
_FLAGS, _UP = 16, 0x1  # where the kernel puts an interface's flags; that of one that is up
_CONNECT_TIMEOUT = 5.0  # seconds
_loopback_works = False
_NAME = 256  # bytes for the name in the ioctl's argument
_ADDRESS = slice(20, 24)  # where the kernel puts the address into it


def lacks_loopback() -> str:
    """Say why processes of this machine cannot meet at its loopback address; "" if they can.

    Once they can, this is not tried again, nor in forks: that the interface goes down later is not foreseen.
    """
    global _loopback_works  # noqa: PLW0603 - a fact about this machine
    try:
        if not _loopback_works:
            # Not by create_connection, whose look for a name imports a codec, here of all processes.
            with listen() as there, socket.socket() as client:
                client.settimeout(_CONNECT_TIMEOUT)
                client.connect(there.getsockname())
                _loopback_works = True
    except OSError as error:
        return (
            f"{LOOPBACK} cannot be reached ({error.strerror or error}), where the ranks of a machine meet: its "
            f"loopback interface is down (ip link set lo up), or a firewall is in between"
        )
    return ""


def listen(address: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Returns a listening socket; port 0: the kernel chooses.

    Its connections send at once. The kernel would hold a second small record until the first was acknowledged, which
    takes 40 ms where the other side has nothing to say; asyncio changes that for what it has opened by itself alone.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # The kernel cuts the backlog to net.core.somaxconn; who finds it full tries again after 1 s.
    listener = socket.create_server((address, port), family=family, backlog=4096)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # which connections inherit
    return listener


def listen_as_master(name: str, port: int) -> socket.socket:
    """Returns a socket where other machines find this one under ``name``, on the interface of that address alone.

    A host name that means loopback here (as Debian's own name does) means something else to others: then it listens on
    all interfaces.

    Raises:
        OSError: The name does not resolve, is not this machine's, or the port is taken.
    """
    family, _, _, _, found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
    address = str(found[0])
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback and not _means_loopback(name):
        address = "::" if family == socket.AF_INET6 else "0.0.0.0"
    return listen(address, port)


def is_taken(port: int) -> bool:
    """Tells whether somebody on this machine listens at a port, on any address."""
    dual = socket.has_dualstack_ipv6()
    try:
        # On all addresses at once: a port that is free on one may be taken on another, where rank 0 is to listen as
        # well.
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
    """Finds the network interface that has this address of the machine; "" if there is none."""
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
    """Names this machine's network: two processes with the same one find each other on loopback."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    # The namespace besides: containers of one machine have its boot_id, but each a loopback of its own.
    return f"{machine} {os.stat('/proc/self/ns/net').st_ino}"


def _is_up(probe: socket.socket, name: str) -> bool:
    answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack(f"{_NAME}s", name.encode()))
    flags: int = struct.unpack_from("H", answer, _FLAGS)[0]
    return bool(flags & _UP)


def addresses() -> list[str]:
    """Returns this machine's IPv4 addresses, that of the way to everywhere else first.

    Those of loopback are left out, and those of interfaces that are down.
    """
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack(f"{_NAME}s", name.encode()))
                if _is_up(probe, name):
                    found[name] = socket.inet_ntoa(answer[_ADDRESS])
    usual = _usual_interface()
    # Of several networks that with the way to everywhere is the one on which other machines are most likely to be.
    ordered = sorted(found, key=lambda name: name != usual)
    return [found[name] for name in ordered if not ipaddress.ip_address(found[name]).is_loopback]


def _usual_interface() -> str:
    """Returns the one of the default route; "" if there is none."""
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
