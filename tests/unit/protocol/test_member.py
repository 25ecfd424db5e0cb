"""Rules of a member between views."""

from __future__ import annotations

import pytest

from everstep.errors import LocalProtocolError
from everstep.protocol import marks
from everstep.protocol import member as m
from everstep.protocol.member import Member, Phase
from everstep.protocol.messages import BoundaryReached, PlanOrdered, Report, StateReady, Stuck
from everstep.view import Member as InView
from everstep.view import View
from tests.unit.protocol.makers import N0, N1, U0, order, union, view

NEWCOMER = {"applied": -1, "attempt": -1, "prepared": False, "union": None, "holds": ()}
INTERRUPTED = {"applied": 5, "attempt": 0, "prepared": True, "union": union(4), "holds": (U0,)}


def drained(number: int, **held: object) -> m.Drained:
    return m.Drained(view=number, **{**NEWCOMER, **held})  # type: ignore[arg-type]


def planning(number: int = 1, **held: object) -> Member:
    member = Member(N0, 0)
    member.handle(m.ViewSeen(view(number, N0, N1), 1), 0.0)
    member.handle(drained(number, **held), 0.0)
    assert member.phase is Phase.PLANNING
    return member


def training(number: int = 1, plan: PlanOrdered | None = None) -> Member:
    member = planning(number)
    for event in (m.PlanSeen(plan or order(number)), m.StateMoved(number), m.ResumeSeen(number, 1)):
        member.handle(event, 0.0)
    assert member.phase is Phase.TRAINING
    return member


def in_phase(phase: Phase) -> Member:
    """A member of view 1 in any phase but JOINING and HALTED."""
    member = training() if phase in (Phase.TRAINING, Phase.AT_BOUNDARY) else Member(N0, 0)
    events = {
        Phase.DRAINING: 1, Phase.PLANNING: 2, Phase.MOVING: 3, Phase.READY: 4, Phase.TRAINING: 0, Phase.AT_BOUNDARY: 0,
    }[phase]
    way = (m.ViewSeen(view(1, N0, N1), 1), drained(1), m.PlanSeen(order(1)), m.StateMoved(1))
    for event in way[:events]:
        member.handle(event, 0.0)
    if phase is Phase.AT_BOUNDARY:
        member.handle(m.BoundaryHeld(1, 6), 0.0)
    assert member.phase is phase
    return member


IN_A_VIEW = [phase for phase in Phase if phase not in (Phase.JOINING, Phase.HALTED)]


def test_from_a_view_to_training() -> None:
    member, plan = Member(N0, 0), order(1)
    assert member.handle(m.ViewSeen(view(1, N0, N1), 1), 0.0) == [m.Drain(view(1, N0, N1))]
    (tell,) = member.handle(drained(1, **INTERRUPTED), 0.0)
    assert tell == m.Tell(Report(
        view=1, node=N0, incarnation=0, applied=5, attempt=0, prepared=True, union=union(4), holds=(U0,),
    ))
    (change,) = member.handle(m.PlanSeen(plan), 0.0)
    assert change == m.ChangeState(order=plan, follow=False, drop_begun=True, discard=False)
    assert member.handle(m.StateMoved(1), 0.0) == [m.Tell(StateReady(view=1, node=N0))]
    assert member.handle(m.ResumeSeen(1, 1), 0.0) == [m.Resume(plan)]


@pytest.mark.parametrize("phase", IN_A_VIEW)
def test_the_newest_view_wins_in_any_phase(phase: Phase) -> None:
    member = in_phase(phase)
    assert member.handle(m.ViewSeen(view(2, N0), 1), 0.0) == [m.Drain(view(2, N0))]
    assert (member.phase, member.order) == (Phase.DRAINING, None)


@pytest.mark.parametrize("phase", IN_A_VIEW)
def test_an_answer_about_an_older_view_is_dropped(phase: Phase) -> None:
    member = in_phase(phase)
    member.handle(m.ViewSeen(view(2, N0, N1), 1), 0.0)
    old: list[m.Event] = [
        drained(1), m.PlanSeen(order(1)), m.StateMoved(1), m.MoveFailed(1, N1, "unit"), m.ResumeSeen(1, 1),
        m.BoundarySeen(1, 1, "change"), m.BoundaryHeld(1, 6), m.LinkLost(1, N1, "activation"),
        m.ViewSeen(view(1, N0, N1), 1), m.ViewSeen(view(2, N0, N1), 1),
    ]
    for event in old:
        with marks.expect("member.stale-answer-dropped"):
            assert member.handle(event, 0.0) == []
    assert member.phase is Phase.DRAINING


@pytest.mark.parametrize("phase", [Phase.JOINING, *IN_A_VIEW])
def test_a_view_with_another_incarnation_of_ours_is_the_end(phase: Phase) -> None:
    member = Member(N0, 0) if phase is Phase.JOINING else in_phase(phase)
    (halt,) = member.handle(m.ViewSeen(View(2, (InView(N0, incarnation=1),)), 1), 0.0)
    assert halt == m.Halt("view 2 has n0 as incarnation 1, this is 0")
    assert member.phase is Phase.HALTED
    assert member.handle(m.ViewSeen(view(3, N0), 1), 0.0) == [], "and nothing comes after it"


