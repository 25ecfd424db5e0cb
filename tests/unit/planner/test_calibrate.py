"""How predictions follow what is measured: one ratio for the machine, one residual for each kind of plan."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import cycle, islice

import pytest

from everstep.plan import Order
from everstep.planner.policies.situation import Situation
from everstep.planner.policies.table import propose
from everstep.planner.step.calibrate import Calibration, Family, calibrated, changed, family_of
from everstep.planner.step.cost import step_seconds

from .worlds import cluster_of, grid_plan, node, workload_of

GRID = Family("one length", "fused")
MIXED = Family("several lengths", "fused")
REROUTED = Family("rerouted", "fused")


def test_a_family_says_how_routes_meet_and_how_backward_is_done() -> None:
    plan = grid_plan(2, 2, 4)
    assert family_of(plan) == GRID and str(GRID) == "one length, fused"
    assert family_of(replace(plan, order=Order(split=True))).backward == "split"
    assert family_of(replace(plan, order=Order(split=True, staggered=True))).backward == "staggered"
    first, other = dict.fromkeys(plan.routes)
    borrowed = (other[0], first[1])
    assert family_of(replace(plan, routes=(first, borrowed))).shape == "rerouted"
    whole = (replace(first[0], end=plan.num_layers),)
    assert family_of(replace(plan, routes=(other, whole))).shape == "several lengths"


def test_the_first_step_sets_the_common_ratio_and_later_ones_move_it() -> None:
    calibration = Calibration().after(3.0, 2.0, GRID)
    assert calibration.ratio == pytest.approx(1.5)
    for _ in range(40):
        calibration = calibration.after(4.0, 2.0, GRID)
    assert calibration.ratio == pytest.approx(2.0, rel=0.01)
    assert calibration.residuals[GRID] == 1.0, "with one family alone all is common"


def test_a_family_that_was_never_seen_is_predicted_by_the_common_ratio() -> None:
    calibration = Calibration().after(3.0, 2.0, GRID)
    assert calibration.seconds(10.0, MIXED) == pytest.approx(15.0)
    assert MIXED not in calibration.residuals


def test_the_first_step_of_another_family_is_its_own_and_says_nothing_of_the_rest() -> None:
    calibration = Calibration().after(3.0, 2.0, GRID).after(6.0, 2.0, MIXED)
    assert calibration.seconds(2.0, GRID) == pytest.approx(3.0)
    assert calibration.seconds(2.0, MIXED) == pytest.approx(6.0)
    assert calibration.seconds(2.0, REROUTED) == pytest.approx(3.0)


def test_what_the_machine_does_is_not_put_down_to_the_family_that_is_running() -> None:
    calibration = Calibration()
    for family in islice(cycle([GRID, MIXED]), 40):
        calibration = calibration.after(2.0 if family == GRID else 3.0, 2.0, family)
    for _ in range(30):  # twice the load, while only one family runs
        calibration = calibration.after(6.0, 2.0, MIXED)
    assert calibration.seconds(2.0, MIXED) == pytest.approx(6.0, rel=0.02)
    assert calibration.seconds(2.0, GRID) == pytest.approx(4.0, rel=0.15), "it has not run since, and is slower too"


def test_errors_that_are_fixed_by_family_are_learnt_through_noise() -> None:
    chance = random.Random(7)
    truth = {GRID: 1.3, MIXED: 0.8, REROUTED: 1.1}
    calibration = Calibration()
    for family in islice(cycle(truth), 90):
        calibration = calibration.after(truth[family] * chance.lognormvariate(0, 0.03), 1.0, family)
    for family, factor in truth.items():
        assert calibration.seconds(1.0, family) == pytest.approx(factor, rel=0.05)


def test_a_candidate_of_a_family_with_a_residual_takes_so_much_longer() -> None:
    cluster, plan = cluster_of(4), grid_plan(2, 2, 4)
    workload = workload_of(2, 8)
    bare = Situation(
        cluster=cluster.without(frozenset({node(3)})), workload=workload, plan=plan, lost=(node(3),), step=40,
        holds={member: workload.units_of(frozenset(plan.placement[member])) for member in (node(0), node(1), node(2))},
    )
    learnt = replace(bare, residuals={REROUTED: 1.5})
    for before, after in zip(propose(bare), propose(learnt), strict=True):
        if before.plan is None or after.plan is None:
            continue
        factor = 1.5 if family_of(after.plan) == REROUTED else 1.0
        assert before.plan == after.plan and after.step_s == pytest.approx(factor * before.step_s)
        assert (after.value < before.value) == (factor > 1), "what is slower is worth less"
    assert any(candidate.plan and family_of(candidate.plan) == REROUTED for candidate in propose(bare))


def test_residuals_that_moved_beyond_noise_are_seen() -> None:
    assert changed({}, {}) == 0.0
    assert changed({}, {GRID: 1.2}) == pytest.approx(0.2)
    assert changed({GRID: 1.2, MIXED: 1.0}, {GRID: 1.2, MIXED: 0.7}) == pytest.approx(0.3)


def test_a_step_that_took_no_time_teaches_nothing() -> None:
    before = Calibration().after(3.0, 2.0, GRID)
    assert before.after(0.0, 1.0, GRID) == before


def test_a_workload_is_scaled_as_a_whole() -> None:
    plan, workload = grid_plan(1, 2, 3), workload_of(2, 3, fixed_s=1.0)
    scaled_s = step_seconds(plan, calibrated(workload, Calibration(ratio=2.0)), cluster_of(2))
    assert scaled_s == 2 * step_seconds(plan, workload, cluster_of(2))
