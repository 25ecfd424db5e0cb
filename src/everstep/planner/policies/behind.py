"""Two phases: the best that can be had at once, and behind it the state of something better, switched to when it is there."""

from __future__ import annotations

from everstep.decision import Candidate
from everstep.planner.policies.pricing import CANNOT, if_both_fit, in_two_phases, no_answer
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
    pairs = [in_two_phases(situation, "two-phase", now, later) for now in at_once for later in moving]
    alone = max(candidate.value for candidate in at_once)
    found = no_answer("two-phase", "nothing is worth moving state for")
    for pair in sorted(pairs, key=lambda pair: -pair.value):
        if pair.value <= alone:
            return [no_answer("two-phase", f"{pair.reason}: no more samples than without the second phase")]
        found = if_both_fit(situation, pair)
        if found.feasible:
            break
    return [found]
