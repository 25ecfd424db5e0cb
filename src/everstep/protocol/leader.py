"""The leader's side of a view: who is in, what they hold, which plan they get. A table.

The rules that carry the safety argument:

1. The newest view wins. A lost member in any phase starts a new view; losses that come while a swap is under way are
   taken together in the next one.
2. A plan is made from reports of *this* view by *all* its members, and written once.
3. Training resumes when the state of every member is ready.
4. With everybody alive and no progress (a link was lost), a new view with the same members is the only retry there is.
5. A leader that loses a swap or a write was replaced, and stands down.

Silence is not judged here: the failure detector turns it into ``NodeLost``. No clock, socket, thread or random number is
used here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from everstep.errors import LocalProtocolError
from everstep.protocol.marks import mark
from everstep.protocol.messages import (
    BoundaryOrdered,
    BoundaryReached,
    PlanOrdered,
    Report,
    ResumeOrdered,
    StateReady,
    Stuck,
    ToMember,
    ViewOrdered,
)
from everstep.protocol.resolution import Resolution, resolve
from everstep.quantities import NodeId, node_number
from everstep.view import Member, View

CHANGE = "change"
"""The flag that stops members at a step boundary, so that joiners can be let in."""


class Phase(enum.Enum):
    """Where the leader is."""

    GATHERING = "gathering"
    TRAINING = "training"
    BOUNDARY_WANTED = "boundary wanted"
    SWAPPING = "swapping"
    COLLECTING = "collecting"
    PLANNING = "planning"
    WRITING = "writing"
    MOVING = "moving"
    ENDED = "ended"


# What happened.


@dataclass(frozen=True, slots=True)
class NodeReady:
    """A process is up and waits to be let in."""

    member: Member


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A process exited, or was silent for too long. ``cause`` says which."""

    node: NodeId
    cause: str


@dataclass(frozen=True, slots=True)
class SwapAnswered:
    """Answers ``SwapView``: whether view ``number`` is in the store because of us; else what is."""

    number: int
    won: bool
    current: View | None


@dataclass(frozen=True, slots=True)
class ReportCame:
    """What a member holds."""

    report: Report


@dataclass(frozen=True, slots=True)
class PlanAnswered:
    """Answers ``ComputePlan``. None: no plan fits, and ``reason`` says why."""

    view: int
    order: PlanOrdered | None
    reason: str


@dataclass(frozen=True, slots=True)
class AnswerDelayed:
    """Answers ``ComputePlan``: somebody is expected with whom the plan would be better. Whoever comes makes a new view; when
    ``until_s`` is over the same is asked again."""

    view: int
    until_s: float


@dataclass(frozen=True, slots=True)
class PlanWritten:
    """Answers ``WritePlan``: whether the plan of ``view`` in the store is ours."""

    view: int
    won: bool


@dataclass(frozen=True, slots=True)
class ReadyCame:
    """A member has all of its state."""

    message: StateReady


@dataclass(frozen=True, slots=True)
class BoundaryCame:
    """A member stopped at the boundary that was ordered."""

    message: BoundaryReached


@dataclass(frozen=True, slots=True)
class StuckCame:
    """A member lost a link to a peer that may be alive."""

    message: Stuck


@dataclass(frozen=True, slots=True)
class FlagWanted:
    """Somebody wants a checkpoint or a stop. Ordered again after each change of view, until ``FlagHeld``."""

    flag: str


@dataclass(frozen=True, slots=True)
class FlagHeld:
    """A union with ``flag`` was held."""

    flag: str


@dataclass(frozen=True, slots=True)
class StepHeard:
    """Step ``step`` was committed, as far as the members tell. Only used to say what a roll-back goes back over."""

    step: int


@dataclass(frozen=True, slots=True)
class PlanWanted:
    """Everybody is well, and another plan than the present one would be better, for ``cause``."""

    cause: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """It is ``next_deadline_s`` or later."""


Event = (
    NodeReady | NodeLost | SwapAnswered | ReportCame | PlanAnswered | AnswerDelayed | PlanWritten | ReadyCame | BoundaryCame
    | StuckCame | FlagWanted | FlagHeld | StepHeard | PlanWanted | Ticked
)


# What to do.


@dataclass(frozen=True, slots=True)
class SwapView:
    """Put ``view`` into the store if the number there is ``expected`` (0: none); answer ``SwapAnswered``."""

    expected: int
    view: View
    cause: str


