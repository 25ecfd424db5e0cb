"""When the nodes of a plan are through with their actions, and how much they hold on the way.

Pipelines of one shape are looked at once, and where they do 1F1B in closed form, so a plan of thousands of alike pipelines
costs little more than one of a few. Any other part is the longest path through its list schedule:

    start(action) = max(end of the action before it on its node, end of what it needs + message)

where a message over a boundary takes ``alpha + output_bytes / rate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from everstep.cluster import Cluster
from everstep.plan import Plan
from everstep.planner.parts import Part, parts
from everstep.planner.pipelines import flush, stage_ends_s
from everstep.planner.schedules import B, Costs, F, Stops, W, arranged
from everstep.quantities import NodeId
from everstep.workload import Workload


@dataclass(frozen=True, slots=True)
class Pace:
    """By node that computes: when its last action ends, and the most bytes of activations that it holds."""

    ends_s: dict[NodeId, float]
    active_bytes: dict[NodeId, int]


def pace(plan: Plan, workload: Workload, cluster: Cluster) -> Pace:
    """For a full step of ``plan`` in its own order, reductions not counted."""
    found = Pace({}, {})
    plain: dict[_Shape, list[Part]] = {}
    table = _Times.of(plan, workload, cluster)
    for part in parts(plan):
        if part.is_plain:
            plain.setdefault(table.shape(part), []).append(part)
        else:
            _follow(part, plan, table, found)
    if not plan.order.split and not plan.order.extra_slots:
        _in_closed_form(plain, table, found)
        return found
    for alike in plain.values():
        _follow(alike[0], plan, table, found)
        first = alike[0].routes[0]
        for part in alike[1:]:
            for hop, like in zip(part.routes[0], first, strict=True):
                found.ends_s[hop.node] = found.ends_s[like.node]
                found.active_bytes[hop.node] = found.active_bytes[like.node]
    return found


_Shape = tuple[tuple[tuple[int, int, float], ...], int]
"""First layer, end layer and speed of each stage; micro-batches."""


@dataclass(frozen=True, slots=True)
class _Times:
    """Times and bytes of ranges of layers."""

    costs: Costs
    message_s: tuple[float, ...]
    """In front of each layer."""
    active_bytes: tuple[int, ...]
    cluster: Cluster
    split: bool

    @classmethod
    def of(cls, plan: Plan, workload: Workload, cluster: Cluster) -> _Times:
        return cls(
            costs=Costs.of(plan, workload),
            message_s=(0.0, *(cluster.link.seconds(layer.output_bytes) for layer in workload.layers[:-1])),
            active_bytes=tuple(accumulate((layer.activation_bytes for layer in workload.layers), initial=0)),
            cluster=cluster, split=plan.order.split,
        )

    def shape(self, plain: Part) -> _Shape:
        nodes = self.cluster.nodes
        (route,), (members,) = plain.routes, plain.micro_batches
        return tuple([(hop.first, hop.end, nodes[hop.node].speed) for hop in route]), len(members)

    def bytes_of(self, first: int, end: int) -> int:
        return self.active_bytes[end] - self.active_bytes[first]


def _in_closed_form(plain: dict[_Shape, list[Part]], table: _Times, found: Pace) -> None:
    if not plain:
        return
    width = max(len(stages) for stages, _ in plain)
    forward, backward = table.costs.forward, table.costs.backward
    ends_s = stage_ends_s(
        flush([[(forward[end] - forward[first]) / speed for first, end, speed in stages] for stages, _ in plain], width),
        flush([[(backward[end] - backward[first]) / speed for first, end, speed in stages] for stages, _ in plain], width),
        flush([[table.message_s[first] for first, _, _ in stages] for stages, _ in plain], width),
        np.array([len(stages) for stages, _ in plain]), np.array([many for _, many in plain]),
    ).tolist()
    for ((stages, many), alike), row in zip(plain.items(), ends_s, strict=True):
        ends = row[width - len(stages):]
        held = [min(many, len(stages) - index) * table.bytes_of(s[0], s[1]) for index, s in enumerate(stages)]
        for part in alike:
            for hop, end_s, num_bytes in zip(part.routes[0], ends, held, strict=True):
                found.ends_s[hop.node] = end_s
                found.active_bytes[hop.node] = num_bytes


def _follow(part: Part, plan: Plan, table: _Times, found: Pace) -> None:
    schedule = arranged(part, plan)
    path = LongestPath(schedule.stops, table)
    clock = [0.0] * len(schedule.stops.nodes)
    path.run(schedule.actions, clock)
    held, peak = [0] * len(clock), [0] * len(clock)
    freeing = W if table.split else B
    for action in schedule.actions:
        stop, kind = divmod(action, 3)
        if kind in (F, freeing):
            node = schedule.stops.node_of[stop]
            held[node] += path.active_bytes[stop] if kind == F else -path.active_bytes[stop]
            peak[node] = max(peak[node], held[node])
    found.ends_s.update(zip(schedule.stops.nodes, clock, strict=True))
    found.active_bytes.update(zip(schedule.stops.nodes, peak, strict=True))


class LongestPath:
    """The times of a part's actions when each node does them in a given order."""

    def __init__(self, stops: Stops, table: _Times) -> None:
        nodes = table.cluster.nodes
        speeds = [nodes[node].speed for node in stops.nodes]
        bare = stops.seconds(table.costs)
        self._seconds = [[t / speeds[node] for t, node in zip(row, stops.node_of, strict=True)] for row in bare]
        hops = [hop for _, route in stops.routes for hop in route]
        self._message_s = [table.message_s[hop.first] for hop in hops]
        self.active_bytes = [table.bytes_of(hop.first, hop.end) for hop in hops]
        self._stops = stops

    def run(self, actions: Sequence[int], clock: list[float]) -> None:
        """``actions`` in an order in which what an action needs comes before it; ``clock`` by node goes on from its value."""
        forward_s, backward_s, weight_s = self._seconds
        node_of, index, hops_left, message_s = self._stops.node_of, self._stops.index, self._stops.hops_left, self._message_s
        done_f, done_b = [0.0] * len(node_of), [0.0] * len(node_of)
        for action in actions:
            stop, kind = divmod(action, 3)
            node = node_of[stop]
            now = clock[node]
            if kind == F:
                if index[stop]:
                    arrived = done_f[stop - 1] + message_s[stop]
                    now = arrived if arrived > now else now
                clock[node] = done_f[stop] = now + forward_s[stop]
            elif kind == B:
                if hops_left[stop] > 1:
                    arrived = done_b[stop + 1] + message_s[stop + 1]
                    now = arrived if arrived > now else now
                clock[node] = done_b[stop] = now + backward_s[stop]
            else:
                clock[node] = now + weight_s[stop]


def staggered_ends(plan: Plan, workload: Workload, cluster: Cluster, steps: int) -> list[dict[NodeId, float]]:
    """Ends of each of ``steps`` steps by node, when every node begins the next one as soon as it is through with one.

    What staggered updates allow, without reductions: only a model of them, since nothing here takes an update back.
    """
    table = _Times.of(plan, workload, cluster)
    found: list[dict[NodeId, float]] = [{} for _ in range(steps)]
    for part in parts(plan):
        schedule = arranged(part, plan)
        path = LongestPath(schedule.stops, table)
        clock = [0.0] * len(schedule.stops.nodes)
        for step in range(steps):
            path.run(schedule.actions, clock)
            found[step].update(zip(schedule.stops.nodes, clock, strict=True))
    return found
