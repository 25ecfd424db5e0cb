"""A recovery that is paid for beforehand: each node also holds what its successor holds, and computes its forwards too.

Successors go round in a ring over all pipelines: along a pipeline, and from its last node to the first of the next one. A
first stage is thus looked after by another pipeline, since no route may visit a node twice; where there is only one
pipeline, by the node behind it. After a loss the one before takes over, at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from everstep.decision import Candidate
from everstep.plan import Hop, Plan, Route
from everstep.planner.policies.layouts import layouts, why_no_layout
from everstep.planner.policies.pricing import candidate_of, copied_behind, layout_words, no_answer
from everstep.planner.policies.routes import keep, over_the_living, rerouted
from everstep.planner.policies.situation import Situation, available, is_broken
from everstep.planner.routes.router import merged
from everstep.planner.step.parts import grouped
from everstep.quantities import NodeId

REBUILT = 2
"""So many new layouts are proposed with redundancy, the fastest."""


def redundant(situation: Situation) -> list[Candidate]:
    """Who shadows somebody lost takes over at once; then, or when somebody joins, new layouts with all redundancy.

    Where it is the newcomers' turn, what is in place may stay as it is, with them as spares.
    """
    return with_redundancy_again(situation, "redundant", layouts_with(situation))


def with_redundancy_again(situation: Situation, policy: str, rebuilt: list[Plan]) -> list[Candidate]:
    """Going on at once with what redundancy is there; and each of ``rebuilt``, moved to or copied behind that."""
    first = taken_over(situation, policy) if is_broken(situation) else replace(keep(situation)[0], policy=policy)
    found = [first]
    for plan in rebuilt:
        if plan == first.plan:
            continue
        later = candidate_of(situation, policy, plan, "blocking", f"{layout_words(plan)} with redundancy")
        found.append(later)
        if later.feasible and first.feasible and later.way == "blocking" and "behind" in situation.ways:
            found.append(copied_behind(situation, policy, first, later))
    if not rebuilt:
        found.append(no_answer(policy, why_no_layout(situation)))
    return found


def layouts_with(situation: Situation) -> list[Plan]:
    """The plan before, where it is whole, and new layouts, all with redundancy."""
    whole = [] if is_broken(situation) else [keep(situation)[0].plan]
    new = [found.plan for found in layouts(situation)[:REBUILT]]
    return [with_redundancy(plan, shadows=situation.shadows) for plan in [*whole, *new] if plan is not None]


def taken_over(situation: Situation, policy: str) -> Candidate:
    """Gaps closed by those before them; what they cannot close is rerouted as usual."""
    plan = _taken_over(situation) if is_redundant(situation.plan) else over_the_living(situation)
    return no_answer(policy, plan) if isinstance(plan, str) else candidate_of(situation, policy, plan, "now")


def _taken_over(situation: Situation) -> Plan | str:
    can = available(situation)
    before = ring(situation.plan)
    routes: dict[Route, Route] = {}
    for route in grouped(situation.plan.routes):
        hops = [_taken(hop, before[route][index], route, can) for index, hop in enumerate(route)]
        routes[route] = merged(hops) if hops != list(route) else route
    taken = replace(situation.plan, routes=tuple([routes[route] for route in situation.plan.routes]))
    return rerouted(situation, taken, can)


def _taken(hop: Hop, holder: NodeId | None, route: Route, can: Mapping[NodeId, frozenset[int]]) -> Hop:
    """``hop`` by ``holder`` if its own node is gone, and only if the route then visits nobody twice."""
    if can.get(hop.node, frozenset()).issuperset(hop.layers) or holder is None:
        return hop
    if not can.get(holder, frozenset()).issuperset(hop.layers):
        return hop
    beside = {other.node for other in route if other.end == hop.first or other.first == hop.end}
    if holder in {other.node for other in route} - beside:
        return hop
    return Hop(holder, hop.first, hop.end)


def with_redundancy(plan: Plan, *, shadows: bool) -> Plan:
    """``plan`` in which everybody also holds what the next in the ring does; ``shadows``: and computes its forwards."""
    before = ring(plan)
    held = {node: set(layers) for node, layers in plan.placement.items()}
    routes: dict[Route, Route] = {}
    for route in grouped(plan.routes):
        holders = before[route]
        for hop, holder in zip(route, holders, strict=True):
            if holder is not None:
                held[holder].update(hop.layers)
        routes[route] = tuple([
            replace(hop, shadow=holder if shadows else None) for hop, holder in zip(route, holders, strict=True)
        ])
    return replace(
        plan, placement={node: tuple(sorted(layers)) for node, layers in held.items()},
        routes=tuple([routes[route] for route in plan.routes]),
    )


def is_redundant(plan: Plan) -> bool:
    """Whether somebody who computes holds more than that takes."""
    routes = grouped(plan.routes).routes
    busy = [hop.node for route in routes for hop in route]
    if len(set(busy)) == len(busy):  # plain pipelines, each of which takes every layer once
        return sum([len(plan.placement.get(node, ())) for node in busy]) > len(routes) * plan.num_layers
    own: dict[NodeId, set[tuple[int, int]]] = {}
    for route in routes:
        for hop in route:
            own.setdefault(hop.node, set()).add((hop.first, hop.end))
    return any(
        len(plan.placement[node]) > len(set[int]().union(*(range(*bounds) for bounds in ranges)))
        for node, ranges in own.items() if node in plan.placement
    )


def ring(plan: Plan) -> dict[Route, list[NodeId | None]]:
    """By route and hop, who comes before it in the ring. None: nobody, as in a pipeline of one node that is alone."""
    routes = list(grouped(plan.routes))
    found: dict[Route, list[NodeId | None]] = {}
    for index, route in enumerate(routes):
        visited = {hop.node for hop in route}
        last = routes[index - 1][-1].node
        behind = route[1].node if len(route) > 1 else None
        found[route] = [behind if last in visited else last, *(hop.node for hop in route[:-1])]
    return found
