"""Oobleck on plans: each pipeline takes the template of its new size, after borrowing and merging."""

from __future__ import annotations

import numpy as np

from everstep.decision import Candidate
from everstep.planner.baselines.grids import built
from everstep.planner.baselines.oobleck import reconfigured
from everstep.planner.baselines.rerouting import called
from everstep.planner.layouts.catalogue import Catalogue, water_fill
from everstep.planner.policies.pricing import candidate_of, layout_words, no_answer
from everstep.planner.policies.routes import keep
from everstep.planner.policies.situation import Situation, is_broken
from everstep.planner.step.parts import grouped
from everstep.quantities import NodeId, node_number


def oobleck(situation: Situation) -> list[Candidate]:
    """One layout, dictated by who is left in each pipeline. Templates are the best cuts for each number of nodes.

    Newcomers make a pipeline if they are enough for the smallest template, else they lengthen the shortest one.
    """
    if not is_broken(situation) and not situation.joined:
        return called("oobleck", keep(situation))
    catalogue = Catalogue(
        situation.workload, situation.cluster, situation.config, situation.usable, situation.order,
    )
    longest = catalogue.splits.longest
    fitting = [length for length in range(1, longest + 1) if np.isfinite(catalogue.splits.seconds(length)[0])]
    if not fitting:
        return [no_answer("oobleck", "no template fits")]
    pipelines = _pipelines(situation, fitting[0], longest)
    if not pipelines:
        return [no_answer("oobleck", f"fewer than {fitting[0]} nodes are left, and the smallest template needs as many")]
    shares = _shares(catalogue, [len(pipeline) for pipeline in pipelines], situation.workload.num_micro_batches)
    if shares is None:
        return [no_answer("oobleck", f"{len(pipelines)} pipelines are too many for the micro-batches")]
    splits = [
        catalogue.splits.bounds(len(pipeline), share) for pipeline, share in zip(pipelines, shares, strict=True)
    ]
    chosen = [node for pipeline in pipelines for node in pipeline]
    plan = built(situation, splits, shares, situation.order, chosen)
    return [candidate_of(situation, "oobleck", plan, "blocking", layout_words(plan))]


def _pipelines(situation: Situation, smallest: int, longest: int) -> list[list[NodeId]]:
    """The nodes of each pipeline afterwards. None is longer than the longest template; who is left over idles."""
    names = {node_number(node): node for node in situation.usable}
    before: list[list[int]] = []
    seen: set[NodeId] = set()
    for route in grouped(situation.plan.routes):
        own = [hop.node for hop in route if hop.node not in seen]
        seen.update(own)
        before.append([node_number(node) for node in own])
    gone = {number for pipeline in before for number in pipeline if number not in names}
    after = reconfigured([pipeline for pipeline in before if pipeline], gone, smallest) or []
    idle = [number for number, node in names.items() if node not in seen]
    if len(idle) >= smallest:
        after.append(idle)
    elif after:
        for number in idle:
            min(after, key=len).append(number)
    return [[names[number] for number in pipeline[:longest]] for pipeline in after]


def _shares(catalogue: Catalogue, lengths: list[int], total: int) -> tuple[int, ...] | None:
    """Micro-batches by pipeline so that the slowest is as fast as can be; tables as long as it takes."""
    while True:
        filled = water_fill([catalogue.splits.seconds(length) for length in lengths], total)
        if catalogue.columns >= total or (filled is not None and max(filled[0]) < catalogue.columns):
            return filled[0] if filled else None
        catalogue.columns *= 2
