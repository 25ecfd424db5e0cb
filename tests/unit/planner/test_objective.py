"""Values, the choice, and the words for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decision import Candidate
from everstep.errors import InfeasibleError
from everstep.planner.objective import (
    Curve,
    Exponential,
    Gap,
    choose,
    expected_gap_s,
    explained,
    two_phase_value,
    value,
)

from .worlds import grid_plan

PLAN = grid_plan(1, 1, 1)


def candidate(policy: str, step_s: float, stall_s: float, gap_s: float = 600.0) -> Candidate:
    worth = value(batch=10, step_s=step_s, stall_s=stall_s, gap=Exponential(gap_s))
    return Candidate(policy=policy, plan=PLAN, step_s=step_s, stall_s=stall_s, value=worth)


def test_the_value_is_the_mean_over_exponential_gaps() -> None:
    step_s, stall_s, gap_s, width_s = 2.0, 5.0, 10.0, 0.001
    expected = sum(
        10 / step_s * (gap - stall_s) * math.exp(-gap / gap_s) / gap_s * width_s
        for gap in (stall_s + width_s * (k + 0.5) for k in range(200_000))
    )
    assert value(batch=10, step_s=step_s, stall_s=stall_s, gap=Exponential(gap_s)) == pytest.approx(expected, rel=1e-3)


def test_a_short_gap_favours_the_slower_plan_without_a_stall() -> None:
    def favoured(gap_s: float) -> int:
        return choose([candidate("reroute", 2.0, 0.0, gap_s), candidate("repartition", 1.0, 10.0, gap_s)])

    assert favoured(gap_s=10.0) == 0
    assert favoured(gap_s=40.0) == 1


def test_redundancy_counts_for_what_the_next_loss_would_cost() -> None:
    safe = value(batch=10, step_s=1.0, stall_s=0.0, gap=Exponential(100.0))
    assert value(batch=10, step_s=1.0, stall_s=0.0, gap=Exponential(100.0), at_risk=0.5, redo_steps=20) == safe - 100


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


# The time to the next event.

SECONDS = st.floats(0.0, 200.0)


@given(step_s=st.floats(0.5, 5.0), one_s=SECONDS, other_s=SECONDS, gap_s=st.floats(1.0, 1000.0))
def test_the_value_falls_with_the_stall(step_s: float, one_s: float, other_s: float, gap_s: float) -> None:
    short, long = sorted((one_s, other_s))
    gap = Exponential(gap_s)
    assert value(batch=8, step_s=step_s, stall_s=long, gap=gap) <= value(batch=8, step_s=step_s, stall_s=short, gap=gap)


@given(
    step_s=st.floats(0.5, 5.0), later_step_s=st.floats(0.5, 5.0), stall_s=SECONDS, copy_s=SECONDS, later_stall_s=SECONDS,
    mean_s=st.floats(5.0, 500.0),
)
def test_two_phases_are_worth_what_integration_says(
    step_s: float, later_step_s: float, stall_s: float, copy_s: float, later_stall_s: float, mean_s: float,
) -> None:
    """E[min((G - stall)+, copy)] at the first speed and E[(G - stall - copy - later stall)+] at the second."""
    gap = Exponential(mean_s)
    copied_s, switched_s = stall_s + copy_s, stall_s + copy_s + later_stall_s
    expected = integral(gap, stall_s, copied_s) / step_s + integral(gap, switched_s, switched_s + 30 * mean_s) / later_step_s
    found = two_phase_value(
        batch=1, step_s=step_s, stall_s=stall_s, copy_s=copy_s, later_step_s=later_step_s, later_stall_s=later_stall_s, gap=gap,
    )
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)


def integral(gap: Gap, start_s: float, end_s: float, pieces: int = 3000) -> float:
    width_s = (end_s - start_s) / pieces
    return sum(gap.survival(start_s + (index + 0.5) * width_s) for index in range(pieces)) * width_s


def test_a_copy_that_takes_no_time_is_a_switch_without_a_wait() -> None:
    gap = Exponential(100.0)
    found = two_phase_value(batch=8, step_s=2.0, stall_s=1.0, copy_s=0.0, later_step_s=1.0, later_stall_s=0.0, gap=gap)
    assert found == pytest.approx(value(batch=8, step_s=1.0, stall_s=1.0, gap=gap))


def test_a_survival_curve_takes_the_place_of_the_exponential() -> None:
    even = Curve(lambda after_s: max(0.0, 1 - after_s / 100), 100.0)
    assert value(batch=1, step_s=1.0, stall_s=20.0, gap=even) == pytest.approx(32.0, rel=1e-3), "a gap of 0 to 100 s, evenly"
    followed = Curve(Exponential(10.0).survival, 80.0)
    assert value(batch=1, step_s=1.0, stall_s=5.0, gap=followed) == pytest.approx(
        value(batch=1, step_s=1.0, stall_s=5.0, gap=Exponential(10.0)), rel=1e-3,
    )
    assert followed.survival(90.0) == 0.0


def test_an_end_that_is_known_cuts_the_value_off() -> None:
    whole = value(batch=1, step_s=1.0, stall_s=0.0, gap=Exponential(100.0))
    cut = value(batch=1, step_s=1.0, stall_s=0.0, gap=Exponential(100.0), until_s=30.0)
    assert cut == pytest.approx(100 * (1 - math.exp(-0.3))) and cut < whole
    assert value(batch=1, step_s=1.0, stall_s=40.0, gap=Exponential(100.0), until_s=30.0) == 0


def test_a_copy_that_is_not_made_before_the_end_leads_nowhere() -> None:
    def worth(until_s: float) -> float:
        return two_phase_value(
            batch=1, step_s=2.0, stall_s=0.0, copy_s=20.0, later_step_s=1.0, later_stall_s=1.0, gap=Exponential(100.0),
            until_s=until_s,
        )

    assert worth(19.0) == pytest.approx(50 * (1 - math.exp(-0.19)))
    assert worth(21.0) == pytest.approx(50 * (1 - math.exp(-0.2)) + 100 * math.exp(-0.21))


def test_what_the_next_loss_would_cost_is_that_of_the_plan_it_meets() -> None:
    def worth(at_risk: float, later_at_risk: float) -> float:
        return two_phase_value(
            batch=1, step_s=1.0, stall_s=0.0, copy_s=50.0, later_step_s=1.0, later_stall_s=0.0, gap=Exponential(100.0),
            at_risk=at_risk, later_at_risk=later_at_risk, redo_steps=10,
        )

    assert worth(0, 0) - worth(1, 0) == pytest.approx(10 * (1 - math.exp(-0.5)))
    assert worth(0, 0) - worth(0, 1) == pytest.approx(10 * math.exp(-0.5))


def test_a_loser_of_two_phases_is_told_what_its_first_phase_costs() -> None:
    def behind(copy_s: float) -> Candidate:
        worth = two_phase_value(
            batch=10, step_s=2.0, stall_s=0.0, copy_s=copy_s, later_step_s=1.0, later_stall_s=0.0, gap=Exponential(600.0),
        )
        return Candidate(
            policy="two-phase", plan=PLAN, way="behind", step_s=2.0, later=PLAN, later_step_s=1.0, copy_s=copy_s, value=worth,
            reason="now reroute, then heal after 12.00 s",
        )

    at_once = candidate("repartition", 1.0, 0.0)
    told = explained([at_once, behind(60.0)], 0)[1].reason
    assert told == "now reroute, then heal after 12.00 s: 4.8 % fewer samples: steps of 2.00 s for 60.00 s first"


def test_what_is_worth_more_and_was_not_taken_is_told_so() -> None:
    told = explained([candidate("reroute", 2.0, 0.0), candidate("repartition", 1.0, 0.0)], 0)[1].reason
    assert told == "100 % more samples, but less would be left after the next loss"
    waiting = replace(candidate("wait", 2.0, 0.0), way="wait")
    assert explained([waiting, candidate("repartition", 1.0, 0.0)], 0)[1].reason == (
        "100 % more samples, but waiting was asked for"
    )
