"""What single moves make of a layout, and which move each system picks."""

import math

import pytest

from everstep.simulator.study.layout import Layout, built
from everstep.simulator.study.player import Costs, Situation
from everstep.simulator.study.policies import Policy
from everstep.simulator.study.rules import named
from everstep.simulator.study.times import Times, equal_layers

TIMES = {family: Times(equal_layers(), family) for family in ("fused", "split", "staggered")}
NODES = tuple(f"n{number}" for number in range(32))
GRID = built([TIMES["staggered"].grid_bounds()] * 8, NODES)
"""Pipeline d is n{4d} → n{4d + 1} → n{4d + 2} → n{4d + 3}."""


def policy(name: str) -> Policy:
    return Policy(named(name), TIMES[named(name).family])


def situation(layout: Layout, *, gap_s: float = 600.0, move_s: float = 10.0) -> Situation:
    return Situation(layout=layout, gap_s=gap_s, seen_gap_s=gap_s, costs=Costs(move_s=move_s))


def test_two_holes_at_one_stage_are_spread_over_two():
    layout = GRID.without(["n1", "n5"])
    chosen = policy("recycle").react(situation(layout))
    assert (layout.holes, chosen.policy) == ((0, 2, 0, 0), "normalize")
    assert sorted(chosen.target.holes) == [0, 0, 1, 1]
    assert sorted(chosen.target.nodes) == sorted(layout.nodes)
    assert chosen.step_s < policy("recycle").step_s(layout)


def test_a_newcomer_takes_the_hole_where_it_helps_most():
    layout = GRID.without(["n1", "n5", "n10"]).joined_by(["new"])
    chosen = policy("reroute").react(situation(layout))
    assert chosen.policy == "heal"
    assert chosen.target.holes == (0, 1, 1, 0)


def test_a_move_that_would_not_be_through_in_time_is_not_begun():
    layout = GRID.without(["n1", "n5"])
    assert policy("recycle").react(situation(layout, gap_s=60.0, move_s=600.0)).way == "now"


@pytest.mark.parametrize(("gap_s", "picked"), [(15.0, "reroute"), (4000.0, "repartition")])
def test_chameleon_reroutes_in_a_short_window_and_moves_in_a_long_one(gap_s: float, picked: str):
    assert policy("chameleon").react(situation(GRID.without(["n1"]), gap_s=gap_s, move_s=30.0)).policy == picked


def test_chameleon_cannot_reroute_what_is_no_grid():
    mixed = policy("chameleon").react(situation(GRID.without(["n1"]), gap_s=4000.0)).target
    assert mixed.grid is None
    assert math.isinf(policy("chameleon").step_s(mixed.without([mixed.busy[0]])))
    assert math.isfinite(policy("auto").step_s(mixed.without([mixed.busy[0]])))


def test_oobleck_keeps_whole_pipelines_and_borrows_for_short_ones():
    after = policy("oobleck").react(situation(GRID.without(["n1"]))).target
    kept = {tuple(place.node for place in pipeline) for pipeline in after.pipelines}
    assert len(kept) == 7           # nobody can lend without becoming too short itself, so three nodes are merged
    assert sum(tuple(f"n{4 * line + stage}" for stage in range(4)) in kept for line in range(8)) == 6
    assert sorted(after.busy) == sorted(set(NODES) - {"n1"})


def test_torchft_drops_the_broken_pipeline_and_begins_a_new_one_with_enough_idle_nodes():
    torchft = policy("torchft")
    one, two = GRID.without(["n1"]), GRID.without(["n1", "n6"])
    assert torchft.react(situation(one)).way == "now"
    grown = torchft.react(situation(two))
    assert (grown.policy, grown.way) == ("grow", "behind")
    assert len(grown.target.whole) == 7


def test_bamboo_survives_a_loss_slower_and_two_neighbours_only_by_restarting():
    bamboo = policy("bamboo")
    healthy_s = bamboo.step_s(GRID)
    assert bamboo.step_s(GRID.without(["n1"])) == pytest.approx(1.5 * healthy_s)
    assert math.isfinite(bamboo.step_s(GRID.without(["n1", "n3"])))
    assert math.isinf(bamboo.step_s(GRID.without(["n1", "n2"])))
    assert bamboo.react(situation(GRID.without(["n1", "n2"]))).stall_s == Costs(move_s=10.0).restore_s


def test_varuna_takes_the_fastest_grid_whose_depth_divides_the_layers():
    after = policy("varuna").react(situation(GRID.without(["n1", "n6", "n8"]))).target
    assert after.grid is not None
    assert 32 % len(after.grid) == 0


def test_whoever_holds_the_only_copy_is_at_risk():
    auto = policy("auto")
    assert auto.at_risk(GRID) == 0
    single = GRID.without([f"n{4 * line + 1}" for line in range(7)])
    assert auto.at_risk(single) == pytest.approx(1 / 25)


def test_a_plan_that_risks_a_layer_is_left_even_for_a_slower_one():
    risky = GRID.without([f"n{4 * line + stage}" for line in range(6, 8) for stage in range(4)]).without(
        [f"n{4 * line + 1}" for line in range(5)])
    chosen = policy("auto").react(situation(risky, gap_s=300.0))
    assert policy("auto").at_risk(chosen.target) < policy("auto").at_risk(risky)


def test_all_nodes_fit_into_a_grid_with_holes():
    holed = policy("auto")._moved("holed", Layout((), NODES[:30]))
    assert holed is not None
    assert (len(holed.pipelines), holed.holes, holed.idle) == (8, (1, 1, 0, 0), ())
    assert sorted(holed.busy) == sorted(NODES[:30])


def test_what_is_left_after_a_loss_counts_every_node_as_likely_as_the_others():
    auto, reroute_s = policy("shrink"), policy("shrink").step_s(GRID.without(["n1"]))
    assert auto.after_a_loss(GRID) == pytest.approx(1 / reroute_s)


def test_an_idle_node_makes_a_loss_cost_nothing():
    assert policy("auto").after_a_loss(GRID.joined_by(["spare"])) == 1 / policy("auto").step_s(GRID)


@pytest.mark.parametrize("name", ["auto", "oobleck", "chameleon", "parcae", "varuna"])
def test_every_target_holds_all_layers_and_nobody_twice(name: str):
    layout = GRID.without(["n1", "n6", "n11"]).joined_by(["x", "y"])
    for option in policy(name).options(situation(layout)):
        assert option.target.has_all(32)
        assert len(set(option.target.nodes)) == len(option.target.nodes)
        assert set(option.target.nodes) <= set(layout.nodes)
        assert all(place.end - place.first <= 8 for line in option.target.pipelines for place in line)
