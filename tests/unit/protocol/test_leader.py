"""Rules of the leader."""

from __future__ import annotations

import pytest

from everstep.errors import LocalProtocolError
from everstep.protocol import leader as do
from everstep.protocol import marks
from everstep.protocol.leader import Leader, Phase
from everstep.protocol.messages import (
    BoundaryOrdered,
    BoundaryReached,
    PlanOrdered,
    ResumeOrdered,
    StateReady,
    Stuck,
    ToMember,
    ViewOrdered,
)
from everstep.quantities import NodeId
from everstep.view import Member, View
from tests.unit.protocol.makers import N0, N1, N2, N3, order, report, view


def gathered(*nodes: NodeId) -> tuple[Leader, list[do.Effect]]:
    leader = Leader(token=1, num_members=len(nodes), stuck_grace_s=0.5)
    effects = [effect for node in nodes for effect in leader.handle(do.NodeReady(Member(node)), 0.0)]
    return leader, effects


def win(leader: Leader) -> list[do.Effect]:
    proposed = leader._proposed
    assert proposed is not None
    return leader.handle(do.SwapAnswered(proposed.number, True, proposed), 0.0)


def collect(leader: Leader, applied: int = 5, **fields: object) -> do.ComputePlan:
    view = leader.view
    assert view is not None
    effects = [
        effect
        for node in view.nodes
        for effect in leader.handle(do.ReportCame(report(node, applied, view=view.number, **fields)), 0.0)
    ]
    (wanted,) = effects
    assert isinstance(wanted, do.ComputePlan)
    return wanted


def write(leader: Leader, **fields: object) -> PlanOrdered:
    view = leader.view
    assert view is not None
    answer = order(view.number, *view.nodes, **{"rollbacks": leader.rollbacks, **fields})
    (writing,) = leader.handle(do.PlanAnswered(view.number, answer, ""), 0.0)
    assert isinstance(writing, do.WritePlan)
    sent = leader.handle(do.PlanWritten(view.number, True), 0.0)
    assert sent == [do.SendMember(node, writing.order) for node in view.nodes]
    return writing.order


def resume(leader: Leader) -> list[do.Effect]:
    view = leader.view
    assert view is not None
    return [e for node in view.nodes for e in leader.handle(do.ReadyCame(StateReady(view.number, node)), 0.0)]


def training(*nodes: NodeId, **fields: object) -> Leader:
    leader, _ = gathered(*nodes)
    win(leader)
    collect(leader, applied=-1, holds=())
    write(leader, step=0, restore="initial", **fields)
    resume(leader)
    assert leader.phase is Phase.TRAINING
    return leader


def in_phase(phase: Phase) -> Leader:
    """A leader of view 2 (n0, n1, n2), after view 1 with n3."""
    leader = training(N0, N1, N2, N3)
    lose: list[do.Effect] = leader.handle(do.NodeLost(N3, "exit 1"), 0.0)
    assert len(lose) == 1
    steps = [
        (Phase.SWAPPING, lambda: None), (Phase.COLLECTING, lambda: win(leader)), (Phase.PLANNING, lambda: collect(leader)),
        (Phase.WRITING, lambda: leader.handle(do.PlanAnswered(2, order(2, N0, N1, N2), ""), 0.0)),
        (Phase.MOVING, lambda: leader.handle(do.PlanWritten(2, True), 0.0)), (Phase.TRAINING, lambda: resume(leader)),
        (Phase.BOUNDARY_WANTED, lambda: leader.handle(do.NodeReady(Member(NodeId("n9"))), 0.0)),
    ]
    for name, step in steps:
        step()
        assert leader.phase is name
        if name is phase:
            return leader
    raise AssertionError(phase)


IN_A_VIEW = (Phase.COLLECTING, Phase.PLANNING, Phase.WRITING, Phase.MOVING, Phase.TRAINING, Phase.BOUNDARY_WANTED)


def to_all(message: ToMember, *nodes: NodeId) -> list[do.Effect]:
    return [do.SendMember(node, message) for node in nodes]


def test_from_the_first_hello_to_training() -> None:
    leader, effects = gathered(N0, N1)
    assert effects == [do.SwapView(0, view(1, N0, N1), "start")]
    assert win(leader) == to_all(ViewOrdered(view(1, N0, N1), 1), N0, N1)
    wanted = collect(leader, applied=-1, holds=())
    assert (wanted.view, wanted.resolution.step, wanted.joined) == (view(1, N0, N1), None, (N0, N1))
    write(leader, step=0, restore="initial")
    assert resume(leader) == to_all(ResumeOrdered(1, 1), N0, N1)
    assert leader.phase is Phase.TRAINING


