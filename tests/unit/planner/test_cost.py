"""The cost model against closed forms, hand cases, and a slower simulation; and memory along the schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from everstep.cluster import Link
from everstep.plan import Hop, Order, Plan
from everstep.planner.step.cost import (
    finish_seconds,
    is_shared,
    load_seconds,
    shared_seconds,
    stall_seconds,
    step_seconds,
)
from everstep.planner.step.memory import cap_bytes, node_bytes, overfull
from everstep.planner.step.reductions import reduction_groups
from everstep.planner.step.schedules import order_of
from everstep.quantities import HostId, UnitName
from everstep.schedule import Kind
from everstep.transfer import Move
from everstep.workload import Unit

from .worlds import cluster_of, grid_plan, node, plans, slow_makespan_s, workload_of

UNIT = UnitName("l0")


@pytest.mark.parametrize(("num_stages", "each"), [(1, 5), (4, 8), (3, 3), (8, 16)])
def test_an_even_pipeline_takes_what_the_closed_form_says(num_stages: int, each: int) -> None:
    plan, workload = grid_plan(1, num_stages, each), workload_of(num_stages, each)
    assert step_seconds(plan, workload, cluster_of(num_stages)) == (num_stages + each - 1) * 3


@settings(max_examples=100, deadline=None)
@given(plans())
def test_the_longest_path_is_what_a_second_by_second_simulation_takes(plan: Plan) -> None:
    split = plan.order.split
    workload = workload_of(plan.num_layers, len(plan.routes), output_bytes=2)
    cluster = cluster_of(len(plan.nodes), link=Link(alpha_s=1.0, bytes_per_s=1.0))
    schedule = order_of(plan)
    seconds = {Kind.FORWARD: 1, Kind.BACKWARD: 1 if split else 2, Kind.WEIGHT: 1}
    assert max(finish_seconds(plan, workload, cluster, schedule).values()) == slow_makespan_s(schedule, plan, seconds, 3)


def test_nodes_of_one_host_share_its_cores() -> None:
    plan, workload = grid_plan(2, 4, 8), workload_of(4, 16, optimizer_s=1.0)
    alone_s = step_seconds(plan, workload, cluster_of(8))
    assert alone_s == (4 + 8 - 1) * 3 + 1
    work_s = 16 * 4 * 3 + 8 * 1.0
    assert step_seconds(plan, workload, cluster_of(8, cores=2)) == work_s / 2 > 2.5 * alone_s
    assert shared_seconds(plan, workload, cluster_of(8, cores=2)) == {HostId("localhost"): work_s / 2}
    assert shared_seconds(plan, workload, cluster_of(8)) == {}


def test_a_host_is_shared_when_it_has_more_nodes_than_cores() -> None:
    assert is_shared(cluster_of(3, cores=2))
    assert not is_shared(cluster_of(2, cores=2))
    assert not is_shared(cluster_of(3))


def test_holders_of_a_unit_reduce_in_a_ring_after_their_last_action() -> None:
    plan, workload = grid_plan(2, 1, 2), workload_of(1, 4, gradient_bytes=10, fixed_s=0.5)
    link = Link(alpha_s=0.25, bytes_per_s=5.0)
    assert reduction_groups(plan, workload) == {(node(0), node(1)): 10}
    ring_s = 2 * (1 / 2) * 10 / 5.0 + 2 * 0.25
    assert step_seconds(plan, workload, cluster_of(2, link=link)) == 2 * 3 + ring_s + 0.5


def test_a_unit_with_one_holder_needs_no_reduction() -> None:
    assert reduction_groups(grid_plan(1, 3, 2), workload_of(3, 2)) == {}


def test_a_tie_group_is_reduced_over_the_holders_of_all_its_layers() -> None:
    tied = Unit(name=UNIT, layers=(0, 2), parameter_bytes=4, state_bytes=12, gradient_bytes=4)
    workload = replace(workload_of(3, 1), units={UNIT: tied})
    assert reduction_groups(grid_plan(1, 3, 1), workload) == {(node(0), node(2)): 4}


def test_a_slow_node_takes_longer_for_the_same_layers() -> None:
    cluster = cluster_of(1)
    slow = replace(cluster, nodes={node(0): replace(cluster.nodes[node(0)], speed=0.5)})
    plan, workload = grid_plan(1, 1, 2), workload_of(1, 2, optimizer_s=1.0)
    assert step_seconds(plan, workload, slow) == 2 * step_seconds(plan, workload, cluster) == 14


def test_the_slowest_node_decides_how_long_moves_stall() -> None:
    cluster = cluster_of(3, link=Link(alpha_s=0.1, bytes_per_s=10.0))
    moves = [Move(UNIT, node(0), node(1), 10), Move(UNIT, node(0), node(2), 20)]
    assert stall_seconds(moves, cluster, switch_s=0.5) == pytest.approx(0.5 + (1.1 + 2.1))
    assert stall_seconds([], cluster, switch_s=0.5) == 0.5


def test_a_restore_reads_the_bytes_of_the_fullest_node_at_the_rate_of_the_disk() -> None:
    plan, workload = grid_plan(2, 2, 1), workload_of(2, 2, state_bytes=30)
    assert load_seconds(plan, workload, read_bytes_per_s=10.0) == 3.0
    whole = replace(plan, placement={**plan.placement, node(0): (0, 1)})
    assert load_seconds(whole, workload, read_bytes_per_s=10.0) == 6.0


def test_memory_is_state_and_gradients_and_what_is_in_flight() -> None:
    plan = grid_plan(1, 3, 8)
    workload = workload_of(3, 8, state_bytes=100, gradient_bytes=20, activation_bytes=7)
    assert node_bytes(plan, workload) == {node(0): 120 + 3 * 7, node(1): 120 + 2 * 7, node(2): 120 + 7}


def test_split_backward_keeps_activations_until_the_weight_gradient() -> None:
    workload = workload_of(2, 4, state_bytes=0, gradient_bytes=0, activation_bytes=1)
    roomy = grid_plan(1, 2, 4, order=Order(split=True, extra_slots=2))
    assert node_bytes(roomy, workload)[node(0)] > node_bytes(grid_plan(1, 2, 4), workload)[node(0)]


def test_a_tie_group_is_held_once_on_a_node_with_two_of_its_layers() -> None:
    tied = Unit(name=UNIT, layers=(0, 1), parameter_bytes=4, state_bytes=12, gradient_bytes=4)
    workload = replace(workload_of(2, 1, activation_bytes=0), units={UNIT: tied})
    plan = Plan(num_layers=2, placement={node(0): (0, 1)}, routes=((Hop(node(0), 0, 2),),))
    assert node_bytes(plan, workload) == {node(0): 16}


def test_what_does_not_fit_names_the_node_that_lacks_most() -> None:
    cluster = cluster_of(2, memory_bytes=24_000_000)
    assert overfull({node(0): 25_000_000, node(1): 32_000_000}, cluster, None) == "n1 needs 32.0 MB of 24.0 MB"
    assert overfull({node(0): 24_000_000}, cluster, None) == ""
    assert overfull({node(0): 2}, cluster_of(1), 1) == "n0 needs 2 B of 1 B"


def test_the_smaller_of_two_limits_counts() -> None:
    assert cap_bytes(node(0), cluster_of(1, memory_bytes=5), 3) == 3
    assert cap_bytes(node(0), cluster_of(1, memory_bytes=5), None) == 5
    assert cap_bytes(node(0), cluster_of(1), None) is None


def test_no_staggered_step_is_shorter_than_a_nodes_work_sums_and_update() -> None:
    """Two micro-batches on each of two nodes: 6 of work, a ring of 2.5, an update of 1."""
    plan = grid_plan(2, 1, 2, order=Order(split=True, staggered=True))
    workload = workload_of(1, 4, gradient_bytes=10, optimizer_s=1.0, fixed_s=0.5)
    assert step_seconds(plan, workload, cluster_of(2, link=Link(alpha_s=0.25, bytes_per_s=5.0))) == 6 + 2.5 + 1 + 0.5


def test_staggered_steps_need_no_warm_up_between_them() -> None:
    plan = grid_plan(1, 4, 8, order=Order(split=True, extra_slots=8, staggered=True))
    workload = workload_of(4, 8)
    assert step_seconds(plan, workload, cluster_of(4)) == 8 * 3
    assert step_seconds(replace(plan, order=Order(split=True, extra_slots=8)), workload, cluster_of(4)) > 8 * 3
