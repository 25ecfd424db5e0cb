"""Values, the choice, and the words for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from everstep.decision import Candidate
from everstep.errors import InfeasibleError
from everstep.planner.objective import choose, expected_gap_s, explained, value

from .worlds import grid_plan

PLAN = grid_plan(1, 1, 1)


def candidate(policy: str, step_s: float, stall_s: float, gap_s: float = 600.0) -> Candidate:
    worth = value(batch=10, step_s=step_s, stall_s=stall_s, gap_s=gap_s)
    return Candidate(policy=policy, plan=PLAN, step_s=step_s, stall_s=stall_s, value=worth)


def test_the_value_is_the_mean_over_exponential_gaps() -> None:
    step_s, stall_s, gap_s, width_s = 2.0, 5.0, 10.0, 0.001
    expected = sum(
        10 / step_s * (gap - stall_s) * math.exp(-gap / gap_s) / gap_s * width_s
        for gap in (stall_s + width_s * (k + 0.5) for k in range(200_000))
    )
    assert value(batch=10, step_s=step_s, stall_s=stall_s, gap_s=gap_s) == pytest.approx(expected, rel=1e-3)


def test_a_short_gap_favours_the_slower_plan_without_a_stall() -> None:
    def favoured(gap_s: float) -> int:
        return choose([candidate("reroute", 2.0, 0.0, gap_s), candidate("repartition", 1.0, 10.0, gap_s)])

    assert favoured(gap_s=10.0) == 0
    assert favoured(gap_s=40.0) == 1


def test_redundancy_counts_for_what_the_next_loss_would_cost() -> None:
    safe = value(batch=10, step_s=1.0, stall_s=0.0, gap_s=100.0)
    assert value(batch=10, step_s=1.0, stall_s=0.0, gap_s=100.0, at_risk=0.5, redo_steps=20) == safe - 100


def test_the_gap_begins_as_the_prior_and_follows_the_history() -> None:
    assert expected_gap_s(600.0, events=0, elapsed_s=0.0) == 600.0
    assert expected_gap_s(600.0, events=1, elapsed_s=600.0) == 600.0
    assert expected_gap_s(600.0, events=100, elapsed_s=1000.0) == pytest.approx(15.8, abs=0.1)
    assert expected_gap_s(600.0, events=0, elapsed_s=6000.0) == 6600.0


def test_equal_values_go_to_the_smaller_stall_then_to_the_earlier() -> None:
    first = Candidate(policy="a", plan=PLAN, step_s=1.0, stall_s=1.0, value=100.0)
    assert choose([first, replace(first, policy="b", stall_s=0.5), replace(first, policy="c", stall_s=0.5)]) == 1
    assert choose([first, replace(first, value=100.0 + 1e-9)]) == 0


def test_a_candidate_without_a_plan_is_never_chosen() -> None:
    assert choose([Candidate(policy="spare", plan=None, reason="no node is idle"), candidate("reroute", 9.0, 9.0)]) == 1


def test_without_any_plan_every_reason_is_told() -> None:
    with pytest.raises(InfeasibleError, match="spare: no node is idle; shrink: no pipeline is whole") as caught:
        choose([
            Candidate(policy="spare", plan=None, reason="no node is idle"),
            Candidate(policy="shrink", plan=None, reason="no pipeline is whole"),
        ])
    assert caught.value.rejected == {"spare": "no node is idle", "shrink": "no pipeline is whole"}


def test_losers_are_told_why() -> None:
    candidates = [
        candidate("reroute", 2.0, 0.0), candidate("shrink", 2.24, 0.0), candidate("repartition", 2.0, 1.2),
        Candidate(policy="spare", plan=None, reason="no node is idle"),
        replace(candidate("restore", 2.0, 0.0), value=candidate("reroute", 2.0, 0.0).value * 0.99),
    ]
    reasons = [told.reason for told in explained(candidates, choose(candidates))]
    assert reasons == [
        "", "11 % fewer samples: steps 12 % slower", "0.2 % fewer samples: stall 1.20 s longer", "no node is idle",
        "1.0 % fewer samples: more would be lost with the next node",
    ]
