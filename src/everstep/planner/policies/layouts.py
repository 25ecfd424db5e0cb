"""Recoveries with new pipelines: over everybody, around those that stay, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from everstep.decision import Candidate
from everstep.plan import Order, Route
from everstep.planner.layouts.search import Priced, best_priced, why_nothing_fits
from everstep.planner.policies.pricing import candidate_of, layout_words, no_answer, priced_in
from everstep.planner.policies.situation import Situation, available, intact
from everstep.planner.routes.windows import shifted
from everstep.planner.step.cost import is_shared

REPARTITIONS = 3
"""So many new layouts are proposed, the fastest."""

ROOMY_SLOTS = 4
"""With so many slots besides, layouts are looked for as if memory for activations were plenty; nodes then get what there is."""

FURTHER_NODES = 128
"""Larger clusters are not looked at further: there a loss is a smaller part of all, and each look takes longer."""


def repartition(situation: Situation) -> list[Candidate]:
    """New layouts over all living nodes, from those that leave most pipelines as they are to the fastest.

    Where there is time, also such in which only what is left of a broken pipeline holds something else (``windows``), and
    those that are best with as much memory for activations as nodes have.
    """
    found = [(answer, layout_words(answer.plan)) for answer in layouts(situation)[:REPARTITIONS]]
    if situation.thorough:
        found += further(situation)
    if not found:
        return [no_answer("repartition", why_no_layout(situation))]
    candidates = [candidate_of(situation, "repartition", answer, "blocking", words) for answer, words in found]
    return [candidate for candidate in candidates if candidate.feasible] or candidates[:1]


def further(situation: Situation) -> list[tuple[Priced, str]]:
    """The fastest with moved windows, and a few more layouts, each with what to call it. Not for large clusters."""
    if len(situation.nodes) > FURTHER_NODES or is_shared(situation.cluster) or situation.cluster.site_links:
        return []
    found = []
    speeds = {node: situation.cluster.nodes[node].speed for node in situation.nodes}
    moved = [
        priced_in(situation, plan) for plan in shifted(situation.plan, situation.workload, speeds, available(situation))
    ]
    if moved:
        found.append((min(moved, key=lambda answer: answer.step_s), "moved windows"))
    if situation.order.split:
        roomy = replace(situation.order, extra_slots=ROOMY_SLOTS)
        known = {layout_words(answer.plan) for answer in layouts(situation)[:REPARTITIONS]}
        more = {
            layout_words(answer.plan): answer for keep in ((), intact(situation))
            for answer in reversed(_layouts_of(situation, roomy, keep))
        }
        fastest = sorted((answer.step_s, words) for words, answer in more.items() if words not in known)
        found += [(more[words], words) for _, words in fastest[:REPARTITIONS]]
    return found


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
    return situation.remembered("layouts", lambda: _layouts_of(situation, situation.order, intact(situation)))


def _layouts_of(situation: Situation, order: Order, keep: Sequence[Route]) -> list[Priced]:
    found = best_priced(
        situation.usable, situation.workload, situation.cluster, situation.config, holds=situation.holds, order=order,
        keep=keep,
    )
    return [_with_avoided(situation, answer) for answer in found]


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
