"""In which order each node of a plan acts.

A plain pipeline with fused backward and no extra slots does 1F1B. Everything else gets a list schedule, found by pretending
to run the plan: whenever a node is free it takes the ready action with the earliest deadline, where the deadline is the
moment at which 1F1B would have started it in a plain pipeline of such hops. Three rules:

1. A node holds the activations of as many micro-batches as 1F1B holds there (one for each hop from here to the end of the
   route), and ``extra_slots`` more, each counted by the layers that it computes there; or what ``Plan.room`` says. A forward
   beyond that waits, and what waits never keeps the node from what is ready.
2. Weight gradients (split order) come when nothing else can be done.
3. If nothing runs and only waiting forwards are left, which can happen when routes cross, the one nearest to the end of
   its route starts in spite of rule 1: it can always be finished, so no schedule ends in a deadlock.

The same plan gives the same schedule on every node, because nothing but the plan is used. Parts of a plan that share no
node do not know of each other.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TypeVar

from everstep.plan import Hop, Plan, Route
from everstep.planner.step.parts import Part, parts
from everstep.quantities import NodeId
from everstep.schedule import REDUCE, Action, Kind, Order, Schedule, one_f_one_b
from everstep.workload import Workload

_T = TypeVar("_T")


def order_of(plan: Plan, num_micro_batches: int | None = None, workload: Workload | None = None) -> Schedule:
    """The order of every node of ``plan``, spares included (theirs is empty).

    ``num_micro_batches``: only the first so many, for a partial last batch. ``workload``: arrange for these times
    instead of one unit a layer forward and two backward; then the schedule is a function of both.
    """
    orders: dict[NodeId, Order] = {}
    for part in parts(plan, num_micro_batches):
        orders |= _one_f_one_b(part) if does_one_f_one_b(part, plan) else arranged(part, plan, workload).orders()
    return {node: (*orders.get(node, ()), *((REDUCE,) if plan.placement[node] else ())) for node in plan.nodes}


def does_one_f_one_b(part: Part, plan: Plan) -> bool:
    """Whether the nodes of ``part`` need no list schedule."""
    return part.is_plain and not plan.order.split and not plan.order.extra_slots


def _one_f_one_b(part: Part) -> dict[NodeId, Order]:
    (route,), (members,) = part.routes, part.micro_batches
    return {
        hop.node: tuple(
            Action(action.kind, index, members[action.micro_batch]) for action in one_f_one_b(index, len(route), len(members))
        )
        for index, hop in enumerate(route)
    }


def streams(routes: Sequence[Route]) -> tuple[NodeId, ...]:
    """For each micro-batch the node that names its pipeline: of the nodes it visits the least visited, first on its route.

    A rerouted micro-batch shares its borrowed hops with others, and its own pipeline's nodes with its own alone, so it
    stays in the stream it started in.
    """
    by_object = {id(route): route for route in routes}
    visits: dict[NodeId, int] = {}
    for name, count in Counter(map(id, routes)).items():
        for hop in by_object[name]:
            visits[hop.node] = visits.get(hop.node, 0) + count
    names = {name: min(route, key=lambda hop: visits[hop.node]).node for name, route in by_object.items()}
    return tuple([names[name] for name in map(id, routes)])


@dataclass(frozen=True, slots=True)
class Costs:
    """Running sums over layers of the time of F, B and W; W is empty of time when backward is fused."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]

    @classmethod
    def of(cls, plan: Plan, workload: Workload | None) -> Costs:
        """``workload`` None: one unit a layer for each of F, B and W."""
        split = plan.order.split
        if workload is None:
            forward, backward, weight = [1.0] * plan.num_layers, [1.0] * plan.num_layers, [1.0] * plan.num_layers
        else:
            forward = [layer.forward_s for layer in workload.layers]
            backward = [layer.backward_input_s for layer in workload.layers]
            weight = [layer.backward_weight_s for layer in workload.layers]
        if not split:
            backward, weight = [b + w for b, w in zip(backward, weight, strict=True)], [0.0] * plan.num_layers
        return cls(*(tuple(accumulate(times, initial=0.0)) for times in (forward, backward, weight)))

    def hop(self, hop: Hop) -> tuple[float, float, float]:
        first, end = hop.first, hop.end
        return (
            self.forward[end] - self.forward[first],
            self.backward[end] - self.backward[first],
            self.weight[end] - self.weight[first],
        )


