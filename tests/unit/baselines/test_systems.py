"""Published systems on real plans: what each does after a loss and when somebody joins, and where it has no answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from everstep.config import PlannerConfig
from everstep.decision import Candidate
from everstep.plan import Hop, Order, Plan
from everstep.planner.baselines.chameleon import rerouted_slots
from everstep.planner.baselines.grids import cuts_of, equal_cuts, even_cuts, grid
from everstep.planner.baselines.rerouting import plain_reroute
from everstep.planner.baselines.selection import chameleon
from everstep.planner.baselines.systems import SYSTEMS
from everstep.planner.baselines.templates import oobleck
from everstep.planner.first import first_plan
from everstep.planner.policies.situation import CheckpointInfo, Situation
from everstep.planner.policies.standing import with_redundancy
from everstep.planner.policies.table import decide, propose
from everstep.planner.step.cost import step_seconds
from everstep.planner.step.schedules import order_of
from tests.unit.planner.test_policies import load_of, situation_after, wrong_with
from tests.unit.planner.worlds import cluster_of, grid_plan, node, workload_of

ALL_WAYS = frozenset({"start", "now", "blocking", "behind", "wait", "restore"})


def after(plan: Plan, *lost: int, policy: str = "auto", joined: int = 0, memory_bytes: int | None = None) -> Situation:
    return situation_after(
        plan, lost, joined=joined, cores=None, policy=policy, memory_bytes=memory_bytes,
        checkpoint=CheckpointInfo(step=30, path="c"),
    )


def taken(situation: Situation) -> Candidate:
    candidates, chosen = decide(situation)
    return candidates[chosen]


def plan_of(candidate: Candidate) -> Plan:
    assert candidate.plan is not None, candidate.reason
    return candidate.plan


def lengths(plan: Plan) -> list[int]:
    return sorted(len(route) for route in plan.pipelines())


# Oobleck.

CASES = {
    "smaller template": ({2}, [[0, 1], [3, 4], [5, 6, 7, 8], [9, 10, 11, 12, 13]]),
    "borrow for two": ({1, 3, 4}, [[0, 13], [2, 12], [9, 10, 11], [5, 6, 7, 8]]),
    "borrow twice from one": ({2, 4, 6, 7, 8}, [[0, 1], [3, 13], [5, 12], [9, 10, 11]]),
    "merge": ({1, 2, 3, 5, 6, 7, 9, 10, 11}, [[0, 4], [8, 12, 13]]),
}


@pytest.mark.parametrize(("lost", "expected"), CASES.values(), ids=CASES)
def test_the_reference_cases_come_out_on_real_plans(lost: set[int], expected: list[list[int]]) -> None:
    """Memory holds two stages' worth at most, so the smallest template has two nodes."""
    workload = workload_of(10, 28, state_bytes=20, gradient_bytes=0, activation_bytes=0)
    start = [[0, 1], [2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12, 13]]
    routes = [
        tuple(Hop(node(name), *cut) for name, cut in zip(names, even_cuts(10, len(names)), strict=True)) for names in start
    ]
    plan = Plan(
        num_layers=10, placement={hop.node: tuple(hop.layers) for route in routes for hop in route}, routes=tuple(routes) * 7,
    )
    situation = situation_after(plan, tuple(lost), workload=workload, cores=None, memory_bytes=120)
    everywhere = {member: frozenset(workload.units) for member in situation.nodes}
    found = oobleck(replace(situation, holds=everywhere))
    assert [[int(hop.node[1:]) for hop in route] for route in plan_of(found[0]).pipelines()] != []
    assert sorted([int(hop.node[1:]) for hop in route] for route in plan_of(found[0]).pipelines()) == sorted(expected)
    assert wrong_with(situation, plan_of(found[0])) == []


