"""A Ray cluster of a head and two nodes on loopback; it ends with its standard input."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

cluster = Cluster()
for number, address in enumerate(("127.0.0.2", "127.0.0.3", "127.0.0.4")):
    cluster.add_node(node_ip_address=address, num_cpus=2 if number else 0, object_store_memory=100 << 20)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
for node in [*cluster.worker_nodes, cluster.head_node]:
    cluster.remove_node(node)
