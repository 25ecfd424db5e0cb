"""The life of one worker between views, as a table.

The rules that carry the safety argument:

1. The newest view wins. A view change in any phase sends us back to draining, so an answer about an older view is
   dropped, never used.
2. A report is a promise: once drained, nothing of an older view is used any more, and nothing runs before that view's
   plan.
3. Nothing resumes before every byte it needs has arrived, at every member. Old copies are freed on ``Resume``, not before.
4. A view without us, or with our name and another incarnation, is the end of this process.
5. Orders with an older token come from a leader that was replaced, and are dropped.

No clock, socket, thread or random number is used here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from everstep.errors import LocalProtocolError
from everstep.protocol.marks import mark
from everstep.protocol.messages import BoundaryReached, PlanOrdered, Report, StateReady, Stuck, ToLeader, Union
from everstep.protocol.resolution import may_follow
from everstep.quantities import NodeId, UnitName
from everstep.view import View


class Phase(enum.Enum):
    """Where a member is. PLANNING: reported, waiting for the plan. READY: waiting for everybody else's state."""

    JOINING = "joining"
    TRAINING = "training"
    AT_BOUNDARY = "at boundary"
    DRAINING = "draining"
    PLANNING = "planning"
    MOVING = "moving"
    READY = "ready"
    HALTED = "halted"


# What happened.


@dataclass(frozen=True, slots=True)
class ViewSeen:
    """The store holds ``view``."""

    view: View
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """Answers ``Drain``: nothing runs, older views' messages are gone, and this is what is held (as in a report)."""

    view: int
    applied: int
    attempt: int
    prepared: bool
    union: Union | None
    holds: tuple[UnitName, ...]


@dataclass(frozen=True, slots=True)
class PlanSeen:
    """The plan of a view."""

    order: PlanOrdered

    @property
    def view(self) -> int:
        return self.order.view

    @property
    def token(self) -> int:
        return self.order.token


@dataclass(frozen=True, slots=True)
class StateMoved:
    """Answers ``ChangeState``: every byte that this node needs is here and verified."""

    view: int


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """Answers ``ChangeState``: state could not be had from ``peer``. What has arrived whole is kept."""

    view: int
    peer: NodeId
    what: str


@dataclass(frozen=True, slots=True)
class ResumeSeen:
    """Everybody's state is ready."""

    view: int
    token: int


@dataclass(frozen=True, slots=True)
class BoundarySeen:
    """The leader wants ``flag`` in the next prepared record."""

    view: int
    token: int
    flag: str


