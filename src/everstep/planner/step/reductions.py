"""When the nodes of a plan have their gradient sums.

What a set of holders sums up together is one group: every member sends each other member a part, sums its own part and sends
that to all. So each sends 2·(n-1)/n of the bytes, in two rounds of messages, at the rate of the slowest link in the group:

    ring_s = 2·(n-1)/n · bytes / rate + 2·alpha

A link between two sites is shared. Of a group with a members at one end and b at the other, 2·a·b/n of the bytes cross it
each way, one group after the other in the order in which they are ready. (First within each site and then between them would
be less; the engine does not do that.)

The engine reduces once, after a node's last action, its groups one after the other in the order of ``rounds``; so does
``after_work``. ``beside_work`` is what reducing each unit as soon as it is whole, beside later work, would give.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from everstep.cluster import Cluster, Link, SitePair, site_pair
from everstep.plan import Plan
from everstep.planner.remembered import Same
from everstep.planner.step.pace import one_speed
from everstep.planner.step.parts import holders, holders_by_unit
from everstep.planner.step.rounds import in_rounds
from everstep.quantities import HostId, NodeId, SiteId, node_number
from everstep.schedule import Action, Kind
from everstep.workload import Workload

_Place = tuple[SiteId, HostId | None]
"""Where a node is, as far as links tell places apart."""


Sort = tuple[tuple[int, ...], float, _Place | None]
"""What a node holds, how fast it is, and where it is. Nodes of a sort are in the same groups."""


class _Sum(NamedTuple):
    """What one reduction takes, for members by number."""

    members: tuple[int, ...]
    ring_s: float
    crossing: tuple[tuple[SitePair, float, float], ...] = ()
    """Links between sites that it uses, for how long it needs each to itself, and how long what is sent is then under way."""
    whole_s: float = 0.0
    """Not before."""


def reduction_groups(plan: Plan, workload: Workload) -> dict[tuple[NodeId, ...], int]:
    """Bytes of gradients that each set of holders sums up together; a unit with one holder needs no sum."""
    by_layers = holders(plan.placement)
    members = list(by_layers.values())
    found: dict[tuple[NodeId, ...], int] = {}
    for indices, num_bytes in _groups(list(by_layers), list(map(len, members)), workload).items():
        found[tuple(sorted((node for index in indices for node in members[index]), key=node_number))] = num_bytes
    return found


def after_work(plan: Plan, workload: Workload, cluster: Cluster, ends_s: Mapping[NodeId, float]) -> dict[Sort, float]:
    """When the last node of each sort has its sums, if all are through with their work at ``ends_s``."""
    sorts, members = _sorts(plan, cluster)
    ends = [max([ends_s.get(node, 0.0) for node in nodes]) for nodes in members]
    _reduce(ends, _sums_of(workload, cluster, sorts, members))
    return dict(zip(sorts, ends, strict=True))


def own_seconds(plan: Plan, workload: Workload, cluster: Cluster) -> dict[NodeId, float]:
    """For how long each node is busy with its sums in a step, waiting for others not counted."""
    sorts, members = _sorts(plan, cluster)
    busy = [0.0] * len(sorts)
    for each in _sums_of(workload, cluster, sorts, members):
        for index in each.members:
            busy[index] += each.ring_s
    return {node: seconds for nodes, seconds in zip(members, busy, strict=True) for node in nodes}


def _sums_of(
    workload: Workload, cluster: Cluster, sorts: Sequence[Sort], members: Sequence[Sequence[NodeId]],
) -> tuple[_Sum, ...]:
    links = (cluster.link, cluster.host_link, tuple(cluster.site_links.items()))
    return _known_sums(Same(workload), links, tuple(sorts), tuple(map(len, members)))


@lru_cache(maxsize=1 << 10)
def _known_sums(
    workload: Same[Workload], links: tuple[Link, Link | None, tuple[tuple[SitePair, Link], ...]], sorts: tuple[Sort, ...],
    counts: tuple[int, ...],
) -> tuple[_Sum, ...]:
    """The reductions in their order. They depend on how many nodes are of each sort, not on which: kept for the next plan."""
    cluster = Cluster(nodes={}, link=links[0], host_link=links[1], site_links=dict(links[2]))
    groups = _groups([layers for layers, _, _ in sorts], counts, workload.value)
    return tuple([_sum(indices, groups[indices], sorts, counts, cluster) for indices in _in_order(groups)])


def beside_work(
    plan: Plan, workload: Workload, cluster: Cluster, spans: Iterable[tuple[NodeId, Action, float, float]],
) -> dict[NodeId, float]:
    """When each node has its sums and is through with its work, if a unit is summed as soon as the last action that adds to
    it has ended on all its holders, one unit at a time on each node, in the order in which they are whole.

    That messages of the work use the same links at that time is not counted. ``spans``: actions with their start and end.
    """
    adding = Kind.WEIGHT if plan.order.split else Kind.BACKWARD
    whole_s: dict[tuple[NodeId, int], float] = {}
    ends_s = dict.fromkeys(plan.placement, 0.0)
    for node, action, _, end_s in spans:
        ends_s[node] = max(ends_s[node], end_s)
        if action.kind is adding:
            for layer in plan.routes[action.micro_batch][action.hop].layers:
                whole_s[node, layer] = max(whole_s.get((node, layer), 0.0), end_s)
    nodes = list(plan.placement)
    sorts = [_sort_of(node, plan.placement[node], cluster) for node in nodes]
    sums: list[_Sum] = []
    for name, indices in holders_by_unit([(layers, 1.0) for layers, _, _ in sorts], workload).items():
        unit = workload.units[name]
        if len(indices) > 1:
            ready_s = max(whole_s.get((nodes[index], layer), 0.0) for index in indices for layer in unit.layers)
            num_bytes = unit.gradient_bytes or unit.parameter_bytes
            sums.append(_sum(indices, num_bytes, sorts, [1] * len(nodes), cluster)._replace(whole_s=ready_s))
    link_free = [0.0] * len(nodes)
    _reduce(link_free, sorted(sums, key=lambda each: each.whole_s))
    return {node: max(ends_s[node], link_free[index]) for index, node in enumerate(nodes)}


def crossing_seconds(plan: Plan, workload: Workload, cluster: Cluster) -> dict[SitePair, float]:
    """For each link between sites: for how long the sums of a step need it to themselves."""
    sorts, members = _sorts(plan, cluster)
    found: dict[SitePair, float] = {}
    counts = list(map(len, members))
    for indices, num_bytes in _groups([layers for layers, _, _ in sorts], counts, workload).items():
        for pair, seconds, _ in _sum(indices, num_bytes, sorts, counts, cluster).crossing:
            found[pair] = found.get(pair, 0.0) + seconds
    return found


def _sort_of(node: NodeId, layers: tuple[int, ...], cluster: Cluster) -> Sort:
    facts = cluster.nodes[node]
    if cluster.one_link is not None:
        return layers, facts.speed, None
    return layers, facts.speed, (facts.site, facts.host if cluster.host_link else None)


def _sorts(plan: Plan, cluster: Cluster) -> tuple[list[Sort], list[Sequence[NodeId]]]:
    speed = one_speed(cluster)
    if speed is not None and cluster.one_link is not None:
        by_layers = sorted(holders(plan.placement).items())
        return [(layers, speed, None) for layers, _ in by_layers], [nodes for _, nodes in by_layers]
    found: dict[Sort, list[NodeId]] = {}
    for layers, nodes in holders(plan.placement).items():
        for node in nodes:
            sort = _sort_of(node, layers, cluster)
            if sort in found:
                found[sort].append(node)
            else:
                found[sort] = [node]
    return sorted(found), [found[sort] for sort in sorted(found)]


def _groups(
    held: Sequence[tuple[int, ...]], counts: Sequence[int], workload: Workload,
) -> dict[tuple[int, ...], int]:
    """Bytes by group, a group named by the numbers of the sorts in it, in the order of units. ``counts``: nodes by sort."""
    groups: dict[tuple[int, ...], int] = {}
    for name, indices in holders_by_unit([(layers, 1.0) for layers in held], workload).items():
        if indices in groups or len(indices) > 1 or (indices and counts[indices[0]] > 1):
            unit = workload.units[name]
            groups[indices] = groups.get(indices, 0) + (unit.gradient_bytes or unit.parameter_bytes)
    return groups


def _in_order(groups: Mapping[tuple[int, ...], int]) -> Sequence[tuple[int, ...]]:
    if len({index for group in groups for index in group}) == sum(map(len, groups)):
        return list(groups)  # nobody is in two
    return _known_order(tuple(groups.items()))


@lru_cache(maxsize=1 << 10)
def _known_order(groups: tuple[tuple[tuple[int, ...], int], ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(in_rounds(dict(groups)))


def _sum(
    indices: tuple[int, ...], num_bytes: int, sorts: Sequence[Sort], counts: Sequence[int], cluster: Cluster,
) -> _Sum:
    count = sum(counts[index] for index in indices)
    share = 2 * (count - 1) / count * num_bytes
    if cluster.one_link is not None:
        return _Sum(indices, share / cluster.link.bytes_per_s + 2 * cluster.link.alpha_s)
    at: Counter[_Place] = Counter()
    for index in indices:
        place = sorts[index][2]
        assert place is not None, "places are told apart where links are"
        at[place] += counts[index]
    by_site: Counter[SiteId] = Counter()
    for (site, _), number in at.items():
        by_site[site] += number
    lines = {
        site_pair(one, other): 2 * by_site[one] * by_site[other] / count * num_bytes for one, other in combinations(by_site, 2)
    }
    links = [cluster.site_links[pair] for pair in lines] + _inner_links(at, by_site, cluster)
    return _Sum(
        indices, max(share / link.bytes_per_s + 2 * link.alpha_s for link in links),
        tuple(
            (pair, crossing / cluster.site_links[pair].bytes_per_s, 2 * cluster.site_links[pair].alpha_s)
            for pair, crossing in lines.items()
        ),
    )


def _inner_links(at: Counter[_Place], by_site: Counter[SiteId], cluster: Cluster) -> list[Link]:
    """The links that members of one site use among each other."""
    found = []
    for site, number in by_site.items():
        most_at_one_place = max(count for (there, _), count in at.items() if there == site)
        if number > most_at_one_place or (cluster.host_link is None and number > 1):
            found.append(cluster.link)
        if cluster.host_link is not None and most_at_one_place > 1:
            found.append(cluster.host_link)
    return found


def _reduce(ends: list[float], sums: Sequence[_Sum]) -> None:
    """Let members work off ``sums`` in this order; ``ends``: by member when it may begin, then when it is through."""
    if any(each.crossing for each in sums):
        _reduce_over_lines(ends, sums)
        return
    for each in sums:
        end_s = max(each.whole_s, max(ends[index] for index in each.members)) + each.ring_s
        for index in each.members:
            ends[index] = end_s


def _reduce_over_lines(ends: list[float], sums: Sequence[_Sum]) -> None:
    """The same where sums share links between sites, which serve who comes first."""
    queues: dict[int, list[int]] = {}
    for number, each in reversed(list(enumerate(sums))):
        for index in each.members:
            queues.setdefault(index, []).append(number)
    absent = [len(each.members) for each in sums]
    ready: list[tuple[float, int]] = []

    def next_of(index: int) -> None:
        if queues[index]:
            number = queues[index].pop()
            absent[number] -= 1
            if not absent[number]:
                begin_s = max(sums[number].whole_s, max(ends[member] for member in sums[number].members))
                heapq.heappush(ready, (begin_s, number))

    for index in queues:
        next_of(index)
    line_free: dict[SitePair, float] = {}
    while ready:
        begin_s, number = heapq.heappop(ready)
        each = sums[number]
        end_s = begin_s + each.ring_s
        for pair, seconds, under_way_s in each.crossing:
            line_free[pair] = max(line_free.get(pair, 0.0), begin_s) + seconds
            end_s = max(end_s, line_free[pair] + under_way_s)
        for index in each.members:
            ends[index] = end_s
            next_of(index)