def test_a_process_that_dies_before_the_start_is_not_waited_for() -> None:
    leader = Leader(token=1, num_members=2)
    leader.handle(do.NodeReady(Member(N0)), 0.0)
    assert leader.handle(do.NodeLost(N1, "exit 1"), 0.0) == [do.SwapView(0, view(1, N0), "start")]
    alone = Leader(token=1, num_members=1)
    assert alone.handle(do.NodeLost(N0, "exit 1"), 0.0) == [do.EndRun("n0: exit 1; no node is left to start with")]


@pytest.mark.parametrize("phase", IN_A_VIEW)
def test_a_lost_member_makes_a_new_view_in_any_phase(phase: Phase) -> None:
    leader = in_phase(phase)
    (swap,) = leader.handle(do.NodeLost(N2, "silent for 5 s"), 0.0)
    assert isinstance(swap, do.SwapView)
    assert (swap.expected, N2 in swap.view, leader.phase) == (2, False, Phase.SWAPPING)
    assert "n2 lost: silent for 5 s" in swap.cause


def test_losses_while_a_swap_is_under_way_are_taken_together_in_the_next() -> None:
    leader = in_phase(Phase.SWAPPING)
    assert leader.handle(do.NodeLost(N2, "exit 1"), 0.0) == leader.handle(do.NodeLost(N1, "exit 1"), 0.0) == []
    effects = win(leader)
    assert effects == [do.Fence(N3, "exit 1"), do.SwapView(2, view(3, N0), "n2 lost: exit 1; n1 lost: exit 1")]
    assert [type(effect) for effect in win(leader)] == [do.Fence, do.Fence, do.SendMember, do.SendMember, do.SendMember]
    assert collect(leader).lost == (N3, N1, N2)


def test_who_is_removed_is_fenced_and_told() -> None:
    effects = win(in_phase(Phase.SWAPPING))
    assert do.Fence(N3, "exit 1") in effects
    assert do.SendMember(N3, ViewOrdered(view(2, N0, N1, N2), 1)) in effects


@pytest.mark.parametrize("phase", IN_A_VIEW)
def test_a_lost_process_that_is_no_member_is_forgotten(phase: Phase) -> None:
    leader = in_phase(phase)
    leader.handle(do.NodeReady(Member(NodeId("n7"))), 0.0)
    before = leader.phase
    with marks.expect("leader.no-member-lost"):
        assert leader.handle(do.NodeLost(NodeId("n7"), "exit 1"), 0.0) == []
    assert leader.phase is before
    (swap,) = leader.handle(do.NodeLost(N2, "exit 1"), 0.0)
    assert isinstance(swap, do.SwapView) and NodeId("n7") not in swap.view


def test_when_the_last_member_is_lost_the_run_ends() -> None:
    leader = training(N0)
    assert leader.handle(do.NodeLost(N0, "exit 1"), 0.0) == [do.EndRun("n0 lost: exit 1; no node is left")]
    assert leader.handle(do.NodeLost(N0, "exit 1"), 0.0) == [], "and nothing comes after it"


def test_a_joiner_is_let_in_at_a_boundary() -> None:
    leader = training(N0, N1)
    assert leader.handle(do.NodeReady(Member(N2)), 0.0) == to_all(BoundaryOrdered(1, 1, "change"), N0, N1)
    assert leader.handle(do.BoundaryCame(BoundaryReached(1, N1, 7)), 0.0) == [
        do.SwapView(1, view(2, N0, N1, N2), "n2 joins"),
    ]
    assert leader.handle(do.BoundaryCame(BoundaryReached(1, N0, 7)), 0.0) == [], "one member's word is enough"
    win(leader)
    assert collect(leader).joined == (N2,)


def test_a_joiner_is_let_in_with_any_new_view() -> None:
    leader = in_phase(Phase.COLLECTING)
    assert leader.handle(do.NodeReady(Member(NodeId("n7"))), 0.0) == []
    (swap,) = leader.handle(do.NodeLost(N2, "exit 1"), 0.0)
    assert isinstance(swap, do.SwapView) and swap.view.nodes == (N0, N1, "n7")


def test_a_joiner_that_waited_through_a_recovery_is_let_in_at_the_next_boundary() -> None:
    leader = in_phase(Phase.MOVING)
    leader.handle(do.NodeReady(Member(NodeId("n7"))), 0.0)
    assert resume(leader)[-3:] == to_all(BoundaryOrdered(2, 1, "change"), N0, N1, N2)