F, B, W = 0, 1, 2
_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)


@dataclass(frozen=True, slots=True)
class Stops:
    """The hops of a part's micro-batches, one after the other and numbered through."""

    routes: tuple[tuple[int, Route], ...]
    nodes: tuple[NodeId, ...]
    node_of: tuple[int, ...]
    """By stop: an index into ``nodes``."""
    hops_left: tuple[int, ...]
    """By stop: hops from here to the end of the route, this one counted."""
    index: tuple[int, ...]
    """By stop: the position of its hop on the route."""
    layers: tuple[int, ...]
    """By stop: how many layers its hop computes."""

    @classmethod
    def of(cls, part: Part) -> Stops:
        routes = part.in_order()
        nodes = part.nodes
        numbers = {node: number for number, node in enumerate(nodes)}
        visited = {id(route): [numbers[hop.node] for hop in route] for route in part.routes}
        sizes = {id(route): [hop.end - hop.first for hop in route] for route in part.routes}
        lengths = [len(route) for _, route in routes]
        return cls(
            routes=tuple(routes), nodes=nodes,
            node_of=tuple(chain.from_iterable([visited[id(route)] for _, route in routes])),
            hops_left=tuple(chain.from_iterable([range(length, 0, -1) for length in lengths])),
            index=tuple(chain.from_iterable([range(length) for length in lengths])),
            layers=tuple(chain.from_iterable([sizes[id(route)] for _, route in routes])),
        )

    def seconds(self, costs: Costs) -> list[list[float]]:
        """By kind and stop."""
        return self.by_stop({id(route): list(zip(*map(costs.hop, route), strict=True)) for _, route in self.routes})

    def by_stop(self, columns: Mapping[int, Sequence[Sequence[_T]]]) -> list[list[_T]]:
        """``columns`` of what belongs to the hops of a route, by the identity of the route, as columns by stop."""
        taken = [columns[id(route)] for _, route in self.routes]
        return [list(chain.from_iterable(column)) for column in zip(*taken, strict=True)]

    def micro_batches(self) -> list[int]:
        """By stop."""
        return [micro_batch for micro_batch, route in self.routes for _ in route]


@dataclass(frozen=True, slots=True)
class Arranged:
    """Actions in the order in which a pretended run started them, which is also each node's own order.

    An action is ``3 · stop + kind``.
    """

    stops: Stops
    actions: list[int]

    def orders(self) -> dict[NodeId, Order]:
        """By node, as actions that an engine can follow."""
        found: list[list[Action]] = [[] for _ in self.stops.nodes]
        of_stop = self.stops.micro_batches()
        for action in self.actions:
            stop, kind = divmod(action, 3)
            found[self.stops.node_of[stop]].append(Action(_KINDS[kind], self.stops.index[stop], of_stop[stop]))
        return {node: tuple(order) for node, order in zip(self.stops.nodes, found, strict=True)}


def arranged(part: Part, plan: Plan, workload: Workload | None = None) -> Arranged:
    """The list schedule of ``part``."""
    stops, costs = Stops.of(part), Costs.of(plan, workload)
    forward, backward = deadlines(stops, costs)
    limits = limits_of(stops, plan)
    actions = arrange(stops, stops.seconds(costs), forward, backward, limits, split=plan.order.split)
    return Arranged(stops, actions)


