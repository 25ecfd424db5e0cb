"""What is searched for in idle time: faster schedules that nodes have the memory for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep import schedule as schedules
from everstep.cluster import Cluster, Link, Node
from everstep.plan import Hop, Order, Plan
from everstep.planner.idle.improve import improve, improvements
from everstep.planner.routes.level import least_seconds
from everstep.planner.step.cost import finish_seconds
from everstep.planner.step.memory import node_bytes
from everstep.planner.step.schedules import order_of

from .worlds import cluster_of, grid_plan, node, workload_of

WORKLOAD = workload_of(8, 24, state_bytes=20, gradient_bytes=0)


def uneven_plan() -> Plan:
    """Stages of 3+5, 4+4 and 2+2+2+2 layers; the node with the last five is gone and the others with its layers take over."""
    first = (Hop(node(0), 0, 3), Hop(node(3), 3, 4), Hop(node(5), 4, 6), Hop(node(6), 6, 8))
    other = (Hop(node(0), 0, 3), Hop(node(4), 3, 8))
    second = (Hop(node(2), 0, 4), Hop(node(4), 4, 8))
    third = (Hop(node(1), 0, 2), Hop(node(3), 2, 4), Hop(node(5), 4, 6), Hop(node(6), 6, 8))
    placement = {
        node(0): (0, 1, 2), node(1): (0, 1), node(2): (0, 1, 2, 3), node(3): (2, 3), node(4): (3, 4, 5, 6, 7),
        node(5): (4, 5), node(6): (6, 7),
    }
    routes = tuple((first, second, third, other, second, third)[m % 6] for m in range(24))
    return Plan(num_layers=8, placement=placement, routes=routes, order=Order(split=True, extra_slots=2))


def test_following_who_is_late_and_finer_pieces_bring_an_uneven_plan_near_the_bound() -> None:
    plan = uneven_plan()
    windows = {member: frozenset(layers) for member, layers in plan.placement.items()}
    least_s = least_seconds(windows, WORKLOAD, dict.fromkeys(windows, 1.0))
    found = improve(plan, WORKLOAD, rounds=60)
    assert schedules.problems(found.schedule, found.plan) == []
    assert found.plan.placement == plan.placement
    assert found.before_s > 1.25 * least_s
    assert least_s <= found.after_s < 1.1 * least_s


@pytest.mark.parametrize("spare_bytes", [8, 20, 60])
def test_no_node_gets_more_than_its_cap_and_what_there_is_may_be_used(spare_bytes: int) -> None:
    plan = uneven_plan()
    caps = {member: 20 * len(layers) + spare_bytes for member, layers in plan.placement.items()}
    found = improve(plan, WORKLOAD, rounds=30, caps=caps)
    assert schedules.problems(found.schedule, found.plan) == []
    needed = node_bytes(found.plan, WORKLOAD, found.schedule)
    assert all(needed[member] <= caps[member] for member in caps)


def test_more_memory_gives_a_faster_schedule() -> None:
    plan = replace(uneven_plan(), order=Order(split=True))
    tight, roomy = (
        improve(plan, WORKLOAD, rounds=30, caps={member: 20 * len(layers) + spare for member, layers in plan.placement.items()})
        for spare in (8, 60)
    )
    assert roomy.after_s < tight.after_s


def test_messages_and_speeds_of_a_cluster_are_counted() -> None:
    plan = grid_plan(3, 4, 4, lost=[(0, 1), (1, 2)], order=Order(split=True))
    workload = workload_of(4, 12, output_bytes=10)
    nodes = {node(k): Node(node_id=node(k), speed=2.0 if k == 3 else 1.0) for k in range(12)}
    cluster = Cluster(nodes=nodes, link=Link(alpha_s=0.1, bytes_per_s=100.0))
    found = improve(plan, workload, rounds=40, cluster=cluster)
    ends_s = finish_seconds(found.plan, workload, cluster, found.schedule)
    assert found.after_s == pytest.approx(max(ends_s.values())), "what it says is what the cost model says"
    assert found.after_s < found.before_s
    assert found.before_s > improve(plan, workload, rounds=0).before_s, "which leaves messages out"


def test_without_rounds_the_list_schedule_stays() -> None:
    plan = uneven_plan()
    found = improve(plan, rounds=0)
    assert (found.plan, found.schedule) == (plan, order_of(plan)) and found.before_s == found.after_s


def test_the_search_comes_in_pieces_that_only_get_better() -> None:
    found = list(improvements(uneven_plan(), WORKLOAD, rounds=12, rounds_each=3))
    assert len(found) == 1 + 4 + 1
    assert [piece.after_s for piece in found] == sorted((piece.after_s for piece in found), reverse=True)
    assert found[-1].after_s == improve(uneven_plan(), WORKLOAD, rounds=12).after_s


def test_work_of_shadowed_routes_is_not_passed_on() -> None:
    """Who shadows a hop computes its forward too: a piece of it elsewhere would be computed a third time."""
    plan = uneven_plan()
    routes = tuple((replace(route[0], shadow=node(2)) if route[0].end == 3 else route[0], *route[1:]) for route in plan.routes)
    found = improve(replace(plan, routes=routes), rounds=40)
    assert {(hop.first, hop.end) for route in found.plan.routes for hop in route} == {
        (hop.first, hop.end) for route in routes for hop in route
    }


def test_a_plan_at_its_bound_is_not_searched() -> None:
    plan = grid_plan(1, 1, 5)
    assert len(list(improvements(plan, cluster=cluster_of(1), rounds=50))) == 2
