"""In which order each node of a plan acts: a list schedule, found by pretending to run the plan.

Whenever a node is free it takes the ready action with the earliest deadline, where the deadline is the moment at which
1F1B would have started it in a plain pipeline of that length. Three rules:

1. A node holds the activations of as many micro-batches as 1F1B holds there (one for each hop from here to the end of the
   route), and ``extra_slots`` more, and one more for each stream of another pipeline that it serves. A forward beyond that
   waits, and what waits never keeps the node from what is ready.
2. Weight gradients (split order) come when nothing else can be done.
3. If nothing runs and only waiting forwards are left, which can happen when routes cross, the one nearest to the end of
   its route starts in spite of rule 1: it can always be finished, so no schedule ends in a deadlock.

For one plain pipeline with equal stages this is 1F1B, action by action. The same plan gives the same schedule on every
node, because nothing but the plan is used.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from everstep.plan import Hop, Plan, Route
from everstep.quantities import NodeId
from everstep.schedule import REDUCE, Action, Kind, Order, Schedule
from everstep.workload import Workload


def order_of(plan: Plan, num_micro_batches: int | None = None, workload: Workload | None = None) -> Schedule:
    """The order of every node of ``plan``, spares included (theirs is empty).

    ``num_micro_batches``: only the first so many, for a partial last batch. ``workload``: arrange for these times
    instead of one unit a layer forward and two backward; then the schedule is a function of both.
    """
    routes = plan.routes if num_micro_batches is None else plan.routes[:num_micro_batches]
    orders = _Run(routes, plan, _Costs.of(plan, workload)).orders()
    return {node: (*orders.get(node, ()), *((REDUCE,) if plan.placement[node] else ())) for node in plan.nodes}


def streams(routes: Sequence[Route]) -> tuple[NodeId, ...]:
    """For each micro-batch the node that names its pipeline: of the nodes it visits the least visited, first on its route.

    A rerouted micro-batch shares its borrowed hops with others, and its own pipeline's nodes with its own alone, so it
    stays in the stream it started in.
    """
    visits: dict[NodeId, int] = {}
    for route in routes:
        for hop in route:
            visits[hop.node] = visits.get(hop.node, 0) + 1
    return tuple(min(route, key=lambda hop: visits[hop.node]).node for route in routes)


@dataclass(frozen=True, slots=True)
class _Costs:
    """Running sums over layers of the time of F, B and W; W is empty of time when backward is fused."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]

    @classmethod
    def of(cls, plan: Plan, workload: Workload | None) -> _Costs:
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


_F, _B, _W = 0, 1, 2
_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
_Ready = tuple[float, int, int]
"""Deadline, micro-batch, hop."""


