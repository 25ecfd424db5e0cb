"""What the next loss would leave of a plan: the best few candidates are compared by it, where that is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from everstep.decision import Candidate
from everstep.plan import Plan
from everstep.planner import objective
from everstep.planner.cases import cases_of
from everstep.planner.policies.situation import Situation
from everstep.planner.step.parts import units_by_layers
from everstep.quantities import NodeId

LOOKED_AT = 4
"""So many candidates, the best, are followed beyond the next loss."""

Recover = Callable[[Situation], list[Candidate]]


def choose_with_foresight(
    situation: Situation, candidates: Sequence[Candidate], recoveries: Sequence[Recover], lasts_s: float,
) -> int:
    """The index of what is worth most together with what one loss more would leave of it.

    A loss is answered at once with the best of ``recoveries``, and that lasts for ``lasts_s``. Who is lost is drawn by the
    situation's weights.

    Raises:
        InfeasibleError: there is no candidate with a plan.
    """
    best = objective.choose(candidates)
    feasible = [index for index, candidate in enumerate(candidates) if candidate.feasible]
    shortlist = sorted(feasible, key=lambda index: (index != best, -candidates[index].value))[:LOOKED_AT]
    worth = {
        index: candidates[index].value + lasts_s * _samples_a_second_after(situation, candidates[index], recoveries)
        for index in shortlist
    }
    most = max(worth.values())
    return next(index for index in shortlist if most - worth[index] <= objective.NOISE * abs(most))


def until_moved_s(situation: Situation, candidates: Sequence[Candidate]) -> float:
    """How long what follows a loss at once is expected to last: until state could be moved again, or the event after it."""
    moving_s = max((max(each.copy_s, each.stall_s) for each in candidates if each.way in ("blocking", "behind")), default=0.0)
    return -situation.gap_s * math.expm1(-max(moving_s, situation.switch_s) / situation.gap_s)


def _samples_a_second_after(situation: Situation, candidate: Candidate, recoveries: Sequence[Recover]) -> float:
    """On average over who is lost next; nothing where no recovery is left."""
    plan = candidate.settled
    assert plan is not None, "asked of feasible candidates"
    nodes = list(plan.placement)
    if any(node not in situation.cluster.nodes for node in nodes):  # who is waited for is not known well enough
        return situation.workload.batch / candidate.step_s
    weight: dict[NodeId, float] = {}
    cases = cases_of(plan, situation.cluster)
    for node in nodes:
        weight[cases[node]] = weight.get(cases[node], 0.0) + situation.weights.get(node, 1.0)
    total = sum(weight.values())
    if len(nodes) < 2 or not total:
        return 0.0
    return sum(share * _rate(situation, plan, node, recoveries) for node, share in weight.items()) / total


def _rate(situation: Situation, plan: Plan, lost: NodeId, recoveries: Sequence[Recover]) -> float:
    units = units_by_layers([(), *plan.placement.values()], situation.workload)
    cluster = situation.cluster.without(frozenset({lost}))
    after = replace(
        situation, cluster=cluster, plan=plan, lost=(lost,), joined=(), expected={}, ends={},
        holds={node: units[plan.placement.get(node, ())] for node in cluster.nodes},
    )
    steps_s = [each.step_s for recover in recoveries for each in recover(after) if each.feasible]
    return situation.workload.batch / min(steps_s) if steps_s else 0.0