def test_a_boundary_that_is_reached_makes_a_view_even_if_the_joiner_has_gone() -> None:
    leader = in_phase(Phase.BOUNDARY_WANTED)
    leader.handle(do.NodeLost(NodeId("n9"), "exit 1"), 0.0)
    (swap,) = leader.handle(do.BoundaryCame(BoundaryReached(2, N0, 7)), 0.0)
    assert isinstance(swap, do.SwapView) and swap.view.nodes == (N0, N1, N2)


def test_a_better_plan_for_the_same_members_takes_a_new_view_at_a_boundary() -> None:
    leader = training(N0, N1)
    assert leader.handle(do.PlanWanted("a faster schedule"), 0.0) == to_all(BoundaryOrdered(1, 1, "change"), N0, N1)
    reached = leader.handle(do.BoundaryCame(BoundaryReached(1, N1, 7)), 0.0)
    assert reached == [do.SwapView(1, view(2, N0, N1), "a faster schedule")]
    win(leader)
    wanted = collect(leader)
    assert (wanted.cause, wanted.lost, wanted.joined) == ("a faster schedule", (), ())
    write(leader)
    resume(leader)
    leader.handle(do.NodeReady(Member(N2)), 0.0)
    assert leader.handle(do.BoundaryCame(BoundaryReached(2, N0, 9)), 0.0) == [
        do.SwapView(2, view(3, N0, N1, N2), "n2 joins"),
    ], "the wish was granted"


def test_a_better_plan_that_was_wanted_is_forgotten_when_a_member_is_lost() -> None:
    leader = training(N0, N1, N2)
    leader.handle(do.PlanWanted("a faster schedule"), 0.0)
    (swap,) = leader.handle(do.NodeLost(N2, "exit 1"), 0.0)
    assert isinstance(swap, do.SwapView) and swap.cause == "n2 lost: exit 1"


@pytest.mark.parametrize("phase", [p for p in IN_A_VIEW if p is not Phase.TRAINING])
def test_no_plan_is_wanted_while_one_is_on_its_way(phase: Phase) -> None:
    leader = in_phase(phase)
    with marks.expect("leader.plan-is-on-its-way"):
        assert leader.handle(do.PlanWanted("a faster schedule"), 0.0) == []
    assert leader.phase is phase


def waiting() -> Leader:
    """A leader of n0, n1, n2 whose plan is held back until 3.0."""
    leader = in_phase(Phase.PLANNING)
    assert leader.handle(do.AnswerDelayed(2, 3.0), 1.0) == []
    assert (leader.phase, leader.next_deadline_s()) == (Phase.PLANNING, 3.0)
    return leader


def test_who_is_waited_for_makes_a_view_of_those_who_are_there() -> None:
    leader = waiting()
    assert leader.handle(do.NodeReady(Member(NodeId("n7"))), 2.0) == [
        do.SwapView(2, view(3, N0, N1, N2, NodeId("n7")), "n7 joins"),
    ]
    assert leader.next_deadline_s() is None
    win(leader)
    wanted = collect(leader)
    assert (wanted.lost, wanted.joined) == ((N3,), ("n7",)), "both belong to the same recovery"


def test_who_came_while_the_answer_was_thought_about_is_not_waited_for() -> None:
    leader = in_phase(Phase.PLANNING)
    leader.handle(do.NodeReady(Member(NodeId("n7"))), 0.0)
    (swap,) = leader.handle(do.AnswerDelayed(2, 3.0), 1.0)
    assert isinstance(swap, do.SwapView) and "n7" in swap.view


def test_when_the_time_is_over_the_same_is_asked_again() -> None:
    leader = in_phase(Phase.COLLECTING)
    asked = collect(leader)
    leader.handle(do.AnswerDelayed(2, 3.0), 1.0)
    assert leader.handle(do.Ticked(), 2.9) == []
    assert leader.handle(do.Ticked(), 3.0) == [asked]
    assert leader.next_deadline_s() is None
    assert write(leader).view == 2


def test_a_loss_while_somebody_is_waited_for_makes_a_new_view() -> None:
    leader = waiting()
    (swap,) = leader.handle(do.NodeLost(N2, "exit 1"), 2.0)
    assert isinstance(swap, do.SwapView) and swap.view.nodes == (N0, N1)
    win(leader)
    assert collect(leader).lost == (N3, N2)


def test_an_answer_that_is_late_and_delayed_is_dropped() -> None:
    leader = in_phase(Phase.PLANNING)
    leader.handle(do.NodeLost(N2, "exit 1"), 0.0)
    assert leader.handle(do.AnswerDelayed(2, 3.0), 1.0) == []
    assert leader.next_deadline_s() is None
    win(leader)
    with marks.expect("leader.stale-answer-dropped"):
        assert leader.handle(do.AnswerDelayed(2, 3.0), 1.0) == []