@dataclass(frozen=True, slots=True)
class BoundaryHeld:
    """A union with the flag ``change`` was applied; ``step`` is not begun."""

    view: int
    step: int


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A message to or from ``peer`` was lost, for ``what``. The peer may well be alive."""

    view: int
    peer: NodeId
    what: str


Event = (
    ViewSeen | Drained | PlanSeen | StateMoved | MoveFailed | ResumeSeen | BoundarySeen | BoundaryHeld | LinkLost
)


# What to do.


@dataclass(frozen=True, slots=True)
class Drain:
    """Stop the main thread, forget messages of views before ``view``, take nothing more from them; answer ``Drained``.

    Also given when nothing runs any more: the answer then comes at once.
    """

    view: View


@dataclass(frozen=True, slots=True)
class Tell:
    """Send ``message`` to the leader."""

    message: ToLeader


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeState:
    """Get what ``order`` gives this node; answer ``StateMoved`` or ``MoveFailed``.

    ``follow``: first apply ``order.union`` to the sums that are kept. ``drop_begun``: forget sums of the step about to be
    run. ``discard``: what is held, the union included, is of another step than ``order.step`` or of another line; forget
    it. Afterwards the node's state is that of ``order.step``, also where it holds nothing yet, and ``order.union``, if
    there is one, is the union it keeps.
    """

    order: PlanOrdered
    follow: bool
    drop_begun: bool
    discard: bool


@dataclass(frozen=True, slots=True)
class Resume:
    """Free old copies and train on: ``order.step``, as try ``order.attempt``."""

    order: PlanOrdered


@dataclass(frozen=True, slots=True)
class RaiseFlag:
    """Put ``flag`` into the next prepared record."""

    flag: str


@dataclass(frozen=True, slots=True)
class Halt:
    """End this process without writing anything."""

    reason: str


Effect = Drain | Tell | ChangeState | Resume | RaiseFlag | Halt

TRANSITIONS: Mapping[tuple[Phase, type[Event]], Phase] = {
    (Phase.JOINING, ViewSeen): Phase.DRAINING,
    (Phase.TRAINING, ViewSeen): Phase.DRAINING,
    (Phase.AT_BOUNDARY, ViewSeen): Phase.DRAINING,
    (Phase.DRAINING, ViewSeen): Phase.DRAINING,
    (Phase.PLANNING, ViewSeen): Phase.DRAINING,
    (Phase.MOVING, ViewSeen): Phase.DRAINING,
    (Phase.READY, ViewSeen): Phase.DRAINING,
    (Phase.DRAINING, Drained): Phase.PLANNING,
    (Phase.PLANNING, PlanSeen): Phase.MOVING,
    (Phase.MOVING, StateMoved): Phase.READY,
    (Phase.READY, ResumeSeen): Phase.TRAINING,
    (Phase.TRAINING, BoundarySeen): Phase.TRAINING,
    (Phase.AT_BOUNDARY, BoundarySeen): Phase.AT_BOUNDARY,
    (Phase.TRAINING, BoundaryHeld): Phase.AT_BOUNDARY,
    (Phase.MOVING, MoveFailed): Phase.MOVING,
    (Phase.TRAINING, LinkLost): Phase.TRAINING,
    (Phase.AT_BOUNDARY, LinkLost): Phase.AT_BOUNDARY,
    (Phase.DRAINING, LinkLost): Phase.DRAINING,
    (Phase.PLANNING, LinkLost): Phase.PLANNING,
    (Phase.MOVING, LinkLost): Phase.MOVING,
    (Phase.READY, LinkLost): Phase.READY,
}
"""Every legal step. ``HALTED`` is reached from each phase by a ``ViewSeen`` that ends this process, and is not left."""


class Member:
    """One worker process: ``node`` in this ``incarnation``."""

    def __init__(self, node: NodeId, incarnation: int) -> None:
        self.node, self.incarnation = node, incarnation
        self.phase = Phase.JOINING
        self.view: View | None = None
        self.order: PlanOrdered | None = None
        """The plan of the current view, once it is known."""
        self._token = -1
        self._drained: Drained | None = None

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """What to do about ``event``. ``now_s`` is not needed by any rule yet; drivers pass it to every machine.

        Raises:
            LocalProtocolError: the event is not legal in this phase.
        """
        if self.phase is Phase.HALTED or self._is_stale(event):
            return []
        if isinstance(event, ViewSeen) and not self._is_ours(event.view):
            return self._other_view(event.view)
        key = (self.phase, type(event))
        if key not in TRANSITIONS:
            raise LocalProtocolError(f"{self.node}: {type(event).__name__} while {self.phase.value}")
        self.phase = TRANSITIONS[key]
        return self._effects_of(event)

    def _is_stale(self, event: Event) -> bool:
        if isinstance(event, ViewSeen | PlanSeen | ResumeSeen | BoundarySeen):
            if event.token < self._token:
                mark("member.order-of-an-old-leader-dropped")
                return True
            self._token = event.token
        if isinstance(event, ViewSeen):
            stale = self.view is not None and event.view.number <= self.view.number
        else:
            stale = self.view is None or event.view != self.view.number
        if stale:
            mark("member.stale-answer-dropped")
        repeated = (isinstance(event, PlanSeen) and self.order is not None) or (
            isinstance(event, ResumeSeen) and self.phase in (Phase.TRAINING, Phase.AT_BOUNDARY)
        )
        if not stale and repeated:
            mark("member.repeated-order-dropped")
        return stale or repeated

    def _is_ours(self, view: View) -> bool:
        return self.node in view and view.member(self.node).incarnation == self.incarnation

    def _other_view(self, view: View) -> list[Effect]:
        if self.phase is Phase.JOINING and self.node not in view:
            mark("member.not-admitted-yet")
            return []
        self.phase = Phase.HALTED
        if self.node in view:
            other = view.member(self.node).incarnation
            return [Halt(f"view {view.number} has {self.node} as incarnation {other}, this is {self.incarnation}")]
        return [Halt(f"{self.node} is not in view {view.number}")]

    def _effects_of(self, event: Event) -> list[Effect]:
        match event:
            case ViewSeen(view):
                self.view, self.order, self._drained = view, None, None
                return [Drain(view)]
            case Drained():
                return self._report(event)
            case PlanSeen(order):
                return self._adopt(order)
            case StateMoved(view_number):
                return [Tell(StateReady(view=view_number, node=self.node))]
            case ResumeSeen():
                assert self.order is not None, "READY is reached through a plan"
                return [Resume(self.order)]
            case BoundarySeen(flag=flag):
                return [RaiseFlag(flag)] if self.phase is Phase.TRAINING else []
            case BoundaryHeld(view_number, step):
                return [Tell(BoundaryReached(view=view_number, node=self.node, step=step))]
            case MoveFailed(view_number, peer, what) | LinkLost(view_number, peer, what):
                return [Tell(Stuck(view=view_number, node=self.node, peer=peer, what=what))]

    def _report(self, drained: Drained) -> list[Effect]:
        self._drained = drained
        return [Tell(Report(
            view=drained.view, node=self.node, incarnation=self.incarnation, applied=drained.applied,
            attempt=drained.attempt, prepared=drained.prepared, union=drained.union, holds=drained.holds,
        ))]

    def _adopt(self, order: PlanOrdered) -> list[Effect]:
        drained = self._drained
        assert drained is not None, "PLANNING is reached through a report"
        self.order = order
        follow = order.restore is None and order.union is not None and may_follow(
            applied=drained.applied, attempt=drained.attempt, prepared=drained.prepared, union=order.union,
        )
        discard = not follow and (order.restore is not None or drained.applied != order.step)
        return [ChangeState(order=order, follow=follow, drop_begun=not follow and drained.attempt >= 0, discard=discard)]
