"""Better schedules than the list schedule, searched for in idle time.

Two ways, one after the other:

1. Following who is late. Micro-batches that visit a node which ends late get earlier deadlines everywhere, by how much later
   than the mean it ends; so others make way for them. A dozen rounds take out most of what the list schedule loses, without
   chance. This is done for the routes as they are, and for routes with work passed on more finely (``level``).
2. Deadlines and routes changed at random, kept if no worse.

Pure and repeatable: the same plan, rounds and seed give the same answer. What is found is a schedule, not a plan, because
nodes cannot work it out from the plan alone; it has to be handed to them. Routes change only between holders of the same
layers, so nothing moves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from everstep.cluster import Cluster
from everstep.plan import Hop, Plan, Route
from everstep.planner.routes.level import Levelled, least_seconds
from everstep.planner.step.memory import node_bytes, rooms
from everstep.planner.step.pace import LongestPath
from everstep.planner.step.parts import parts
from everstep.planner.step.schedules import Arranged, Costs, Stops, arrange, deadlines, limits_of
from everstep.quantities import NodeId
from everstep.schedule import REDUCE, Order, Schedule
from everstep.workload import LayerCost, Workload

ROUNDS = 400
"""A second or less for a grid of a dozen nodes."""

FOLLOWED = 12
"""Rounds that follow who is late, for each kind of routes."""

LEVELS = ((0.06, 0.8), (0.03, 0.5), (0.015, 0.25))
"""How far above the bound the busiest node may end, one kind of routes each: this at most, and this share of how far it is."""

EQUAL = 1e-9
"""Relative difference below which two times are the same."""

LEVELLED_NODES = 128
"""With more nodes work is not passed on: that alone would take longer than a round may."""


@dataclass(frozen=True, slots=True)
class Improved:
    """The plan (its routes may have changed), its schedule, and what a step takes before and after, reductions not counted."""

    plan: Plan
    schedule: Schedule
    before_s: float
    after_s: float


def improve(
    plan: Plan, workload: Workload | None = None, *, rounds: int = ROUNDS, seed: int = 0, cluster: Cluster | None = None,
    caps: Mapping[NodeId, int | None] | None = None,
) -> Improved:
    """Search around the list schedule. ``workload`` None: one unit a layer for each of F, B and W.

    ``cluster``: count its messages and speeds; None: messages take no time. ``caps``: bytes that each node may use, which it
    then may fill; no schedule that needs more is taken. Needs a workload.
    """
    *_, best = improvements(
        plan, workload, rounds=rounds, rounds_each=max(1, rounds), seed=seed, cluster=cluster, caps=caps,
    )
    return best


def improvements(
    plan: Plan, workload: Workload | None = None, *, rounds: int = ROUNDS, rounds_each: int = 1, seed: int = 0,
    cluster: Cluster | None = None, caps: Mapping[NodeId, int | None] | None = None,
) -> Iterator[Improved]:
    """The same in pieces: the best so far at the begin and after every ``rounds_each`` rounds, for whoever has little time."""
    assert caps is None or workload is not None, "bytes are counted with a workload"
    search = _Search(plan, _Problem(workload or _even_workload(plan), cluster, caps), random.Random(seed))
    yield search.found()
    for done, _ in enumerate(islice(search.tries(), rounds), start=1):
        if done % rounds_each == 0:
            yield search.found()
    yield search.found()


@dataclass(frozen=True, slots=True)
class _Problem:
    """What stays the same whatever is tried."""

    workload: Workload
    cluster: Cluster | None
    caps: Mapping[NodeId, int | None] | None

    def roomy(self, plan: Plan) -> Plan:
        """``plan`` with leave to use the memory that there is; as it is where nothing is said about it."""
        return plan if self.caps is None else replace(plan, room=rooms(plan, self.workload, self.caps))

    def speed_of(self, node: NodeId) -> float:
        return self.cluster.nodes[node].speed if self.cluster else 1.0

    def message_s(self, before: Hop, hop: Hop) -> float:
        if self.cluster is None:
            return 0.0
        link = self.cluster.link_between(before.node, hop.node)
        return link.seconds(self.workload.layers[hop.first - 1].output_bytes)


@dataclass(frozen=True, slots=True)
class _Frame:
    """A part of a plan, ready to be arranged with other deadlines. Lists are by stop."""

    stops: Stops
    seconds: list[list[float]]
    """By kind."""
    deadlines: tuple[list[float], list[float]]
    limits: list[int]
    micro_batches: list[int]
    path: LongestPath
    period_s: list[float]
    """Of the work of a step for one micro-batch, the part that one of its hops takes on average."""

    @classmethod
    def all_of(cls, plan: Plan, problem: _Problem) -> tuple[_Frame, ...]:
        costs = Costs.of(plan, problem.workload)
        total_s = costs.forward[-1] + costs.backward[-1] + costs.weight[-1]
        found = []
        for part in parts(plan):
            stops = Stops.of(part)
            table = {
                id(route): [[seconds / problem.speed_of(hop.node) for seconds in costs.hop(hop)] for hop in route]
                for route in part.routes
            }
            seconds = stops.by_stop({name: list(zip(*hops, strict=True)) for name, hops in table.items()})
            messages = stops.by_stop({
                id(route): [[0.0, *(problem.message_s(*hops) for hops in pairwise(route))]] for route in part.routes
            })
            found.append(cls(
                stops, seconds, deadlines(stops, costs), limits_of(stops, plan), stops.micro_batches(),
                LongestPath(stops, seconds[0], seconds[1], seconds[2], messages[0]),
                [total_s / (left + index) for left, index in zip(stops.hops_left, stops.index, strict=True)],
            ))
        return tuple(found)


_Offsets = Mapping[tuple[int, int, int], float]
"""Added to the deadline of (micro-batch, hop, kind)."""

_Pulls = Mapping[int, float]
"""Added to all deadlines of a micro-batch."""


@dataclass(frozen=True, slots=True)
class _Try:
    """A plan, deadlines, and what came of them."""

    plan: Plan
    frames: tuple[_Frame, ...]
    offsets: _Offsets
    pulls: _Pulls
    arranged: tuple[Arranged, ...]
    ends_s: Mapping[NodeId, float]
    fits: bool

    @property
    def step_s(self) -> float:
        return max(self.ends_s.values())

    @property
    def rank(self) -> tuple[bool, float]:
        """Smaller is better: what does not fit comes last."""
        return not self.fits, self.step_s

    def schedule(self) -> Schedule:
        return _schedule(self.plan, self.arranged)


def _tried(plan: Plan, frames: tuple[_Frame, ...], offsets: _Offsets, pulls: _Pulls, problem: _Problem) -> _Try:
    found: list[Arranged] = []
    ends_s: dict[NodeId, float] = {}
    for frame in frames:
        stops = frame.stops
        keys = [
            [
                key + pulls.get(member, 0.0) + (offsets.get((member, index, kind), 0.0) if offsets else 0.0)
                for key, member, index in zip(row, frame.micro_batches, stops.index, strict=True)
            ]
            for kind, row in enumerate(frame.deadlines)
        ]
        actions = arrange(stops, frame.seconds, keys[0], keys[1], frame.limits, split=plan.order.split)
        found.append(Arranged(stops, actions))
        ends_s.update(zip(stops.nodes, frame.path.run(actions, [0.0] * len(stops.nodes)), strict=True))
    fits = True
    if problem.caps is not None:
        needed = node_bytes(plan, problem.workload, _schedule(plan, found))
        fits = all(num_bytes <= (problem.caps.get(node) or num_bytes) for node, num_bytes in needed.items())
    return _Try(plan, frames, offsets, pulls, tuple(found), ends_s, fits)


def _schedule(plan: Plan, arranged: Sequence[Arranged]) -> Schedule:
    orders: dict[NodeId, Order] = {}
    for part in arranged:
        orders |= part.orders()
    return {node: (*orders.get(node, ()), *((REDUCE,) if plan.placement[node] else ())) for node in plan.nodes}


class _Search:
    """The best so far, and what to try next."""

    def __init__(self, plan: Plan, problem: _Problem, chance: random.Random) -> None:
        self._problem, self._chance = problem, chance
        self._best = _tried(plan, _Frame.all_of(plan, problem), {}, {}, problem)
        self._before_s = self._best.step_s
        self._windows = {node: frozenset(layers) for node, layers in plan.placement.items() if layers}
        self._speeds = {node: problem.speed_of(node) for node in self._windows}
        everything = replace(problem.workload, num_micro_batches=len(plan.routes))
        self._least_s = least_seconds(self._windows, everything, self._speeds, split=plan.order.split)

    def found(self) -> Improved:
        return Improved(self._best.plan, self._best.schedule(), self._before_s, self._best.step_s)

    def tries(self) -> Iterator[None]:
        """After each try; it ends when nothing can be better."""
        for plan in () if self._is_done() else self._kinds_of_routes():
            other = self._take(_tried(plan, _Frame.all_of(plan, self._problem), {}, {}, self._problem))
            yield
            for _ in range(FOLLOWED):
                if self._is_done():
                    return
                other = self._take(_tried(plan, other.frames, {}, _pulled(other), self._problem))
                yield
        while not self._is_done():
            best = self._best
            plan = _rerouted(best.plan, self._chance) if self._chance.random() < 0.3 else best.plan
            frames = best.frames if plan is best.plan else _Frame.all_of(plan, self._problem)
            offsets = dict(best.offsets)
            for frame in frames:
                _shake(offsets, frame, self._chance)
            self._take(_tried(plan, frames, offsets, best.pulls, self._problem))
            yield

    def _kinds_of_routes(self) -> Iterator[Plan]:
        plan = self._problem.roomy(self._best.plan)
        yield plan
        if len(plan.placement) > LEVELLED_NODES or any(hop.shadow for route in set(plan.routes) for hop in route):
            return
        level = Levelled(plan.routes, self._windows, self._problem.workload, self._speeds, split=plan.order.split)
        over = level.over
        for most, share in LEVELS:
            if level.pass_on(min(most, share * over), len(plan.routes)):
                yield self._problem.roomy(replace(plan, routes=level.routes()))

    def _take(self, other: _Try) -> _Try:
        if other.rank <= self._best.rank:
            self._best = other
        return other

    def _is_done(self) -> bool:
        return self._best.fits and self._best.step_s <= self._least_s * (1 + EQUAL)


def _pulled(last: _Try) -> _Pulls:
    """Those that visit a node which ended late earlier, by how much later than the mean it did; others later."""
    late_s: dict[int, float] = {}
    for micro_batch, route in enumerate(last.plan.routes):
        late_s[micro_batch] = max(last.ends_s[hop.node] for hop in route)
    mean_s = sum(late_s.values()) / len(late_s)
    return {micro_batch: last.pulls.get(micro_batch, 0.0) + mean_s - seconds for micro_batch, seconds in late_s.items()}


def _shake(offsets: dict[tuple[int, int, int], float], frame: _Frame, chance: random.Random) -> None:
    """One action, or all of one kind and hop on one node, earlier or later by up to two of a hop's periods."""
    stops, members = frame.stops, frame.micro_batches
    stop, kind = chance.randrange(len(members)), chance.randrange(2)
    shift_s = chance.uniform(-2, 2) * frame.period_s[stop]
    alike = [
        other for other in range(len(members))
        if stops.node_of[other] == stops.node_of[stop] and stops.index[other] == stops.index[stop]
        and members[other] % 2 == members[stop] % 2
    ] if chance.random() < 0.3 else [stop]
    for other in alike:
        name = (members[other], stops.index[other], kind)
        offsets[name] = offsets.get(name, 0.0) + shift_s


