"""What becomes of candidates that would put a pipeline across the link between two sites."""

from __future__ import annotations

from everstep.decision import Candidate
from everstep.planner.policies.pricing import no_answer
from everstep.planner.policies.situation import Situation
from everstep.planner.routes.inside import crossing


def only_inside(situation: Situation, candidates: list[Candidate]) -> list[Candidate]:
    """``candidates`` without those in which a pipeline spans two sites, if there is any without; of two phases both count."""
    if not situation.cluster.site_links:
        return candidates
    sites = {}
    for index, candidate in enumerate(candidates):
        plans = [plan for plan in (candidate.plan, candidate.later) if plan is not None]
        sites[index] = next(filter(None, (crossing(plan, situation.cluster) for plan in plans)), None)
    if not any(candidate.feasible and sites[index] is None for index, candidate in enumerate(candidates)):
        return candidates
    return [
        no_answer(candidate.policy, f"a pipeline would span {' and '.join(pair)}") if (pair := sites[index]) else candidate
        for index, candidate in enumerate(candidates)
    ]
