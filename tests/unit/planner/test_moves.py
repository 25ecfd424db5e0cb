"""Every node gets what it lacks, from holders in turn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import transfer
from everstep.cluster import Cluster, Link, Node
from everstep.errors import InfeasibleError
from everstep.plan import Hop, Plan
from everstep.planner.step.cost import stall_seconds
from everstep.planner.step.moves import moves_for
from everstep.quantities import HostId, NodeId, SiteId, UnitName
from everstep.transfer import Load, Move
from everstep.workload import Workload

from .worlds import FREE_LINK, node, workload_of


def test_holders_take_turns() -> None:
    workload = workload_of(4, 1, state_bytes=30)
    everything = workload.units_of({0, 1, 2, 3})
    plan = Plan(
        num_layers=4, placement={node(k): (0, 1, 2, 3) for k in range(3)}, routes=((Hop(node(0), 0, 4),),),
    )
    moves, loads = moves_for(plan, {node(0): everything, node(1): everything, node(2): frozenset()}, workload)
    assert loads == ()
    assert [move.source for move in moves].count(node(0)) == [move.source for move in moves].count(node(1)) == 2


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_moves_are_right_and_enough(data: st.DataObject) -> None:
    num_layers, num_nodes = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    workload = workload_of(num_layers, 1, state_bytes=10)
    subsets = st.frozensets(st.integers(0, num_layers - 1))
    holds = {node(k): workload.units_of(data.draw(subsets)) for k in range(num_nodes)} | {
        node(num_nodes): workload.units_of(set(range(num_layers)))
    }
    placement = {member: tuple(sorted(data.draw(subsets))) for member in holds}
    plan = Plan(num_layers=num_layers, placement=placement, routes=())
    moves, _ = moves_for(plan, holds, workload)
    assert transfer.problems(moves, holds) == []
    for member, layers in placement.items():
        gained = {move.unit for move in moves if move.target == member}
        assert workload.units_of(frozenset(layers)) <= holds[member] | gained


def test_a_restore_loads_everything_also_what_is_held() -> None:
    workload = workload_of(2, 1)
    plan = Plan(num_layers=2, placement={node(0): (0, 1)}, routes=((Hop(node(0), 0, 2),),))
    moves, loads = moves_for(plan, {node(0): workload.units_of({0, 1})}, workload, restore=True)
    assert (moves, loads) == ((), (Load(UnitName("l0"), node(0)), Load(UnitName("l1"), node(0))))


def test_a_unit_without_a_holder_is_named() -> None:
    plan = Plan(num_layers=2, placement={node(0): (0, 1)}, routes=((Hop(node(0), 0, 2),),))
    with pytest.raises(InfeasibleError, match="no living holder of l1") as caught:
        moves_for(plan, {node(0): frozenset({UnitName("l0")})}, workload_of(2, 1))
    assert caught.value.rejected == {"l1": "no living holder"}


def test_who_is_not_in_the_plan_is_no_source() -> None:
    plan = Plan(num_layers=1, placement={node(0): (0,), node(1): (0,)}, routes=((Hop(node(0), 0, 1),),))
    unit = frozenset({UnitName("l0")})
    moves, _ = moves_for(plan, {node(0): frozenset(), node(1): unit, node(2): unit}, workload_of(1, 1, state_bytes=30))
    assert moves == (Move(UnitName("l0"), node(1), node(0), 30),)


EAST, WEST = SiteId("east"), SiteId("west")


def over_two_sites(line: Link, link: Link = FREE_LINK, host_link: Link | None = None) -> Cluster:
    """``n0`` and ``n1`` in the east, ``n2`` and ``n3`` in the west, a host at each."""
    sites = [EAST, EAST, WEST, WEST]
    return Cluster(
        nodes={node(k): Node(node_id=node(k), host=HostId(site), site=site) for k, site in enumerate(sites)}, link=link,
        host_link=host_link, site_links={(EAST, WEST): line},
    )


def held_by(workload: Workload, *holders: int) -> dict[NodeId, frozenset[UnitName]]:
    everything = workload.units_of(set(range(workload.num_layers)))
    return {node(k): everything if k in holders else frozenset() for k in range(4)}


def test_state_comes_from_the_same_site_where_somebody_there_has_it() -> None:
    workload = workload_of(4, 1, state_bytes=30)
    plan = Plan(
        num_layers=4, placement={node(k): (0, 1, 2, 3) for k in range(4)}, routes=((Hop(node(0), 0, 4),),),
    )
    cluster = over_two_sites(Link(alpha_s=5.0, bytes_per_s=1.0))
    moves, _ = moves_for(plan, held_by(workload, 0, 2), workload, cluster=cluster)
    assert {(move.source, move.target) for move in moves} == {(node(0), node(1)), (node(2), node(3))}
    without, _ = moves_for(plan, held_by(workload, 0, 2), workload)
    assert stall_seconds(moves, cluster) < stall_seconds(without, cluster)


def test_a_link_between_sites_helps_where_near_holders_are_the_slower_way() -> None:
    """Each of four units takes a second from n0 beside n1, and a second over the line: two each."""
    workload = workload_of(4, 1, state_bytes=10)
    plan = Plan(num_layers=4, placement={node(k): (0, 1, 2, 3) for k in (0, 1, 2, 3)}, routes=((Hop(node(0), 0, 4),),))
    cluster = over_two_sites(Link(alpha_s=0.0, bytes_per_s=10.0), Link(alpha_s=0.0, bytes_per_s=10.0))
    moves, _ = moves_for(plan, held_by(workload, 0, 2, 3), workload, cluster=cluster)
    assert sorted(move.source == node(0) for move in moves) == [False, False, True, True]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_moves_are_right_and_enough_where_links_differ(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 5))
    workload = workload_of(num_layers, 1, state_bytes=10)
    subsets = st.frozensets(st.integers(0, num_layers - 1))
    holds = {node(k): workload.units_of(data.draw(subsets)) for k in range(4)}
    placement = {node(k): tuple(sorted(data.draw(subsets))) for k in range(4)}
    wanted = {name: workload.units_of(set(layers)) for name, layers in placement.items()}
    plan = Plan(num_layers=num_layers, placement=placement, routes=())
    cluster = over_two_sites(Link(alpha_s=1.0, bytes_per_s=1.0), host_link=data.draw(st.none() | st.just(FREE_LINK)))
    try:
        moves, _ = moves_for(plan, holds, workload, cluster=cluster)
    except InfeasibleError:
        assert frozenset().union(*wanted.values()) - frozenset().union(*holds.values())
        return
    assert transfer.problems(moves, dict(holds)) == []
    gained = {name: {move.unit for move in moves if move.target == name} for name in holds}
    assert all(wanted[name] <= holds[name] | gained[name] for name in holds)
    site = {name: facts.site for name, facts in cluster.nodes.items()}
    crossing = {move.source for move in moves if site[move.source] != site[move.target]}
    for move in moves:
        near = {name for name in holds if site[name] == site[move.target] and move.unit in holds[name]}
        assert site[move.source] == site[move.target] or near <= crossing, "somebody near is idle"