def _rerouted(plan: Plan, chance: random.Random) -> Plan:
    """Two micro-batches change the nodes of one hop, where both nodes can do both and no route meets one twice."""
    first, second = chance.randrange(len(plan.routes)), chance.randrange(len(plan.routes))
    index = chance.randrange(len(plan.routes[first]))
    if index >= len(plan.routes[second]):
        return plan
    here, there = plan.routes[first][index], plan.routes[second][index]
    if (here.first, here.end) != (there.first, there.end) or here.node == there.node:
        return plan
    routes = list(plan.routes)
    routes[first] = _with(plan.routes[first], index, there.node)
    routes[second] = _with(plan.routes[second], index, here.node)
    if any(len({hop.node for hop in routes[m]}) < len(routes[m]) for m in (first, second)):
        return plan
    return replace(plan, routes=tuple(routes))


def _with(route: Route, index: int, node: NodeId) -> Route:
    hop = route[index]
    return (*route[:index], Hop(node, hop.first, hop.end, hop.shadow), *route[index + 1:])


def _even_workload(plan: Plan) -> Workload:
    """One second a layer for each of F, B and W."""
    layers = tuple(
        LayerCost(name=str(layer), forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
        for layer in range(plan.num_layers)
    )
    return Workload(layers=layers, units={}, num_micro_batches=len(plan.routes))
