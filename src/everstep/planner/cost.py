"""What a plan costs: the time of a step, and the time without training before the first one.

A step is the longest path through the schedule (times of layers, messages between nodes), then each group's reduction,
then the update of what a node holds. Nodes of one host share its cores, so a step also takes at least the host's work
divided by its cores: eight workers on two cores are bound by that, not by the path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from everstep.cluster import Cluster
from everstep.plan import Plan
from everstep.planner.pace import pace, staggered_ends
from everstep.planner.parts import Kind as NodeKind
from everstep.planner.parts import grouped, holders_by_unit, kinds_of, units_by_layers
from everstep.planner.shadows import shadow_seconds
from everstep.quantities import HostId, NodeId, node_number
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
    path_s = max(_updated(plan, workload, cluster, ends_s).values(), default=0.0)
    return max(path_s, *shared_seconds(plan, workload, cluster).values(), 0.0) + workload.fixed_s


STAGGERED_STEPS = 8
"""Steps that are followed until the drift of nodes has settled; the later half is measured."""


def staggered_seconds(plan: Plan, workload: Workload, cluster: Cluster) -> float:
    """Seconds between two steps when each node begins the next one as soon as its own sums are applied."""
    ends = [
        max(_updated(plan, workload, cluster, ends_s).values(), default=0.0)
        for ends_s in staggered_ends(plan, workload, cluster, STAGGERED_STEPS)
    ]
    half = STAGGERED_STEPS // 2
    period_s = (ends[-1] - ends[half - 1]) / (STAGGERED_STEPS - half)
    return max(period_s, *shared_seconds(plan, workload, cluster).values(), 0.0) + workload.fixed_s


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
    ``schedule.needs``; a message is ``alpha + output_bytes / rate``.
    """
    seconds = _hop_seconds(plan, workload, cluster)
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
                    message_s = cluster.link.seconds(workload.layers[boundary].output_bytes)
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


def reduction_groups(plan: Plan, workload: Workload) -> dict[tuple[NodeId, ...], int]:
    """Bytes of gradients that each set of holders sums up together; a unit with one holder needs no sum."""
    kinds = kinds_of(plan)
    members = list(kinds.values())
    groups: dict[tuple[NodeId, ...], int] = {}
    for indices, num_bytes in _groups(list(kinds), members, workload).items():
        nodes = sorted((node for index in indices for node in members[index]), key=node_number)
        groups[tuple(nodes)] = num_bytes
    return groups


def _groups(
    kinds: Sequence[NodeKind], members: Sequence[Sequence[NodeId]], workload: Workload,
) -> dict[tuple[int, ...], int]:
    """The same with a group named by the kinds of nodes in it."""
    groups: dict[tuple[int, ...], int] = {}
    for name, indices in holders_by_unit(kinds, workload).items():
        if sum(len(members[index]) for index in indices) > 1:
            unit = workload.units[name]
            groups[indices] = groups.get(indices, 0) + (unit.gradient_bytes or unit.parameter_bytes)
    return groups


def _updated(plan: Plan, workload: Workload, cluster: Cluster, ends_s: Mapping[NodeId, float]) -> dict[NodeKind, float]:
    """When all nodes of each kind have their sums and have applied them.

    A ring of n: each sends 2·(n-1)/n of the bytes, in two rounds of messages. Nodes of a kind are in the same groups.
    """
    by_kind = kinds_of(plan, {node: cluster.nodes[node].speed for node in plan.placement})
    kinds, members = list(by_kind), list(by_kind.values())
    ends = [max(ends_s.get(node, 0.0) for node in nodes) for nodes in members]
    for indices, num_bytes in _groups(kinds, members, workload).items():
        count = sum(len(members[index]) for index in indices)
        ring_s = 2 * (count - 1) / count * num_bytes / cluster.link.bytes_per_s + 2 * cluster.link.alpha_s
        end_s = max(ends[index] for index in indices) + ring_s
        for index in indices:
            ends[index] = end_s
    return {kind: end_s + _optimizer_s(kind, workload) for kind, end_s in zip(kinds, ends, strict=True)}


def _optimizer_s(kind: NodeKind, workload: Workload) -> float:
    layers, speed = kind
    return sum(workload.layers[layer].optimizer_s for layer in layers) / speed


def shared_seconds(plan: Plan, workload: Workload, cluster: Cluster) -> dict[HostId, float]:
    """For each host whose nodes share cores: its work in a step divided by its cores, a floor under the step."""
    if not any(cluster.host_cores.values()):
        return {}
    work_s = {
        node: _optimizer_s((layers, cluster.nodes[node].speed), workload) for node, layers in plan.placement.items()
    }
    total = _sums(layer.total_s for layer in workload.layers)
    shadow_s = shadow_seconds(plan.routes, _sums(layer.forward_s for layer in workload.layers))
    for route, members in grouped(plan.routes).items():
        for hop in route:
            each_s = total[hop.end] - total[hop.first] + shadow_s.get(hop.node, 0.0)
            work_s[hop.node] += len(members) * each_s / cluster.nodes[hop.node].speed
    found: dict[HostId, float] = {}
    for node, seconds in work_s.items():
        host = cluster.nodes[node].host
        cores = cluster.host_cores.get(host)
        if cores is not None:
            found[host] = found.get(host, 0.0) + seconds / cores
    return found


def is_shared(cluster: Cluster) -> bool:
    """Whether some host has more nodes than cores for them."""
    if not any(cluster.host_cores.values()):
        return False
    hosts = Counter(node.host for node in cluster.nodes.values())
    return any(cores is not None and hosts[host] > cores for host, cores in cluster.host_cores.items())


def stall_seconds(moves: Iterable[Move], cluster: Cluster, *, switch_s: float = SWITCH_S) -> float:
    """Seconds without training while state is moved: the slowest node's share, and the fixed ``switch_s``.

    A node sends and receives at the same time, each at the link's rate, one message a unit.
    """
    sent: dict[NodeId, float] = {}
    received: dict[NodeId, float] = {}
    for move in moves:
        for node, sums in ((move.source, sent), (move.target, received)):
            sums[node] = sums.get(node, 0.0) + cluster.link.seconds(move.num_bytes)
    return switch_s + max([*sent.values(), *received.values()], default=0.0)


def load_seconds(plan: Plan, workload: Workload, read_bytes_per_s: float = READ_BYTES_PER_S) -> float:
    """Seconds until every node has read its units from a checkpoint: the fullest node's bytes."""
    held = units_by_layers(plan.placement.values(), workload)
    return max(sum(workload.units[name].state_bytes for name in units) for units in held.values()) / read_bytes_per_s
