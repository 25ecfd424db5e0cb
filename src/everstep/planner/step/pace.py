"""When the nodes of a plan are through with their actions, and how much they hold on the way.

Pipelines of one shape are looked at once, and where they do 1F1B in closed form, so a plan of thousands of alike pipelines
costs little more than one of a few. Any other part is the longest path through its list schedule:

    start(action) = max(end of the action before it on its node, end of what it needs + message)

where a message over a boundary takes ``alpha + output_bytes / rate`` of the link between the two nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, cycle, pairwise

from everstep.cluster import Cluster
from everstep.plan import Hop, Order, Plan, Route
from everstep.planner.remembered import remembered
from everstep.planner.step.parts import Alike, Part, alike, parts
from everstep.planner.step.pipelines import one_pipeline_ends_s
from everstep.planner.step.schedules import Arranged, B, Costs, F, Stops, W, arranged
from everstep.planner.step.shadows import shadow_seconds
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
    table = _Times.of(plan, workload, cluster)
    plain, others = alike(plan.routes)
    for part in others:
        (ends_s,), active_bytes = _follow(part, plan, table)
        found.ends_s.update(ends_s)
        found.active_bytes.update(active_bytes)
    for shape in plain:
        for route, nodes in _stand_ins(shape, table, plan):
            ends, held = _alone(tuple(table.on(route)), shape.num_micro_batches, plan.order, _rooms(plan, route))
            found.ends_s.update(zip(nodes, cycle(ends), strict=False))
            found.active_bytes.update(zip(nodes, cycle(held), strict=False))
    return found


def _stand_ins(shape: Alike, table: _Times, plan: Plan) -> Iterator[tuple[Route, Sequence[NodeId]]]:
    """Routes to look at, and the nodes that each of them speaks for."""
    if not table.is_one_for_all:
        yield from ((route, [hop.node for hop in route]) for route in shape.routes)
        return
    rooms = list(map(plan.room.get, shape.nodes))
    if rooms == rooms[:len(shape.routes[0])] * len(shape.routes):
        yield shape.routes[0], shape.nodes
    else:
        same: dict[object, list[Route]] = {}
        for route in shape.routes:
            same.setdefault(_rooms(plan, route), []).append(route)
        yield from ((routes[0], [hop.node for route in routes for hop in route]) for routes in same.values())


def _rooms(plan: Plan, route: Route) -> tuple[int | None, ...]:
    """By hop what the plan says about its node's room; empty where it says nothing."""
    return tuple([plan.room.get(hop.node) for hop in route]) if plan.room else ()


@remembered(16)
def one_speed(cluster: Cluster) -> float | None:
    """The speed of all nodes; None: it is not one."""
    speeds = {node.speed for node in cluster.nodes.values()}
    return speeds.pop() if len(speeds) == 1 else None


_Stage = tuple[int, float, float, float, float, int]
"""Layers; seconds of F, B, W and of a message in front; bytes of activations."""


