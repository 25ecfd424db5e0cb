"""Redundancy that stands before anything is lost: who looks after whom, what it costs, and how it takes over."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.cluster import Cluster
from everstep.config import PlannerConfig
from everstep.plan import Hop, Order, Plan
from everstep.planner.first import first_plan
from everstep.planner.policies.situation import Situation
from everstep.planner.policies.standing import is_redundant, redundant, ring, taken_over, with_redundancy
from everstep.planner.policies.table import decide, propose
from everstep.planner.step.cost import finish_seconds, shared_seconds, step_seconds
from everstep.planner.step.memory import node_bytes
from everstep.planner.step.pace import pace
from everstep.planner.step.schedules import order_of
from everstep.planner.step.shadows import shadow_seconds
from everstep.workload import Workload

from .test_any_situation import EVERY_WAY, under
from .test_policies import load_of, plan_of, situation_after, wrong_with
from .worlds import cluster_of, grid_plan, node, workload_of
from .worlds import plans as any_plan


def standing(num_pipelines: int = 2, num_stages: int = 3, *, shadows: bool = True, order: Order | None = None) -> Plan:
    return with_redundancy(grid_plan(num_pipelines, num_stages, 4, order=order), shadows=shadows)


def after(plan: Plan, *lost: int, policy: str = "redundant") -> Situation:
    return replace(situation_after(plan, lost, cores=None, policy=policy), ways=EVERY_WAY, shadows=True)


def costs(plan: Plan) -> tuple[Workload, Cluster]:
    return workload_of(plan.num_layers, len(plan.routes)), cluster_of(len(plan.placement))


def test_the_ring_goes_along_each_pipeline_and_on_to_the_next() -> None:
    plan = grid_plan(2, 3, 1)
    assert list(ring(plan).values()) == [[node(5), node(0), node(1)], [node(2), node(3), node(4)]]
    alone = grid_plan(1, 3, 1)
    assert list(ring(alone).values()) == [[node(1), node(0), node(1)]], "a route cannot visit its last node twice"
    assert list(ring(grid_plan(1, 1, 1)).values()) == [[None]]


def test_each_node_also_holds_what_its_successor_holds() -> None:
    plan = standing()
    held = [(0, 1), (1, 2), (0, 2)] * 2
    assert plan.placement == {node(number): layers for number, layers in enumerate(held)}
    assert [hop.shadow for hop in plan.routes[0]] == [node(5), node(0), node(1)]
    silent = standing(shadows=False)
    assert silent.placement == plan.placement and all(hop.shadow is None for route in silent.routes for hop in route)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_a_plan_with_redundancy_is_a_plan(num_pipelines: int, num_stages: int, shadows: bool) -> None:
    plan = standing(num_pipelines, num_stages, shadows=shadows)
    assert wrong_with(situation_after(plan), plan) == []


# What it costs.


def test_shadows_make_steps_longer_and_placement_alone_does_not() -> None:
    plain = grid_plan(2, 3, 4)
    workload, cluster = costs(plain)
    plain_s = step_seconds(plain, workload, cluster)
    assert step_seconds(standing(), workload, cluster) > plain_s
    assert step_seconds(standing(shadows=False), workload, cluster) == pytest.approx(plain_s, rel=0.1)


def test_a_node_computes_the_forwards_that_it_shadows_beside_its_own() -> None:
    """Every node shadows one hop of one layer: a forward of 2 instead of 1 second, for as many micro-batches."""
    assert shadow_seconds(standing().routes, [0.0, 1.0, 2.0, 3.0]) == dict.fromkeys(map(node, range(6)), 1.0)
    workload = workload_of(3, 8, seconds=[1.0, 1.0, 1.0])
    slow = replace(workload, layers=tuple(replace(each, forward_s=2.0) for each in workload.layers))
    cluster = cluster_of(6)
    assert step_seconds(standing(), workload, cluster) == pytest.approx(step_seconds(grid_plan(2, 3, 4), slow, cluster))


def test_who_does_less_of_its_own_is_held_up_longer_by_each() -> None:
    """One micro-batch of its own, three of its neighbour's to shadow."""
    one, other = (Hop(node(0), 0, 1),), (Hop(node(1), 0, 1, shadow=node(0)),)
    assert shadow_seconds((one, other, other, other), [0.0, 2.0]) == {node(0): 6.0}


