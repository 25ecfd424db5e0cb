"""What there is to run on: nodes, the hosts they share, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.quantities import HostId, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One process that can compute."""

    node_id: NodeId
    host: HostId = HostId("localhost")
    memory_bytes: int | None = None
    """What state and activations may take here; None: not limited."""
    speed: float = 1.0
    """Work per second compared with the node the workload was measured on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a message between two nodes costs: ``alpha_s + bytes / bytes_per_s``."""

    alpha_s: float = 2e-4
    bytes_per_s: float = 1e9

    def seconds(self, num_bytes: float) -> float:
        return self.alpha_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes by id, cores by host, and one kind of link between all of them."""

    nodes: Mapping[NodeId, Node]
    host_cores: Mapping[HostId, int | None] = field(default_factory=dict)
    """Cores that a host's nodes share. None or absent: each node has a device of its own."""
    link: Link = field(default_factory=Link)

    def without(self, lost: frozenset[NodeId]) -> Cluster:
        """The same cluster after ``lost`` are gone."""
        kept = {node_id: node for node_id, node in self.nodes.items() if node_id not in lost}
        return Cluster(nodes=kept, host_cores=self.host_cores, link=self.link)


def problems(cluster: Cluster) -> list[str]:
    """Everything wrong with ``cluster``; an empty list means it can be planned for."""
    found = [] if cluster.nodes else ["a cluster needs at least one node"]
    for node_id, node in cluster.nodes.items():
        if node.node_id != node_id:
            found.append(f"{node_id} is filed under another name: {node.node_id}")
        if node.memory_bytes is not None and node.memory_bytes <= 0:
            found.append(f"{node_id}: memory must be positive, got {node.memory_bytes}")
        if not node.speed > 0:
            found.append(f"{node_id}: speed must be positive, got {node.speed}")
    for host, cores in cluster.host_cores.items():
        if cores is not None and cores < 1:
            found.append(f"host {host}: cores must be at least 1, got {cores}")
    if cluster.link.alpha_s < 0 or not cluster.link.bytes_per_s > 0:
        found.append(f"a link needs alpha_s >= 0 and bytes_per_s > 0, got {cluster.link}")
    return found
