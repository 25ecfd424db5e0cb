"""Clusters and workloads from files: those that are shipped by bare name (``cluster-8``), others by path.

An unknown key, a wrong unit or a negative figure is a ``ConfigError`` that names the file, the line, the key and what was
expected.
Sizes are bytes or text like ``24MB``, durations seconds or text like ``0.2ms``; rates are bytes in a second, ``25GB``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from everstep import cluster as clusters
from everstep import workload as workloads
from everstep.catalog.tables import MOST, Table, nearest, read
from everstep.cluster import HERE, Cluster, Link, Node, SitePair, site_pair
from everstep.errors import ConfigError
from everstep.quantities import HostId, NodeId, SiteId, UnitName
from everstep.workload import LayerCost, Unit, Workload

_HERE = Path(__file__).parent

_LINK = {"alpha_s", "bytes_per_s"}
_HOST = {"name", "count", "nodes", "site", "cores", "memory_bytes", "speed"}
_MOST_LAYERS = 10_000
_UNIT_SIZES = ("parameter_bytes", "state_bytes", "gradient_bytes")
_LAYER = {
    "name", "count", "ties", "forward_s", "backward_input_s", "backward_weight_s", "optimizer_s", "output_bytes",
    "activation_bytes", *_UNIT_SIZES,
}


def names(kind: str) -> tuple[str, ...]:
    """The shipped files of a ``kind``, ``"cluster"`` or ``"workload"``, as they are named on the command line."""
    return tuple(sorted(path.stem for path in _HERE.glob(f"{kind}-*.toml")))


def load_cluster(name: str) -> Cluster:
    """A shipped cluster by name, or a file by path. Nodes are numbered through, host by host.

    A host with a count becomes ``host0``, ``host1``, …; one that is named twice has nodes of two sorts. Hosts without a
    site are at one site, ``here``. ``[link]`` is between nodes of a site, ``[host_link]`` between those of one host,
    ``[[site_links]]`` between those of two sites.

    Raises:
        ConfigError: no such file, or something in it is wrong.
    """
    table = _read(name, "cluster").only({"link", "host_link", "site_links", "hosts"})
    nodes: dict[NodeId, Node] = {}
    cores: dict[HostId, int | None] = {}
    for host in table.inner_list("hosts"):
        host.only(_HOST)
        count, num_nodes = host.count("count", 1), host.count("nodes")
        if len(nodes) + count * num_nodes > MOST:
            raise host.wrong("nodes", f"would make more than {MOST:,} nodes")
        num_cores = host.count("cores") if "cores" in host else None
        like = Node(
            node_id=NodeId("n0"), site=SiteId(host.text("site", HERE)), speed=host.positive("speed", 1.0),
            memory_bytes=host.size("memory_bytes", least=1) if "memory_bytes" in host else None,
        )
        for repeat in range(count):
            host_id = HostId(host.text("name") if count == 1 else f"{host.text('name')}{repeat}")
            if cores.setdefault(host_id, num_cores) != num_cores:
                raise host.wrong("cores", f"must be as before for host {host_id}")
            for _ in range(num_nodes):
                node_id = NodeId(f"n{len(nodes)}")
                nodes[node_id] = replace(like, node_id=node_id, host=host_id)
    link = _link(table.inner("link").only(_LINK), Link())
    found = Cluster(
        nodes=nodes, host_cores=cores, link=link,
        host_link=_link(table.inner("host_link").only(_LINK), link) if "host_link" in table else None,
        site_links=_site_links(table, {node.site for node in nodes.values()}),
    )
    _no_problems(clusters.problems(found), table.at())
    return found


def _link(table: Table, default: Link) -> Link:
    return Link(
        alpha_s=table.seconds("alpha_s", default.alpha_s),
        bytes_per_s=float(table.size("bytes_per_s", default.bytes_per_s, least=1)),
    )


def _site_links(table: Table, sites: set[SiteId]) -> dict[SitePair, Link]:
    found: dict[SitePair, Link] = {}
    for entry in table.inner_list("site_links"):
        entry.only({"between", *_LINK})
        between = [SiteId(site) for site in entry.texts("between")]
        if len(set(between)) != 2 or len(between) != 2:
            raise entry.wrong("between", 'must name two sites, for example ["east", "west"]')
        for site in between:
            if site not in sites:
                raise ConfigError(f"{entry.at('between')}: between: no host is at site {site!r}{nearest(site, sites)}")
        pair = site_pair(*between)
        if pair in found:
            raise entry.wrong("between", "must be another pair than before")
        found[pair] = Link(alpha_s=entry.seconds("alpha_s"), bytes_per_s=float(entry.size("bytes_per_s", least=1)))
    return found


def load_workload(name: str) -> Workload:
    """A shipped workload by name, or a file by path. A layer with a count becomes ``block.0``, ``block.1``, ….

    Raises:
        ConfigError: no such file, or something in it is wrong.
    """
    table = _read(name, "workload").only({"micro_batches", "micro_batch_samples", "fixed_s", "layers", "tied"})
    costs: list[LayerCost] = []
    units: dict[UnitName, Unit] = {}
    users: dict[str, list[int]] = {}
    taken: set[str] = set()
    for layer in table.inner_list("layers"):
        layer.only(_LAYER)
        count = layer.count("count", 1)
        if len(costs) + count > _MOST_LAYERS:
            raise layer.wrong("count", f"would make more than {_MOST_LAYERS:,} layers")
        for repeat in range(count):
            called = layer.text("name") if count == 1 else f"{layer.text('name')}.{repeat}"
            if called in taken:
                raise layer.wrong("name", f"must be another than before: two layers are called {called}")
            taken.add(called)
            for tie in layer.texts("ties"):
                users.setdefault(tie, []).append(len(costs))
            if any(layer.size(key, 0) for key in _UNIT_SIZES):
                units[UnitName(called)] = _unit(called, (len(costs),), layer)
            costs.append(LayerCost(
                name=called, forward_s=layer.seconds("forward_s"), backward_input_s=layer.seconds("backward_input_s"),
                backward_weight_s=layer.seconds("backward_weight_s"), optimizer_s=layer.seconds("optimizer_s", 0.0),
                output_bytes=layer.size("output_bytes", 0), activation_bytes=layer.size("activation_bytes", 0),
            ))
    for tied in table.inner_list("tied"):
        tied.only({"name", *_UNIT_SIZES})
        called = tied.text("name")
        if called not in users:
            raise ConfigError(f"{tied.at('name')}: name: no layer has ties = [{called!r}]{nearest(called, users)}")
        units[UnitName(called)] = _unit(called, tuple(users.pop(called)), tied)
    if users:
        raise ConfigError(f"{table.at()}: tied: nothing is called {', '.join(sorted(users))}, but layers name it in ties")
    found = Workload(
        layers=tuple(costs), units=units, num_micro_batches=table.count("micro_batches"),
        micro_batch_samples=table.count("micro_batch_samples", 1), fixed_s=table.seconds("fixed_s", 0.0), measured=True,
    )
    _no_problems(workloads.problems(found), table.at())
    return found


def _unit(name: str, layers: tuple[int, ...], table: Table) -> Unit:
    return Unit(
        name=UnitName(name), layers=layers, parameter_bytes=table.size("parameter_bytes"),
        state_bytes=table.size("state_bytes"), gradient_bytes=table.size("gradient_bytes", 0),
    )


def _read(name: str, kind: str) -> Table:
    shipped = _HERE / f"{name}.toml"
    path = shipped if "/" not in name and shipped.is_file() else Path(name)
    if path is not shipped and not path.is_file():
        shipped_names = ", ".join(names(kind))
        raise ConfigError(f"no {kind} {name!r}: no such file, and shipped are {shipped_names}{nearest(name, names(kind))}")
    return read(path, path.name if path is shipped else str(path))


def _no_problems(found: Sequence[str], where: str) -> None:
    if found:
        raise ConfigError(f"{where}: {'; '.join(found)}")