@lru_cache(maxsize=1 << 14)
def _alone(
    stages: tuple[_Stage, ...], num_micro_batches: int, order: Order, rooms: tuple[int | None, ...] = (),
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Ends and peaks by stage of a plain pipeline, remembered: the same few shapes come again in plan after plan."""
    many = num_micro_batches
    if not order.split and not order.extra_slots:
        forward, backward, message = ([stage[column] for stage in stages] for column in (1, 2, 4))
        held = [min(many, len(stages) - index) * stage[5] for index, stage in enumerate(stages)]
        return tuple(one_pipeline_ends_s(forward, backward, message, many)), tuple(held)
    (ends,), peaks = _followed(((tuple(enumerate(stages)),), (0,) * many, rooms), order)
    return ends, peaks


_Stop = tuple[int, _Stage]
"""A hop of a part: its node, numbered from 0 in the order in which the part's micro-batches meet them, and what it takes."""


_Shape = tuple[tuple[tuple[_Stop, ...], ...], tuple[int, ...], tuple[int | None, ...]]
"""A part without names: its routes, for each micro-batch which of them it takes, and the room of its nodes if that is given.
What is known of shapes is remembered: candidates of one decision share parts, and the same come again with other names."""


@lru_cache(maxsize=1 << 12)
def _followed(shape: _Shape, order: Order, steps: int = 1) -> tuple[tuple[tuple[float, ...], ...], tuple[int, ...]]:
    """Ends by step and node, and the most bytes of activations at once by node.

    With several ``steps`` every node begins the next one as soon as it is through with one.
    """
    schedule, path, active_bytes = _arranged(shape, order)
    clock = [0.0] * len(schedule.stops.nodes)
    ends = tuple(tuple(path.run(schedule.actions, clock)) for _ in range(steps))
    return ends, tuple(_peaks(schedule, active_bytes, order.split))


@lru_cache(maxsize=16)
def _arranged(shape: _Shape, order: Order) -> tuple[Arranged, LongestPath, list[int]]:
    """The list schedule of a part, its times, and the bytes of activations by stop."""
    ways, taken, rooms = shape
    routes: list[tuple[Hop, ...]] = []
    table: dict[int, list[_Stage]] = {}
    for way in ways:
        firsts = accumulate((stage[0] for _, stage in way), initial=0)
        hops = [Hop(NodeId(f"n{node}"), first, first + stage[0]) for (node, stage), first in zip(way, firsts, strict=False)]
        routes.append(tuple(hops))
        table[id(routes[-1])] = [stage for _, stage in way]
    members: list[list[int]] = [[] for _ in ways]
    for number, index in enumerate(taken):
        members[index].append(number)
    part = Part(routes=tuple(routes), micro_batches=tuple(map(tuple, members)))
    room = {NodeId(f"n{node}"): layers for node, layers in enumerate(rooms) if layers is not None}
    schedule = arranged(part, Plan(num_layers=routes[0][-1].end, placement={}, routes=(), order=order, room=room))
    return schedule, *_path(schedule.stops, table)


@dataclass(frozen=True, slots=True)
class _Times:
    """Times and bytes of hops."""

    costs: Costs
    message_s: tuple[float, ...]
    """In front of each layer, over the link of most nodes."""
    output_bytes: tuple[int, ...]
    """What a message weighs in front of each layer."""
    active_bytes: tuple[int, ...]
    cluster: Cluster
    shadow_s: dict[NodeId, float]
    """By node that shadows: how much longer each of its forwards takes at speed 1."""
    is_one_for_all: bool
    """Whether what a hop takes is the same on all nodes."""
    stages: dict[tuple[int, int, float, float], _Stage] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, workload: Workload, cluster: Cluster) -> _Times:
        known, split = _tables(workload, cluster), plan.order.split
        if split not in known:
            known[split] = cls(
                costs=Costs.of(plan, workload), shadow_s={}, cluster=cluster,
                is_one_for_all=one_speed(cluster) is not None and cluster.one_link is not None,
                message_s=(0.0, *(cluster.link.seconds(layer.output_bytes) for layer in workload.layers[:-1])),
                output_bytes=(0, *(layer.output_bytes for layer in workload.layers[:-1])),
                active_bytes=tuple(accumulate((layer.activation_bytes for layer in workload.layers), initial=0)),
            )
        found = known[split]
        shadow_s = shadow_seconds(plan.routes, found.costs.forward)
        return replace(found, shadow_s=shadow_s, is_one_for_all=False) if shadow_s else found

    def on(self, route: Route) -> list[_Stage]:
        """By hop. With links of several kinds a message takes what the link between its two nodes needs."""
        found = [self.stage(hop) for hop in route]
        if self.cluster.one_link is None:
            for index, (before, hop) in enumerate(pairwise(route), start=1):
                link = self.cluster.link_between(before.node, hop.node)
                found[index] = (*found[index][:4], link.seconds(self.output_bytes[hop.first]), found[index][5])
        return found

    def stage(self, hop: Hop) -> _Stage:
        speed = self.cluster.nodes[hop.node].speed
        shadow_s = self.shadow_s.get(hop.node, 0.0)
        key = (hop.first, hop.end, speed, shadow_s)
        if key not in self.stages:
            forward, backward, weight = self.costs.hop(hop)
            self.stages[key] = (
                hop.end - hop.first, (forward + shadow_s) / speed, backward / speed, weight / speed, self.message_s[hop.first],
                self.active_bytes[hop.end] - self.active_bytes[hop.first],
            )
        return self.stages[key]