@pytest.mark.parametrize("order", [Order(), Order(split=True, extra_slots=1)])
def test_both_ways_to_time_a_step_see_shadows(order: Order) -> None:
    plan = standing(order=order)
    workload, cluster = costs(plan)
    assert finish_seconds(plan, workload, cluster, order_of(plan)) == pytest.approx(pace(plan, workload, cluster).ends_s)


def test_on_shared_cores_shadows_are_work_like_any_other() -> None:
    plan = standing()
    workload, shared = workload_of(3, 8), cluster_of(6, cores=2)
    (host,) = shared_seconds(plan, workload, shared)
    without = shared_seconds(grid_plan(2, 3, 4), workload, shared)[host]
    assert shared_seconds(plan, workload, shared)[host] == pytest.approx(without + 8 * 3 * 1.0 / 2)


# Taking over.


def test_who_comes_before_takes_over_at_once() -> None:
    found = taken_over(after(standing(), 1), "redundant")
    plan = plan_of([found])
    assert (found.way, found.moved_bytes) == ("now", 0)
    first = plan.routes[0][0]
    assert (first.node, first.first, first.end) == (node(0), 0, 2)
    assert load_of(plan)[node(4)] == 4, "the other pipeline goes on as it was"


def test_a_first_stage_is_taken_over_by_the_pipeline_before() -> None:
    plan = plan_of([taken_over(after(standing(), 3), "redundant")])
    assert [hop.node for hop in plan.routes[1]] == [node(2), node(4), node(5)]


def test_in_a_single_pipeline_the_node_behind_takes_over_the_first_stage() -> None:
    plan = plan_of([taken_over(after(standing(1), 0), "redundant")])
    assert [(hop.node, hop.first, hop.end) for hop in plan.routes[0]] == [(node(1), 0, 2), (node(2), 2, 3)]


def test_two_neighbours_at_once_are_too_much_for_one_pipeline() -> None:
    found = propose(after(standing(1, 4), 1, 2))
    assert [each.policy for each in found if each.feasible] == ["restore"]
    assert found[0].reason == "layer l2 has no living holder"


def test_after_a_takeover_redundancy_comes_back() -> None:
    situation = after(standing(2, 3), 1)
    again = [each for each in redundant(situation) if each.feasible and each.settled is not None and each.way != "now"]
    assert {each.way for each in again} == {"blocking", "behind"}
    for each in again:
        assert each.settled is not None
        shadowed = [hop.shadow for route in each.settled.routes for hop in route]
        assert all(shadowed) or len(each.settled.pipelines()) == 1


def test_a_run_starts_with_what_its_policy_stands_on() -> None:
    workload, cluster = workload_of(3, 6), cluster_of(6, cores=None)
    config = PlannerConfig(policy="redundant")
    plan = first_plan(tuple(cluster.nodes), workload, cluster, config, shadows=True).plan
    assert any(hop.shadow for route in plan.routes for hop in route)
    small = replace(config, worker_memory_bytes=plan_bytes(plan, workload) - 1)
    assert first_plan(tuple(cluster.nodes), workload, cluster, small, shadows=True).plan.placement != plan.placement


def plan_bytes(plan: Plan, workload: Workload) -> int:
    return max(node_bytes(plan, workload).values())


def test_among_all_redundancy_is_proposed_only_where_something_is_held_by_few() -> None:
    safe = next(each for each in propose(under(after(grid_plan(4, 2, 4), 1), "auto")) if each.policy == "redundant")
    assert (safe.plan, safe.reason) == (None, "no layer depends on one or two nodes alone")
    alone = [each for each in propose(under(after(grid_plan(2, 2, 4), 1), "auto")) if each.policy == "redundant"]
    assert any(each.feasible for each in alone)


def test_where_a_loss_would_cost_much_the_second_copy_is_made() -> None:
    """One node of three is gone and half of the rest hold an only copy; a step trained again costs a day."""
    situation = replace(after(grid_plan(2, 2, 4), 1), redo_steps=1e6)
    candidates, chosen = decide(under(situation, "auto"))
    settled = candidates[chosen].settled
    assert settled is not None
    assert all(len(settled.holders(layer)) > 1 for layer in range(2))


@settings(max_examples=60, deadline=None)
@given(any_plan(), st.booleans())
def test_who_holds_more_than_he_computes_is_found(plan: Plan, more: bool) -> None:
    if more:
        plan = with_redundancy(plan, shadows=False)
    computed = {member: {layer for route in plan.routes for hop in route if hop.node == member for layer in hop.layers}
                for member in load_of(plan)}
    assert is_redundant(plan) == any(set(plan.placement[member]) > layers for member, layers in computed.items())