class _Run:
    """One pretended run of the routes. Times are those of ``costs``; messages take none."""

    def __init__(self, routes: Sequence[Route], plan: Plan, costs: _Costs) -> None:
        self._routes = routes
        self._split = plan.order.split
        self._seconds = [[costs.hop(hop) for hop in route] for route in routes]
        self._deadlines = _deadlines(routes, costs)
        self._limit = _limits(routes, plan.order.extra_slots)
        nodes = list(self._limit)
        self._ready: dict[NodeId, tuple[list[_Ready], list[_Ready], list[_Ready]]] = {n: ([], [], []) for n in nodes}
        self._held = dict.fromkeys(nodes, 0)
        self._busy = dict.fromkeys(nodes, False)
        self._orders: dict[NodeId, list[Action]] = {node: [] for node in nodes}
        self._running: list[tuple[float, int, int, int, NodeId]] = []

    def orders(self) -> dict[NodeId, Order]:
        now = 0.0
        for micro_batch, route in enumerate(self._routes):
            self._make_ready(_F, micro_batch, 0, route[0].node)
        for node in self._orders:
            self._dispatch(node, now)
        while self._running or self._start_a_waiting_forward(now):
            now = self._running[0][0]
            touched: dict[NodeId, None] = {}
            while self._running and self._running[0][0] <= now:
                _, kind, micro_batch, index, node = heapq.heappop(self._running)
                self._busy[node] = False
                touched[node] = None
                for freed in self._finish(kind, micro_batch, index, node):
                    touched[freed] = None
            for node in touched:
                self._dispatch(node, now)
        return {node: tuple(order) for node, order in self._orders.items()}

    def _make_ready(self, kind: int, micro_batch: int, index: int, node: NodeId) -> NodeId:
        deadline = self._deadlines[micro_batch][index][kind]
        heapq.heappush(self._ready[node][kind], (deadline, micro_batch, index))
        return node

    def _finish(self, kind: int, micro_batch: int, index: int, node: NodeId) -> list[NodeId]:
        """Everything that the end of an action makes ready; the nodes it is ready on."""
        route = self._routes[micro_batch]
        if kind == _F:
            if index + 1 < len(route):
                return [self._make_ready(_F, micro_batch, index + 1, route[index + 1].node)]
            return [self._make_ready(_B, micro_batch, index, node)]
        freed: list[NodeId] = []
        if kind == _B:
            if self._split:
                self._make_ready(_W, micro_batch, index, node)
            if index:
                freed.append(self._make_ready(_B, micro_batch, index - 1, route[index - 1].node))
        if kind == (_W if self._split else _B):
            self._held[node] -= 1
        return freed

    def _dispatch(self, node: NodeId, now: float) -> None:
        if self._busy[node]:
            return
        forwards, backwards, weights = self._ready[node]
        may_forward = bool(forwards) and self._held[node] < self._limit[node]
        if may_forward and (not backwards or forwards[0] <= backwards[0]):
            self._start(_F, node, now)
        elif backwards:
            self._start(_B, node, now)
        elif weights:
            self._start(_W, node, now)

    def _start(self, kind: int, node: NodeId, now: float) -> None:
        _, micro_batch, index = heapq.heappop(self._ready[node][kind])
        self._busy[node] = True
        self._held[node] += kind == _F
        self._orders[node].append(Action(_KINDS[kind], index, micro_batch))
        end = now + self._seconds[micro_batch][index][kind]
        heapq.heappush(self._running, (end, kind, micro_batch, index, node))

    def _start_a_waiting_forward(self, now: float) -> bool:
        """Rule 3. False when all is done."""
        waiting = [
            (len(self._routes[micro_batch]) - index, deadline, micro_batch, node)
            for node, (forwards, _, _) in self._ready.items()
            for deadline, micro_batch, index in forwards
        ]
        if not waiting:
            return False
        _, _, chosen, node = min(waiting)
        forwards = self._ready[node][_F]
        first = next(entry for entry in forwards if entry[1] == chosen)
        forwards.remove(first)
        forwards.insert(0, (float("-inf"), first[1], first[2]))
        heapq.heapify(forwards)
        self._start(_F, node, now)
        return True


def _limits(routes: Sequence[Route], extra_slots: int) -> dict[NodeId, int]:
    """Rule 1: how many micro-batches each node may hold activations of."""
    behind: dict[NodeId, int] = {}
    served: dict[NodeId, set[NodeId]] = {}
    for route, stream in zip(routes, streams(routes), strict=True):
        for index, hop in enumerate(route):
            behind[hop.node] = max(behind.get(hop.node, 0), len(route) - index)
            served.setdefault(hop.node, set()).add(stream)
    return {node: slots + extra_slots + len(served[node]) - 1 for node, slots in behind.items()}


def _deadlines(routes: Sequence[Route], costs: _Costs) -> list[list[tuple[float, float, float]]]:
    """For each micro-batch and hop, when 1F1B with equal stages would begin its F, B and W.

    Hop s of p, j-th micro-batch of its stream, f, b, w the mean times of a hop: B begins at p·f + (p-1-s)·b + j·(f+b+w);
    F at (s+j)·f while the pipeline fills, then right after the B of micro-batch j-(p-s).
    """
    ranks: dict[NodeId, int] = {}
    found: list[list[tuple[float, float, float]]] = []
    for route, stream in zip(routes, streams(routes), strict=True):
        rank = ranks.get(stream, 0)
        ranks[stream] = rank + 1
        num_hops = len(route)
        forward_s, backward_s = costs.forward[-1] / num_hops, costs.backward[-1] / num_hops
        period_s = forward_s + backward_s + costs.weight[-1] / num_hops
        times: list[tuple[float, float, float]] = []
        for index in range(num_hops):
            behind = num_hops - index
            first_backward = num_hops * forward_s + (behind - 1) * backward_s
            if rank < behind:
                forward = (index + rank) * forward_s
            else:
                forward = first_backward + (rank - behind) * period_s + backward_s
            times.append((forward, first_backward + rank * period_s, float(rank)))
        found.append(times)
    return found
