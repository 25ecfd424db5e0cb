"""The plan that a run starts with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from everstep.cluster import Cluster
from everstep.config import PlannerConfig
from everstep.decision import Candidate, Decision
from everstep.plan import Order
from everstep.planner import objective
from everstep.planner.baselines.grids import alike
from everstep.planner.baselines.systems import SYSTEMS
from everstep.planner.layouts.catalogue import COMPARED
from everstep.planner.layouts.search import Priced, best_priced, priced, why_nothing_fits, with_best_order
from everstep.planner.policies.pricing import at_risk, layout_words
from everstep.planner.policies.standing import with_redundancy
from everstep.planner.policies.survivors import sturdy_words
from everstep.planner.step.cost import is_shared
from everstep.planner.step.memory import overfull
from everstep.quantities import NodeId
from everstep.workload import Workload

Split = Literal["auto", "on", "off"]

SPARED, SPARED_OF = 4, 64
"""Up to so many nodes more are left idle at the start if steps are shorter without them, of so many nodes at most."""

STANDING = ("redundant", "bamboo")
"""Policies that are paid for before anything is lost."""


def first_plan(
    nodes: Sequence[NodeId], workload: Workload, cluster: Cluster, config: PlannerConfig, *, idle: int = 0,
    split: Split = "off", view: int = 1, step: int = 0, redo_steps: float = 0.0, cause: str = "start", shadows: bool = False,
) -> Decision:
    """The best layout of ``nodes``, ``idle`` of them left out as spares, as a decision with what it was compared with.

    ``split``: ``auto`` splits backward only where each node has a device of its own and the step is predicted faster.
    Policies that stand on redundancy start with it, if it fits; ``shadows``: who shadows a hop also computes it. Published
    systems whose pipelines are all cut alike start with such.

    Raises:
        InfeasibleError: nothing fits; ``rejected`` says for each number of stages why.
    """
    order = Order(split=split == "on")
    idle = min(idle, len(nodes) - 1)
    if config.policy in SYSTEMS and SYSTEMS[config.policy].starts_alike:
        found = alike(nodes, workload, cluster, config, order, idle=idle)[:COMPARED]
    else:
        found = _of_so_many_or_fewer(nodes, workload, cluster, config, order, idle)
    if not found:
        raise why_nothing_fits(nodes, workload, cluster, config)
    if split == "auto" and not is_shared(cluster):
        found = [with_best_order(answer, workload, cluster, config) for answer in found]
    if config.policy in STANDING:
        found = _with_redundancy(found, workload, cluster, config, shadows) or found
    candidates = [
        Candidate(
            policy="start", plan=answer.plan, way="start", step_s=answer.step_s, peak_bytes=answer.peak_bytes,
            reason=layout_words(answer.plan), note=sturdy_words(answer.plan, workload, cluster, config.tolerate),
            value=objective.value(
                batch=workload.batch, step_s=answer.step_s, stall_s=0.0, gap=objective.Exponential(config.gap_s),
                at_risk=at_risk(answer.plan, workload), redo_steps=redo_steps,
            ),
        )
        for answer in found
    ]
    chosen = objective.choose(candidates)
    return Decision(
        cause=cause, view=view, step=step, gap_s=config.gap_s, candidates=objective.explained(candidates, chosen),
        chosen=chosen,
    )


def _of_so_many_or_fewer(
    nodes: Sequence[NodeId], workload: Workload, cluster: Cluster, config: PlannerConfig, order: Order, idle: int,
) -> list[Priced]:
    """The best layouts; before them those of fewer nodes if one is faster. The search counts sums and messages only roughly,
    so that what it finds for one node more may be slower."""
    found = best_priced(nodes, workload, cluster, config, order=order, idle=idle)
    if len(nodes) > SPARED_OF or is_shared(cluster) or not found:
        return found
    fewer = [
        answer for more in range(1, min(SPARED, len(nodes) - 1 - idle) + 1)
        for answer in best_priced(nodes, workload, cluster, config, order=order, idle=idle + more)[:1]
        if answer.step_s < found[0].step_s
    ]
    return [*sorted(fewer, key=lambda answer: answer.step_s)[:1], *found]


def _with_redundancy(
    found: Sequence[Priced], workload: Workload, cluster: Cluster, config: PlannerConfig, shadows: bool,
) -> list[Priced]:
    limit = config.worker_memory_bytes
    answers = [priced(with_redundancy(answer.plan, shadows=shadows), workload, cluster, limit) for answer in found]
    fitting = [each for each in answers if not overfull(each.needed_bytes, cluster, config.worker_memory_bytes)]
    return sorted(fitting, key=lambda answer: answer.step_s)
