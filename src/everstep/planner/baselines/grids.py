"""Pipelines that are all cut alike, as most published systems have them: whether a plan has such, and which there could be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from everstep.plan import Hop, Order, Plan, Route
from everstep.planner.memory import overfull
from everstep.planner.parts import grouped, units_by_layers
from everstep.planner.places import assign, interleaved
from everstep.planner.policies.situation import Situation
from everstep.planner.search import Priced, priced
from everstep.planner.splits import Bounds
from everstep.quantities import NodeId, node_number

NOT_ALIKE = "the pipelines are not cut alike"


def cuts_of(plan: Plan) -> Bounds | None:
    """How all pipelines of ``plan`` are cut; None: not all alike."""
    found = {tuple([(hop.first, hop.end) for hop in route]) for route in grouped(plan.routes)}
    return found.pop() if len(found) == 1 else None


def even_cuts(num_layers: int, num_stages: int) -> Bounds:
    """As many layers a stage as can be, the first ones one more where it does not come out even."""
    each, more = divmod(num_layers, num_stages)
    ends = [each * (stage + 1) + min(stage + 1, more) for stage in range(num_stages)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def even_shares(total: int, count: int) -> tuple[int, ...]:
    each, more = divmod(total, count)
    return tuple(each + (index < more) for index in range(count))


def grid(situation: Situation, cuts: Bounds, order: Order) -> Priced | None:
    """As many pipelines of these ``cuts`` as there are nodes for, the batch shared evenly; None: too few nodes, or memory.

    Nodes that are left over idle. Who gets which place is such that the fewest bytes move.
    """
    workload = situation.workload
    count = min(len(situation.usable) // len(cuts), workload.num_micro_batches)
    if not count:
        return None
    plan = built(situation, [cuts] * count, even_shares(workload.num_micro_batches, count), order)
    answer = priced(plan, workload, situation.cluster, situation.config.worker_memory_bytes)
    too_much = overfull(answer.needed_bytes, situation.cluster, situation.config.worker_memory_bytes)
    return None if too_much else answer


def grids(situation: Situation, order: Order, *, dividing: bool = False) -> list[Priced]:
    """The grid of every depth that fits, fastest first. ``dividing``: only with as many layers on every stage."""
    num_layers = situation.workload.num_layers
    depths = range(1, min(num_layers, situation.config.max_stages, len(situation.usable)) + 1)
    found = [
        grid(situation, even_cuts(num_layers, depth), order) for depth in depths if not (dividing and num_layers % depth)
    ]
    return sorted([answer for answer in found if answer is not None], key=lambda answer: answer.step_s)


def built(
    situation: Situation, splits: Sequence[Bounds], shares: Sequence[int], order: Order,
    chosen: Sequence[NodeId] | None = None,
) -> Plan:
    """Pipelines of these ``splits`` over the living. ``chosen``: who takes the places, in order; None: the nearest."""
    workload = situation.workload
    places = [tuple(range(first, end)) for split in splits for first, end in split]
    if chosen is None:
        units = units_by_layers(places, workload)
        nodes = sorted(situation.usable, key=lambda node: (situation.cluster.nodes[node].host, node_number(node)))
        chosen = assign([units[layers] for layers in places], nodes, workload, situation.holds)
    placement: dict[NodeId, tuple[int, ...]] = dict.fromkeys(situation.nodes, ())
    placement.update(zip(chosen, places, strict=True))
    hops = iter(chosen)
    routes: list[Route] = [tuple([Hop(next(hops), first, end) for first, end in split]) for split in splits]
    return Plan(
        num_layers=workload.num_layers, placement=placement, order=order,
        routes=tuple([routes[index] for index in interleaved(shares)]),
    )


def idle_nodes(situation: Situation, plan: Plan) -> list[NodeId]:
    """Living nodes that compute nothing in ``plan``."""
    busy = {hop.node for route in grouped(plan.routes) for hop in route}
    return [node for node in situation.usable if node not in busy]


def one_more(situation: Situation, plan: Plan, cuts: Bounds) -> Plan | None:
    """``plan`` with as many pipelines of these ``cuts`` more as idle nodes make, the batch shared evenly; None: too few."""
    idle = idle_nodes(situation, plan)
    routes = list(grouped(plan.routes))
    count = min(len(idle) // len(cuts), situation.workload.num_micro_batches - len(routes))
    if count < 1:
        return None
    places = [tuple(range(first, end)) for first, end in cuts] * count
    units = units_by_layers(places, situation.workload)
    chosen = assign([units[layers] for layers in places], idle, situation.workload, situation.holds)
    placement = {**plan.placement, **dict(zip(chosen, places, strict=True))}
    hops = iter(chosen)
    routes += [tuple([Hop(next(hops), first, end) for first, end in cuts]) for _ in range(count)]
    shares = even_shares(situation.workload.num_micro_batches, len(routes))
    return replace(plan, placement=placement, routes=tuple([routes[index] for index in interleaved(shares)]))
