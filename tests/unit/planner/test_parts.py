"""Plans cut into parts that share no node, and what is alike looked at together: against looking at each alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.plan import Hop, Plan, Route
from everstep.planner.step.parts import (
    Held,
    alike,
    grouped,
    holders,
    holders_by_unit,
    kinds_of,
    parts,
    units_by_layers,
)
from everstep.quantities import NodeId, UnitName
from everstep.workload import Unit

from .worlds import grid_plan, node, plans, workload_of

TIED = replace(
    workload_of(3, 2, state_bytes=30, gradient_bytes=10),
    units={
        UnitName("tie"): Unit(name=UnitName("tie"), layers=(0, 2), parameter_bytes=4, state_bytes=12, gradient_bytes=4),
        UnitName("middle"): Unit(name=UnitName("middle"), layers=(1,), parameter_bytes=1, state_bytes=3, gradient_bytes=1),
    },
)


def hops(*parts: tuple[int, int, int]) -> Route:
    return tuple(Hop(node(number), first, end) for number, first, end in parts)


def again(route: Route) -> Route:
    """The same route as another object."""
    return tuple(replace(hop) for hop in route)


A, B = hops((0, 0, 1), (1, 1, 2)), hops((2, 0, 1), (3, 1, 2))
CROSSED = hops((0, 0, 1), (3, 1, 2))


def test_equal_routes_are_one_whether_or_not_they_are_one_object() -> None:
    found = grouped((A, B, again(A), B, A))
    assert found == {A: (0, 2, 4), B: (1, 3)}
    assert list(found) == [A, B]


def test_routes_that_share_a_node_are_one_part() -> None:
    assert [part.routes for part in parts(Plan(num_layers=2, placement={}, routes=(A, B)))] == [(A,), (B,)]
    (part,) = parts(Plan(num_layers=2, placement={}, routes=(A, B, CROSSED, A)))
    assert set(part.routes) == {A, B, CROSSED}
    assert set(part.nodes) == {node(k) for k in range(4)}
    assert not part.is_plain
    assert part.in_order() == [(0, A), (1, B), (2, CROSSED), (3, A)]


def test_only_the_first_micro_batches_may_be_looked_at() -> None:
    plan = Plan(num_layers=2, placement={}, routes=(A, B, CROSSED))
    assert [part.is_plain for part in parts(plan, 2)] == [True, True]
    assert [part.is_plain for part in parts(plan, 3)] == [False]
    assert parts(plan, 0) == ()


def connected(routes: Sequence[Route]) -> set[frozenset[NodeId]]:
    """Sets of nodes that routes join, by putting together what touches until nothing does."""
    sets = [{hop.node for hop in route} for route in routes]
    merged = True
    while merged:
        merged = False
        for one in sets:
            for other in sets:
                if one is not other and one & other:
                    one |= other
                    sets.remove(other)
                    merged = True
                    break
            if merged:
                break
    return set(map(frozenset, sets))


@settings(max_examples=150, deadline=None)
@given(plans())
def test_parts_are_the_sets_of_nodes_that_routes_join(plan: Plan) -> None:
    found = parts(plan)
    assert {frozenset(part.nodes) for part in found} == connected(plan.routes)
    taken = sorted((pair for part in found for pair in part.in_order()), key=lambda pair: pair[0])
    assert taken == list(enumerate(plan.routes))
    firsts = [min(part.in_order())[0] for part in found]
    assert firsts == sorted(firsts)


@settings(max_examples=150, deadline=None)
@given(plans())
def test_every_route_knows_its_number_among_the_distinct_ones(plan: Plan) -> None:
    routes = tuple(again(route) if number % 2 else route for number, route in enumerate(plan.routes))
    found = grouped(routes)
    assert [found.routes[found.number[id(route)]] for route in routes] == list(plan.routes)
    assert len(set(found.routes)) == len(found.routes)
    for number, route in enumerate(routes):
        assert number in found.micro_batches[found.number[id(route)]]


@settings(max_examples=150, deadline=None)
@given(plans())
def test_pipelines_of_one_shape_are_put_together_and_nothing_else(plan: Plan) -> None:
    shapes, others = alike(plan.routes)
    plain = [part for part in parts(plan) if part.is_plain]
    assert sorted(others, key=str) == sorted((part for part in parts(plan) if not part.is_plain), key=str)
    assert sorted(str(route) for shape in shapes for route in shape.routes) == sorted(str(part.routes[0]) for part in plain)
    counts = {part.routes[0]: len(part.micro_batches[0]) for part in plain}
    for shape in shapes:
        cuts = {tuple((hop.first, hop.end) for hop in route) for route in shape.routes}
        assert len(cuts) == 1
        assert {counts[route] for route in shape.routes} == {shape.num_micro_batches}
        assert shape.nodes == tuple(hop.node for route in shape.routes for hop in route)


def test_a_grid_is_one_shape() -> None:
    shapes, others = alike(grid_plan(4, 3, 2).routes)
    assert [(len(shape.routes), shape.num_micro_batches) for shape in shapes] == [(4, 2)]
    assert others == ()


def test_nodes_are_told_apart_by_what_they_hold_and_where_asked_by_speed() -> None:
    plan = grid_plan(2, 2, 1)
    assert holders(plan.placement) == {(0,): [node(0), node(2)], (1,): [node(1), node(3)]}
    assert kinds_of(plan) == {((0,), 1.0): [node(0), node(2)], ((1,), 1.0): [node(1), node(3)]}
    speeds = {node(k): 0.5 if k == 2 else 1.0 for k in range(4)}
    assert kinds_of(plan, speeds) == {
        ((0,), 1.0): [node(0)], ((0,), 0.5): [node(2)], ((1,), 1.0): [node(1), node(3)],
    }


def test_a_tie_group_is_held_by_whoever_holds_one_of_its_layers() -> None:
    kinds = [((0,), 1.0), ((1,), 1.0), ((2,), 1.0), ((), 1.0), ((0, 1), 1.0)]
    assert holders_by_unit(kinds, TIED) == {UnitName("tie"): (0, 2, 4), UnitName("middle"): (1, 4)}
    assert units_by_layers([(0, 2), (1,), ()], TIED) == {(0, 2): {"tie"}, (1,): {"middle"}, (): frozenset()}


@given(st.sets(st.integers(0, 2)).map(sorted).map(tuple))
def test_what_is_held_is_what_the_workload_says(layers: tuple[int, ...]) -> None:
    held = Held.of(TIED)
    assert held.units(layers) == TIED.units_of(set(layers))
    assert held.held_bytes(layers) == TIED.held_bytes(set(layers))


def test_what_is_held_is_asked_of_each_workload_by_itself() -> None:
    other = replace(TIED, units={name: replace(unit, state_bytes=100) for name, unit in TIED.units.items()})
    assert (Held.of(TIED).held_bytes((1,)), Held.of(other).held_bytes((1,))) == (4, 101)
