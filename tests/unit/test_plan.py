"""A plan is whole or its faults are found: by a function that did not make it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.plan import Hop, Order, Plan, even_placement, problems
from everstep.quantities import NodeId
from everstep.view import Member, View
from tests.untimed import UNTIMED


def n(number: int) -> NodeId:
    return NodeId(f"n{number}")


def view_of(plan: Plan, number: int = 1) -> View:
    return View(number, tuple(Member(node) for node in plan.nodes))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Pipelines of any cuts, with spares and extra layers held."""
    num_layers = draw(st.integers(1, 6))
    routes, placement, number = [], {}, 0
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, num_layers - 1), max_size=3))) if num_layers > 1 else []
        bounds = [0, *cuts, num_layers]
        hops = []
        for first, end in itertools.pairwise(bounds):
            extra = draw(st.sets(st.integers(0, num_layers - 1), max_size=2))
            placement[n(number)] = tuple(sorted({*range(first, end), *extra}))
            hops.append(Hop(n(number), first, end))
            number += 1
        routes += [tuple(hops)] * draw(st.integers(1, 2))
    for _ in range(draw(st.integers(0, 2))):
        placement[n(number)] = ()
        number += 1
    return Plan(num_layers=num_layers, placement=placement, routes=tuple(routes), order=Order(split=draw(st.booleans())))


@given(plans())
@UNTIMED
def test_a_whole_plan_has_no_problems_and_survives_writing_down(plan: Plan) -> None:
    assert problems(plan, view_of(plan), plan.num_layers) == []
    again = msgspec.json.decode(msgspec.json.encode(plan), type=Plan)
    assert again == plan and again.hash() == plan.hash()


def with_hop(plan: Plan, micro_batch: int, index: int, **changes: Any) -> Plan:
    routes = [list(route) for route in plan.routes]
    routes[micro_batch][index] = replace(routes[micro_batch][index], **changes)
    return replace(plan, routes=tuple(tuple(route) for route in routes))


def with_layers(plan: Plan, layers: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Plan:
    return replace(plan, placement={**plan.placement, n(0): layers(plan.placement[n(0)])})


def without_layer(plan: Plan) -> Plan:
    held = {node: tuple(layer for layer in layers if layer != 0) for node, layers in plan.placement.items()}
    return replace(plan, placement=held)


FAULTS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "a layer too many": (lambda p: replace(p, num_layers=p.num_layers + 1), "the model has"),
    "nobody has a layer": (without_layer, "nobody holds layer 0"),
    "a layer outside": (lambda p: with_layers(p, lambda held: (*held, 99)), "n0 holds layers outside"),
    "a layer twice": (lambda p: with_layers(p, lambda held: (0, *held)), "ascending and once each"),
    "no routes": (lambda p: replace(p, routes=()), "the plan has no routes"),
    "an empty route": (lambda p: replace(p, routes=((), *p.routes)), "the route ends at layer 0"),
    "a gap": (lambda p: with_hop(p, 0, 0, first=1), "should begin at layer 0"),
    "a hop of nothing": (lambda p: with_hop(p, 0, 0, end=0), "should begin at layer 0"),
    "an end too far": (lambda p: with_hop(p, 0, -1, end=p.num_layers + 1), "the route ends at layer"),
    "a node from nowhere": (lambda p: with_hop(p, 0, 0, node=n(88)), "n88 does not hold all of"),
    "a shadow from nowhere": (lambda p: with_hop(p, 0, 0, shadow=n(88)), "n88 does not hold all of"),
    "a member too many": (lambda p: replace(p, placement={**p.placement, n(77): ()}), "n77 is in the plan, not in view 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
@given(plan=plans())
@UNTIMED
def test_a_planted_fault_is_found(fault: str, plan: Plan) -> None:
    plant, said = FAULTS[fault]
    found = problems(plant(plan), view_of(plan), plan.num_layers)
    assert any(said in problem for problem in found), found


@given(plans())
@UNTIMED
def test_a_member_of_the_view_that_the_plan_forgot_is_found(plan: Plan) -> None:
    view = View(4, (*view_of(plan).members, Member(n(99))))
    assert problems(plan, view, plan.num_layers) == ["n99 is in view 4, not in the plan"]


def test_a_node_that_is_visited_twice_is_found() -> None:
    plan = Plan(num_layers=2, placement={n(0): (0, 1)}, routes=((Hop(n(0), 0, 1), Hop(n(0), 1, 2)),))
    assert problems(plan, view_of(plan), 2) == ["micro-batch 0: visits a node twice"]


LONG = (Hop(n(2), 0, 1), Hop(n(3), 1, 3, shadow=n(1)))
PLAN = Plan(
    num_layers=3, placement={n(10): (), n(2): (0, 1), n(3): (1, 2), n(1): (0, 1, 2)},
    routes=(LONG, (Hop(n(1), 0, 3),), LONG),
)


def test_nodes_come_in_the_order_of_their_numbers() -> None:
    assert PLAN.nodes == (n(1), n(2), n(3), n(10))
    assert PLAN.holders(1) == (n(1), n(2), n(3)) and PLAN.holders(2) == (n(1), n(3))
    assert PLAN.spares == (n(10),)


def test_layers_are_lost_with_their_last_holder() -> None:
    assert PLAN.lost_layers(frozenset({n(1)})) == ()
    assert PLAN.lost_layers(frozenset({n(1), n(3)})) == (2,)
    assert PLAN.lost_layers(frozenset(PLAN.placement)) == (0, 1, 2)


def test_a_plan_reads_as_its_pipelines() -> None:
    assert str(PLAN) == "n2[0:1] → n3[1:3]~n1  ×2\nn1[0:3]  ×1\nspare: n10"
    assert PLAN.pipelines() == {PLAN.routes[0]: (0, 2), PLAN.routes[1]: (1,)}


def test_the_hash_is_of_the_plan_and_not_of_the_order_it_was_put_together_in() -> None:
    turned = replace(PLAN, placement=dict(reversed(PLAN.placement.items())))
    assert turned.hash() == PLAN.hash()
    others = [replace(PLAN, order=Order(split=True)), replace(PLAN, routes=PLAN.routes[:2]), with_hop(PLAN, 0, 1, shadow=None)]
    assert len({plan.hash() for plan in (PLAN, *others)}) == 4


def test_an_even_placement_gives_each_node_its_bounds() -> None:
    assert even_placement((n(0), n(1)), ((0, 2), (2, 3))) == {n(0): (0, 1), n(1): (2,)}
    with pytest.raises(ValueError, match="zip"):
        even_placement((n(0),), ((0, 2), (2, 3)))
