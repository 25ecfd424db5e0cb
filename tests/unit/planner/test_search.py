"""The rules for batch, places and memory; lengths and splits have tests of their own."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import plan as plans
from everstep.catalog import files
from everstep.cluster import Link
from everstep.config import PlannerConfig
from everstep.errors import InfeasibleError
from everstep.plan import Hop, Order, Plan, Route
from everstep.planner.first import first_plan
from everstep.planner.idle.ahead import renamed
from everstep.planner.layouts.catalogue import water_fill
from everstep.planner.layouts.places import assign, interleaved, lacking_bytes
from everstep.planner.layouts.search import best_plans, priced, priced_anew, why_nothing_fits
from everstep.planner.step.cost import step_seconds
from everstep.planner.step.memory import node_bytes
from everstep.quantities import NodeId, parse_bytes
from everstep.view import Member, View

from .worlds import cluster_of, node, workload_of
from .worlds import plans as any_plan

FREE = PlannerConfig()


def view_of(plan: Plan) -> View:
    return View(1, tuple(Member(member) for member in plan.nodes))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 5), min_size=6, max_size=6), min_size=1, max_size=3), st.integers(1, 6))
def test_the_batch_is_shared_so_that_the_slowest_is_as_fast_as_can_be(steps: list[list[int]], total: int) -> None:
    tables = [[float(sum(row[: m + 1])) for m in range(6)] for row in steps]
    filled = water_fill(tables, total)
    if len(tables) > total:
        assert filled is None
        return
    ways: list[list[int]] = [[]]
    for _ in tables:
        ways = [[*way, share] for way in ways for share in range(1, total + 1)]
    best_s = min(
        max(table[share - 1] for table, share in zip(tables, way, strict=True)) for way in ways if sum(way) == total
    )
    assert filled is not None
    assert (sum(filled[0]), filled[1]) == (total, best_s)


def test_faster_pipelines_get_more_of_the_batch() -> None:
    tables = [[speed * m for m in range(1, 11)] for speed in (2.0, 3.4, 5.0)]
    assert water_fill(tables, 10) == ((5, 3, 2), pytest.approx(10.2))


def test_any_first_part_of_the_batch_is_shared_like_the_whole() -> None:
    taken = interleaved((5, 3, 2))
    assert [taken.count(index) for index in range(3)] == [5, 3, 2]
    assert sorted(taken[:5]) == [0, 0, 1, 1, 2] or sorted(taken[:5]) == [0, 0, 0, 1, 2]
    assert set(taken[:3]) == {0, 1, 2}


def test_a_newcomer_in_a_pipeline_of_nine_layers_costs_two_layers_to_move() -> None:
    """Nodes hold (0,1,2), (3,4,5), (6,7,8) and nothing; four places share nine layers, the first a single one."""
    workload = workload_of(9, 1, state_bytes=1)
    holds = {
        node(0): workload.units_of({0, 1, 2}), node(1): workload.units_of({3, 4, 5}),
        node(2): workload.units_of({6, 7, 8}), node(3): frozenset(),
    }
    places = [workload.units_of(layers) for layers in ({0, 1}, {2, 3}, {4, 5}, {6, 7, 8})]
    nodes = [node(number) for number in range(4)]
    cost = lacking_bytes(places, nodes, workload, holds)
    chosen = assign(places, nodes, workload, holds)
    total = sum(cost[nodes.index(member), place] for place, member in enumerate(chosen))
    assert total == min(sum(cost[row, place] for place, row in enumerate(rows)) for rows in permutations(range(4))) == 2
    assert cost.tolist() == [[0, 1, 2, 3], [2, 1, 0, 3], [2, 2, 2, 0], [2, 2, 2, 3]]
    assert chosen == [node(0), node(3), node(1), node(2)]


def test_eight_nodes_become_two_pipelines_of_four_when_cores_are_shared() -> None:
    workload = workload_of(8, 8, optimizer_s=0.5)
    found = best_plans([node(k) for k in range(8)], workload, cluster_of(8, cores=2), FREE)
    assert [len(route) for route in found[0].pipelines()] == [4, 4]
    assert len({plan.hash() for plan in found}) == len(found)


def test_plans_come_by_predicted_step_time() -> None:
    workload, cluster = workload_of(8, 16), cluster_of(7)
    seconds = [step_seconds(plan, workload, cluster) for plan in best_plans(list(cluster.nodes), workload, cluster, FREE)]
    assert seconds == sorted(seconds) and len(seconds) > 1


def test_a_layout_that_survives_every_single_loss_comes_before_any_other() -> None:
    found = best_plans([node(0), node(1)], workload_of(4, 8), cluster_of(2, cores=1), FREE)
    assert all(len(plan.holders(layer)) == 2 for plan in found for layer in range(4))


def test_nodes_stay_idle_where_no_faster_layout_uses_them() -> None:
    workload = workload_of(2, 2)
    found = best_plans([node(k) for k in range(7)], workload, cluster_of(7), FREE)
    assert found and all(len(plan.spares) >= 3 for plan in found)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 7), st.integers(1, 10), st.integers(20, 120))
def test_whatever_is_found_may_run_and_fits(num_nodes: int, num_layers: int, each: int, cap: int) -> None:
    workload = workload_of(num_layers, each, state_bytes=9, gradient_bytes=3, activation_bytes=2)
    cluster = cluster_of(num_nodes, memory_bytes=cap)
    for plan in best_plans(list(cluster.nodes), workload, cluster, FREE):
        assert plans.problems(plan, view_of(plan), num_layers) == []
        assert len(plan.routes) == each
        assert max(node_bytes(plan, workload).values()) <= cap


def test_pipelines_are_no_longer_than_max_stages() -> None:
    found = best_plans([node(k) for k in range(6)], workload_of(6, 12), cluster_of(6), PlannerConfig(max_stages=2))
    assert max(len(route) for plan in found for route in plan.routes) == 2


def test_a_limit_for_all_workers_bounds_the_activations_that_a_node_may_hold() -> None:
    """Their own memory is larger: what they may hold beside their state follows from the smaller of the two."""
    workload = workload_of(4, 8, state_bytes=9, gradient_bytes=1, activation_bytes=2)
    cluster, limit = cluster_of(4, memory_bytes=1000), PlannerConfig(worker_memory_bytes=30)
    found = best_plans(list(cluster.nodes), workload, cluster, limit)
    assert found
    assert all(max(node_bytes(plan, workload).values()) <= 30 for plan in found)


def test_memory_makes_pipelines_longer() -> None:
    workload = workload_of(4, 8, state_bytes=9, gradient_bytes=1, activation_bytes=0)
    tight = PlannerConfig(worker_memory_bytes=10)
    assert {len(route) for route in best_plans([node(k) for k in range(8)], workload, cluster_of(8), tight)[0].routes} == {4}


def test_what_does_not_fit_says_so_for_each_number_of_stages() -> None:
    workload = workload_of(2, 4, state_bytes=24_000_000, gradient_bytes=8_000_000)
    config = PlannerConfig(worker_memory_bytes=16_000_000)
    error = why_nothing_fits([node(k) for k in range(3)], workload, cluster_of(3), config)
    assert error.rejected == {
        "1 stage": "n0 needs 64.0 MB of 16.0 MB", "2 stages": "n0 needs 32.0 MB of 16.0 MB",
        "3 stages": "3 stages but only 2 layers",
    }
    with pytest.raises(InfeasibleError, match=r"n0 needs 32\.0 MB of 16\.0 MB"):
        first_plan([node(k) for k in range(3)], workload, cluster_of(3), config)


@pytest.mark.parametrize("workload", ["workload-gpt-6.7b", "workload-gpt-1.3b"])
def test_one_node_more_never_makes_the_step_of_the_first_plan_longer(workload: str) -> None:
    """Messages and sums counted; what is not needed stays idle."""
    cluster, job = files.load_cluster("cluster-32"), files.load_workload(workload)
    steps = []
    for count in range(26, 33):
        some = replace(cluster, nodes=dict(list(cluster.nodes.items())[:count]))
        steps.append(first_plan(tuple(some.nodes), job, some, PlannerConfig(), split="auto").candidate.step_s)
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(steps)), steps


def test_the_first_plan_leaves_as_many_nodes_idle_as_are_asked_for() -> None:
    decision = first_plan([node(k) for k in range(5)], workload_of(4, 8), cluster_of(5), FREE, idle=1)
    assert len(decision.plan.spares) == 1
    assert decision.candidate.way == "start"


def test_backward_is_split_when_devices_are_own_and_it_is_faster() -> None:
    workload, nodes = workload_of(8, 4), [node(k) for k in range(8)]
    tight = PlannerConfig(worker_memory_bytes=130)
    assert first_plan(nodes, workload, cluster_of(8), tight, split="auto").plan.order.split
    assert not first_plan(nodes, workload, cluster_of(8, cores=2), tight, split="auto").plan.order.split
    assert first_plan(nodes, workload, cluster_of(8, cores=2), tight, split="on").plan.order.split
    assert not first_plan(nodes, workload, cluster_of(8), tight, split="off").plan.order.split


def test_the_order_of_a_plan_is_the_one_that_was_asked_for() -> None:
    found = best_plans([node(0)], workload_of(2, 2), cluster_of(1), FREE, order=Order(split=True))
    assert found[0].order == Order(split=True)


def test_names_of_nodes_do_not_choose_the_layout() -> None:
    workload, cluster = workload_of(6, 6), cluster_of(9)
    low = best_plans([node(k) for k in range(5)], workload, cluster, FREE)[0]
    high = best_plans([node(k) for k in range(4, 9)], workload, cluster, FREE)[0]
    assert [[(hop.first, hop.end) for hop in route] for route in low.routes] == [
        [(hop.first, hop.end) for hop in route] for route in high.routes
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.lists(st.integers(0, 5), min_size=6, max_size=6),
    st.integers(1, 6), st.integers(1, 12),
)
def test_what_is_said_to_be_enough_memory_is(held: list[int], active: list[int], num_nodes: int, micro_batches: int) -> None:
    workload = workload_of(len(held), micro_batches)
    layers = tuple(replace(layer, activation_bytes=size) for layer, size in zip(workload.layers, active, strict=False))
    units = {
        name: replace(unit, state_bytes=size, gradient_bytes=0)
        for (name, unit), size in zip(workload.units.items(), held, strict=True)
    }
    workload = replace(workload, layers=layers, units=units)
    nodes = [node(k) for k in range(num_nodes)]
    error = why_nothing_fits(nodes, workload, cluster_of(num_nodes), PlannerConfig(worker_memory_bytes=1))
    (said,) = re.findall(r"It would fit with (.*) on every node", str(error))
    assert best_plans(nodes, workload, cluster_of(num_nodes), PlannerConfig(worker_memory_bytes=parse_bytes(said)))


@st.composite
def plain_plans(draw: st.DrawFn) -> Plan:
    """Pipelines that share no node, some of them alike, and idle nodes."""
    num_layers = draw(st.integers(1, 4))
    edges_of = st.sets(st.integers(1, num_layers)).map(lambda some: sorted(some | {0, num_layers}))
    cuts = draw(st.lists(edges_of, min_size=1, max_size=4))
    placement: dict[NodeId, tuple[int, ...]] = {}
    routes: list[Route] = []
    for edges in [*cuts, *cuts[:draw(st.integers(0, 2))]]:
        hops = []
        for first, end in pairwise(edges):
            hops.append(Hop(node(len(placement)), first, end))
            placement[hops[-1].node] = tuple(range(first, end))
        routes.append(tuple(hops))
    for _ in range(draw(st.integers(0, 2))):
        placement[node(len(placement))] = ()
    taken = [*routes, *draw(st.lists(st.sampled_from(routes), max_size=6))]
    order = Order(split=draw(st.booleans()), extra_slots=draw(st.integers(0, 2)), staggered=draw(st.booleans()))
    return Plan(num_layers=num_layers, placement=placement, routes=tuple(taken), order=order)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.one_of(plain_plans(), any_plan()))
def test_a_remembered_price_is_the_price_of_a_plan_with_other_names(data: st.DataObject, plan: Plan) -> None:
    """Priced under other names first, so that what is remembered is asked for."""
    workload = workload_of(
        plan.num_layers, len(plan.routes), seconds=[1.0 + 0.5 * layer for layer in range(plan.num_layers)],
        output_bytes=data.draw(st.sampled_from([0, 7])), optimizer_s=0.25,
    )
    names = dict(zip(plan.nodes, data.draw(st.permutations(plan.nodes)), strict=True))
    cluster = cluster_of(
        len(plan.nodes), link=Link(alpha_s=0.01, bytes_per_s=100.0), memory_bytes=data.draw(st.sampled_from([None, 170, 400])),
    )
    limit = data.draw(st.sampled_from([None, 300]))
    priced(renamed(plan, names), workload, cluster, limit)
    assert priced(plan, workload, cluster, limit) == priced_anew(plan, workload, cluster, limit)


def test_plain_pipelines_on_nodes_that_are_alike_are_priced_once() -> None:
    workload, cluster = workload_of(4, 8), cluster_of(5, memory_bytes=500)
    plan = best_plans(list(cluster.nodes), workload, cluster, FREE)[0]
    one = priced(plan, workload, cluster)
    other = priced(renamed(plan, {node(0): node(4), node(4): node(0)}), workload, cluster)
    assert one.step_s is other.step_s
