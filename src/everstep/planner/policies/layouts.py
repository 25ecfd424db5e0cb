"""Recoveries with new pipelines: over everybody, around those that stay, or from a checkpoint."""

from __future__ import annotations

from dataclasses import replace

from everstep.decision import Candidate
from everstep.planner.policies.pricing import candidate_of, layout_words, no_answer
from everstep.planner.policies.situation import Situation, intact
from everstep.planner.search import Priced, best_priced, why_nothing_fits

REPARTITIONS = 3
"""So many new layouts are proposed, the fastest."""


def repartition(situation: Situation) -> list[Candidate]:
    """New layouts over all living nodes, from those that leave most pipelines as they are to the fastest."""
    found = layouts(situation)
    if not found:
        return [no_answer("repartition", why_no_layout(situation))]
    candidates = [
        candidate_of(situation, "repartition", answer, "blocking", layout_words(answer.plan)) for answer in found[:REPARTITIONS]
    ]
    return [candidate for candidate in candidates if candidate.feasible] or candidates[:1]


def restore(situation: Situation) -> list[Candidate]:
    """The fastest layout over all living nodes, and the steps since the checkpoint once more."""
    found = layouts(situation)
    if not found:
        return [no_answer("restore", why_no_layout(situation))]
    return [candidate_of(situation, "restore", found[0], "restore")]


def grow(situation: Situation) -> list[Candidate]:
    """Pipelines that are whole stay; the other nodes, newcomers among them, lengthen one or make new ones."""
    candidates = [
        candidate_of(situation, "grow", answer, "blocking", layout_words(answer.plan))
        for answer in layouts(situation)[:REPARTITIONS]
    ]
    feasible = [candidate for candidate in candidates if candidate.feasible]
    if not feasible:
        return [no_answer("grow", why_no_layout(situation))]
    return [min(feasible, key=lambda candidate: (candidate.moved_bytes, candidate.step_s))]


def layouts(situation: Situation) -> list[Priced]:
    """By step time. A restore takes the same layouts: what nodes hold decides only who gets which place."""
    return situation.remembered("layouts", lambda: [_with_avoided(situation, found) for found in best_priced(
        situation.usable, situation.workload, situation.cluster, situation.config, holds=situation.holds,
        order=situation.order, keep=intact(situation),
    )])


def _with_avoided(situation: Situation, found: Priced) -> Priced:
    """Every living node is in a plan; those that get nothing to do hold nothing."""
    if not situation.avoided:
        return found
    layers = {node: found.plan.placement.get(node, ()) for node in situation.nodes}
    needed = {node: found.needed_bytes.get(node, 0) for node in situation.nodes}
    return replace(found, plan=replace(found.plan, placement=layers), needed_bytes=needed)


def why_no_layout(situation: Situation) -> str:
    error = why_nothing_fits(situation.usable, situation.workload, situation.cluster, situation.config)
    return "; ".join(error.rejected.values()) or "no layout of these nodes fits"
