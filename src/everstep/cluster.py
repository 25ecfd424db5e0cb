"""What there is to run on: nodes, the hosts and sites they are at, and the links between them.

Most clusters have one kind of link, and ``Cluster.one_link`` says so at no cost, so that large ones stay cheap to plan for.
Otherwise a link depends on where its two ends are: on one host, at one site, or at two. A node sends and receives at the
same time, each at the rate of the link; a link between two sites is shared by all nodes there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from everstep.quantities import HostId, NodeId, SiteId

HERE = SiteId("here")
"""The site of a cluster that has only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One process that can compute."""

    node_id: NodeId
    host: HostId = HostId("localhost")
    site: SiteId = HERE
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


SitePair = tuple[SiteId, SiteId]
"""Two sites, in the order of their names."""


def site_pair(one: SiteId, other: SiteId) -> SitePair:
    return (one, other) if one <= other else (other, one)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes by id, cores by host, and the links between nodes."""

    nodes: Mapping[NodeId, Node]
    host_cores: Mapping[HostId, int | None] = field(default_factory=dict)
    """Cores that a host's nodes share. None or absent: each node has a device of its own."""
    link: Link = field(default_factory=Link)
    """Between nodes of one site."""
    host_link: Link | None = None
    """Between nodes of one host; None: as between hosts."""
    site_links: Mapping[SitePair, Link] = field(default_factory=dict)
    """Between nodes of two sites, the same both ways (``site_pair`` makes the key)."""

    @property
    def one_link(self) -> Link | None:
        """The link between any two nodes, where it is one; None: ask ``link_between``. Looks at no node."""
        return self.link if not self.site_links and self.host_link is None else None

    def link_between(self, one: NodeId, other: NodeId) -> Link:
        """What two different nodes of the cluster send over.

        Raises:
            KeyError: a node is not in the cluster, or their sites have no link.
        """
        here, there = self.nodes[one], self.nodes[other]
        if here.site != there.site:
            return self.site_links[site_pair(here.site, there.site)]
        return self.link if self.host_link is None or here.host != there.host else self.host_link

    def hosts(self) -> dict[HostId, tuple[NodeId, ...]]:
        """The nodes of each host, in the order of ``nodes``: what is lost with it."""
        found: dict[HostId, list[NodeId]] = {}
        for node_id, node in self.nodes.items():
            found.setdefault(node.host, []).append(node_id)
        return {host: tuple(nodes) for host, nodes in found.items()}

    def sites(self) -> dict[SiteId, tuple[NodeId, ...]]:
        """The nodes of each site, in the order of ``nodes``."""
        found: dict[SiteId, list[NodeId]] = {}
        for node_id, node in self.nodes.items():
            found.setdefault(node.site, []).append(node_id)
        return {site: tuple(nodes) for site, nodes in found.items()}

    def without(self, lost: frozenset[NodeId]) -> Cluster:
        """The same cluster after ``lost`` are gone."""
        return replace(self, nodes={node_id: node for node_id, node in self.nodes.items() if node_id not in lost})


def problems(cluster: Cluster) -> list[str]:
    """Everything wrong with ``cluster``; an empty list means it can be planned for."""
    found = [] if cluster.nodes else ["a cluster needs at least one node"]
    for node_id, node in cluster.nodes.items():
        if node.node_id != node_id:
            found.append(f"{node_id} is filed under another name: {node.node_id}")
        if node.memory_bytes is not None and node.memory_bytes <= 0:
            found.append(f"{node_id}: memory must be positive, got {node.memory_bytes}")
        if not 0 < node.speed < float("inf"):
            found.append(f"{node_id}: speed must be positive, got {node.speed}")
    for host, cores in cluster.host_cores.items():
        if cores is not None and cores < 1:
            found.append(f"host {host}: cores must be at least 1, got {cores}")
    links = {"a link": cluster.link}
    if cluster.host_link is not None:
        links["a link inside a host"] = cluster.host_link
    links |= {f"the link between sites {' and '.join(pair)}": link for pair, link in cluster.site_links.items()}
    for name, link in links.items():
        if not 0 <= link.alpha_s < float("inf") or not link.bytes_per_s > 0:
            found.append(f"{name} needs alpha_s >= 0 and bytes_per_s > 0, got {link}")
    return found + _site_problems(cluster)


def _site_problems(cluster: Cluster) -> list[str]:
    sites_of: dict[HostId, set[SiteId]] = {}
    for node in cluster.nodes.values():
        sites_of.setdefault(node.host, set()).add(node.site)
    found = [
        f"host {host} cannot be at more than one site: {', '.join(sorted(sites))}"
        for host, sites in sites_of.items() if len(sites) > 1
    ]
    found += [
        f"a link between sites needs two, in the order of their names, got {one} and {other}"
        for one, other in cluster.site_links if one >= other
    ]
    names = sorted(set[SiteId]().union(*sites_of.values()))
    found += [
        f"there is no link between sites {one} and {other}"
        for index, one in enumerate(names) for other in names[index + 1:] if (one, other) not in cluster.site_links
    ]
    return found
