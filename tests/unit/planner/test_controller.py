"""The one place that knows protocol and planner: orders that may be carried out, and words where there are none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import plan as plans
from everstep import schedule as schedules
from everstep import transfer
from everstep.config import CheckpointConfig, EngineConfig, PlannerConfig, Policy, RunConfig
from everstep.controller import LET_IN, ClusterFacts, Controller
from everstep.planner.explain import summary
from everstep.planner.policies.situation import CheckpointInfo
from everstep.planner.step.measure import from_bytes
from everstep.protocol.messages import PlanOrdered, Union
from everstep.protocol.resolution import Resolution
from everstep.quantities import HostId, NodeId, UnitName
from everstep.view import Member, View

from .worlds import grid_plan, node, workload_of

TWO_CORES = ClusterFacts(host_cores={HostId("localhost"): 2})
WORKLOAD = workload_of(8, 8, optimizer_s=0.1)
UNION = Union(1, 39, 0, {}, {}, (), {})
CHECKPOINT = CheckpointInfo(step=30, path="checkpoints/30")


def view_of(number: int, members: Iterable[int]) -> View:
    return View(number, tuple(Member(node(member), place=member) for member in members))


def started(policy: str = "auto", facts: ClusterFacts = TWO_CORES, workers: int = 8, **more: object) -> Controller:
    planner = PlannerConfig(policy=policy, **more)  # type: ignore[arg-type]
    controller = Controller(RunConfig(planner=planner), facts)
    controller.start(view_of(1, range(workers)), WORKLOAD, None)
    return controller


def held(controller: Controller, members: Iterable[NodeId]) -> dict[NodeId, frozenset[UnitName]]:
    assert controller.plan is not None
    placement = controller.plan.placement
    return {member: WORKLOAD.units_of(frozenset(placement.get(member, ()))) for member in members}


def lose(controller: Controller, lost: set[int], checkpoint: CheckpointInfo | None = CHECKPOINT):  # type: ignore[no-untyped-def]
    assert controller.plan is not None
    before = controller.plan.nodes
    view = view_of(2, [int(member[1:]) for member in before if int(member[1:]) not in lost])
    resolution = Resolution(40, 1, UNION, held(controller, view.nodes))
    gone = tuple(node(number) for number in sorted(lost))
    answer = controller.answer(view, resolution, gone, (), f"{', '.join(gone)} lost", 100.0, 7, checkpoint)
    return view, resolution, *answer


def test_a_run_starts_from_the_initial_weights() -> None:
    controller = Controller(RunConfig(), TWO_CORES)
    order, decision = controller.start(view_of(1, range(8)), WORKLOAD, None, token=3)
    assert (order.step, order.attempt, order.restore, order.union, order.moves, order.token) == (0, 0, "initial", None, (), 3)
    assert {(load.target, load.unit) for load in order.loads} == {
        (member, unit) for member, layers in order.plan.placement.items() for unit in WORKLOAD.units_of(frozenset(layers))
    }
    assert decision.plan == order.plan == controller.plan
    assert decision.candidate.way == "start"


def test_a_run_is_continued_from_its_checkpoint() -> None:
    order, decision = Controller(RunConfig(), TWO_CORES).start(view_of(1, range(4)), WORKLOAD, CHECKPOINT)
    assert (order.step, order.restore) == (30, "checkpoints/30")
    assert decision.cause == "start from step 30"


def test_spares_are_left_out_of_the_first_plan() -> None:
    order, _ = Controller(RunConfig(), TWO_CORES).start(view_of(1, range(5)), WORKLOAD, None, num_spares=1)
    assert len(order.plan.spares) == 1


@pytest.mark.parametrize("policy", ["auto", "reroute", "shrink", "repartition"])
def test_after_a_loss_the_next_try_goes_on_with_the_state_that_lives(policy: str) -> None:
    _, resolution, order, decision, _ = lose(started(policy), {5})
    assert (order.view, order.token, order.step, order.attempt, order.union) == (2, 7, 40, 1, UNION)
    assert order.restore is None and order.loads == ()
    assert transfer.problems(order.moves, dict(resolution.holds)) == []
    assert decision.lost == (node(5),) and decision.cause == "n5 lost"
    assert policy in ("auto", decision.candidate.policy)
    assert sum(candidate.reason == "" for candidate in decision.candidates if candidate.feasible) <= 1


def test_the_plan_that_was_answered_is_the_plan_before_of_the_next_answer() -> None:
    controller = started("reroute")
    lose(controller, {5})
    _, _, order, _, _ = lose(controller, {6})
    assert order is not None and set(order.plan.nodes) == {node(k) for k in (0, 1, 2, 3, 4, 7)}


def test_a_policy_without_an_answer_falls_to_restore_and_says_so() -> None:
    _, _, order, decision, _ = lose(started("reroute"), {1, 5})
    assert (order.step, order.attempt, order.restore, order.union, order.moves) == (30, 0, "checkpoints/30", None, ())
    assert decision.candidate.policy == "restore"
    assert "no living holder" in decision.candidates[0].reason


def test_without_a_checkpoint_a_restore_begins_with_the_initial_weights() -> None:
    _, _, order, _, _ = lose(started("restore"), {1}, checkpoint=None)
    assert (order.step, order.restore) == (0, "initial")


def test_a_restore_of_steps_already_run_again_keeps_their_numbers_apart() -> None:
    controller = started("restore")
    view = view_of(2, range(7))
    rollbacks = ((35, 20, 4),)
    order, _, _ = controller.answer(
        view, Resolution(40, 1, None, held(controller, view.nodes)), (node(7),), (), "n7 lost", 9.0, 1, CHECKPOINT, rollbacks,
    )
    assert order is not None and (order.step, order.attempt, order.rollbacks) == (30, 4, rollbacks)


def test_when_nobody_has_state_the_run_is_restored() -> None:
    controller = started()
    view = view_of(2, range(6))
    resolution = Resolution(None, 0, None, {member: frozenset() for member in view.nodes})
    order, decision, _ = controller.answer(view, resolution, (node(6), node(7)), (), "all lost", 9.0, 1, CHECKPOINT)
    assert order is not None and decision is not None and decision.candidate.policy == "restore"


def test_a_newcomer_that_holds_nothing_is_planned_for() -> None:
    controller = started()
    view = view_of(2, range(9))
    resolution = Resolution(40, 0, None, held(controller, view.nodes))
    order, decision, _ = controller.answer(view, resolution, (), (node(8),), "n8 joins", 50.0, 1, None)
    assert order is not None and decision is not None
    assert node(8) in order.plan.placement and order.restore is None
    assert {candidate.policy for candidate in decision.candidates} == {
        "spare", "heal", "rebalance", "repartition", "two-phase", "redundant", "wait",
    }


def test_what_cannot_be_done_names_the_lost_layers_and_the_newest_checkpoint() -> None:
    tight = PlannerConfig(worker_memory_bytes=130)
    controller = Controller(RunConfig(planner=tight), TWO_CORES)
    order, _ = controller.start(view_of(1, range(8)), WORKLOAD, None)
    first = order.plan.routes[0][0].node
    _, _, order, decision, reason = lose(controller, {int(m[1:]) for m in order.plan.nodes if m != first})
    assert order is None and decision is None
    assert "n0 needs" in reason and "layers without a living holder: l" in reason
    assert "newest checkpoint: step 30 at checkpoints/30" in reason


def test_the_gap_follows_the_history_of_the_run() -> None:
    controller = started()
    first = lose(controller, {5})[3].gap_s
    second = lose(controller, {6})[3].gap_s
    assert first == (600.0 + 100.0) / 2 and second == (600.0 + 100.0) / 3


def test_measurements_replace_guesses_and_calibrate_predictions() -> None:
    controller = Controller(RunConfig(), TWO_CORES)
    units = dict(WORKLOAD.units)
    guess = from_bytes([layer.name for layer in WORKLOAD.layers], units, num_micro_batches=8)
    controller.start(view_of(1, range(8)), guess, None)
    times = {node(0): {f"{kind}:{layer.name}": 0.01 for layer in WORKLOAD.layers for kind in "FBW"}}
    for _ in range(5):
        controller.observe(times, step_s=2.0)
    assert controller.workload is not None and controller.workload.measured
    assert controller.workload.layers[0].forward_s == pytest.approx(0.01)
    assert controller.predicted_step_s() == pytest.approx(2.0)


def test_what_was_thought_ahead_is_void_once_a_residual_has_moved() -> None:
    controller = started("reroute")
    while controller.think():
        pass
    controller.observe({}, step_s=controller.predicted_step_s())
    before = lose(controller, {5})[3].candidate.step_s
    for _ in range(9):
        controller.observe({}, step_s=2 * before)
    assert controller.predicted_step_s() == pytest.approx(2 * before, rel=0.02)
    after = lose(controller, {6})[3].candidate.step_s
    assert after == pytest.approx(2 * before, rel=0.02), "cores are shared: one worker less changes little"


def test_later_steps_are_observed_now_and_then() -> None:
    controller = started()
    for _ in range(15):
        controller.observe({}, step_s=100.0)
    assert controller.calibration.count == 10


def test_a_new_leader_goes_on_from_the_plan_in_the_store() -> None:
    before = started()
    assert before.plan is not None
    after = Controller(RunConfig(), TWO_CORES)
    after.adopt(before.plan, WORKLOAD, view_of(1, range(8)))
    assert lose(after, {5})[2] == lose(before, {5})[2]


def test_nodes_of_a_plan_keep_splitting_as_the_run_began() -> None:
    config = RunConfig(planner=PlannerConfig(policy="repartition"), engine=EngineConfig(split_backward="on"))
    controller = Controller(config, TWO_CORES)
    controller.start(view_of(1, range(8)), WORKLOAD, None)
    assert lose(controller, {5})[2].plan.order.split


def test_without_checkpoints_a_fatal_loss_is_not_taken_lightly() -> None:
    config = RunConfig(checkpoint=CheckpointConfig(every_steps=0))
    controller = Controller(config, TWO_CORES)
    controller.start(view_of(1, range(8)), WORKLOAD, None)
    assert lose(controller, {5}, checkpoint=None)[2] is not None


def test_a_decision_fits_on_one_line() -> None:
    decision = lose(started("reroute"), {5})[3]
    assert summary(decision).startswith("reroute chosen: step ")
    restored = lose(started("restore"), {5})[3]
    assert summary(restored).endswith("back to step 30")
    assert summary(replace(restored, candidates=(*restored.candidates,) * 3)).startswith("restore chosen of 3 candidates")


REROUTED = grid_plan(3, 4, 4, lost=[(0, 1), (1, 2)])


def running(config: RunConfig | None = None, facts: ClusterFacts | None = None) -> tuple[Controller, View]:
    """A run whose plan has a better schedule than its own, on devices of their own."""
    controller = Controller(config or RunConfig(), facts or ClusterFacts())
    view = view_of(1, sorted(int(member[1:]) for member in REROUTED.nodes))
    controller.adopt(REROUTED, workload_of(4, 12), view)
    while controller.refine():
        pass
    return controller, view


def well(controller: Controller, number: int) -> PlanOrdered:
    """The answer for a view in which nobody is lost and nobody is new."""
    assert controller.plan is not None and controller.workload is not None
    view = view_of(number, [int(member[1:]) for member in controller.plan.nodes])
    placement = controller.plan.placement
    holds = {member: controller.workload.units_of(frozenset(placement[member])) for member in view.nodes}
    cause = controller.wish or "no progress"
    order, _, reason = controller.answer(view, Resolution(40, 0, UNION, holds), (), (), cause, 9.0, 1, None)
    assert order is not None, reason
    return order


def test_a_better_schedule_is_wished_for_and_comes_with_the_order() -> None:
    controller, _ = running()
    assert controller.wish.endswith("less time")
    before_s = controller.predicted_step_s()
    order = well(controller, 2)
    assert order.schedule is not None and order.moves == ()
    found = {member: schedules.parse_order(text) for member, text in order.schedule.items()}
    assert schedules.problems(found, order.plan) == []
    assert controller.predicted_step_s() < 0.99 * before_s
    assert controller.wish == "" and not controller.refine(), "it is not searched for twice"


def test_a_schedule_stays_with_its_plan_and_goes_with_it() -> None:
    controller, _ = running()
    order = well(controller, 2)
    controller.config = RunConfig(planner=PlannerConfig(policy="reroute"))  # or another layout may be thought better
    assert well(controller, 3).schedule == order.schedule, "as after a lost link"
    assert controller.plan is not None and controller.workload is not None
    view = view_of(4, [int(member[1:]) for member in controller.plan.nodes if member != "n0"])
    holds = {m: controller.workload.units_of(frozenset(controller.plan.placement[m])) for m in view.nodes}
    later, _, _ = controller.answer(view, Resolution(41, 0, UNION, holds), (node(0),), (), "n0 lost", 9.0, 1, None)
    assert later is not None and later.schedule is None and controller.schedule is None


def asked(
    controller: Controller, number: int, members: Iterable[int], lost: tuple[int, ...] = (), joined: tuple[int, ...] = (),
    expected: dict[NodeId, float] | None = None,
):  # type: ignore[no-untyped-def]
    """The answer after changes of who is there; newcomers hold nothing."""
    view = view_of(number, members)
    resolution = Resolution(40, 1, UNION, held(controller, view.nodes))
    return controller.answer(
        view, resolution, tuple(map(node, lost)), tuple(map(node, joined)), "n5 lost", 100.0, 7, CHECKPOINT, (), expected,
    )


def test_a_plan_is_held_back_for_who_is_on_the_way_and_has_them_in_it_once_they_are_there() -> None:
    controller = started("wait")
    left = [0, 1, 2, 3, 4, 6, 7]
    order, decision, reason = asked(controller, 2, left, lost=(5,), expected={node(8): 1.5})
    assert order is None and decision.candidate.way == "wait" and reason == "n8 expected in 1.50 s"
    order, decision, _ = asked(controller, 3, [*left, 8], lost=(5,), joined=(8,))
    assert order is not None and decision.candidate.policy == "wait" and decision.candidate.way == "blocking"
    assert order.plan == decision.plan and node(8) not in order.plan.spares
    assert {move.target for move in order.moves} == {node(8)}
    assert controller.num_events == 1, "waiting is no event of its own"


def test_when_nobody_has_come_in_time_the_run_goes_on_without_them() -> None:
    controller = started("wait")
    left = [0, 1, 2, 3, 4, 6, 7]
    asked(controller, 2, left, lost=(5,), expected={node(8): 1.5})
    order, decision, _ = asked(controller, 2, left, lost=(5,))
    assert order is not None and decision.candidate.policy == "reroute"


def test_a_loss_while_somebody_is_waited_for_is_answered_with_who_is_there_then() -> None:
    controller = started("wait")
    asked(controller, 2, [0, 1, 2, 3, 4, 6, 7], lost=(5,), expected={node(8): 1.5})
    order, decision, _ = asked(controller, 3, [0, 1, 2, 3, 4, 6, 8], lost=(5, 7), joined=(8,))
    assert order is not None and decision.candidate.policy != "wait"
    assert set(order.plan.nodes) == {node(k) for k in (0, 1, 2, 3, 4, 6, 8)}


def test_among_all_policies_nobody_stands_still_for_who_is_let_in_anyway() -> None:
    controller = started("auto")
    order, decision, _ = asked(controller, 2, [0, 1, 2, 3, 4, 6, 7], lost=(5,), expected={node(8): 1.5})
    assert order is not None
    assert [each.reason for each in decision.candidates if each.policy == "wait"] == [LET_IN]


def test_answers_worked_out_ahead_know_who_is_expected_when_they_are_asked_for() -> None:
    controller = started("wait")
    while controller.think():
        pass
    order, decision, _ = asked(controller, 2, [0, 1, 2, 3, 4, 6, 7], lost=(5,), expected={node(8): 1.5})
    assert order is None and decision.candidate.policy == "wait"


def test_a_wish_is_void_once_somebody_is_lost() -> None:
    controller, _ = running()
    assert controller.plan is not None and controller.workload is not None
    view = view_of(2, [int(member[1:]) for member in controller.plan.nodes if member != "n0"])
    holds = {m: controller.workload.units_of(frozenset(controller.plan.placement[m])) for m in view.nodes}
    order, decision, _ = controller.answer(view, Resolution(41, 0, UNION, holds), (node(0),), (), "n0 lost", 9.0, 1, None)
    assert order is not None and decision is not None
    assert order.schedule is None and decision.candidate.policy != "schedule" and controller.wish == ""


def test_schedules_are_searched_for_only_where_they_matter_and_all_policies_are_asked() -> None:
    shared, _ = running(facts=TWO_CORES)
    assert shared.wish == ""
    forced, _ = running(RunConfig(planner=PlannerConfig(policy="reroute")))
    assert forced.wish == ""


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_run_goes_on_through_any_losses_that_leave_somebody(data: st.DataObject) -> None:
    facts = data.draw(st.sampled_from([TWO_CORES, ClusterFacts()]))
    policy = data.draw(st.sampled_from(get_args(Policy)))
    controller = started(policy, facts, workers=data.draw(st.integers(2, 8)))
    newest = len(controller.plan.nodes)  # type: ignore[union-attr]
    for number in range(2, 6):
        assert controller.plan is not None
        before = controller.plan.nodes
        lost = data.draw(st.sets(st.sampled_from(before), max_size=min(2, len(before) - 1)))
        joined = [node(newest + k) for k in range(data.draw(st.integers(0, 1)))]
        newest += len(joined)
        view = view_of(number, [int(member[1:]) for member in (*before, *joined) if member not in lost])
        resolution = Resolution(40 + number, 0, None, held(controller, view.nodes))
        order, decision, reason = controller.answer(
            view, resolution, tuple(sorted(lost)), tuple(joined), "event", 60.0 * number, 1, CHECKPOINT,
        )
        assert order is not None and decision is not None, reason
        assert plans.problems(order.plan, view, WORKLOAD.num_layers) == []
        lacking = set(WORKLOAD.units) - frozenset[UnitName]().union(*resolution.holds.values())
        assert (order.restore is not None) or not lacking, "lost state is restored"
