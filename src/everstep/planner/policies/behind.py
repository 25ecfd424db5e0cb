"""Two phases: the best that can be had at once, and behind it the state of something better, switched to when it is there."""

from __future__ import annotations

from everstep.decision import Candidate
from everstep.planner import objective
from everstep.planner.policies.pricing import CANNOT, copied_behind, no_answer
from everstep.planner.policies.situation import Situation


def two_phase(situation: Situation, others: list[Candidate]) -> list[Candidate]:
    """The best pair out of what ``others`` propose: one that is reached at once, and one that moves state.

    Newcomers get what the second one gives them.
    """
    if "behind" not in situation.ways:
        return [no_answer("two-phase", CANNOT["behind"])]
    at_once = [candidate for candidate in others if candidate.feasible and candidate.way == "now"]
    moving = [candidate for candidate in others if candidate.feasible and candidate.way == "blocking"]
    if not at_once:
        return [no_answer("two-phase", "nothing can be had at once")]
    if not moving:
        return [no_answer("two-phase", "nothing is worth moving state for")]
    pairs = [copied_behind(situation, "two-phase", now, later) for now in at_once for later in moving]
    feasible = [pair for pair in pairs if pair.feasible]
    if not feasible:
        return pairs[:1]
    best = feasible[objective.choose(feasible)]
    if best.value <= max(candidate.value for candidate in at_once):
        return [no_answer("two-phase", f"{best.reason}: no more samples than without the second phase")]
    return [best]