def limits_of(stops: Stops, plan: Plan) -> list[int]:
    """Rule 1, by node: how many layers' activations it may hold, a micro-batch counting once for each layer of its hop.

    Never less than its largest hop needs.
    """
    most, largest = [0] * len(stops.nodes), [0] * len(stops.nodes)
    for node, left, layers in set(zip(stops.node_of, stops.hops_left, stops.layers, strict=True)):
        most[node] = max(most[node], left * layers)
        largest[node] = max(largest[node], layers)
    return [
        max(plan.room.get(name, held + plan.order.extra_slots * layers), layers)
        for name, held, layers in zip(stops.nodes, most, largest, strict=True)
    ]


PACE = 0.8
"""How fast micro-batches follow each other at least, as a share of what the mean node needs for each."""

SMALL_FIRST = 1e-3
"""Of what is due at the same time the smaller piece goes first: the part of a period by which a hop of no work is early."""


def deadlines(stops: Stops, costs: Costs) -> tuple[list[float], list[float]]:
    """By stop, when 1F1B would begin its F and its B if nothing else were done.

    The j-th micro-batch of a stream, whose slowest hop takes t (F, B and W together), on a hop with F times before it that
    sum up to f, of all layers to F, and B times behind it that sum up to b: its B begins at F + b + j·t. It is in flight with
    d others, d being the work from here to the end of the route, there and back, divided by t. While the pipeline fills, its
    F begins at f + j·F/p, p being the route's length in periods t; then right after the B of micro-batch j-d.

    Where micro-batches go many ways, streams are short and t says little about how fast they follow each other. So t is at
    most the mean work of a node divided by the micro-batches of the stream, and no micro-batch is ahead of its turn by more
    than a fifth (``PACE``).
    """
    ranks: dict[NodeId, int] = {}
    forwards: list[float] = []
    backwards: list[float] = []
    known: dict[tuple[int, NodeId], _Cadence] = {}
    routes = [route for _, route in stops.routes]
    names = streams(routes)
    sizes = Counter(names)
    mean_s = (costs.forward[-1] + costs.backward[-1] + costs.weight[-1]) * len(routes) / len(stops.nodes)
    turn_s = PACE * mean_s / len(routes)
    for turn, (route, stream) in enumerate(zip(routes, names, strict=True)):
        rank = ranks.get(stream, 0)
        ranks[stream] = rank + 1
        cadence = known.get((id(route), stream))
        if cadence is None:
            cadence = known[id(route), stream] = _Cadence.of([costs.hop(hop) for hop in route], mean_s / sizes[stream])
        period_s = cadence.period_s
        rank = max(rank, int(turn * turn_s / period_s))
        backwards += [first_s + rank * period_s for first_s in cadence.backward_s]
        forwards += [
            filling_s + rank * cadence.filling_s if rank < depth else first_s + rank * period_s
            for filling_s, depth, first_s in cadence.forward_s
        ]
    return forwards, backwards


@dataclass(frozen=True, slots=True)
class _Cadence:
    """When a route's first micro-batch is due at its hops, and how fast others follow."""

    period_s: float
    filling_s: float
    """Between two F while the pipeline fills."""
    backward_s: tuple[float, ...]
    forward_s: tuple[tuple[float, int, float], ...]
    """By hop: due while the pipeline fills; how many micro-batches do that; due of rank 0 if the pipeline were full."""

    @classmethod
    def of(cls, hops: Sequence[tuple[float, float, float]], most_s: float) -> _Cadence:
        """``hops``: seconds of F, B and W. ``most_s``: no period is longer."""
        work_s = [sum(hop) for hop in hops]
        slowest_s = max(work_s)
        period_s = min(slowest_s, most_s) or 1.0
        before_s = list(accumulate((forward_s for forward_s, _, _ in hops), initial=0.0))
        behind_s = list(accumulate((backward_s for _, backward_s, _ in reversed(hops)), initial=0.0))[-2::-1]
        rest_s = list(accumulate(reversed(work_s)))[::-1]
        early_s = [SMALL_FIRST * (slowest_s - seconds) for seconds in work_s]
        first_s = [before_s[-1] + behind - early for behind, early in zip(behind_s, early_s, strict=True)]
        depths = [math.ceil(rest / period_s - 1e-9) for rest in rest_s]
        return cls(
            period_s=period_s, filling_s=period_s * before_s[-1] / rest_s[0] if rest_s[0] else 0.0, backward_s=tuple(first_s),
            forward_s=tuple([
                (before - early, depth, first - depth * period_s + backward_s)
                for before, early, depth, first, (_, backward_s, _) in zip(
                    before_s, early_s, depths, first_s, hops, strict=False,
                )
            ]),
        )