def test_a_lost_link_is_not_forgotten_while_somebody_is_waited_for() -> None:
    leader = waiting()
    leader.handle(do.StuckCame(Stuck(2, N0, N1, "state")), 1.0)
    assert leader.next_deadline_s() == 1.5
    (swap,) = leader.handle(do.Ticked(), 1.5)
    assert isinstance(swap, do.SwapView)


def test_a_member_that_says_hello_again_is_in_already() -> None:
    leader = training(N0, N1)
    with marks.expect("leader.member-is-in-already"):
        assert leader.handle(do.NodeReady(Member(N1)), 0.0) == []
    assert leader.phase is Phase.TRAINING


def test_another_incarnation_takes_the_place_of_the_first() -> None:
    leader = training(N0, N1)
    leader.handle(do.NodeReady(Member(N1, incarnation=1)), 0.0)
    (swap,) = leader.handle(do.BoundaryCame(BoundaryReached(1, N0, 7)), 0.0)
    assert isinstance(swap, do.SwapView) and swap.view.members == (Member(N0), Member(N1, incarnation=1))


def test_only_reports_of_this_view_by_its_members_count() -> None:
    leader = in_phase(Phase.COLLECTING)
    with marks.expect("leader.stale-answer-dropped", "leader.report-of-a-stranger-dropped"):
        leader.handle(do.ReportCame(report(N0, 5, view=1)), 0.0)
        leader.handle(do.ReportCame(report(N3, 5, view=2)), 0.0)
        leader.handle(do.ReportCame(report(N1, 5, view=2, incarnation=1)), 0.0)
    leader.handle(do.ReportCame(report(N0, 5)), 0.0)
    leader.handle(do.ReportCame(report(N1, 5)), 0.0)
    assert leader.phase is Phase.COLLECTING
    leader.handle(do.ReportCame(report(N2, 5)), 0.0)
    assert leader.phase is Phase.PLANNING


def test_answers_about_an_older_view_are_dropped() -> None:
    leader = in_phase(Phase.WRITING)
    leader.handle(do.NodeLost(N2, "exit 1"), 0.0)
    win(leader)
    old: list[do.Event] = [
        do.PlanAnswered(2, order(2, N0, N1, N2), ""), do.PlanWritten(2, False), do.ReadyCame(StateReady(2, N0)),
        do.BoundaryCame(BoundaryReached(2, N0, 6)), do.StuckCame(Stuck(2, N0, N2, "unit")), do.SwapAnswered(3, False, None),
    ]
    for event in old:
        with marks.expect("leader.stale-answer-dropped"):
            assert leader.handle(event, 0.0) == []
    assert (leader.phase, leader.next_deadline_s()) == (Phase.COLLECTING, None)


def test_a_plan_that_our_own_swap_overtook_is_no_sign_of_another_leader() -> None:
    leader = in_phase(Phase.WRITING)
    leader.handle(do.NodeLost(N2, "exit 1"), 0.0)
    with marks.expect("leader.plan-overtaken"):
        assert leader.handle(do.PlanWritten(2, False), 0.0) == []


def test_a_leader_that_loses_a_swap_or_a_write_stands_down() -> None:
    leader = in_phase(Phase.SWAPPING)
    assert leader.handle(do.SwapAnswered(2, False, view(2, N0)), 0.0) == [
        do.EndRun("view 2 was not taken, view 2 is there: another leads"),
    ]
    leader = in_phase(Phase.WRITING)
    assert leader.handle(do.PlanWritten(2, False), 0.0) == [do.EndRun("the plan of view 2 was not taken: another leads")]


def test_where_no_plan_fits_the_run_ends_and_says_why() -> None:
    leader = in_phase(Phase.PLANNING)
    assert leader.handle(do.PlanAnswered(2, None, "n0 needs 32 of 16 bytes"), 0.0) == [do.EndRun("n0 needs 32 of 16 bytes")]


def test_who_was_lost_and_who_joined_is_kept_until_a_plan_trains() -> None:
    leader = in_phase(Phase.PLANNING)
    leader.handle(do.NodeReady(Member(NodeId("n7"))), 0.0)
    leader.handle(do.NodeLost(N2, "exit 1"), 0.0)
    win(leader)
    wanted = collect(leader)
    assert (wanted.lost, wanted.joined) == ((N3, N2), ("n7",))
    assert wanted.cause == "n3 lost: exit 1; n2 lost: exit 1; n7 joins"
    leader.handle(do.NodeLost(NodeId("n7"), "exit 1"), 0.0)
    win(leader)
    assert (collect(leader).lost, leader._joined) == ((N3, N2), []), "who never trained was neither lost nor joined"
    write(leader)
    resume(leader)
    leader.handle(do.NodeLost(N1, "exit 1"), 0.0)
    win(leader)
    assert collect(leader).lost == (N1,)


