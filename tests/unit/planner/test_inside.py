"""Pipelines stay inside a site: the search, what is rerouted, and what is proposed after a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import plan as plans
from everstep.cluster import Cluster, Link, Node, site_pair
from everstep.config import PlannerConfig
from everstep.errors import InfeasibleError
from everstep.plan import Plan
from everstep.planner.layouts.search import best_plans
from everstep.planner.routes.inside import crossing, routes_inside
from everstep.planner.step.memory import node_bytes
from everstep.planner.whatif import running, what_if
from everstep.quantities import HostId, NodeId, SiteId
from everstep.view import Member, View

from .worlds import FREE_LINK, grid_plan, node, workload_of

FREE = PlannerConfig()
EAST, WEST = SiteId("east"), SiteId("west")
SLOW = Link(alpha_s=0.5, bytes_per_s=1e3)


def two_sites(
    at: Sequence[int], *, memory_bytes: Sequence[int | None] = (None, None), slow: Link = SLOW,
    speeds: Sequence[float] = (1.0, 1.0),
) -> Cluster:
    """Nodes ``n0``, ``n1``, …: ``at`` says how many are in the east and how many in the west."""
    nodes: dict[NodeId, Node] = {}
    for count, site, cap, speed in zip(at, (EAST, WEST), memory_bytes, speeds, strict=True):
        for _ in range(count):
            name = node(len(nodes))
            nodes[name] = Node(node_id=name, host=HostId(site), site=site, memory_bytes=cap, speed=speed)
    return Cluster(nodes=nodes, link=FREE_LINK, site_links={site_pair(EAST, WEST): slow})


def sites_of(plan: Plan, cluster: Cluster) -> list[list[SiteId]]:
    """By pipeline the site of each hop."""
    return [[cluster.nodes[hop.node].site for hop in route] for route in plan.pipelines()]


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(any), st.integers(1, 5), st.integers(1, 8),
    st.tuples(st.sampled_from([None, 60, 110]), st.sampled_from([None, 60, 110])),
)
def test_no_pipeline_is_at_two_sites_unless_none_fits_into_one(
    at: tuple[int, int], num_layers: int, each: int, caps: tuple[int | None, int | None],
) -> None:
    workload = workload_of(num_layers, each, state_bytes=30, gradient_bytes=10)
    cluster = two_sites(at, memory_bytes=caps)
    alone = [
        best_plans([name for name, facts in cluster.nodes.items() if facts.site == site], workload, cluster, FREE)
        for site, count in zip((EAST, WEST), at, strict=True) if count
    ]
    found = best_plans(list(cluster.nodes), workload, cluster, FREE)
    for plan in found:
        assert plans.problems(plan, View(1, tuple(Member(name) for name in plan.nodes)), num_layers) == []
        for name, num_bytes in node_bytes(plan, workload).items():
            assert num_bytes <= (cluster.nodes[name].memory_bytes or num_bytes)
        crossings = [sum(a != b for a, b in pairwise(sites)) for sites in sites_of(plan, cluster)]
        assert crossings == [0] * len(crossings) if any(alone) else crossings == [1]


def test_one_pipeline_spans_sites_in_one_run_each_where_neither_has_room_for_it() -> None:
    workload = workload_of(6, 4, state_bytes=30, gradient_bytes=10, activation_bytes=0)
    cluster = two_sites((3, 2), memory_bytes=(55, 55))  # a layer takes 40, and there are six
    with pytest.raises(InfeasibleError):
        running(cluster, workload, FREE)
    cluster = two_sites((4, 3), memory_bytes=(55, 55))
    (plan, *_) = best_plans(list(cluster.nodes), workload, cluster, FREE)
    assert sites_of(plan, cluster) == [[EAST] * 4 + [WEST] * 2]


def test_a_site_whose_sums_would_cost_more_than_its_nodes_are_worth_is_left_alone() -> None:
    workload = workload_of(2, 8, gradient_bytes=1000)
    for slow, used in ((SLOW, {EAST}), (FREE_LINK, {EAST, WEST})):
        cluster = two_sites((4, 1), slow=slow)
        plan = best_plans(list(cluster.nodes), workload, cluster, FREE)[0]
        assert set().union(*sites_of(plan, cluster)) == used


def test_a_site_of_slower_nodes_gets_less_of_the_batch() -> None:
    workload = workload_of(2, 9)
    cluster = two_sites((2, 2), slow=FREE_LINK, speeds=(2.0, 1.0))
    plan = best_plans(list(cluster.nodes), workload, cluster, FREE)[0]
    shares = {EAST: 0, WEST: 0}
    for route, members in plan.pipelines().items():
        shares[cluster.nodes[route[0].node].site] += len(members)
    assert shares[EAST] > shares[WEST] > 0


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_is_rerouted_stays_inside_a_site_that_holds_all_layers(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, 3))
    plan = grid_plan(4, num_stages, 2)
    sites = {name: EAST if number < 2 * num_stages else WEST for number, name in enumerate(plan.nodes)}
    lost = data.draw(st.sets(st.sampled_from(plan.nodes), max_size=len(plan.nodes) - 1))
    available = {name: frozenset(layers) for name, layers in plan.placement.items() if name not in lost}
    workload = workload_of(num_stages, 8)
    found = routes_inside(plan.routes, available, workload, dict.fromkeys(available, 1.0), sites)
    held = {
        site: frozenset[int]().union(*(layers for name, layers in available.items() if sites[name] == site))
        for site in (EAST, WEST)
    }
    whole = {site for site, layers in held.items() if len(layers) == num_stages}
    if not whole:
        assert found is None or all(hop.node in available for route in found for hop in route)
        return
    assert found is not None and len(found) == len(plan.routes)
    for before, route in zip(plan.routes, found, strict=True):
        assert [layer for hop in route for layer in hop.layers] == list(range(num_stages))
        assert all(hop.node in available for hop in route)
        assert len({sites[hop.node] for hop in route}) == 1 and sites[route[0].node] in whole
        if sites[before[0].node] in whole:
            assert sites[route[0].node] == sites[before[0].node]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_after_any_losses_nothing_is_proposed_across_sites_that_could_be_inside(data: st.DataObject) -> None:
    workload = workload_of(3, 8)
    cluster = two_sites((4, 4), slow=FREE_LINK)
    start = running(cluster, workload, FREE)
    lost = tuple(data.draw(st.sets(st.sampled_from(sorted(cluster.nodes)), min_size=1, max_size=6)))
    answer = what_if(cluster, workload, FREE, lose=lost, start=start)
    feasible = [candidate for candidate in answer.candidates if candidate.plan is not None]
    assert all(crossing(candidate.plan, cluster) is None for candidate in feasible if candidate.plan)
    assert crossing(answer.plan, cluster) is None


def test_with_one_site_left_nothing_is_different_from_a_cluster_without_sites() -> None:
    workload = workload_of(4, 8)
    east = two_sites((5, 0))
    plain = replace(east, site_links={})
    assert [plan.hash() for plan in best_plans(list(east.nodes), workload, east, FREE)] == [
        plan.hash() for plan in best_plans(list(plain.nodes), workload, plain, FREE)
    ]