def arrange(
    stops: Stops, seconds: Sequence[Sequence[float]], forward_keys: Sequence[float], backward_keys: Sequence[float],
    limits: Sequence[int], *, split: bool,
) -> list[int]:
    """Pretend to run; the actions in the order in which they start. Smaller keys go first; messages take no time.

    ``limits`` by node: layers' activations.
    """
    node_of, hops_left, index, layers = stops.node_of, stops.hops_left, stops.index, stops.layers
    forward_s, backward_s, weight_s = seconds
    num_nodes, num_stops = len(stops.nodes), len(node_of)
    forwards: list[list[tuple[float, int]]] = [[] for _ in range(num_nodes)]
    backwards: list[list[tuple[float, int]]] = [[] for _ in range(num_nodes)]
    weights: list[list[int]] = [[] for _ in range(num_nodes)]
    held, busy = [0] * num_nodes, [False] * num_nodes
    running: list[tuple[float, int]] = []
    """Ends, and actions as ``kind · num_stops + stop``: of equal ends F comes first, then B."""
    started: list[int] = []
    push, pop = heapq.heappush, heapq.heappop
    for stop, position in enumerate(index):
        if not position:
            push(forwards[node_of[stop]], (forward_keys[stop], stop))
    now = 0.0
    touched: Iterable[int] = range(num_nodes)
    forced = False
    while True:
        for node in touched:
            if busy[node]:
                continue
            ready_f, ready_b = forwards[node], backwards[node]
            if ready_f and (not ready_b or ready_f[0] <= ready_b[0]) and (
                held[node] + layers[ready_f[0][1]] <= limits[node] or forced
            ):
                stop = pop(ready_f)[1]
                held[node] += layers[stop]
                started.append(3 * stop)
                push(running, (now + forward_s[stop], stop))
            elif ready_b:
                stop = pop(ready_b)[1]
                started.append(3 * stop + 1)
                push(running, (now + backward_s[stop], num_stops + stop))
            elif weights[node]:
                stop = pop(weights[node])
                started.append(3 * stop + 2)
                push(running, (now + weight_s[stop], 2 * num_stops + stop))
            else:
                continue
            busy[node] = True
        forced = not running
        if forced:
            waiting = [(hops_left[stop], key, stop) for entries in forwards for key, stop in entries]
            if not waiting:
                return started
            _, _, stop = min(waiting)  # rule 3
            node = node_of[stop]
            forwards[node] = [(-1.0 if other == stop else key, other) for key, other in forwards[node]]
            heapq.heapify(forwards[node])
            touched = (node,)
            continue
        now = running[0][0]
        met: dict[int, None] = {}
        while running and running[0][0] <= now:
            stop = pop(running)[1]
            if stop < num_stops:
                met[node_of[stop]] = None
                busy[node_of[stop]] = False
                if hops_left[stop] > 1:
                    stop += 1
                    push(forwards[node_of[stop]], (forward_keys[stop], stop))
                    met[node_of[stop]] = None
                else:
                    push(backwards[node_of[stop]], (backward_keys[stop], stop))
                continue
            is_backward = stop < 2 * num_stops
            stop -= num_stops if is_backward else 2 * num_stops
            node = node_of[stop]
            met[node] = None
            busy[node] = False
            if is_backward and split:
                push(weights[node], stop)
            else:
                held[node] -= layers[stop]
            if is_backward and index[stop]:
                stop -= 1
                push(backwards[node_of[stop]], (backward_keys[stop], stop))
                met[node_of[stop]] = None
        touched = met
