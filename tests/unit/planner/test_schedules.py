"""The three rules of ``planner.step.schedules``, and how good the schedules are."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings

from everstep import schedule as schedules
from everstep.plan import Hop, Order, Plan
from everstep.planner.step.parts import parts
from everstep.planner.step.schedules import Costs, Stops, deadlines, order_of, streams
from everstep.quantities import NodeId
from everstep.schedule import REDUCE, Action, Kind, one_f_one_b, peak_activations

from .worlds import grid_plan, node, plans, workload_of


@settings(max_examples=300, deadline=None)
@given(plans())
def test_no_plan_gives_a_schedule_with_problems(plan: Plan) -> None:
    assert schedules.problems(order_of(plan), plan) == []


@pytest.mark.parametrize(("num_pipelines", "num_stages", "each"), [(1, 1, 4), (1, 4, 8), (2, 4, 6), (1, 8, 3), (3, 2, 5)])
def test_plain_pipelines_get_one_f_one_b(num_pipelines: int, num_stages: int, each: int) -> None:
    schedule = order_of(grid_plan(num_pipelines, num_stages, each))
    for d in range(num_pipelines):
        for stage in range(num_stages):
            expected = [
                Action(action.kind, action.hop, action.micro_batch * num_pipelines + d)
                for action in one_f_one_b(stage, num_stages, each)
            ]
            assert list(schedule[node(d * num_stages + stage)]) == [*expected, REDUCE]


def test_even_stages_of_several_layers_get_one_f_one_b_too() -> None:
    route = (Hop(node(0), 0, 3), Hop(node(1), 3, 6))
    plan = Plan(num_layers=6, placement={node(0): (0, 1, 2), node(1): (3, 4, 5)}, routes=(route,) * 5)
    assert order_of(plan)[node(0)][:-1] == one_f_one_b(0, 2, 5)
    assert order_of(plan)[node(1)][:-1] == one_f_one_b(1, 2, 5)


def test_a_plain_node_holds_no_more_activations_than_one_f_one_b() -> None:
    schedule = order_of(grid_plan(2, 4, 8))
    assert [peak_activations(schedule[node(stage)]) for stage in range(4)] == [4, 3, 2, 1]


def test_extra_slots_are_used_and_not_exceeded() -> None:
    schedule = order_of(grid_plan(2, 4, 12, order=Order(split=True, extra_slots=2)))
    assert max(peak_activations(schedule[node(stage)]) - (4 - stage) for stage in range(4)) == 2


def test_a_node_that_serves_another_stream_holds_no_more_either() -> None:
    schedule = order_of(grid_plan(2, 3, 6, lost=[(1, 1)]))
    assert peak_activations(schedule[node(1)]) == 2


def test_a_plain_pipeline_of_uneven_stages_does_one_f_one_b_too() -> None:
    route = (Hop(node(0), 0, 1), Hop(node(1), 1, 5), Hop(node(2), 5, 6))
    plan = Plan(num_layers=6, placement={hop.node: tuple(hop.layers) for hop in route}, routes=(route,) * 5)
    assert [order_of(plan)[node(stage)][:-1] for stage in range(3)] == [one_f_one_b(stage, 3, 5) for stage in range(3)]


def test_parts_that_share_no_node_do_not_know_of_each_other() -> None:
    alone, together = grid_plan(1, 3, 4, order=Order(split=True)), grid_plan(2, 3, 4, order=Order(split=True))
    for stage in range(3):
        expected = [(action.kind, 2 * action.micro_batch) for action in order_of(alone)[node(stage)][:-1]]
        assert [(action.kind, action.micro_batch) for action in order_of(together)[node(stage)][:-1]] == expected


def test_a_rerouted_micro_batch_stays_in_the_stream_it_started_in() -> None:
    plan = grid_plan(2, 3, 2, lost=[(1, 1)])
    assert streams(plan.routes) == (node(0), node(3), node(0), node(3))


def layers_held(plan: Plan, member: NodeId) -> int:
    """The most layers' activations that ``member`` holds at once, a micro-batch counting once for each layer of its hop."""
    held = most = 0
    for action in order_of(plan)[member][:-1]:
        layers = len(plan.routes[action.micro_batch][action.hop].layers)
        if action.kind is Kind.FORWARD:
            held += layers
        elif action.kind is (Kind.WEIGHT if plan.order.split else Kind.BACKWARD):
            held -= layers
        most = max(most, held)
    return most


def lending_plan(room: Mapping[NodeId, int]) -> Plan:
    """Two stages of four layers, twice; a third pipeline has a node for five layers, and others lend it the last three."""
    whole = [(Hop(node(2 * d), 0, 4), Hop(node(2 * d + 1), 4, 8)) for d in range(2)]
    lent = tuple((Hop(node(4), 0, 5), Hop(node(2 * d + 1), 5, 8)) for d in range(2))
    routes = [(*whole, lent[k % 2])[k % 3] for k in range(24)]
    placement = {hop.node: tuple(hop.layers) for route in whole for hop in route} | {node(4): (0, 1, 2, 3, 4)}
    return Plan(num_layers=8, placement=placement, routes=tuple(routes), order=Order(split=True), room=room)