def test_newcomers_make_a_pipeline_or_lengthen_the_shortest() -> None:
    workload = workload_of(4, 16, state_bytes=100, gradient_bytes=0, activation_bytes=0)
    one, other = ((Hop(node(0), 0, 2), Hop(node(1), 2, 4)), (Hop(node(2), 0, 2), Hop(node(3), 2, 4)))
    placement = {hop.node: tuple(hop.layers) for hop in (*one, *other)}
    plan = Plan(num_layers=4, placement=placement, routes=(one, other) * 8)

    def joined(count: int) -> list[int]:
        situation = situation_after(plan, joined=count, workload=workload, cores=None, memory_bytes=250)
        return lengths(plan_of(oobleck(situation)[0]))

    assert joined(1) == [2, 3]
    assert joined(2) == [2, 2, 2]


def test_below_the_smallest_template_oobleck_goes_back_to_a_checkpoint() -> None:
    workload = workload_of(2, 4, state_bytes=100, gradient_bytes=0, activation_bytes=0)
    situation = situation_after(
        grid_plan(2, 2, 2), (1, 3, 2), workload=workload, cores=None, policy="oobleck", memory_bytes=150,
    )
    assert propose(situation)[0].reason == "fewer than 2 nodes are left, and the smallest template needs as many"
    lost_layer = after(grid_plan(2, 2, 2), 1, 3, policy="oobleck")
    assert [each.policy for each in propose(lost_layer) if each.feasible] == ["restore"]


# Rerouting.


def test_plain_rerouting_goes_round_the_peers_of_the_stage() -> None:
    before = grid_plan(4, 2, 6)
    found = plain_reroute(after(before, 3))[0]
    assert found.way == "now" and load_of(plan_of(found)) == {
        **{node(number): 6 for number in (0, 2, 4, 6)}, node(1): 8, node(5): 8, node(7): 8,
    }
    assert plan_of(found).order == before.order, "it has no more activation slots than before"


@pytest.mark.parametrize("lost", [(6,), (5, 10), (5, 9)])
def test_plain_rerouting_takes_no_longer_than_equation_13_says(lost: tuple[int, ...]) -> None:
    """The equation adds up what may overlap. Without more slots the list schedule is up to three units from the best."""
    situation = after(grid_plan(3, 4, 6), *lost)
    failed = Counter(number % 4 for number in lost)
    slots = rerouted_slots(3, 4, 6, [failed[stage] for stage in range(4)])
    assert plain_reroute(situation)[0].step_s <= 3 * slots + 3


def test_a_stage_without_anybody_is_the_end_of_rerouting() -> None:
    assert plain_reroute(after(grid_plan(2, 2, 4), 1, 3))[0].reason == "nobody is left at the stage of n1"


def test_pipelines_that_are_not_alike_cannot_be_rerouted_by_published_systems() -> None:
    one, other = (Hop(node(0), 0, 2),), (Hop(node(1), 0, 1), Hop(node(2), 1, 2))
    plan = Plan(
        num_layers=2, placement={node(0): (0, 1), node(1): (0,), node(2): (1,)}, routes=(one, other) * 4,
    )
    assert cuts_of(plan) is None
    for name in ("plain-reroute", "recycle"):
        found = propose(after(plan, 1, policy=name))
        assert found[0].reason == "the pipelines are not cut alike"
        assert [each.policy for each in found if each.feasible] == ["restore"]


def test_recycle_splits_backward_and_spreads_losses() -> None:
    found = propose(after(grid_plan(3, 4, 6), 6, policy="recycle"))
    words = [each.reason for each in found if each.feasible]
    assert "reroute with split backward" in words
    best = taken(after(grid_plan(3, 4, 6), 6, policy="recycle"))
    assert plan_of(best).order.split and best.step_s < found[0].step_s
    twice = taken(after(grid_plan(3, 4, 6), 2, 6, policy="recycle"))
    assert twice.policy == "recycle" and twice.reason.startswith("normalize")


