"""Every node gets what it lacks, from holders in turn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import transfer
from everstep.errors import InfeasibleError
from everstep.plan import Hop, Plan
from everstep.planner.moves import moves_for
from everstep.quantities import UnitName
from everstep.transfer import Load, Move

from .worlds import node, workload_of


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