@pytest.mark.parametrize("phase", IN_A_VIEW)
def test_a_view_without_us_is_the_end(phase: Phase) -> None:
    member = in_phase(phase)
    assert member.handle(m.ViewSeen(view(2, N1), 1), 0.0) == [m.Halt("n0 is not in view 2")]
    assert member.phase is Phase.HALTED


def test_who_was_not_let_in_yet_waits() -> None:
    member = Member(N0, 0)
    with marks.expect("member.not-admitted-yet"):
        assert member.handle(m.ViewSeen(view(4, N1), 1), 0.0) == []
    assert member.handle(m.ViewSeen(view(5, N0, N1), 1), 0.0) == [m.Drain(view(5, N0, N1))]


def test_orders_with_an_older_token_are_dropped() -> None:
    member = Member(N0, 0)
    member.handle(m.ViewSeen(view(2, N0, N1), 8), 0.0)
    with marks.expect("member.order-of-an-old-leader-dropped"):
        assert member.handle(m.ViewSeen(view(3, N0), 7), 0.0) == []
    assert member.view == view(2, N0, N1)


def test_orders_that_come_twice_are_dropped() -> None:
    member = training()
    for event in (m.PlanSeen(order(1)), m.ResumeSeen(1, 1)):
        with marks.expect("member.repeated-order-dropped"):
            assert member.handle(event, 0.0) == []


def test_who_is_behind_follows_with_sums_of_the_same_try() -> None:
    plan = order(1, step=6, union=union(5))
    (change,) = planning(**INTERRUPTED).handle(m.PlanSeen(plan), 0.0)
    assert change == m.ChangeState(order=plan, follow=True, drop_begun=False, discard=False)


@pytest.mark.parametrize("lacking", [{"prepared": False}, {"attempt": 1}, {"applied": 4}])
def test_who_is_behind_and_cannot_follow_discards(lacking: dict[str, object]) -> None:
    plan = order(1, step=6, union=union(5))
    (change,) = planning(**{**INTERRUPTED, **lacking}).handle(m.PlanSeen(plan), 0.0)
    assert isinstance(change, m.ChangeState)
    assert (change.follow, change.discard) == (False, True)


def test_who_is_ahead_drops_what_it_began() -> None:
    plan = order(1, step=6, union=union(5))
    (change,) = planning(applied=6, attempt=0, union=union(5), holds=(U0,)).handle(m.PlanSeen(plan), 0.0)
    assert change == m.ChangeState(order=plan, follow=False, drop_begun=True, discard=False)


def test_a_restore_discards_even_what_is_of_the_right_step() -> None:
    plan = order(1, step=5, restore="step-5")
    (change,) = planning(**INTERRUPTED).handle(m.PlanSeen(plan), 0.0)
    assert change == m.ChangeState(order=plan, follow=False, drop_begun=True, discard=True)


def test_a_flag_is_raised_in_training_and_has_come_too_late_at_the_boundary() -> None:
    assert in_phase(Phase.TRAINING).handle(m.BoundarySeen(1, 1, "stop"), 0.0) == [m.RaiseFlag("stop")]
    assert in_phase(Phase.AT_BOUNDARY).handle(m.BoundarySeen(1, 1, "stop"), 0.0) == []


def test_at_a_boundary_the_leader_is_told() -> None:
    member = training()
    assert member.handle(m.BoundaryHeld(1, 6), 0.0) == [m.Tell(BoundaryReached(view=1, node=N0, step=6))]
    assert member.phase is Phase.AT_BOUNDARY


def test_a_lost_link_and_a_failed_move_are_told_and_change_nothing() -> None:
    for member, event in (
        (in_phase(Phase.TRAINING), m.LinkLost(1, N1, "activation")),
        (in_phase(Phase.MOVING), m.MoveFailed(1, N1, "activation")),
    ):
        before = member.phase
        assert member.handle(event, 0.0) == [m.Tell(Stuck(view=1, node=N0, peer=N1, what="activation"))]
        assert member.phase is before


@pytest.mark.parametrize(
    ("phase", "event"),
    [
        (Phase.TRAINING, drained(1)),
        (Phase.TRAINING, m.StateMoved(1)),
        (Phase.DRAINING, m.PlanSeen(order(1))),
        (Phase.PLANNING, m.ResumeSeen(1, 1)),
        (Phase.MOVING, m.ResumeSeen(1, 1)),
        (Phase.READY, m.BoundaryHeld(1, 6)),
    ],
)
def test_what_is_not_listed_is_illegal(phase: Phase, event: m.Event) -> None:
    member = in_phase(phase)
    with pytest.raises(LocalProtocolError, match=f"n0: {type(event).__name__} while {phase.value}"):
        member.handle(event, 0.0)
    assert member.phase is phase
