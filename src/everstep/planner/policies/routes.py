"""Recoveries that keep the layout: other routes, fewer pipelines, or somebody else in an empty place."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, cycle

from everstep.decision import Candidate
from everstep.plan import Hop, Plan
from everstep.planner.layouts.places import assign
from everstep.planner.policies.pricing import candidate_of, no_answer
from everstep.planner.policies.situation import Situation, available, pipelines_of, route_work_s, whole_routes
from everstep.planner.routes.inside import routes_inside
from everstep.planner.routes.router import PASSED_ON, Router
from everstep.planner.step.cost import is_shared
from everstep.planner.step.memory import needed_bytes, overfull
from everstep.planner.step.parts import alike, grouped
from everstep.planner.step.shadows import has_shadows
from everstep.quantities import NodeId, SiteId, node_number
from everstep.workload import Workload

EXTRA_SLOTS = 2
"""Activation slots beyond 1F1B that rerouting tries: two recover about half of what it costs without."""

NAMED_AT_MOST = 6
"""So many lost layers are named one by one."""


def reroute(situation: Situation) -> list[Candidate]:
    """Only routes change. On devices of their own, nodes get more activation slots where their memory allows it."""
    plan = over_the_living(situation)
    if isinstance(plan, str):
        return [no_answer("reroute", plan)]
    return [candidate_of(situation, "reroute", with_slots(situation, plan), "now")]


def over_the_living(situation: Situation) -> Plan | str:
    """The plan before with routes over who is left, or why there is no way."""
    return situation.remembered("rerouted", lambda: rerouted(situation, situation.plan, available(situation)))


def with_slots(situation: Situation, plan: Plan) -> Plan:
    """``plan`` with more activation slots where its routes are new, nodes have devices of their own, and memory allows it."""
    extra_slots = max(plan.order.extra_slots, EXTRA_SLOTS)
    if plan.routes == situation.plan.routes or is_shared(situation.cluster) or not _has_room(situation, plan, extra_slots):
        return plan
    return replace(plan, order=replace(plan.order, extra_slots=extra_slots))


def _has_room(situation: Situation, plan: Plan, extra_slots: int) -> bool:
    """Whether every node can hold as many activations as so many slots allow, whether it would use them or not."""
    active = list(accumulate((layer.activation_bytes for layer in situation.workload.layers), initial=0))
    plain, others = alike(plan.routes)
    held: dict[NodeId, int] = {}
    for shape in plain:
        route = shape.routes[0]
        sizes = [active[hop.end] - active[hop.first] for hop in route]
        needed = [(len(route) - index + extra_slots) * size for index, size in enumerate(sizes)]
        held.update(zip(shape.nodes, cycle(needed), strict=False))
    for part in others:
        slots: dict[NodeId, int] = {}
        largest: dict[NodeId, int] = {}
        for route in part.routes:
            for index, hop in enumerate(route):
                slots[hop.node] = max(slots.get(hop.node, 0), len(route) - index)
                largest[hop.node] = max(largest.get(hop.node, 0), active[hop.end] - active[hop.first])
        held.update({node: (count + extra_slots) * largest[node] for node, count in slots.items()})
    return not overfull(
        needed_bytes(plan, situation.workload, held), situation.cluster, situation.config.worker_memory_bytes,
    )


def rerouted(situation: Situation, plan: Plan, can: Mapping[NodeId, frozenset[int]]) -> Plan | str:
    """``plan`` on the living nodes that ``can`` compute; or why there is no way."""
    missing = sorted(set(range(plan.num_layers)) - frozenset[int]().union(*set(can.values())))
    if missing:
        return f"{_layers(missing, situation.workload)} no living holder"
    nodes = situation.cluster.nodes
    speeds = {node: nodes[node].speed for node in can}
    if situation.cluster.site_links:
        routes = routes_inside(plan.routes, can, situation.workload, speeds, {node: nodes[node].site for node in can})
    else:
        passed_on = PASSED_ON if situation.passes_on else 0
        routes = Router(can, situation.workload, speeds, split=plan.order.split).routes(plan.routes, passed_on=passed_on)
    if routes is None:
        return "every way over the living holders would visit a node twice"
    return without_lost_shadows(replace(plan, routes=routes, placement=placement_of(can, situation.nodes)))


def without_lost_shadows(plan: Plan) -> Plan:
    """Who is gone, or does not hold any more what it shadowed, does not shadow it."""
    if not has_shadows(plan.routes):
        return plan
    routes = {route: tuple([_without_lost_shadow(hop, plan) for hop in route]) for route in grouped(plan.routes)}
    return replace(plan, routes=tuple([routes[route] for route in plan.routes]))


def _without_lost_shadow(hop: Hop, plan: Plan) -> Hop:
    if hop.shadow is None or set(hop.layers) <= set(plan.placement.get(hop.shadow, ())):
        return hop
    return replace(hop, shadow=None)


def placement_of(can: Mapping[NodeId, frozenset[int]], nodes: Sequence[NodeId]) -> dict[NodeId, tuple[int, ...]]:
    layers = {held: tuple(sorted(held)) for held in set(can.values())}
    return {node: layers[can[node]] for node in nodes}


def spare(situation: Situation) -> list[Candidate]:
    """Idle nodes take the places of those who are gone, the busiest places first."""
    plan = situation.plan
    busy: Counter[NodeId] = Counter()
    pipelines = pipelines_of(situation)
    for route, members in zip(pipelines.routes, pipelines.micro_batches, strict=True):
        for hop in route:
            busy[hop.node] += len(members)
    gone = [node for node in busy if node not in situation.cluster.nodes]
    empty = sorted(gone, key=lambda node: (-busy[node], node_number(node)))
    idle = [node for node in situation.usable if node not in busy]
    if not empty:
        return [no_answer("spare", "nobody's place is empty")]
    if not idle:
        return [no_answer("spare", "no node is idle")]
    chosen: dict[NodeId, NodeId] = {}
    for site, nodes in _by_site(situation, idle).items():
        places = [place for place in empty if site in (None, _site_of(situation, place))][:len(nodes)]
        wanted = [situation.workload.units_of(frozenset(plan.placement[place])) for place in places]
        chosen |= zip(places, assign(wanted, nodes, situation.workload, situation.holds), strict=True)
    if not chosen:
        return [no_answer("spare", "no node at the same site is idle")]
    can = dict(available(situation))
    for place, node in chosen.items():
        can[node] = frozenset(plan.placement[place])
    filled = rerouted(situation, in_places(plan, chosen), can)
    if isinstance(filled, str):
        return [no_answer("spare", filled)]
    return [candidate_of(situation, "spare", filled, "blocking")]


def _by_site(situation: Situation, nodes: Sequence[NodeId]) -> dict[SiteId | None, list[NodeId]]:
    """``nodes`` by site; None where there is only one."""
    found: dict[SiteId | None, list[NodeId]] = {}
    for node in nodes:
        found.setdefault(situation.cluster.nodes[node].site if situation.cluster.site_links else None, []).append(node)
    return found


def _site_of(situation: Situation, place: NodeId) -> SiteId | None:
    """Where the living are with whom ``place`` made a pipeline; None: nobody is left."""
    nodes = situation.cluster.nodes
    mates = (hop.node for route in pipelines_of(situation) if any(hop.node == place for hop in route) for hop in route)
    return next((nodes[mate].site for mate in mates if mate in nodes), None)


def in_places(plan: Plan, places: Mapping[NodeId, NodeId]) -> Plan:
    """``plan`` with others in the places of some: they hold and do what those did."""
    def moved(hop: Hop) -> Hop:
        shadow = places.get(hop.shadow, hop.shadow) if hop.shadow else None
        return Hop(places.get(hop.node, hop.node), hop.first, hop.end, shadow)

    taken = set(places.values())
    placement = {node: layers for node, layers in plan.placement.items() if node not in taken}
    routes = {route: tuple([moved(hop) for hop in route]) for route in grouped(plan.routes)}
    return replace(
        plan, placement={places.get(node, node): layers for node, layers in placement.items()},
        routes=tuple([routes[route] for route in plan.routes]),
    )


def shrink(situation: Situation) -> list[Candidate]:
    """Whole pipelines take the micro-batches of the broken ones, each next one where the busiest node has least to do."""
    can = available(situation)
    pipelines = pipelines_of(situation)
    passing = whole_routes(situation)
    if not passing:
        return [no_answer("shrink", "no pipeline is whole")]
    whole = [pipelines.routes[index] for index in passing]
    work_s = [route_work_s(situation, route) for route in whole]
    load_s = dict.fromkeys([hop.node for route in whole for hop in route], 0.0)

    def busiest_s(index: int) -> float:
        return max([load_s[hop.node] + seconds for hop, seconds in zip(whole[index], work_s[index], strict=True)])

    for index, route, seconds in zip(passing, whole, work_s, strict=True):
        count = len(pipelines.micro_batches[index])
        for hop, hop_s in zip(route, seconds, strict=True):
            load_s[hop.node] += count * hop_s
    heap = [(busiest_s(index), index) for index in range(len(whole))]
    heapq.heapify(heap)
    routes = list(situation.plan.routes)
    gone = set(range(len(pipelines.routes))).difference(passing)
    broken = sorted(m for index in gone for m in pipelines.micro_batches[index])
    for micro_batch in broken:
        while (now_s := busiest_s(heap[0][1])) > heap[0][0]:  # another route visits one of its nodes
            heapq.heapreplace(heap, (now_s, heap[0][1]))
        index = heap[0][1]
        routes[micro_batch] = whole[index]
        for hop, hop_s in zip(whole[index], work_s[index], strict=True):
            load_s[hop.node] += hop_s
    members = {hop.node for route in whole for hop in route}
    kept = members if broken else set(situation.nodes)
    placement = {node: can[node] if node in kept else frozenset[int]() for node in situation.nodes}
    plan = replace(situation.plan, routes=tuple(routes), placement=placement_of(placement, situation.nodes))
    return [candidate_of(situation, "shrink", without_lost_shadows(plan), "now")]


def keep(situation: Situation) -> list[Candidate]:
    """Nothing changes but who is in: newcomers are spares."""
    plan = over_the_living(situation)
    assert isinstance(plan, Plan), "only asked where no route is broken"
    return [candidate_of(situation, "spare" if situation.joined else "reroute", plan, "now")]


def _layers(indices: list[int], workload: Workload) -> str:
    names = [workload.layers[index].name for index in indices]
    if len(names) > NAMED_AT_MOST:
        names[2:-1] = [f"{len(names) - 3} more"]
    return f"layer {names[0]} has" if len(names) == 1 else f"layers {', '.join(names)} have"
