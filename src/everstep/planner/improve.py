"""Better schedules than the list schedule, searched for in idle time: keys and routes changed at random, kept if no worse.

Pure and repeatable: the same plan, rounds and seed give the same answer. What is found is a schedule, not a plan, because
nodes cannot work it out from the plan alone; it has to be handed to them. Routes change only between holders that compute
the same layers for other micro-batches already, so nothing moves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from everstep.plan import Hop, Plan, Route
from everstep.planner.parts import parts
from everstep.planner.schedules import Arranged, Costs, F, Stops, arrange, deadlines, limits_of
from everstep.quantities import NodeId
from everstep.schedule import REDUCE, Order, Schedule
from everstep.workload import Workload

ROUNDS = 400
"""A second or less for a grid of a dozen nodes."""


@dataclass(frozen=True, slots=True)
class Improved:
    """The plan (its routes may have changed), its schedule, and what a step takes before and after, messages not counted."""

    plan: Plan
    schedule: Schedule
    before_s: float
    after_s: float


def improve(plan: Plan, workload: Workload | None = None, *, rounds: int = ROUNDS, seed: int = 0) -> Improved:
    """Search around the list schedule. ``workload`` None: one unit a layer for each of F, B and W."""
    *_, best = improvements(plan, workload, rounds=rounds, rounds_each=max(1, rounds), seed=seed)
    return best


def improvements(
    plan: Plan, workload: Workload | None = None, *, rounds: int = ROUNDS, rounds_each: int = 1, seed: int = 0,
) -> Iterator[Improved]:
    """The same in pieces: the best so far at the begin and after every ``rounds_each`` rounds, for whoever has little time."""
    chance = random.Random(seed)
    best = _Try.of(plan, workload, None, None)
    before_s = best.step_s
    floor_s = _busiest_s(plan, workload)
    yield Improved(best.plan, best.schedule(), before_s, best.step_s)
    for done in range(1, rounds + 1):
        if best.step_s <= floor_s:
            break
        change = _rerouted(best, chance) if chance.random() < 0.3 else best.plan
        other = _Try.of(change, workload, best, chance)
        if other.step_s <= best.step_s:
            best = other
        if done % rounds_each == 0:
            yield Improved(best.plan, best.schedule(), before_s, best.step_s)
    yield Improved(best.plan, best.schedule(), before_s, best.step_s)


@dataclass(frozen=True, slots=True)
class _Try:
    plan: Plan
    offsets: dict[tuple[int, int, int], float]
    """Added to the deadline of (micro-batch, hop, kind)."""
    arranged: tuple[Arranged, ...]
    step_s: float

    @classmethod
    def of(cls, plan: Plan, workload: Workload | None, before: _Try | None, chance: random.Random | None) -> _Try:
        offsets = dict(before.offsets) if before else {}
        costs = Costs.of(plan, workload)
        found, worst_s = [], 0.0
        for part in parts(plan):
            stops = Stops.of(part)
            members = stops.micro_batches()
            if chance is not None:
                _shake(offsets, stops, members, costs, chance)
            forward, backward = deadlines(stops, costs)
            keys = [
                [key + offsets.get((members[stop], stops.index[stop], kind), 0.0) for stop, key in enumerate(row)]
                for kind, row in enumerate((forward, backward))
            ]
            seconds = stops.seconds(costs)
            limits = limits_of(stops, plan)
            actions = arrange(stops, seconds, keys[0], keys[1], limits, split=plan.order.split)
            found.append(Arranged(stops, actions))
            worst_s = max(worst_s, makespan_s(stops, seconds, actions))
        return cls(plan, offsets, tuple(found), worst_s)

    def schedule(self) -> Schedule:
        orders: dict[NodeId, Order] = {}
        for part in self.arranged:
            orders |= part.orders()
        placement = self.plan.placement
        return {node: (*orders.get(node, ()), *((REDUCE,) if placement[node] else ())) for node in self.plan.nodes}


def makespan_s(stops: Stops, seconds: list[list[float]], actions: list[int]) -> float:
    """When the last of ``actions`` ends, messages not counted."""
    clock = [0.0] * len(stops.nodes)
    done = ([0.0] * len(stops.node_of), [0.0] * len(stops.node_of))
    for action in actions:
        stop, kind = divmod(action, 3)
        node = stops.node_of[stop]
        start = clock[node]
        if kind == F and stops.index[stop]:
            start = max(start, done[0][stop - 1])
        elif kind == 1 and stops.hops_left[stop] > 1:
            start = max(start, done[1][stop + 1])
        clock[node] = start + seconds[kind][stop]
        if kind < 2:
            done[kind][stop] = clock[node]
    return max(clock)


def _shake(
    offsets: dict[tuple[int, int, int], float], stops: Stops, members: list[int], costs: Costs, chance: random.Random,
) -> None:
    """One action, or all of one kind and hop on one node, earlier or later by up to two of a hop's periods."""
    stop, kind = chance.randrange(len(members)), chance.randrange(2)
    hops = stops.hops_left[stop] + stops.index[stop]
    period_s = (costs.forward[-1] + costs.backward[-1] + costs.weight[-1]) / hops
    shift_s = chance.uniform(-2, 2) * period_s
    alike = [
        other for other in range(len(members))
        if stops.node_of[other] == stops.node_of[stop] and stops.index[other] == stops.index[stop]
        and members[other] % 2 == members[stop] % 2
    ] if chance.random() < 0.3 else [stop]
    for other in alike:
        name = (members[other], stops.index[other], kind)
        offsets[name] = offsets.get(name, 0.0) + shift_s


def _rerouted(before: _Try, chance: random.Random) -> Plan:
    """Two micro-batches change the nodes of one hop, where both nodes can do both and no route meets one twice."""
    plan = before.plan
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


def _busiest_s(plan: Plan, workload: Workload | None) -> float:
    """No step is shorter than the work of its busiest node."""
    costs = Costs.of(plan, workload)
    work_s: dict[NodeId, float] = {}
    for route in plan.routes:
        for hop in route:
            work_s[hop.node] = work_s.get(hop.node, 0.0) + sum(costs.hop(hop))
    return max(work_s.values())
