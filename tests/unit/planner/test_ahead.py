"""Answers worked out ahead: the same as when asked, for each node, and void when something is not as was thought."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import plan as plans
from everstep.cluster import Link
from everstep.plan import Plan
from everstep.planner.idle.ahead import answered, cases_of, drift, prepared, renamed
from everstep.planner.policies.situation import CheckpointInfo, Situation
from everstep.planner.policies.table import propose
from everstep.protocol.resolution import Resolution
from everstep.view import Member, View

from .test_controller import WORKLOAD, held, started, view_of
from .test_policies import situation_after
from .worlds import cluster_of, grid_plan, node, workload_of
from .worlds import plans as any_plan


def after_loss(base: Situation, number: int) -> Situation:
    gone = frozenset({node(number)})
    return replace(
        base, cluster=base.cluster.without(gone), lost=(node(number),),
        holds={member: units for member, units in base.holds.items() if member not in gone},
    )


def test_a_grid_has_one_case_for_each_stage_and_one_for_spares() -> None:
    plan = grid_plan(8, 4, 2)
    plan = replace(plan, placement={**plan.placement, node(32): (), node(33): ()})
    cases = cases_of(plan, cluster_of(34))
    assert set(cases) == set(plan.nodes) and len(set(cases.values())) == 5
    assert cases[node(5)] == cases[node(29)] == node(1) and cases[node(33)] == node(32)


def test_pipelines_with_another_share_or_slower_nodes_are_other_cases() -> None:
    plan = grid_plan(3, 2, 2)
    plan = replace(plan, routes=(*plan.routes, plan.routes[0]))
    cluster = cluster_of(6)
    assert len(set(cases_of(plan, cluster).values())) == 4
    slow = replace(cluster, nodes={**cluster.nodes, node(5): replace(cluster.nodes[node(5)], speed=0.5)})
    assert len(set(cases_of(plan, slow).values())) == 6


@settings(max_examples=30, deadline=None)
@given(any_plan(max_micro_batches=4), st.data())
def test_an_answer_worked_out_ahead_costs_what_it_costs_when_asked(plan: Plan, data: st.DataObject) -> None:
    base = situation_after(plan, cores=data.draw(st.sampled_from([1, None])), checkpoint=CheckpointInfo(step=30, path="c"))
    known = {answer.node: answer for answer in prepared(base)}
    if len(plan.nodes) == 1:
        assert known == {}
        return
    cases = cases_of(plan, base.cluster)
    number = data.draw(st.integers(0, len(plan.nodes) - 1))
    situation = replace(after_loss(base, number), step=55, gap_s=70.0, checkpoint=CheckpointInfo(step=50, path="d"))
    found, asked = answered(known[cases[node(number)]], node(number), situation), propose(situation)
    assert [c.policy for c in found] == [c.policy for c in asked]
    for one, other in zip(found, asked, strict=True):
        assert one.feasible == other.feasible and one.restore_step == other.restore_step
        if one.plan is not None:
            assert one.step_s == pytest.approx(other.step_s) and one.stall_s == pytest.approx(other.stall_s, rel=1e-6)
            assert one.value == pytest.approx(other.value)
            view = View(2, tuple(Member(member) for member in situation.nodes))
            assert plans.problems(one.plan, view, plan.num_layers) == []


@pytest.mark.parametrize("number", range(6))
def test_two_phases_worked_out_ahead_are_those_of_whoever_is_lost(number: int) -> None:
    """Both plans are told with the right names, and worth what they are worth when asked."""
    base = situation_after(grid_plan(3, 2, 8), cores=None, link=Link(alpha_s=0.0, bytes_per_s=10.0))
    base = replace(base, ways=base.ways | {"behind"})
    known = {answer.node: answer for answer in prepared(base)}
    situation = after_loss(base, number)
    found = answered(known[cases_of(base.plan, base.cluster)[node(number)]], node(number), situation)
    (pair,), (asked,) = ([each for each in all_of_them if each.way == "behind"] for all_of_them in (found, propose(situation)))
    view = View(2, tuple(Member(member) for member in situation.nodes))
    assert pair.plan is not None and pair.later is not None
    assert plans.problems(pair.plan, view, 2) + plans.problems(pair.later, view, 2) == []
    assert (pair.copy_s, pair.later_step_s) == pytest.approx((asked.copy_s, asked.later_step_s))
    assert pair.value == pytest.approx(asked.value, rel=1e-3), "of layouts that are equally fast, another may be as good"


def test_names_are_exchanged_and_nothing_else() -> None:
    plan = replace(grid_plan(2, 2, 2), room={node(0): 5})
    other = renamed(plan, {node(0): node(2), node(2): node(0)})
    assert other.room == {node(2): 5}
    assert other.placement == plan.placement and renamed(other, {node(0): node(2), node(2): node(0)}) == plan
    assert [hop.node for hop in other.routes[0]] == [node(2), node(1)]


def test_drift_is_the_largest_relative_change() -> None:
    before = workload_of(3, 2, seconds=[1.0, 2.0, 4.0])
    after = replace(before, layers=(*before.layers[:2], replace(before.layers[2], forward_s=5.2)))
    assert drift(before, before) == 0 and drift(before, after) == pytest.approx(0.1)


def think_through(controller) -> int:  # type: ignore[no-untyped-def]
    count = 0
    while controller.think():
        count += 1
    return count


def test_a_controller_answers_a_loss_it_has_thought_of_with_the_same_table() -> None:
    thoughtful, other = started(), started()
    assert think_through(thoughtful) > 0 and not thoughtful.think()
    tables = []
    for controller in (thoughtful, other):
        view = view_of(2, [k for k in range(8) if k != 6])
        _, decision, _ = controller.answer(
            view, Resolution(40, 0, None, held(controller, view.nodes)), (node(6),), (), "n6 lost", 9.0, 1, None,
        )
        assert decision is not None
        tables.append([(c.policy, round(c.step_s, 9)) for c in decision.candidates])
    assert tables[0] == tables[1]


def test_what_was_thought_is_void_after_a_change() -> None:
    controller = started()
    think_through(controller)
    assert controller.plan is not None
    view = view_of(2, range(9))
    controller.answer(view, Resolution(40, 0, None, held(controller, view.nodes)), (), (node(8),), "n8 joins", 5.0, 1, None)
    assert think_through(controller) > 0, "begins anew"
    slower = replace(WORKLOAD, layers=tuple(replace(layer, forward_s=2 * layer.forward_s) for layer in WORKLOAD.layers))
    controller.workload = slower
    assert think_through(controller) > 0, "costs have moved"
