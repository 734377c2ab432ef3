"""Ranks ask no name server while they join, and may ask one afterwards: a host of its own, with a name server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.network import Namespaces, why_no_namespaces

pytestmark = pytest.mark.slow

SCRIPT = """
import json, socket, threading
import torch.distributed as dist
from mlaunch import launcher

server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
asked = []

def answer():  # that there is no such name, whatever is asked
    while True:
        query, address = server.recvfrom(4096)
        asked.append(query[12:].split(b"\\0")[0].decode(errors="replace"))
        server.sendto(query[:2] + b"\\x81\\x83" + query[4:6] + b"\\0" * 6 + query[12:], address)

def train():
    dist.barrier()
    return dist.get_rank()

def look():
    try:
        return socket.gethostbyname("after-the-join.example")
    except OSError as error:
        return str(error)

threading.Thread(target=answer, daemon=True).start()
values = launcher(train, 4)()
joining = list(asked)
print(json.dumps({"values": values, "joining": joining, "after": launcher(look, 2)(), "asked": asked}))
"""


def test_no_name_server_is_asked_during_a_join(tmp_path: Path) -> None:
    if why := why_no_namespaces():
        pytest.skip(why)
    rows = [row.split() for row in Path("/etc/nsswitch.conf").read_text().splitlines() if row.startswith("hosts:")]
    if not any("dns" in row for row in rows):
        pytest.skip("this machine asks no name server")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    network = Namespaces(1)
    try:
        out, err = network.hosts[0].start(str(script)).communicate(timeout=90)
    finally:
        network.close()
    told = json.loads(out) if out else pytest.fail(err)
    assert told["values"] == [0, 1, 2, 3]
    assert told["joining"] == []
    assert len(told["after"]) == 2
    assert any("after-the-join" in name for name in told["asked"])
