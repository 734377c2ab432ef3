"""Where the gate listens."""

from __future__ import annotations

import socket

import pytest

from mlaunch.rendezvous import address as address_module


def test_loopback_means_all_interfaces_only_for_a_name_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kw: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 0))])
    for name, expected in (("myself", "0.0.0.0"), ("localhost", "127.0.1.1"), ("127.0.1.1", "127.0.1.1")):
        with address_module.listen_as_master(name, 0) as listener:
            assert listener.getsockname()[0] == expected
