"""Pipelines that are all cut alike, as most published systems have them: whether a plan has such, and which there could be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from everstep.cluster import Cluster
from everstep.config import PlannerConfig
from everstep.plan import Hop, Order, Plan, Route
from everstep.planner.layouts.catalogue import Catalogue, Layout
from everstep.planner.layouts.places import assign, interleaved, plan_of
from everstep.planner.layouts.search import Priced, priced
from everstep.planner.layouts.splits import Bounds
from everstep.planner.policies.situation import Situation
from everstep.planner.step.memory import overfull
from everstep.planner.step.parts import Held, grouped, units_by_layers
from everstep.quantities import NodeId, node_number
from everstep.workload import Workload

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
    """The grid of every depth that fits, fastest first. ``dividing``: with as many equal layers on every stage, if any fits."""
    workload = situation.workload
    depths = range(1, min(workload.num_layers, situation.config.max_stages, len(situation.usable)) + 1)
    cuts = [equal_cuts(workload, depth) if dividing else even_cuts(workload.num_layers, depth) for depth in depths]
    found = [grid(situation, each, order) for each in cuts if each is not None]
    answers = sorted([answer for answer in found if answer is not None], key=lambda answer: answer.step_s)
    return grids(situation, order) if dividing and not answers else answers


def equal_cuts(workload: Workload, num_stages: int) -> Bounds | None:
    """With the same number of a model's equal layers on every stage; what is before and after them goes to the ends.

    Layers are equal that weigh the same: the blocks of a model, not its embedding or its head. None: it does not come out.
    """
    held = Held.of(workload)
    sizes = [held.held_bytes((layer,)) for layer in range(workload.num_layers)]
    runs = [len(list(members)) for _, members in groupby(sizes)]
    longest = max(range(len(runs)), key=lambda index: runs[index])
    each, left_over = divmod(runs[longest], num_stages)
    if left_over:
        return None
    ends = [sum(runs[:longest]) + each * (stage + 1) for stage in range(num_stages)]
    ends[-1] = workload.num_layers
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def alike(
    nodes: Sequence[NodeId], workload: Workload, cluster: Cluster, config: PlannerConfig, order: Order, *, idle: int = 0,
) -> list[Priced]:
    """Layouts to start with, fastest first: of every depth as many pipelines as there are nodes for, all with its best cuts.

    Those with two pipelines or more come before a lone one. At least ``idle`` nodes are left out.
    """
    catalogue = Catalogue(workload, cluster, config, nodes, order)
    splits = catalogue.splits
    ranked = sorted(nodes, key=lambda node: (cluster.nodes[node].host, node_number(node)))
    found: list[tuple[bool, Priced]] = []
    for depth in range(1, splits.longest + 1):
        count = min((len(nodes) - idle) // depth, workload.num_micro_batches)
        if not count:
            break
        shares = even_shares(workload.num_micro_batches, count)
        times = splits.seconds(depth)
        share = min(max(shares), len(times))
        if not np.isfinite(times[share - 1]):
            continue
        layout = Layout(splits=(splits.bounds(depth, share),) * count, shares=shares, estimate_s=float(times[share - 1]))
        plan = plan_of(layout, ranked, sorted(nodes, key=node_number), workload.num_layers, order)
        answer = priced(plan, workload, cluster, config.worker_memory_bytes)
        if not overfull(answer.needed_bytes, cluster, config.worker_memory_bytes):
            found.append((count < 2, answer))
    return [answer for _, answer in sorted(found, key=lambda each: (each[0], each[1].step_s))]


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
