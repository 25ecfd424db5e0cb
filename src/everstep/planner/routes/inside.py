"""Routes that stay inside a site, where that can be.

Each site takes over for its own: holders at a site fill the gaps of the pipelines there. A site that holds not all layers any
more hands its micro-batches to those that do, whole, shared out by what their nodes can do. Only if no site holds all layers do
routes cross.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.cluster import Cluster
from everstep.plan import Plan, Route
from everstep.planner.routes.router import Router
from everstep.planner.step.parts import grouped
from everstep.quantities import NodeId, SiteId
from everstep.workload import Workload


def routes_inside(
    old: Sequence[Route], available: Mapping[NodeId, frozenset[int]], workload: Workload, speeds: Mapping[NodeId, float],
    sites: Mapping[NodeId, SiteId],
) -> tuple[Route, ...] | None:
    """``old`` with every gap filled by nodes of one site; over all sites where none can, None where even that is no way."""
    held: dict[SiteId, dict[NodeId, frozenset[int]]] = {}
    for node, layers in available.items():
        held.setdefault(sites[node], {})[node] = layers
    able = [site for site, here in held.items() if len(frozenset[int]().union(*here.values())) == workload.num_layers]
    while able:
        homes = _homes(old, able, held, speeds, sites)
        answers = {site: _routes_at(site, old, homes, held[site], workload, speeds) for site in able}
        unable = [site for site, answer in answers.items() if answer is None]
        if not unable:
            routes = {site: iter(answer) for site, answer in answers.items() if answer is not None}
            return tuple([next(routes[site]) for site in homes])
        able = [site for site in able if site not in unable]
    return Router(available, workload, speeds).routes(old)


def _homes(
    old: Sequence[Route], able: Sequence[SiteId], held: Mapping[SiteId, Mapping[NodeId, frozenset[int]]],
    speeds: Mapping[NodeId, float], sites: Mapping[NodeId, SiteId],
) -> list[SiteId]:
    """The site of each micro-batch: where most of its layers are; for those that are at none of ``able``, the least busy."""
    by_route: dict[int, SiteId | None] = {}
    for name, route in {id(route): route for route in old}.items():
        layers: dict[SiteId, int] = {}
        for hop in route:
            if hop.node in sites:
                layers[sites[hop.node]] = layers.get(sites[hop.node], 0) + hop.end - hop.first
        most = max(layers, key=lambda site: layers[site], default=None)
        by_route[name] = most if most in able else None
    found = [by_route[id(route)] for route in old]
    power = {site: sum(speeds[node] for node, layers in held[site].items() if layers) for site in able}
    count = {site: found.count(site) for site in able}
    for number, home in enumerate(found):
        if home is None:
            found[number] = calmest = min(able, key=lambda site: ((count[site] + 1) / power[site], site))
            count[calmest] += 1
    return [home for home in found if home is not None]


def _routes_at(
    site: SiteId, old: Sequence[Route], homes: Sequence[SiteId], here: Mapping[NodeId, frozenset[int]], workload: Workload,
    speeds: Mapping[NodeId, float],
) -> tuple[Route, ...] | None:
    """The routes of the micro-batches whose home is ``site``, over its nodes alone."""
    mine = [route for route, home in zip(old, homes, strict=True) if home == site]
    left: dict[int, Route] = {}
    for name, route in {id(route): route for route in mine}.items():
        hops = tuple([hop for hop in route if hop.node in here])
        left[name] = route if len(hops) == len(route) else hops
    return Router(here, workload, speeds).routes([left[id(route)] for route in mine])


def crossing(plan: Plan, cluster: Cluster) -> tuple[SiteId, SiteId] | None:
    """Two sites between which a pipeline of ``plan`` sends activations; None: every pipeline is inside a site."""
    if not cluster.site_links:
        return None
    for route in grouped(plan.routes).routes:
        here = cluster.nodes[route[0].node].site
        for hop in route:
            there = cluster.nodes[hop.node].site
            if there != here:
                return here, there
    return None
