"""What a plan costs: the time of a step, and the time without training before the first one.

A step is the longest path through the schedule (times of layers, messages between nodes), then each group's reduction
(``reductions``), then the update of what a node holds. Nodes of one host share its cores, so a step also takes at least the
host's work divided by its cores, what messages and sums cost a processor included: eight workers on two cores are bound by
that, not by the path. Nor is it shorter than what crosses a link between two sites.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise

from everstep.cluster import Cluster, SitePair, site_pair
from everstep.plan import Plan
from everstep.planner.step.beside import chores
from everstep.planner.step.pace import pace, staggered_ends
from everstep.planner.step.parts import grouped, units_by_layers
from everstep.planner.step.reductions import after_work, beside_work, crossing_seconds, own_seconds
from everstep.planner.step.shadows import shadow_seconds
from everstep.quantities import HostId, NodeId, SiteId
from everstep.schedule import Action, Kind, Schedule, needs
from everstep.transfer import Move
from everstep.workload import Workload

SWITCH_S = 0.05
"""What any change of plan costs besides moving state: reports, the choice, writing it down, going on."""

READ_BYTES_PER_S = 5e8
"""How fast a node reads its part of a checkpoint."""


def step_seconds(plan: Plan, workload: Workload, cluster: Cluster, schedule: Schedule | None = None) -> float:
    """Predicted seconds of a full step of ``plan``. ``schedule``: another than the plan's own.

    With staggered updates a step takes what lies between two steps once the nodes have drifted apart as far as they do.
    """
    if plan.order.staggered:
        return staggered_seconds(plan, workload, cluster)
    if schedule is None:
        return seconds_after(plan, workload, cluster, pace(plan, workload, cluster).ends_s)
    return seconds_after(plan, workload, cluster, finish_seconds(plan, workload, cluster, schedule))


def seconds_after(plan: Plan, workload: Workload, cluster: Cluster, ends_s: Mapping[NodeId, float]) -> float:
    """Seconds of a step whose nodes are through with their last actions at ``ends_s``: reductions and updates follow."""
    return max(_updated(plan, workload, cluster, ends_s), _least_seconds(plan, workload, cluster)) + workload.fixed_s


def overlapped_seconds(plan: Plan, workload: Workload, cluster: Cluster, schedule: Schedule) -> float:
    """What a step would take if each unit were reduced as soon as it is whole, beside later work.

    The engine reduces after a node's last action, and ``step_seconds`` says what that takes; the difference is what there is
    to be had, or less, since messages of the work are taken not to be in the way.
    """
    summed = beside_work(plan, workload, cluster, action_spans(plan, workload, cluster, schedule))
    path_s = max(
        (end_s + _optimizer_s(plan.placement[node], cluster.nodes[node].speed, workload) for node, end_s in summed.items()),
        default=0.0,
    )
    return max(path_s, _least_seconds(plan, workload, cluster)) + workload.fixed_s


def _least_seconds(plan: Plan, workload: Workload, cluster: Cluster) -> float:
    """What a step takes at least, whatever the order: what nodes share is busy for so long."""
    shared = (*shared_seconds(plan, workload, cluster).values(), *site_seconds(plan, workload, cluster).values())
    return max(shared, default=0.0)


STAGGERED_STEPS = 8
"""Steps that are followed until the drift of nodes has settled; the later half is measured."""


def staggered_seconds(plan: Plan, workload: Workload, cluster: Cluster) -> float:
    """Seconds between two steps when each node begins the next one as soon as its own sums are applied.

    How nodes drift apart is followed without sums and updates; no node's steps are closer than its own work, sums and update.
    """
    ends = [
        _updated(plan, workload, cluster, ends_s) for ends_s in staggered_ends(plan, workload, cluster, STAGGERED_STEPS)
    ]
    half = STAGGERED_STEPS // 2
    period_s = (ends[-1] - ends[half - 1]) / (STAGGERED_STEPS - half)
    sums_s = own_seconds(plan, workload, cluster)
    busy_s = max((work_s + sums_s[node] for node, work_s in _work_seconds(plan, workload, cluster).items()), default=0.0)
    return max(period_s, busy_s, _least_seconds(plan, workload, cluster)) + workload.fixed_s


def finish_seconds(plan: Plan, workload: Workload, cluster: Cluster, schedule: Schedule) -> dict[NodeId, float]:
    """When each node is through with the last action of its order in ``schedule``, reductions not counted."""
    ends_s = dict.fromkeys(schedule, 0.0)
    ends_s.update((node, end_s) for node, _, _, end_s in action_spans(plan, workload, cluster, schedule))
    return ends_s


Span = tuple[NodeId, Action, float, float]
"""An action on its node, with its start and its end in seconds."""


def action_spans(plan: Plan, workload: Workload, cluster: Cluster, schedule: Schedule) -> Iterator[Span]:
    """When each action of ``schedule`` happens; those of one node in its own order.

    start(action) = max(end of the action before it on its node, end of what it needs + message), as in
    ``schedule.needs``; a message is ``alpha + output_bytes / rate`` of the link between the two nodes.
    """
    seconds = _hop_seconds(plan, workload, cluster)
    one_link = cluster.one_link
    clock = dict.fromkeys(schedule, 0.0)
    position = dict.fromkeys(schedule, 0)
    done: dict[Action, float] = {}
    waiting: dict[Action, NodeId] = {}
    runnable = list(schedule)
    while runnable:
        node = runnable.pop()
        order = schedule[node]
        while position[node] < len(order):
            action = order[position[node]]
            if action.kind is Kind.REDUCE:
                break
            route = plan.routes[action.micro_batch]
            wanted = needs(action, len(route))
            absent = next((need for need in wanted if need not in done), None)
            if absent is not None:
                waiting[absent] = node
                break
            start_s = clock[node]
            for need in wanted:
                message_s = 0.0
                if need.hop != action.hop:
                    boundary = route[max(need.hop, action.hop)].first - 1
                    link = one_link or cluster.link_between(route[need.hop].node, node)
                    message_s = link.seconds(workload.layers[boundary].output_bytes)
                start_s = max(start_s, done[need] + message_s)
            done[action] = clock[node] = start_s + seconds[action.micro_batch, action.hop][action.kind]
            yield node, action, start_s, clock[node]
            position[node] += 1
            if action in waiting:
                runnable.append(waiting.pop(action))


def _hop_seconds(plan: Plan, workload: Workload, cluster: Cluster) -> dict[tuple[int, int], dict[Kind, float]]:
    split = plan.order.split
    forward = _sums(layer.forward_s for layer in workload.layers)
    weight = _sums(layer.backward_weight_s if split else 0.0 for layer in workload.layers)
    backward = _sums(
        layer.backward_input_s + (0.0 if split else layer.backward_weight_s) for layer in workload.layers
    )
    shadow_s = shadow_seconds(plan.routes, forward)
    return {
        (micro_batch, index): {
            kind: (times[hop.end] - times[hop.first] + besides.get(hop.node, 0.0)) / cluster.nodes[hop.node].speed
            for kind, times, besides in (
                (Kind.FORWARD, forward, shadow_s), (Kind.BACKWARD, backward, {}), (Kind.WEIGHT, weight, {}),
            )
        }
        for micro_batch, route in enumerate(plan.routes)
        for index, hop in enumerate(route)
    }


def _sums(times: Iterable[float]) -> tuple[float, ...]:
    return tuple(accumulate(times, initial=0.0))


def _updated(plan: Plan, workload: Workload, cluster: Cluster, ends_s: Mapping[NodeId, float]) -> float:
    """When all nodes have their sums and have applied them."""
    summed = after_work(plan, workload, cluster, ends_s)
    return max((end_s + _optimizer_s(layers, speed, workload) for (layers, speed, _), end_s in summed.items()), default=0.0)


def _optimizer_s(layers: tuple[int, ...], speed: float, workload: Workload) -> float:
    return sum(workload.layers[layer].optimizer_s for layer in layers) / speed


def shared_seconds(plan: Plan, workload: Workload, cluster: Cluster) -> dict[HostId, float]:
    """For each host whose nodes share cores: its work in a step divided by its cores, a floor under the step."""
    if not any(cluster.host_cores.values()):
        return {}
    work_s = _work_seconds(plan, workload, cluster)
    for node, (message_ends, summed_bytes) in chores(plan, workload).items():
        work_s[node] += workload.beside.seconds(message_ends, summed_bytes) / cluster.nodes[node].speed
    found: dict[HostId, float] = {}
    for node, seconds in work_s.items():
        host = cluster.nodes[node].host
        cores = cluster.host_cores.get(host)
        if cores is not None:
            found[host] = found.get(host, 0.0) + seconds / cores
    return found


def _work_seconds(plan: Plan, workload: Workload, cluster: Cluster) -> dict[NodeId, float]:
    """What each node computes in a step, its update included."""
    work_s = {
        node: _optimizer_s(layers, cluster.nodes[node].speed, workload) for node, layers in plan.placement.items()
    }
    total = _sums(layer.total_s for layer in workload.layers)
    shadow_s = shadow_seconds(plan.routes, _sums(layer.forward_s for layer in workload.layers))
    for route, members in grouped(plan.routes).items():
        for hop in route:
            each_s = total[hop.end] - total[hop.first] + shadow_s.get(hop.node, 0.0)
            work_s[hop.node] += len(members) * each_s / cluster.nodes[hop.node].speed
    return work_s


def is_shared(cluster: Cluster) -> bool:
    """Whether some host has more nodes than cores for them."""
    if not any(cluster.host_cores.values()):
        return False
    hosts = Counter(node.host for node in cluster.nodes.values())
    return any(cores is not None and hosts[host] > cores for host, cores in cluster.host_cores.items())


def site_seconds(plan: Plan, workload: Workload, cluster: Cluster) -> dict[SitePair, float]:
    """For each link between sites: for how long a step keeps it busy each way, a floor under the step.

    An activation crosses it one way, its gradient the other; sums cross it both ways.
    """
    if not cluster.site_links:
        return {}
    found = crossing_seconds(plan, workload, cluster)
    for route, members in grouped(plan.routes).items():
        for before, hop in pairwise(route):
            here, there = cluster.nodes[before.node].site, cluster.nodes[hop.node].site
            if here != there:
                pair = site_pair(here, there)
                num_bytes = len(members) * workload.layers[hop.first - 1].output_bytes
                found[pair] = found.get(pair, 0.0) + num_bytes / cluster.site_links[pair].bytes_per_s
    return found


def stall_seconds(moves: Iterable[Move], cluster: Cluster, *, switch_s: float = SWITCH_S) -> float:
    """Seconds without training while state is moved: the slowest node's share, and the fixed ``switch_s``.

    A node sends and receives at the same time, each unit as one message at the rate of the link that it takes. All that goes
    from one site to another shares one link, so it takes at least as long as all those bytes.
    """
    one_link = cluster.one_link
    sent: dict[NodeId, float] = {}
    received: dict[NodeId, float] = {}
    crossing_bytes: dict[tuple[SiteId, SiteId], int] = {}
    for move in moves:
        link = one_link or cluster.link_between(move.source, move.target)
        seconds = link.seconds(move.num_bytes)
        sent[move.source] = sent.get(move.source, 0.0) + seconds
        received[move.target] = received.get(move.target, 0.0) + seconds
        if one_link is None:
            way = (cluster.nodes[move.source].site, cluster.nodes[move.target].site)
            if way[0] != way[1]:
                crossing_bytes[way] = crossing_bytes.get(way, 0) + move.num_bytes
    crossing = [cluster.site_links[site_pair(*way)].seconds(num_bytes) for way, num_bytes in crossing_bytes.items()]
    return switch_s + max([*sent.values(), *received.values(), *crossing], default=0.0)


def load_seconds(plan: Plan, workload: Workload, read_bytes_per_s: float = READ_BYTES_PER_S) -> float:
    """Seconds until every node has read its units from a checkpoint: the fullest node's bytes."""
    held = units_by_layers(plan.placement.values(), workload)
    return max(sum(workload.units[name].state_bytes for name in units) for units in held.values()) / read_bytes_per_s
