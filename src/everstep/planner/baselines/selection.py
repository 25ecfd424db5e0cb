"""Chameleon on plans: at each event rerouting and the plan of Algorithm 1, and the larger of Equation 8's scores."""

from __future__ import annotations

from dataclasses import replace

from everstep.decision import Candidate
from everstep.plan import Plan
from everstep.planner.baselines.chameleon import fastest_plan, pipeline_units, rerouted_slots, score
from everstep.planner.baselines.grids import built, cuts_of
from everstep.planner.baselines.rerouting import called, in_turn
from everstep.planner.policies.layouts import layouts
from everstep.planner.policies.pricing import candidate_of, layout_words, no_answer
from everstep.planner.policies.routes import keep
from everstep.planner.policies.situation import Situation, is_broken
from everstep.planner.step.parts import grouped
from everstep.planner.step.schedules import streams
from everstep.quantities import NodeId
from everstep.workload import Workload

SEARCHED_TO = 40
"""Algorithm 1 tries every way to cut the number of nodes into lengths, and every way to place extra layers. For more nodes
than this, or pipelines longer than ``DEEP``, the exact search stands in for it, which finds nothing slower."""

DEEP = 8


def chameleon(situation: Situation) -> list[Candidate]:
    """Rerouting, which is defined while the pipelines are cut alike, and a new layout over everybody, state moved first.

    A candidate's value is its score, in samples until the window of ``gap_s`` closes.
    """
    if is_broken(situation):
        plan = in_turn(situation)
        first = no_answer("chameleon", f"rerouting: {plan}") if isinstance(plan, str) else candidate_of(
            situation, "chameleon", plan, "now", "rerouting",
        )
    else:
        (first,) = called("chameleon", keep(situation))
    dynamic = _dynamic(situation)
    second = no_answer("chameleon", "dynamic: no layout of these nodes fits") if dynamic is None else candidate_of(
        situation, "chameleon", dynamic, "blocking", f"dynamic {layout_words(dynamic)}",
    )
    return [_scored(situation, each) for each in (first, second)]


def _scored(situation: Situation, candidate: Candidate) -> Candidate:
    if candidate.plan is None:
        return candidate
    step_s = _own_step_s(situation, candidate.plan) or candidate.step_s
    each = score(situation.workload.batch, step_s, candidate.stall_s, situation.gap_s)
    return replace(candidate, value=each * situation.gap_s, note="samples by its own rule")


def _own_step_s(situation: Situation, plan: Plan) -> float | None:
    """By its own equations, where the run has the schedules that they are for: fused 1F1B without more slots, steps in turn.

    With other schedules they would be far off, and the cost model, which it is better off with, takes their place.
    """
    if plan.order.split or plan.order.staggered or plan.order.extra_slots:
        return None
    workload = situation.workload
    forward_s = sum(layer.forward_s for layer in workload.layers) / workload.num_layers
    backward_s = sum(layer.total_s for layer in workload.layers) / workload.num_layers - forward_s
    plain = grouped(plan.routes)
    visits: dict[NodeId, int] = {}
    for route in plain:
        for hop in route:
            visits[hop.node] = visits.get(hop.node, 0) + 1
    if max(visits.values()) == 1:
        return max(
            pipeline_units(tuple([len(hop.layers) for hop in route]), len(members), forward_s, backward_s)
            for route, members in plain.items()
        )
    cuts = cuts_of(plan)
    if cuts is None:
        return None
    num_pipelines = len(set(streams(situation.plan.routes)))
    busy: dict[int, set[NodeId]] = {}
    for route in plain:
        for stage, hop in enumerate(route):
            busy.setdefault(stage, set()).add(hop.node)
    failed = [max(0, num_pipelines - len(busy[stage])) for stage in range(len(cuts))]
    slots = rerouted_slots(num_pipelines, len(cuts), len(plan.routes) / num_pipelines, failed)
    return slots * workload.num_layers / len(cuts) * (forward_s + backward_s)


def _dynamic(situation: Situation) -> Plan | None:
    """Algorithm 1 over all survivors; pipelines from half as long as the longest before to two nodes longer."""
    num_nodes, workload = len(situation.usable), situation.workload
    longest = max(len(route) for route in grouped(situation.plan.routes))
    if num_nodes > SEARCHED_TO or longest > DEEP:
        found = layouts(situation)
        return min(found, key=lambda answer: answer.step_s).plan if found else None
    lengths = range(max(1, longest // 2), min(longest + 2, workload.num_layers, situation.config.max_stages) + 1)
    plan = fastest_plan(
        num_nodes, workload.num_layers, workload.num_micro_batches, lengths, most_layers=_most_layers(situation, workload),
    )
    if plan is None:
        return None
    splits = []
    for stages in plan.stages:
        ends = [sum(stages[:stage + 1]) for stage in range(len(stages))]
        splits.append(tuple(zip([0, *ends[:-1]], ends, strict=True)))
    return built(situation, splits, plan.shares, situation.order)


def _most_layers(situation: Situation, workload: Workload) -> int | None:
    """Layers of average size whose state fits on the smallest node; None: not limited."""
    limits = [node.memory_bytes for node in situation.cluster.nodes.values()] + [situation.config.worker_memory_bytes]
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    each = sum(unit.held_bytes for unit in workload.units.values()) / workload.num_layers
    each += sum(layer.activation_bytes for layer in workload.layers) / workload.num_layers
    return max(1, int(min(known) / each)) if each else None