def test_activations_are_counted_by_layers() -> None:
    """A last stage of four layers may hold those of one micro-batch of its own, or of a piece of three and no more."""
    assert layers_held(lending_plan({}), node(1)) == 4
    assert layers_held(lending_plan({}), node(4)) == 10


@pytest.mark.parametrize("room", [4, 7, 11, 16])
def test_a_node_fills_the_room_that_the_plan_gives_it_and_no_more(room: int) -> None:
    held = layers_held(lending_plan({node(0): room, node(1): room}), node(1))
    assert room - 4 < held <= room
    assert layers_held(lending_plan({node(0): room, node(1): room}), node(3)) == 4, "others have what 1F1B has"


def test_room_for_less_than_a_hop_is_room_for_one() -> None:
    plan = lending_plan({node(1): 1})
    assert layers_held(plan, node(1)) == 4
    assert schedules.problems(order_of(plan), plan) == []


def test_a_plain_pipeline_with_fused_backward_does_one_f_one_b_whatever_room_it_has() -> None:
    plan = replace(grid_plan(1, 3, 6), room={node(0): 6, node(2): 6})
    assert order_of(plan) == order_of(grid_plan(1, 3, 6))


def test_of_what_is_due_together_the_smaller_piece_goes_first() -> None:
    """It delays the other little, and somebody waits for it."""
    piece = (Hop(node(0), 0, 1), Hop(node(1), 1, 4))
    plan = Plan(
        num_layers=4, placement={node(0): (0, 1, 2, 3), node(1): (0, 1, 2, 3)},
        routes=((Hop(node(0), 0, 4),), piece) * 3, order=Order(split=True),
    )
    assert str(order_of(plan)[node(0)][0]) == "0F1"


def test_a_late_micro_batch_with_a_way_of_its_own_is_not_due_among_the_first() -> None:
    """It is the first of its stream, but the last of 24: ranks within streams alone would let it overtake all others."""
    usual, other = (Hop(node(0), 0, 8),), (Hop(node(1), 0, 4), Hop(node(0), 4, 8))
    plan = Plan(
        num_layers=8, placement={node(0): tuple(range(8)), node(1): (0, 1, 2, 3)}, routes=(*[usual] * 23, other),
        order=Order(split=True),
    )
    (part,) = parts(plan)
    stops = Stops.of(part)
    forward_s, backward_s = deadlines(stops, Costs.of(plan, None))
    assert forward_s[23] > forward_s[10] and backward_s[23] > backward_s[10]


def test_routes_that_cross_do_not_lock_each_other_out() -> None:
    """Both nodes are full of micro-batches that wait for a forward on the other: one starts in spite of the limit."""
    whole = (Hop(node(1), 0, 2),)
    there = (Hop(node(1), 0, 1), Hop(node(0), 1, 2))
    back = (Hop(node(0), 0, 1), Hop(node(1), 1, 2))
    plan = Plan(
        num_layers=2, placement={node(0): (0, 1), node(1): (0, 1)}, routes=(whole, there, there, there, back, back),
        order=Order(split=True),
    )
    assert schedules.problems(order_of(plan), plan) == []


def test_weight_gradients_come_when_nothing_else_can_be_done() -> None:
    plan = grid_plan(1, 2, 3, order=Order(split=True))
    assert " ".join(map(str, order_of(plan)[node(1)])) == "1F0 1B0 1W0 1F1 1B1 1W1 1F2 1B2 1W2 R"
    assert " ".join(map(str, order_of(plan)[node(0)][:4])) == "0F0 0F1 0B0 0W0"


def test_spares_do_nothing_and_idle_holders_only_reduce() -> None:
    route = (Hop(node(0), 0, 1),)
    plan = Plan(num_layers=1, placement={node(0): (0,), node(1): (0,), node(2): ()}, routes=(route,))
    assert order_of(plan)[node(1)] == (REDUCE,)
    assert order_of(plan)[node(2)] == ()


def test_a_partial_batch_has_only_its_micro_batches() -> None:
    schedule = order_of(grid_plan(2, 2, 4), 3)
    assert {action.micro_batch for order in schedule.values() for action in order} == {0, 1, 2}


def test_given_times_are_used_instead_of_one_unit_a_layer() -> None:
    plan = grid_plan(2, 3, 6, lost=[(1, 1)])
    slow_end = workload_of(3, 12, seconds=[9.0, 1.0, 1.0])
    assert order_of(plan, workload=slow_end)[node(1)] != order_of(plan)[node(1)]


def test_thirty_two_micro_batches_on_eight_nodes_are_arranged_within_ten_milliseconds_of_processor_time() -> None:
    plan = grid_plan(2, 4, 16)
    begun_s = time.process_time()
    for _ in range(10):
        order_of(plan)
    assert (time.process_time() - begun_s) / 10 < 0.01