@dataclass(frozen=True, slots=True)
class SendMember:
    """Send ``message`` to ``target``."""

    target: NodeId
    message: ToMember


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePlan:
    """Choose a plan for ``view``; answer ``PlanAnswered``.

    ``lost`` and ``joined``: everybody who went or came since the last plan that trained. ``rollbacks``: those so far; the
    leader adds the one that the answer itself may be.
    """

    view: View
    resolution: Resolution
    reports: tuple[Report, ...]
    lost: tuple[NodeId, ...]
    joined: tuple[NodeId, ...]
    cause: str
    rollbacks: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Write ``order`` as the plan of its view, once, if that view is still the current one; answer ``PlanWritten``."""

    order: PlanOrdered


@dataclass(frozen=True, slots=True)
class Fence:
    """End ``node``'s process, so that it cannot come back."""

    node: NodeId
    why: str


@dataclass(frozen=True, slots=True)
class EndRun:
    """Nothing more can be done."""

    reason: str


Effect = SwapView | SendMember | ComputePlan | WritePlan | Fence | EndRun


P = Phase
_REMOVAL = (P.SWAPPING, P.ENDED)

TRANSITIONS: Mapping[tuple[Phase, type[Event]], tuple[Phase, ...]] = {
    (P.GATHERING, NodeReady): (P.GATHERING, P.SWAPPING),
    (P.TRAINING, NodeReady): (P.TRAINING, P.BOUNDARY_WANTED),
    (P.BOUNDARY_WANTED, NodeReady): (P.BOUNDARY_WANTED,),
    (P.SWAPPING, NodeReady): (P.SWAPPING,),
    (P.COLLECTING, NodeReady): (P.COLLECTING,),
    (P.PLANNING, NodeReady): (P.PLANNING, P.SWAPPING),
    (P.WRITING, NodeReady): (P.WRITING,),
    (P.MOVING, NodeReady): (P.MOVING,),
    (P.GATHERING, NodeLost): (P.GATHERING, P.SWAPPING, P.ENDED),
    (P.TRAINING, NodeLost): (P.TRAINING, *_REMOVAL),
    (P.BOUNDARY_WANTED, NodeLost): (P.BOUNDARY_WANTED, *_REMOVAL),
    (P.SWAPPING, NodeLost): (P.SWAPPING,),
    (P.COLLECTING, NodeLost): (P.COLLECTING, *_REMOVAL),
    (P.PLANNING, NodeLost): (P.PLANNING, *_REMOVAL),
    (P.WRITING, NodeLost): (P.WRITING, *_REMOVAL),
    (P.MOVING, NodeLost): (P.MOVING, *_REMOVAL),
    (P.SWAPPING, SwapAnswered): (P.COLLECTING, *_REMOVAL),
    (P.COLLECTING, ReportCame): (P.COLLECTING, P.PLANNING),
    (P.SWAPPING, ReportCame): (P.SWAPPING,),
    (P.PLANNING, PlanAnswered): (P.WRITING, P.ENDED),
    (P.SWAPPING, PlanAnswered): (P.SWAPPING,),
    (P.PLANNING, AnswerDelayed): (P.PLANNING, P.SWAPPING),
    (P.SWAPPING, AnswerDelayed): (P.SWAPPING,),
    (P.WRITING, PlanWritten): (P.MOVING, P.ENDED),
    (P.SWAPPING, PlanWritten): (P.SWAPPING,),
    (P.MOVING, ReadyCame): (P.MOVING, P.TRAINING, P.BOUNDARY_WANTED),
    (P.SWAPPING, ReadyCame): (P.SWAPPING,),
    (P.BOUNDARY_WANTED, BoundaryCame): _REMOVAL,
    (P.SWAPPING, BoundaryCame): (P.SWAPPING,),
    **{(phase, StuckCame): (phase,) for phase in P if phase not in (P.GATHERING, P.ENDED)},
    **{(phase, event): (phase,) for phase in P if phase is not P.ENDED for event in (FlagWanted, FlagHeld, StepHeard)},
    **{(phase, PlanWanted): (phase,) for phase in P if phase is not P.ENDED},
    (P.TRAINING, PlanWanted): (P.BOUNDARY_WANTED,),
    (P.GATHERING, Ticked): (P.GATHERING,),
    (P.SWAPPING, Ticked): (P.SWAPPING,),
    **{
        (phase, Ticked): (phase, *_REMOVAL)
        for phase in (P.TRAINING, P.BOUNDARY_WANTED, P.COLLECTING, P.PLANNING, P.WRITING, P.MOVING)
    },
}
"""Every legal step: the phases that an event may lead to. ``ENDED`` is not left."""