def test_a_lost_link_waits_for_a_death_to_explain_it() -> None:
    leader = training(N0, N1)
    assert leader.handle(do.StuckCame(Stuck(1, N0, N1, "activation")), 10.0) == []
    assert leader.next_deadline_s() == 10.5
    leader.handle(do.StuckCame(Stuck(1, N1, N0, "activation")), 10.3)
    assert leader.next_deadline_s() == 10.5, "the first one counts"
    assert leader.handle(do.Ticked(), 10.4) == []
    assert leader.handle(do.Ticked(), 10.5) == [do.SwapView(1, view(2, N0, N1), "n0 has no link to n1: activation")]


def test_a_death_explains_a_lost_link() -> None:
    leader = training(N0, N1)
    leader.handle(do.StuckCame(Stuck(1, N0, N1, "activation")), 10.0)
    leader.handle(do.NodeLost(N1, "exit 1"), 10.1)
    assert leader.next_deadline_s() is None
    assert leader.handle(do.Ticked(), 10.6) == []


def test_a_wanted_flag_is_ordered_again_after_each_change_until_it_was_held() -> None:
    leader = training(N0, N1, N2)
    assert leader.handle(do.FlagWanted("checkpoint"), 0.0) == to_all(BoundaryOrdered(1, 1, "checkpoint"), N0, N1, N2)
    assert leader.handle(do.FlagWanted("checkpoint"), 0.0) == []
    leader.handle(do.NodeLost(N2, "exit 1"), 0.0)
    win(leader)
    collect(leader)
    write(leader)
    assert resume(leader)[2:] == to_all(BoundaryOrdered(2, 1, "checkpoint"), N0, N1)
    leader.handle(do.FlagHeld("checkpoint"), 0.0)
    leader.handle(do.NodeLost(N1, "exit 1"), 0.0)
    win(leader)
    collect(leader)
    write(leader)
    assert resume(leader) == to_all(ResumeOrdered(3, 1), N0)


def restored(leader: Leader, step: int) -> PlanOrdered:
    """The plan of a next view, which goes back to ``step``."""
    view = leader.view
    assert view is not None
    leader.handle(do.NodeLost(view.nodes[-1], "exit 1"), 0.0)
    win(leader)
    collect(leader, applied=7)
    return write(leader, step=step, restore="step-4")


def test_a_roll_back_gives_the_steps_in_between_a_new_first_try() -> None:
    leader = training(N0, N1, N2)
    ordered = restored(leader, 4)
    assert (ordered.attempt, ordered.rollbacks) == (1, ((7, 4, 1),))
    resume(leader)
    again = restored(leader, 4)
    assert (again.attempt, again.rollbacks) == (2, ((7, 4, 1), (7, 4, 2)))


def test_a_roll_back_that_a_new_view_interrupts_is_remembered() -> None:
    leader = training(N0, N1, N2)
    restored(leader, 4)
    leader.handle(do.NodeLost(N1, "exit 1"), 0.0)
    win(leader)
    wanted = collect(leader, applied=4)
    assert (wanted.rollbacks, wanted.resolution.attempt) == (((7, 4, 1),), 1)


def test_a_roll_back_reaches_over_steps_that_were_only_heard_of() -> None:
    leader = training(N0, N1)
    leader.handle(do.StepHeard(20), 0.0)
    assert restored(leader, 4).rollbacks == ((21, 4, 1),)


def test_the_first_plan_rolls_nothing_back() -> None:
    assert training(N0, N1).rollbacks == ()


def test_what_is_not_listed_is_illegal() -> None:
    with pytest.raises(LocalProtocolError, match="leader: ReadyCame while training"):
        in_phase(Phase.TRAINING).handle(do.ReadyCame(StateReady(2, N0)), 0.0)
    with pytest.raises(LocalProtocolError, match="leader: BoundaryCame while collecting"):
        in_phase(Phase.COLLECTING).handle(do.BoundaryCame(BoundaryReached(2, N0, 7)), 0.0)


def test_views_are_numbered_one_by_one() -> None:
    leader = in_phase(Phase.TRAINING)
    (swap,) = leader.handle(do.NodeLost(N2, "exit 1"), 0.0)
    assert isinstance(swap, do.SwapView) and swap.view == View(3, (Member(N0), Member(N1)))
