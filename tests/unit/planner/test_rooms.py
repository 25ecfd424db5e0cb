"""How much of a node's memory its activations may fill."""

from __future__ import annotations

from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.plan import Hop, Order, Plan
from everstep.planner.layouts.search import ROOMY_NODES, priced, with_room
from everstep.planner.step.memory import node_bytes, rooms
from everstep.quantities import NodeId

from .worlds import cluster_of, grid_plan, node, plans, workload_of

WORKLOAD = workload_of(4, 12, state_bytes=20, gradient_bytes=0, activation_bytes=5)


def test_what_state_leaves_is_room_for_activations() -> None:
    plan = grid_plan(1, 4, 12, order=Order(split=True))
    assert rooms(plan, WORKLOAD, {node(0): 49, node(1): 50, node(3): 51}) == {node(0): 5, node(1): 6, node(3): 5}


def test_more_than_keeps_a_node_busy_is_not_asked_for() -> None:
    """1F1B holds 4, 3, 2 and 1; one for each of the four hops more."""
    plan = grid_plan(1, 4, 12, order=Order(split=True))
    assert rooms(plan, WORKLOAD, dict.fromkeys(plan.nodes, 10_000)) == {node(k): 8 - k for k in range(4)}


def test_nothing_is_said_about_nodes_that_are_not_limited_or_hold_nothing_for_a_backward() -> None:
    plan = grid_plan(1, 4, 12)
    assert rooms(plan, WORKLOAD, {node(0): None}) == {}
    assert rooms(plan, workload_of(4, 12, activation_bytes=0), dict.fromkeys(plan.nodes, 100)) == {}


def test_state_alone_too_large_leaves_no_room() -> None:
    assert rooms(grid_plan(1, 4, 12), WORKLOAD, {node(2): 10}) == {node(2): 0}


def test_a_piece_for_somebody_else_counts_by_the_layers_it_has() -> None:
    """The cap of n1 leaves four layers' activations: its own hop twice, or the lent piece four times."""
    routes = ((Hop(node(0), 0, 2), Hop(node(1), 2, 4)), (Hop(node(2), 0, 3), Hop(node(1), 3, 4)))
    plan = Plan(num_layers=4, placement={node(0): (0, 1), node(1): (2, 3), node(2): (0, 1, 2)}, routes=routes * 6)
    assert rooms(plan, WORKLOAD, {node(1): 40 + 4 * 5})[node(1)] == 4


@settings(max_examples=150, deadline=None)
@given(plans(max_micro_batches=6), st.integers(0, 40))
def test_a_schedule_that_fills_its_room_stays_below_the_cap(plan: Plan, spare_bytes: int) -> None:
    workload = workload_of(plan.num_layers, len(plan.routes), state_bytes=20, gradient_bytes=0, activation_bytes=5)
    caps = {member: 20 * len(layers) + spare_bytes for member, layers in plan.placement.items()}
    plan = replace(plan, room=rooms(plan, workload, caps), order=replace(plan.order, split=True))
    largest = {
        member: max((hop.end - hop.first for route in plan.routes for hop in route if hop.node == member), default=0)
        for member in plan.nodes
    }
    for member, num_bytes in node_bytes(plan, workload).items():
        if all(size * 5 <= spare_bytes for size in largest.values()) and not goes_round(plan):
            assert num_bytes <= caps[member]


def goes_round(plan: Plan) -> bool:
    """Whether micro-batches follow nodes in a circle: then one may have to exceed its limit, so that all can go on."""
    order: TopologicalSorter[NodeId] = TopologicalSorter()
    for route in plan.routes:
        for before, after in pairwise(route):
            order.add(after.node, before.node)
    try:
        order.prepare()
    except CycleError:
        return True
    return False


@pytest.mark.parametrize("cap", [20 + 4 * 5, 20 + 8 * 5])
def test_plans_of_nodes_with_limited_memory_are_priced_with_all_of_it(cap: int) -> None:
    """Split backward with the slots of 1F1B: the last stage, which has one, gains most."""
    plan = grid_plan(1, 4, 12, order=Order(split=True))
    free, limited = priced(plan, WORKLOAD, cluster_of(4)), priced(plan, WORKLOAD, cluster_of(4, memory_bytes=cap))
    assert free.plan is plan
    assert limited.step_s < free.step_s
    assert limited.plan.room == {node(k): min(8 - k, (cap - 20) // 5) for k in range(4)}
    assert max(limited.needed_bytes.values()) <= cap


def test_on_shared_cores_and_in_large_clusters_slots_alone_count() -> None:
    plan = grid_plan(1, 4, 12)
    assert with_room(plan, WORKLOAD, cluster_of(4, cores=2, memory_bytes=100)).room == {}
    many = replace(plan, placement={**plan.placement, **{node(k): () for k in range(4, ROOMY_NODES + 1)}})
    assert with_room(many, WORKLOAD, cluster_of(ROOMY_NODES + 1, memory_bytes=100)).room == {}
    assert with_room(plan, WORKLOAD, cluster_of(4, memory_bytes=100)).room != {}