def test_a_newcomer_fills_the_hole_of_rerouting_systems() -> None:
    holed = grid_plan(3, 2, 4, lost=[(1, 0)])
    for name in ("plain-reroute", "recycle"):
        best = taken(after(holed, joined=1, policy=name))
        assert best.reason == "heal" and load_of(plan_of(best))[node(6)] == 4, name


def test_torchft_drops_a_replica_and_takes_one_back_when_it_is_whole() -> None:
    dropped = taken(after(grid_plan(3, 2, 4), 1, policy="torchft"))
    assert dropped.way == "now" and lengths(plan_of(dropped)) == [2, 2]
    assert plan_of(dropped).placement[node(0)] == ()
    settled = plan_of(dropped)
    back = taken(after(settled, joined=1, policy="torchft"))
    assert lengths(plan_of(back)) == [2, 2, 2] and back.way == "blocking"
    behind = taken(replace(after(settled, joined=1, policy="torchft"), ways=ALL_WAYS))
    assert behind.way == "behind" and behind.later is not None and lengths(behind.later) == [2, 2, 2]
    waiting = taken(after(grid_plan(2, 2, 4), joined=1, policy="torchft"))
    assert waiting.way == "now" and load_of(plan_of(waiting))[node(4)] == 0


# Grids.


def test_varuna_restarts_with_the_fastest_grid_of_equal_stages() -> None:
    workload = workload_of(6, 12)
    plan = first_plan([node(k) for k in range(6)], workload, cluster_of(6, cores=None), PlannerConfig()).plan
    situation = situation_after(
        plan, (1,), workload=workload, cores=None, policy="varuna", checkpoint=CheckpointInfo(step=30, path="c"),
    )
    best = taken(situation)
    assert best.way == "restore" and best.restore_step == 30
    cuts = cuts_of(plan_of(best))
    assert cuts is not None and len({end - first for first, end in cuts}) == 1
    others = [grid(situation, even_cuts(6, depth), Order()) for depth in (1, 2, 3)]
    assert best.step_s == min(other.step_s for other in others if other is not None)


def test_varuna_does_not_go_back_for_a_newcomer() -> None:
    best = taken(after(grid_plan(2, 2, 4), joined=2, policy="varuna"))
    assert best.way == "blocking" and best.restore_step is None


def test_parcae_has_every_depth_and_the_rest_of_the_pipelines() -> None:
    found = propose(after(grid_plan(3, 2, 4), 1, policy="parcae"))
    assert next(each.reason for each in found if each.feasible and each.way == "now") == "shrink"
    assert {len(route) for each in found if each.plan for route in each.plan.pipelines()} == {1, 2}


# Bamboo.


def test_bamboo_takes_over_and_is_rebuilt_with_redundancy() -> None:
    plan = with_redundancy(grid_plan(3, 3, 4), shadows=True)
    found = propose(replace(after(plan, 1, policy="bamboo"), shadows=True, ways=ALL_WAYS))
    over, rebuilt = (each for each in found if each.feasible)
    assert over.way == "now" and lengths(plan_of(over)) == [2, 3, 3]
    assert rebuilt.way == "blocking" and lengths(plan_of(rebuilt)) == [3, 3]
    assert all(hop.shadow for route in plan_of(rebuilt).routes for hop in route)


# Chameleon.


def test_chameleon_has_two_candidates_and_moves_only_in_a_long_window() -> None:
    before = grid_plan(4, 2, 8, order=Order())
    situation = after(before, 3, policy="chameleon")
    slow_link = replace(situation.cluster.link, bytes_per_s=1.0)
    situation = replace(situation, cluster=replace(situation.cluster, link=slow_link))
    assert [each.reason.split()[0] for each in chameleon(situation)] == ["rerouting", "dynamic"]
    assert taken(replace(situation, gap_s=100.0)).way == "now"
    assert taken(replace(situation, gap_s=36_000.0)).way == "blocking"


