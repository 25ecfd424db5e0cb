"""A recovery from slowness: nodes that work slower than the others get fewer micro-batches or fewer layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from everstep.decision import Candidate
from everstep.plan import Hop, Plan, Route
from everstep.planner import objective
from everstep.planner.layouts.catalogue import water_fill
from everstep.planner.layouts.places import interleaved
from everstep.planner.policies.pricing import candidate_of, no_answer, priced_in
from everstep.planner.policies.routes import over_the_living, without_lost_shadows
from everstep.planner.policies.situation import Situation
from everstep.planner.step.parts import parts
from everstep.planner.step.pipelines import Array, stage_ends_s

MOST_OF_AVERAGE = 4
"""A pipeline is not given more than so many times an even share of the micro-batches."""


def rebalance(situation: Situation) -> list[Candidate]:
    """Shares of the batch in proportion to what pipelines really do; and pipelines with a slow node cut anew.

    Pipelines that share nodes, as after rerouting, keep their micro-batches. Of a pipeline that is cut anew its own nodes
    alone change what they hold. Newcomers stay spares.
    """
    plan = over_the_living(situation)
    if isinstance(plan, str):
        return [no_answer("rebalance", plan)]
    nodes = situation.cluster.nodes
    speeds = {nodes[hop.node].speed for part in parts(plan) for route in part.routes for hop in route}
    if max(speeds) - min(speeds) <= objective.NOISE * max(speeds):
        return [no_answer("rebalance", "no node is slower than the others")]
    now_s = priced_in(situation, plan).step_s
    proposed = {"other shares": plan}
    cut = _cut_anew(situation, plan)
    if cut.routes != plan.routes:
        proposed["cut anew"] = cut
    found = []
    for words, each in proposed.items():
        shared = _shared_anew(situation, each)
        if shared is not None and priced_in(situation, shared).step_s < now_s * (1 - objective.NOISE):
            found.append(candidate_of(situation, "rebalance", shared, "blocking", words))
    return found or [no_answer("rebalance", "no other shares or cuts are faster")]


def _shared_anew(situation: Situation, plan: Plan) -> Plan | None:
    """Micro-batches of plain pipelines shared out so that the slowest is as fast as can be."""
    plain = [part for part in parts(plan) if part.is_plain]
    numbers = sorted(number for part in plain for number in part.micro_batches[0])
    if len(plain) < 2:
        return plan
    columns = min(len(numbers), MOST_OF_AVERAGE * -(-len(numbers) // len(plain)))
    known: dict[tuple[tuple[float, ...], ...], Array] = {}
    tables = []
    for part in plain:
        times = _times(situation, part.routes[0])
        if times not in known:
            known[times] = _seconds(times, columns)
        tables.append(known[times])
    filled = water_fill(tables, len(numbers))
    if filled is None:
        return None
    routes = list(plan.routes)
    for number, index in zip(numbers, interleaved(filled[0]), strict=True):
        routes[number] = plain[index].routes[0]
    return replace(plan, routes=tuple(routes))


def _times(situation: Situation, route: Route) -> tuple[tuple[float, ...], ...]:
    """By stage: forward, backward and the message in front of it."""
    layers, cluster = situation.workload.layers, situation.cluster
    found = []
    for index, hop in enumerate(route):
        own, speed = layers[hop.first:hop.end], cluster.nodes[hop.node].speed
        forward_s = sum(layer.forward_s for layer in own) / speed
        message_s = 0.0
        if index:
            message_s = cluster.link_between(route[index - 1].node, hop.node).seconds(layers[hop.first - 1].output_bytes)
        found.append((forward_s, sum(layer.total_s for layer in own) / speed - forward_s, message_s))
    return tuple(found)


def _seconds(times: tuple[tuple[float, ...], ...], columns: int) -> Array:
    """What 1F1B takes for 1, 2, … micro-batches: a stand-in for other orders too, which only shares the batch out."""
    forward_s, backward_s, message_s = (np.tile([stage[column] for stage in times], (columns, 1)) for column in range(3))
    many = np.arange(1, columns + 1)
    ends_s = stage_ends_s(forward_s, backward_s, message_s, np.full(columns, len(times)), many)
    found: Array = np.maximum.accumulate(ends_s.max(axis=1))
    return found


def _cut_anew(situation: Situation, plan: Plan) -> Plan:
    """Plain pipelines whose nodes are not equally fast get the cuts at which their slowest stage is fastest."""
    placement = dict(plan.placement)
    other: dict[Route, Route] = {}
    for part in parts(plan):
        route = part.routes[0]
        speeds = [situation.cluster.nodes[hop.node].speed for hop in route]
        if not part.is_plain or len(route) < 2 or max(speeds) == min(speeds):
            continue
        ends = fastest_ends([layer.total_s for layer in situation.workload.layers], speeds)
        hops = [Hop(hop.node, first, end) for hop, first, end in zip(route, [0, *ends], ends, strict=False)]
        if hops == list(route):
            continue
        other[route] = tuple(hops)
        placement.update({hop.node: tuple(hop.layers) for hop in hops})
    routes = tuple([other.get(route, route) for route in plan.routes])
    return without_lost_shadows(replace(plan, placement=placement, routes=routes))


def fastest_ends(work_s: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Where each stage ends when the slowest is as fast as can be: a stage has at least one layer.

    least[k][e]: the slowest of the first k stages over the first e layers, by a dynamic program over both.
    """
    until = list(accumulate(work_s, initial=0.0))
    num_layers, num_stages = len(work_s), len(speeds)
    least = [0.0, *[float("inf")] * num_layers]
    begins: list[list[int]] = []
    for stage, speed in enumerate(speeds):
        following, begin_of = [float("inf")] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(stage + 1, num_layers - (num_stages - 1 - stage) + 1):
            for begin in range(stage, end):
                slowest_s = max(least[begin], (until[end] - until[begin]) / speed)
                if slowest_s < following[end]:
                    following[end], begin_of[end] = slowest_s, begin
        least = following
        begins.append(begin_of)
    ends = [num_layers]
    for begin_of in reversed(begins[1:]):
        ends.append(begin_of[ends[-1]])
    return ends[::-1]