_CURRENT_ONLY = (ReportCame, PlanAnswered, AnswerDelayed, PlanWritten, ReadyCame, BoundaryCame, StuckCame)


class Leader:
    """Decides who is in and when training goes on; carries out nothing."""

    def __init__(self, *, token: int, num_members: int, newest_view: int = 0, stuck_grace_s: float = 0.5) -> None:
        """Waits for ``num_members`` processes (workers and spares) before the first view.

        ``newest_view``: the number of the view that an earlier leader of this run left in the store; 0 if there is none.
        ``stuck_grace_s``: how long a lost link may turn out to be a death before it costs a view.
        """
        self.phase = Phase.GATHERING
        self.view: View | None = None
        self.rollbacks: tuple[tuple[int, int, int], ...] = ()
        self._token = token
        self._awaited = num_members
        self._newest_view = newest_view
        self._stuck_grace_s = stuck_grace_s
        self._candidates: dict[NodeId, Member] = {}
        self._removals: dict[NodeId, str] = {}
        self._proposed: View | None = None
        self._lost: list[NodeId] = []
        self._joined: list[NodeId] = []
        self._causes: list[str] = []
        self._reports: dict[NodeId, Report] = {}
        self._ready: set[NodeId] = set()
        self._order: PlanOrdered | None = None
        self._flags: list[str] = []
        self._known_step = -1
        self._highest_attempt = -1
        self._stuck: tuple[float, str] | None = None
        self._wish: str | None = None
        self._asked: ComputePlan | None = None
        self._ask_again_s: float | None = None

    def next_deadline_s(self) -> float | None:
        """When to give ``Ticked``; None while nothing is waited for."""
        waits_s = [until_s for until_s in (self._stuck and self._stuck[0], self._ask_again_s) if until_s is not None]
        return min(waits_s, default=None)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """What to do about ``event``.

        Raises:
            LocalProtocolError: the event is not legal in this phase.
        """
        if self.phase is Phase.ENDED or self._is_stale(event):
            return []
        key = (self.phase, type(event))
        if key not in TRANSITIONS:
            raise LocalProtocolError(f"leader: {type(event).__name__} while {self.phase.value}")
        effects = self._effects_of(event, now_s)
        if self.phase not in TRANSITIONS[key]:
            raise LocalProtocolError(f"leader: {type(event).__name__} led from {key[0].value} to {self.phase.value}")
        return effects

    def _is_stale(self, event: Event) -> bool:
        if isinstance(event, SwapAnswered):
            stale = self._proposed is None or event.number != self._proposed.number
        elif isinstance(event, _CURRENT_ONLY):
            stale = self.view is None or _view_of(event) != self.view.number
        else:
            stale = False
        if stale:
            mark("leader.stale-answer-dropped")
        return stale

    def _effects_of(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case NodeReady(member):
                return self._candidate(member)
            case NodeLost(node, cause):
                return self._lose(node, cause)
            case SwapAnswered():
                return self._swapped(event)
            case ReportCame(report):
                return self._collect(report)
            case PlanAnswered(_, order, reason):
                return self._planned(order, reason)
            case AnswerDelayed(_, until_s):
                return self._delayed(until_s)
            case PlanWritten(won=won):
                return self._written(won)
            case ReadyCame(message):
                return self._moved(message.node)
            case BoundaryCame(message):
                return [] if self.phase is Phase.SWAPPING else self._swap(self._wish or f"step {message.step} reached")
            case StuckCame(message):
                return self._wait_for_a_death(message, now_s)
            case FlagWanted(flag):
                return self._want(flag)
            case FlagHeld(flag):
                self._flags = [wanted for wanted in self._flags if wanted != flag]
                return []
            case StepHeard(step):
                self._known_step = max(self._known_step, step + 1)
                return []
            case PlanWanted(cause):
                return self._want_plan(cause)
            case Ticked():
                return self._tick(now_s)

    # Who is in.

    def _candidate(self, member: Member) -> list[Effect]:
        if self.view and member in self.view.members:
            mark("leader.member-is-in-already")
            return []
        self._candidates[member.node_id] = member
        if self.phase is Phase.GATHERING:
            return self._start_if_complete()
        if self._ask_again_s is not None:
            return self._swap()
        return self._want_boundary() if self.phase is Phase.TRAINING else []

    def _start_if_complete(self) -> list[Effect]:
        return self._swap("start") if len(self._candidates) >= self._awaited else []

    def _lose(self, node: NodeId, cause: str) -> list[Effect]:
        self._candidates.pop(node, None)
        if self.phase is Phase.GATHERING:
            self._awaited -= 1
            return self._start_if_complete() if self._awaited else self._end(f"{node}: {cause}; no node is left to start with")
        if node in self._removals or not any(view and node in view for view in (self.view, self._proposed)):
            mark("leader.no-member-lost")
            return []
        self._removals[node] = cause
        return [] if self.phase is Phase.SWAPPING else self._swap()

    def _swap(self, cause: str | None = None) -> list[Effect]:
        """Propose the next view: without who is lost, with who waits."""
        before = self.view.members if self.view else ()
        kept = tuple(m for m in before if m.node_id not in self._removals and m.node_id not in self._candidates)
        members = (*kept, *sorted(self._candidates.values(), key=lambda m: node_number(m.node_id)))
        causes = [f"{node} lost: {why}" for node, why in self._removals.items()]
        causes += [f"{node} joins" for node in self._candidates] if self.view else []
        said = "; ".join(causes) or cause or "no progress"
        if not members:
            return self._end(f"{said}; no node is left")
        self.phase = Phase.SWAPPING
        self._stuck = self._wish = self._ask_again_s = None
        expected = self.view.number if self.view else self._newest_view
        self._proposed = View(expected + 1, members)
        self._causes.append(said)
        return [SwapView(expected, self._proposed, said)]

    def _swapped(self, answer: SwapAnswered) -> list[Effect]:
        assert self._proposed is not None, "an answer that is not stale names the proposed view"
        if not answer.won:
            current = f"view {answer.current.number} is there" if answer.current else "there is no view"
            return self._end(f"view {answer.number} was not taken, {current}: another leads")
        before, self.view, self._proposed = self.view, self._proposed, None
        removed = [node for node in (before.nodes if before else ()) if node not in self.view]
        self._lost += [node for node in removed if node not in self._joined]
        self._joined = [node for node in self._joined if node in self.view]
        self._joined += [node for node in self.view.nodes if before is None or node not in before]
        fences: list[Effect] = [Fence(node, self._removals.pop(node)) for node in removed]
        for node in self.view.nodes:
            self._candidates.pop(node, None)
        self._reports, self._ready, self._order = {}, set(), None
        if self._removals:
            return [*fences, *self._swap()]
        self.phase = Phase.COLLECTING
        # Those who were removed are told too: who is alive after all stops by itself, should the fence come late.
        told = (*self.view.nodes, *removed)
        return [*fences, *(SendMember(node, ViewOrdered(self.view, self._token)) for node in told)]

    # What they hold, and what they get.

    def _collect(self, report: Report) -> list[Effect]:
        view = self._current()
        if self.phase is not Phase.COLLECTING:
            return []
        if report.node not in view or view.member(report.node).incarnation != report.incarnation:
            mark("leader.report-of-a-stranger-dropped")
            return []
        self._reports[report.node] = report
        if len(self._reports) < len(view.members):
            return []
        self.phase = Phase.PLANNING
        reports = tuple(self._reports[node] for node in view.nodes)
        resolution = resolve(reports, self.rollbacks)
        if resolution.step is not None:
            self._known_step = max(self._known_step, resolution.step)
        self._asked = ComputePlan(
            view=view, resolution=resolution, reports=reports, lost=tuple(self._lost), joined=tuple(self._joined),
            cause="; ".join(self._causes), rollbacks=self.rollbacks,
        )
        return [self._asked]

    def _planned(self, order: PlanOrdered | None, reason: str) -> list[Effect]:
        if self.phase is not Phase.PLANNING:
            return []
        if order is None:
            return self._end(reason)
        self._order = self._with_rollback(order)
        self.phase = Phase.WRITING
        return [WritePlan(self._order)]

    def _delayed(self, until_s: float) -> list[Effect]:
        if self.phase is not Phase.PLANNING:
            return []
        self._ask_again_s = until_s
        # Who is expected may have come while the answer was thought about.
        return self._swap() if self._candidates else []

    def _with_rollback(self, order: PlanOrdered) -> PlanOrdered:
        """``order``, in whose roll-back no step repeats the number of a try that may have been made before."""
        begun_before = self._highest_attempt >= 0 and order.step <= self._known_step
        if order.restore is None or not begun_before:
            return order
        attempt = max(self._highest_attempt, order.attempt) + 1
        rollbacks = (*self.rollbacks, (self._known_step, order.step, attempt))
        return msgspec.structs.replace(order, attempt=attempt, rollbacks=rollbacks)

    def _written(self, won: bool) -> list[Effect]:
        if self.phase is not Phase.WRITING:
            # Our own swap may have overtaken the write, which then finds its view gone: no sign of another leader.
            mark("leader.plan-overtaken")
            return []
        if not won:
            return self._end(f"the plan of view {self._current().number} was not taken: another leads")
        order = self._order
        assert order is not None, "WRITING is reached through an order"
        # From here on, not from Resume: a member may forget the tries it made once it sees this order, and a view that
        # interrupts the restore may find all state there, so that the next order is none.
        self.rollbacks = order.rollbacks
        self._highest_attempt = max(self._highest_attempt, order.attempt)
        self.phase = Phase.MOVING
        return self._to_all(order)

    def _moved(self, node: NodeId) -> list[Effect]:
        view, order = self._current(), self._order
        if self.phase is not Phase.MOVING:
            return []
        self._ready.add(node)
        if not self._ready.issuperset(view.nodes):
            return []
        assert order is not None, "MOVING is reached through an order"
        self._known_step = order.step
        self._lost, self._joined, self._causes = [], [], []
        self.phase = Phase.TRAINING
        resume = self._to_all(ResumeOrdered(view.number, self._token))
        flags = [effect for flag in self._flags for effect in self._order_flag(flag)]
        return [*resume, *flags, *(self._want_boundary() if self._candidates else [])]

    # What stops them.

    def _want_boundary(self) -> list[Effect]:
        self.phase = Phase.BOUNDARY_WANTED
        return self._order_flag(CHANGE)

    def _want_plan(self, cause: str) -> list[Effect]:
        """A new view with the same members, at a step boundary. In other phases the next plan is on its way already."""
        if self.phase is not Phase.TRAINING:
            mark("leader.plan-is-on-its-way")
            return []
        self._wish = cause
        return self._want_boundary()

    def _want(self, flag: str) -> list[Effect]:
        if flag in self._flags:
            return []
        self._flags.append(flag)
        return self._order_flag(flag) if self.phase in (Phase.TRAINING, Phase.BOUNDARY_WANTED) else []

    def _order_flag(self, flag: str) -> list[Effect]:
        return self._to_all(BoundaryOrdered(self._current().number, self._token, flag))

    def _wait_for_a_death(self, message: Stuck, now_s: float) -> list[Effect]:
        if self._stuck is None and self.phase is not Phase.SWAPPING:
            self._stuck = (now_s + self._stuck_grace_s, f"{message.node} has no link to {message.peer}: {message.what}")
        return []

    def _tick(self, now_s: float) -> list[Effect]:
        if self._stuck is not None and now_s >= self._stuck[0]:
            return self._swap(self._stuck[1])
        if self._ask_again_s is not None and now_s >= self._ask_again_s:
            assert self._asked is not None, "only an answer is delayed"
            self._ask_again_s = None
            return [self._asked]
        return []

    def _end(self, reason: str) -> list[Effect]:
        self.phase = Phase.ENDED
        self._stuck = None
        return [EndRun(reason)]

    def _current(self) -> View:
        assert self.view is not None, "only reached in a view"
        return self.view

    def _to_all(self, message: ToMember) -> list[Effect]:
        return [SendMember(node, message) for node in self._current().nodes]


def _view_of(event: Event) -> int | None:
    match event:
        case ReportCame(message) | ReadyCame(message) | BoundaryCame(message) | StuckCame(message):
            return message.view
        case PlanAnswered(view) | AnswerDelayed(view) | PlanWritten(view):
            return view
    return None