@remembered(16)
def _tables(workload: Workload, cluster: Cluster) -> dict[bool, _Times]:
    """By whether backward is split; filled when asked for."""
    return {}


def _follow(part: Part, plan: Plan, table: _Times, steps: int = 1) -> tuple[list[dict[NodeId, float]], dict[NodeId, int]]:
    """Ends by step, and peaks, of the nodes of a part."""
    numbers: dict[NodeId, int] = {}
    known: dict[int, int] = {}
    ways: list[tuple[_Stop, ...]] = []
    taken = []
    for _, route in part.in_order():
        if id(route) not in known:
            known[id(route)] = len(ways)
            stages = zip(route, table.on(route), strict=True)
            ways.append(tuple([(numbers.setdefault(hop.node, len(numbers)), stage) for hop, stage in stages]))
        taken.append(known[id(route)])
    rooms = tuple([plan.room.get(node) for node in numbers]) if plan.room else ()
    ends, peaks = _followed((tuple(ways), tuple(taken), rooms), plan.order, steps)
    return [dict(zip(numbers, each, strict=True)) for each in ends], dict(zip(numbers, peaks, strict=True))


def _path(stops: Stops, table: Mapping[int, Sequence[_Stage]]) -> tuple[LongestPath, list[int]]:
    """The longest path of a part, and the bytes of activations by stop. ``table``: stages by the ``id`` of a route."""
    columns = stops.by_stop({name: list(zip(*stages, strict=True)) for name, stages in table.items()})
    _, forward, backward, weight, message, active = columns
    return LongestPath(stops, forward, backward, weight, message), active


def _peaks(schedule: Arranged, active_bytes: Sequence[int], split: bool) -> list[int]:
    """The most bytes of activations at once, by node."""
    node_of = schedule.stops.node_of
    held, peak = [0] * len(schedule.stops.nodes), [0] * len(schedule.stops.nodes)
    freeing = W if split else B
    for action in schedule.actions:
        kind = action % 3
        if kind == F:
            stop = action // 3
            node = node_of[stop]
            now = held[node] + active_bytes[stop]
            held[node] = now
            if now > peak[node]:
                peak[node] = now
        elif kind == freeing:
            stop = action // 3
            held[node_of[stop]] -= active_bytes[stop]
    return peak


class LongestPath:
    """The times of a part's actions when each node does them in a given order. All by stop."""

    def __init__(
        self, stops: Stops, forward_s: Sequence[float], backward_s: Sequence[float], weight_s: Sequence[float],
        message_s: Sequence[float],
    ) -> None:
        self._seconds = (forward_s, backward_s, weight_s)
        self._message_s = message_s
        self._stops = stops

    def run(self, actions: Sequence[int], clock: list[float]) -> list[float]:
        """``actions`` in an order in which what an action needs comes before it; ``clock`` by node, and what it is after."""
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
        return clock


def staggered_ends(plan: Plan, workload: Workload, cluster: Cluster, steps: int) -> list[dict[NodeId, float]]:
    """Ends of each of ``steps`` steps by node, when every node begins the next one as soon as it is through with one.

    What staggered updates allow, without reductions: only a model of them, since nothing here takes an update back.
    """
    table = _Times.of(plan, workload, cluster)
    found: list[dict[NodeId, float]] = [{} for _ in range(steps)]
    for part in parts(plan):
        for ends_s, of_part in zip(found, _follow(part, plan, table, steps)[0], strict=True):
            ends_s.update(of_part)
    return found