def test_chameleon_takes_its_own_equations_where_they_are_meant_for_the_schedule() -> None:
    """Rerouting by equation 13, though its schedule is shorter; what it is worth follows from the equation alone."""
    situation = after(grid_plan(3, 4, 6), 5, 10, policy="chameleon")
    rerouting = chameleon(situation)[0]
    assert plan_of(rerouting).routes != situation.plan.routes
    slots = rerouted_slots(3, 4, 6, [0, 1, 1, 0])
    step_s = 3 * slots
    assert rerouting.step_s < step_s
    assert rerouting.value == pytest.approx(18 / step_s * (situation.gap_s - situation.switch_s))


def test_with_other_schedules_chameleon_believes_the_cost_model() -> None:
    situation = after(grid_plan(3, 4, 6, order=Order(split=True, extra_slots=2)), 5, policy="chameleon")
    rerouting = chameleon(situation)[0]
    assert rerouting.value == pytest.approx(18 / rerouting.step_s * (situation.gap_s - situation.switch_s))


def test_what_is_not_through_when_the_window_closes_is_worth_nothing() -> None:
    situation = after(grid_plan(4, 2, 8), 3, policy="chameleon")
    situation = replace(situation, cluster=replace(situation.cluster, link=replace(situation.cluster.link, bytes_per_s=0.1)))
    dynamic = chameleon(replace(situation, gap_s=1.0))[1]
    assert dynamic.value == 0


def test_on_an_irregular_layout_only_the_dynamic_plan_is_left() -> None:
    one, other = (Hop(node(0), 0, 1), Hop(node(1), 1, 2)), (Hop(node(2), 0, 2),)
    plan = Plan(
        num_layers=2, placement={node(0): (0,), node(1): (1,), node(2): (0, 1)}, routes=(one, other) * 4,
    )
    first, second = chameleon(after(plan, 1, policy="chameleon"))
    assert first.reason == "rerouting: the pipelines are not cut alike" and second.feasible


def test_chameleon_without_a_copy_of_everything_goes_back_to_a_checkpoint() -> None:
    found = propose(after(grid_plan(2, 2, 4), 1, 3, policy="chameleon"))
    assert [each.policy for each in found if each.feasible] == ["restore"]


# All of them.


@pytest.mark.parametrize("name", SYSTEMS)
def test_systems_for_pipelines_that_are_cut_alike_start_with_such(name: str) -> None:
    workload = workload_of(5, 14)
    nodes = [node(number) for number in range(7)]
    config = PlannerConfig(policy=name, max_stages=3)  # type: ignore[arg-type]
    plan = first_plan(nodes, workload, cluster_of(7, cores=None, memory_bytes=150), config).plan
    if SYSTEMS[name].starts_alike:
        assert cuts_of(plan) is not None and len(plan.pipelines()) >= 2
    assert wrong_with(situation_after(plan, workload=workload), plan) == []


def test_blocks_are_shared_out_evenly_and_the_ends_take_what_is_besides() -> None:
    """An embedding, six blocks and a head."""
    workload = workload_of(8, 4)
    sizes = [90, 30, 30, 30, 30, 30, 30, 50]
    units = {
        name: replace(unit, state_bytes=size) for (name, unit), size in zip(workload.units.items(), sizes, strict=True)
    }
    workload = replace(workload, units=units)
    assert equal_cuts(workload, 3) == ((0, 3), (3, 5), (5, 8))
    assert equal_cuts(workload, 4) is None and equal_cuts(workload, 1) == ((0, 8),)


@pytest.mark.parametrize("name", SYSTEMS)
def test_they_differ_by_policy_alone(name: str) -> None:
    """The running plan's schedule goes on, but where a system has its own."""
    order = Order(split=True, extra_slots=1)
    plan = grid_plan(3, 2, 4, order=order)
    for situation in (after(plan, 1, policy=name), after(plan, joined=1, policy=name)):
        best = plan_of(taken(situation))
        if name not in ("bamboo", "varuna"):
            assert best.order.split, name
        assert step_seconds(best, situation.workload, situation.cluster) > 0
        assert order_of(best)
