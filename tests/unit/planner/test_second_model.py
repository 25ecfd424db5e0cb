"""The cost model and memory against a second model that plays the step event by event: random cases, and cases by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import cluster as clusters
from everstep.cluster import Cluster, Link, Node, site_pair
from everstep.plan import Hop, Order, Plan
from everstep.planner.step.cost import overlapped_seconds, site_seconds, stall_seconds, step_seconds
from everstep.planner.step.memory import needed_bytes, node_bytes
from everstep.planner.step.pace import pace
from everstep.planner.step.schedules import order_of
from everstep.quantities import HostId, NodeId, SiteId, UnitName
from everstep.transfer import Move
from everstep.workload import Beside, LayerCost, Unit, Workload

from .second_model import Step
from .worlds import FREE_LINK, cluster_of, grid_plan, node, plans, workload_of

EAST, WEST = SiteId("east"), SiteId("west")
UNIT = UnitName("l0")


@st.composite
def clusters_for(draw: st.DrawFn, nodes: tuple[NodeId, ...]) -> Cluster:
    """Nodes of any speed, on up to four hosts at up to three sites, with links of any kind."""
    links = st.builds(
        Link, alpha_s=st.sampled_from([0.0, 0.01, 0.5]), bytes_per_s=st.sampled_from([1.0, 3.0, 50.0, 1e9]),
    )
    hosts = [HostId(f"h{number}") for number in range(draw(st.integers(1, 4)))]
    sites = {host: SiteId(draw(st.sampled_from(["a", "b", "c"]))) for host in hosts}
    made = {}
    for name in nodes:
        host = draw(st.sampled_from(hosts))
        made[name] = Node(node_id=name, host=host, site=sites[host], speed=draw(st.sampled_from([1.0, 1.0, 0.5, 2.0])))
    present = sorted({facts.site for facts in made.values()})
    found = Cluster(
        nodes=made, link=draw(links), host_link=draw(st.none() | links),
        host_cores={host: draw(st.sampled_from([None, None, 1, 2])) for host in hosts},
        site_links={site_pair(one, other): draw(links) for k, one in enumerate(present) for other in present[k + 1:]},
    )
    assert clusters.problems(found) == []
    return found


@st.composite
def workloads_for(draw: st.DrawFn, num_layers: int, num_micro_batches: int) -> Workload:
    seconds, sizes = st.sampled_from([0.0, 0.25, 1.0, 3.0]), st.sampled_from([0, 1, 7, 40])
    layers = tuple(
        LayerCost(
            name=f"l{index}", forward_s=draw(seconds), backward_input_s=draw(seconds), backward_weight_s=draw(seconds),
            output_bytes=draw(sizes), optimizer_s=draw(seconds), activation_bytes=draw(sizes),
        )
        for index in range(num_layers)
    )
    users = {UnitName(f"l{index}"): (index,) for index in range(num_layers)}
    if num_layers > 1 and draw(st.booleans()):
        users[UnitName("tie")] = (0, num_layers - 1)
    units = {
        name: Unit(name=name, layers=used, parameter_bytes=draw(sizes), state_bytes=draw(sizes), gradient_bytes=draw(sizes))
        for name, used in users.items()
    }
    beside = Beside(node_s=draw(seconds), message_s=draw(seconds), summed_byte_s=draw(st.sampled_from([0.0, 0.1])))
    return Workload(
        layers=layers, units=units, num_micro_batches=num_micro_batches, fixed_s=draw(seconds), beside=beside, measured=True,
    )


def shadowed(hop: Hop, plan: Plan) -> st.SearchStrategy[Hop]:
    """``hop``, perhaps with somebody who holds its layers too as its shadow."""
    able = [name for name, layers in plan.placement.items() if name != hop.node and set(hop.layers) <= set(layers)]
    return st.sampled_from([hop, *(replace(hop, shadow=name) for name in able)])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Workload, Cluster]:
    plan = draw(plans())
    if draw(st.booleans()):
        plan = replace(plan, routes=tuple(tuple(draw(shadowed(hop, plan)) for hop in route) for route in plan.routes))
    return plan, draw(workloads_for(plan.num_layers, len(plan.routes))), draw(clusters_for(plan.nodes))


@settings(max_examples=120, deadline=None)
@given(cases())
def test_a_step_takes_as_long_as_when_it_is_played_event_by_event(case: tuple[Plan, Workload, Cluster]) -> None:
    plan, workload, cluster = case
    schedule = order_of(plan)
    played_s = Step(plan, workload, cluster, schedule).seconds()
    assert step_seconds(plan, workload, cluster) == pytest.approx(played_s)
    assert step_seconds(plan, workload, cluster, schedule) == pytest.approx(played_s)


@settings(max_examples=80, deadline=None)
@given(cases())
def test_memory_is_what_nodes_hold_at_once_when_it_is_played(case: tuple[Plan, Workload, Cluster]) -> None:
    plan, workload, cluster = case
    step = Step(plan, workload, cluster, order_of(plan))
    step.seconds()
    assert node_bytes(plan, workload) == step.peak_bytes
    assert needed_bytes(plan, workload, pace(plan, workload, cluster).active_bytes) == step.peak_bytes


@settings(max_examples=80, deadline=None)
@given(cases())
def test_so_does_one_whose_units_are_reduced_beside_the_work(case: tuple[Plan, Workload, Cluster]) -> None:
    plan, workload, cluster = case
    schedule = order_of(plan)
    played_s = Step(plan, workload, cluster, schedule, overlap=True).seconds()
    assert overlapped_seconds(plan, workload, cluster, schedule) == pytest.approx(played_s)


# By hand


def two_sites(num_each: int, *, line: Link, link: Link = FREE_LINK, host_link: Link | None = None) -> Cluster:
    """``n0``, ``n1``, … at one site, as many more at the other, each on a host of its own unless there is a ``host_link``."""
    nodes = {}
    for number in range(2 * num_each):
        site = EAST if number < num_each else WEST
        host = HostId(f"{site}" if host_link else f"h{number}")
        nodes[node(number)] = Node(node_id=node(number), host=host, site=site)
    return Cluster(nodes=nodes, link=link, host_link=host_link, site_links={(EAST, WEST): line})


def test_a_message_between_sites_takes_what_their_link_does() -> None:
    plan, workload = grid_plan(1, 2, 1), workload_of(2, 1, output_bytes=6, gradient_bytes=0)
    line = Link(alpha_s=0.5, bytes_per_s=2.0)
    assert step_seconds(plan, workload, two_sites(1, line=line)) == 2 * 3 + 2 * (0.5 + 6 / 2.0)
    near = cluster_of(2, link=Link(alpha_s=0.5, bytes_per_s=6.0))
    assert step_seconds(plan, workload, near) == 2 * 3 + 2 * (0.5 + 1)


def test_a_message_inside_a_host_takes_what_its_link_does() -> None:
    plan, workload = grid_plan(1, 2, 1), workload_of(2, 1, output_bytes=6, gradient_bytes=0)
    near = replace(cluster_of(2, link=Link(alpha_s=9.0)), host_link=Link(alpha_s=0.5, bytes_per_s=6.0))
    assert step_seconds(plan, workload, near) == 2 * 3 + 2 * (0.5 + 1)


def test_a_node_that_is_reached_from_near_and_from_far_waits_for_each_as_long_as_it_takes() -> None:
    """Micro-batch 1 comes to the last stage from the other site."""
    hops = [(Hop(node(0), 0, 1), Hop(node(1), 1, 2)), (Hop(node(2), 0, 1), Hop(node(1), 1, 2))]
    plan = Plan(num_layers=2, placement={node(0): (0,), node(1): (1,), node(2): (0,), node(3): ()}, routes=tuple(hops))
    workload = workload_of(2, 2, output_bytes=6, gradient_bytes=0)
    line = Link(alpha_s=4.0, bytes_per_s=6.0)
    # n1: F0 1-2, B0 2-4; F1 has come at 1 + 5 and is done at 7, B1 at 9; its gradient comes to n2 at 14, which takes 2.
    # n0 and n2 sum up layer 0: no bytes, but a message each way.
    assert step_seconds(plan, workload, two_sites(2, line=line)) == 16 + 2 * 4


def test_a_link_between_sites_is_shared_by_all_messages_of_a_step() -> None:
    """Two pipelines across: eight activations of 6 bytes one way and as many gradients the other, at a byte a second."""
    plan = Plan(
        num_layers=2, placement={node(0): (0,), node(1): (0,), node(2): (1,), node(3): (1,)},
        routes=tuple((Hop(node(m % 2), 0, 1), Hop(node(2 + m % 2), 1, 2)) for m in range(8)),
    )
    workload = workload_of(2, 8, output_bytes=6, gradient_bytes=0)
    cluster = two_sites(2, line=Link(alpha_s=0.0, bytes_per_s=1.0))
    assert site_seconds(plan, workload, cluster) == {(EAST, WEST): 48.0}
    assert step_seconds(plan, workload, cluster) == 48


def test_sums_across_sites_share_the_link_one_after_the_other() -> None:
    """A pipeline at each site, two layers: both groups cross, 10 bytes each way at 5 a second, once 4 s and once 2 s whole."""
    plan = Plan(
        num_layers=2, placement={node(0): (0,), node(1): (1,), node(2): (0,), node(3): (1,)},
        routes=((Hop(node(0), 0, 1), Hop(node(1), 1, 2)), (Hop(node(2), 0, 1), Hop(node(3), 1, 2))),
    )
    workload = workload_of(2, 2, gradient_bytes=10)
    # Last stages are through at 4, first stages at 6: 4 + 2, then 6 + 2.
    assert step_seconds(plan, workload, two_sites(2, line=Link(alpha_s=0.0, bytes_per_s=5.0))) == 8
    # At 1 a second the first sum takes from 4 to 14, the second from 14 to 24, and 0.5 each way for both rounds.
    assert step_seconds(plan, workload, two_sites(2, line=Link(alpha_s=0.5, bytes_per_s=1.0))) == 25


def test_what_crosses_of_a_sum_grows_with_the_members_on_both_sides() -> None:
    """Four members, two and two: each of two sends a quarter to each of two others, once as a part and once as a sum."""
    plan = grid_plan(4, 1, 1)
    workload = workload_of(1, 4, gradient_bytes=20)
    found = site_seconds(plan, workload, two_sites(2, line=Link(alpha_s=0.0, bytes_per_s=4.0)))
    assert found == {(EAST, WEST): 2 * 2 * 2 * 5 / 4.0}


def test_a_sum_inside_a_host_is_as_fast_as_its_link() -> None:
    plan, workload = grid_plan(2, 1, 1), workload_of(1, 2, gradient_bytes=10)
    fast = replace(cluster_of(2, link=Link(alpha_s=9.0)), host_link=Link(alpha_s=0.25, bytes_per_s=5.0))
    assert step_seconds(plan, workload, fast) == 3 + 2 * (1 / 2) * 10 / 5.0 + 2 * 0.25
    apart = replace(fast, nodes={**fast.nodes, node(1): replace(fast.nodes[node(1)], host=HostId("other"))})
    assert step_seconds(plan, workload, apart) > 9


def test_neighbours_in_a_chain_of_groups_reduce_in_two_rounds() -> None:
    """Six layers cut at 2, 4 and at 1, 3, 5: six groups of two nodes, 10 bytes each at 10 a second."""
    def route(first: int, cuts: list[int]) -> tuple[Hop, ...]:
        pairs = zip([0, *cuts], [*cuts, 6], strict=True)
        return tuple(Hop(node(first + index), begin, end) for index, (begin, end) in enumerate(pairs))

    routes = (route(0, [2, 4]), route(3, [1, 3, 5]))
    plan = Plan(num_layers=6, placement={hop.node: tuple(hop.layers) for way in routes for hop in way}, routes=routes)
    workload = workload_of(6, 2, seconds=[1e-9] * 6, gradient_bytes=10)
    cluster = cluster_of(7, link=Link(alpha_s=0.0, bytes_per_s=10.0))
    assert step_seconds(plan, workload, cluster) == pytest.approx(2.0)


def test_a_unit_that_is_whole_early_can_be_reduced_beside_later_work() -> None:
    """n0 and n1 hold both layers; the weight gradients of layer 1 are done before those of layer 0 begin."""
    routes = ((Hop(node(0), 0, 1), Hop(node(1), 1, 2)), (Hop(node(1), 0, 1), Hop(node(0), 1, 2)))
    plan = Plan(num_layers=2, placement={node(0): (0, 1), node(1): (0, 1)}, routes=routes)
    workload = workload_of(2, 2, gradient_bytes=10)
    cluster = cluster_of(2, link=Link(alpha_s=0.0, bytes_per_s=10.0))
    # F F at 1 and 2, backward of layer 1 until 4, of layer 0 until 6; each sum takes 1.
    assert step_seconds(plan, workload, cluster) == 6 + 2
    assert overlapped_seconds(plan, workload, cluster, order_of(plan)) == 6 + 1


def test_moves_take_what_their_links_do_and_share_the_one_between_sites() -> None:
    cluster = two_sites(
        2, line=Link(alpha_s=0.5, bytes_per_s=2.0), link=Link(alpha_s=9.0, bytes_per_s=5.0),
        host_link=Link(alpha_s=0.1, bytes_per_s=10.0),
    )
    near = Move(UNIT, node(0), node(1), 10)
    assert stall_seconds([near], cluster, switch_s=0.25) == pytest.approx(0.25 + 1.1)
    far = [Move(UNIT, node(0), node(2), 10), Move(UNIT, node(1), node(3), 10)]
    assert stall_seconds(far[:1], cluster, switch_s=0.0) == 0.5 + 5
    assert stall_seconds(far, cluster, switch_s=0.0) == 0.5 + 10
    there_and_back = [far[0], Move(UNIT, node(3), node(1), 10)]
    assert stall_seconds(there_and_back, cluster, switch_s=0.0) == 0.5 + 5
    assert stall_seconds([near, far[0]], cluster, switch_s=0.0) == pytest.approx(1.1 + 5.5)


@pytest.mark.parametrize("order", [Order(), Order(split=True), Order(split=True, extra_slots=2)])
def test_links_that_are_all_alike_are_as_one(order: Order) -> None:
    plan = grid_plan(2, 3, 4, order=order, lost=[(0, 1)])
    workload = workload_of(3, 8, output_bytes=3, gradient_bytes=5, optimizer_s=0.5)
    link = Link(alpha_s=0.25, bytes_per_s=4.0)
    one = cluster_of(6, link=link)
    assert step_seconds(plan, workload, replace(one, host_link=link)) == pytest.approx(step_seconds(plan, workload, one))
