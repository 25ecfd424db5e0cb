"""A pretend worker: it carries out what its ``Member`` and its ``Exchange`` decide, with hashes for sums.

Points at which a node may be ended are said out loud through ``surroundings.point(node, name)``.

1. The header of a message is checked when it is used, not only when it comes.
2. Whoever holds the union of a step applies it before reporting, and keeps it until the next one is held.
3. Old copies are freed on ``Resume`` alone; state is served only once this node has itself adopted the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from everstep.protocol import commit, member
from everstep.protocol.leader import CHANGE
from everstep.protocol.messages import (
    BoundaryOrdered,
    ExchangeMessage,
    PlanOrdered,
    Prepared,
    ResumeOrdered,
    ToMember,
    Union,
    ViewOrdered,
    first_attempt,
)
from everstep.quantities import NodeId, UnitName
from everstep.simulator.kernel import Kernel
from everstep.simulator.model import Model, Pair, Reduced, State, contribution, digest, first_trace, loss
from everstep.simulator.network import LEADER, Network
from everstep.simulator.store import Disk
from everstep.view import View


@dataclass(frozen=True, slots=True)
class Rules:
    """What a pretend world abides by. Switching one off must make some seed fail: that is how checkers are checked."""

    keep_union: bool = True
    """The union of a step is kept until the next one is held."""
    check_headers: bool = True
    """Messages of other views and tries are not used, and those of older views not kept."""
    drop_begun: bool = True
    """A step that is tried again is begun anew."""
    free_on_resume: bool = True
    """Old copies are freed when everybody's state is ready, not when one's own is."""
    write_once: bool = True
    """A view has one plan."""


@dataclass(frozen=True, slots=True)
class Header:
    """Which try of which step in which view a message belongs to."""

    view: int
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Activation:
    """A micro-batch arrives at ``hop``."""

    header: Header
    micro_batch: int
    hop: int
    trace: str


@dataclass(frozen=True, slots=True)
class Gradient:
    """A micro-batch comes back to ``hop``; ``trace`` is that of its whole forward."""

    header: Header
    micro_batch: int
    hop: int
    trace: str


@dataclass(frozen=True, slots=True)
class LocalSum:
    """What ``node`` counted, for the owner of a chunk."""

    header: Header
    unit: UnitName
    chunk: int
    node: NodeId
    contributions: Mapping[Pair, str]


@dataclass(frozen=True, slots=True)
class ReducedSum:
    """What all counted, from the owner of a chunk."""

    header: Header
    unit: UnitName
    chunk: int
    reduced: Reduced


@dataclass(frozen=True, slots=True)
class Pull:
    """``node`` asks for a unit that the plan of ``view`` gives it."""

    view: int
    unit: UnitName
    node: NodeId


@dataclass(frozen=True, slots=True)
class Pulled:
    """The answer, at ``step``."""

    view: int
    unit: UnitName
    step: int
    state: State


@dataclass(frozen=True, slots=True)
class Progress:
    """For the leader's log: ``node`` applied ``step``."""

    step: int
    flags: tuple[str, ...]


StepMessage = Activation | Gradient | LocalSum | ReducedSum


@dataclass(frozen=True, slots=True)
class Applied:
    """A fact for the checkers: ``node`` took ``step``, on a union of ``(view, attempt)``."""

    node: NodeId
    union: Union
    states: Mapping[UnitName, State]


@dataclass(frozen=True, slots=True)
class Begun:
    """A fact for the checkers: ``node`` begins a try of a step."""

    node: NodeId
    view: int
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Used:
    """A fact for the checkers: something that names ``theirs`` was used in view ``ours``."""

    node: NodeId
    ours: int
    theirs: int
    what: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """A fact for the checkers: ``node`` trains on under ``order``, from these states."""

    node: NodeId
    order: PlanOrdered
    states: Mapping[UnitName, State]


@dataclass(frozen=True, slots=True)
class Stranded:
    """A fact for the checkers: ``nodes`` are prepared and one step behind, and nobody in ``view`` has the union."""

    view: int
    nodes: tuple[NodeId, ...]


Fact = Applied | Begun | Used | Resumed | Stranded


class Surroundings(Protocol):
    """What a pretend node needs of the world around it."""

    kernel: Kernel
    network: Network
    disk: Disk
    model: Model
    rules: Rules
    num_steps: int
    checkpoint_every: int

    def point(self, node: NodeId, name: str) -> None:
        """The node is at a point where it may be ended. Raises Died if it is."""

    def note(self, fact: Fact) -> None:
        """Something happened that checkers look at."""

    def halted(self, node: NodeId, reason: str) -> None:
        """The node ended by itself."""


@dataclass(slots=True)
class _Run:
    """One try of one step on one node."""

    header: Header
    order: PlanOrdered
    exchange: commit.Exchange
    backwards_left: int
    local: dict[UnitName, dict[Pair, str]]
    losses: dict[int, tuple[float, float]] = field(default_factory=dict)
    posted: dict[tuple[UnitName, int], dict[NodeId, Mapping[Pair, str]]] = field(default_factory=dict)
    reduced: dict[tuple[UnitName, int], Reduced] = field(default_factory=dict)


class PretendNode:
    """One worker process."""

    def __init__(self, node: NodeId, incarnation: int, world: Surroundings) -> None:
        self.node, self.incarnation, self.alive = node, incarnation, True
        self.member = member.Member(node, incarnation)
        self.applied = -1
        self.states: dict[UnitName, State] = {}
        self.union: Union | None = None
        self._world, self._kernel, self._model = world, world.kernel, world.model
        self._view: View | None = None
        self._order: PlanOrdered | None = None
        self._attempt = -1
        self._sums: dict[UnitName, Reduced] | None = None
        """Complete sums of step ``applied``."""
        self._run: _Run | None = None
        self._changed = False
        """Whether this view's plan was adopted."""
        self._awaited: set[UnitName] = set()
        self._flags: set[str] = set()
        self._kept: list[tuple[NodeId, Any]] = []

    # What comes in.

    def receive(self, source: NodeId, message: Any) -> None:
        """A message arrives."""
        if isinstance(message, ToMember):
            self._handle(_as_event(message))
        elif self._is_for_now(message):
            self._use(source, message)
        elif self._may_be_for_later(message):
            self._kept.append((source, message))

    def link_lost(self, peer: NodeId) -> None:
        """The connection to ``peer`` was reset."""
        if self.alive and self._view is not None:
            self._handle(member.LinkLost(self._view.number, peer, "connection reset"))

    def _is_for_now(self, message: Any) -> bool:
        view = self._view.number if self._view else 0
        if isinstance(message, Pull | Pulled):
            return message.view == view and self._changed
        header = _header_of(message)
        if self._run is None:
            return False
        if not self._world.rules.check_headers:
            return header.step == self._run.header.step
        return header == self._run.header

    def _may_be_for_later(self, message: Any) -> bool:
        view = self._view.number if self._view else 0
        if isinstance(message, Pull | Pulled):
            return message.view > view or (message.view == view and not self._changed)
        header = _header_of(message)
        if header.view != view:
            return header.view > view or not self._world.rules.check_headers
        return self._run is None or header.step > self._run.header.step

    def _use(self, source: NodeId, message: Any) -> None:
        theirs = message.view if isinstance(message, Pull | Pulled) else _header_of(message).view
        self._world.note(Used(self.node, self._view.number if self._view else 0, theirs, type(message).__name__))
        match message:
            case Activation():
                self._later(lambda run: self._forward(run, message.micro_batch, message.hop, message.trace))
            case Gradient():
                self._later(lambda run: self._backward(run, message.micro_batch, message.hop, message.trace))
            case LocalSum():
                self._gather(message)
            case ReducedSum():
                self._write_back(message)
            case Pull():
                self._serve(message)
            case Pulled():
                self._take_state(message)
            case Prepared() | Union():
                assert self._run is not None
                self._perform(self._run.exchange.received(message))

    def _look_again(self) -> None:
        """Messages that came early may be for now."""
        kept, self._kept = self._kept, []
        for source, message in kept:
            self.receive(source, message)

    # What the member decides.

    def _handle(self, event: member.Event) -> None:
        for effect in self.member.handle(event, self._kernel.now_s):
            self._do(effect)

    def _do(self, effect: member.Effect) -> None:
        match effect:
            case member.Drain(view):
                self._drain(view)
            case member.Tell(message):
                self._world.network.send(self.node, LEADER, message)
            case member.ChangeState():
                self._change_state(effect)
            case member.Resume(order):
                self._resume(order)
            case member.RaiseFlag(flag):
                self._flags.add(flag)
            case member.Halt(reason):
                self._world.halted(self.node, reason)

    def _drain(self, view: View) -> None:
        self._run = None
        self._view, self._order, self._changed = view, None, False
        self._awaited = set()
        if self._world.rules.check_headers:
            self._kept = [(s, m) for s, m in self._kept if _view_of(m) >= view.number]
        self._kernel.after(self._kernel.between(0.0, 0.01), lambda: self._drained(view))

    def _drained(self, view: View) -> None:
        if not self.alive or self._view is not view:
            self._stale_drain(view)
            return
        self._apply_what_is_held()
        held = self.union if self.union is not None and self.union.step == self.applied - 1 else None
        self._handle(member.Drained(
            view=view.number, applied=self.applied, attempt=self._attempt, prepared=self._sums is not None, union=held,
            holds=tuple(sorted(self.states)),
        ))
        self._world.point(self.node, "reported")

    def _stale_drain(self, view: View) -> None:
        """A driver that was slow answers all the same; the member must not mind."""
        if self.alive:
            self._handle(member.Drained(view=view.number, applied=-1, attempt=-1, prepared=False, union=None, holds=()))

    def _change_state(self, change: member.ChangeState) -> None:
        order = change.order
        self._world.point(self.node, "plan adopted")
        self._order, self._changed = order, True
        if change.follow:
            assert order.union is not None
            self.union = order.union
            self._apply()
        if change.drop_begun and self._world.rules.drop_begun:
            self._sums = None
        if change.discard:
            self.states, self._sums, self.applied, self._attempt, self.union = {}, None, order.step, -1, None
        if order.union is not None:
            self.union = order.union
        self._world.point(self.node, "state changed")
        wanted = set(self._model.units_of(order.plan.placement[self.node]))
        self._awaited = wanted - set(self.states)
        for move in order.moves:
            if move.target == self.node and move.unit in self._awaited:
                self._world.network.send(self.node, move.source, Pull(order.view, move.unit, self.node))
        for load in order.loads:
            if load.target == self.node:
                self._kernel.after(self._kernel.between(0.001, 0.01), partial(self._load, order, load.unit))
        self._look_again()
        self._tell_if_moved()

    def _load(self, order: PlanOrdered, unit: UnitName) -> None:
        if self.alive and self._order is order and order.restore is not None:
            self._world.point(self.node, "loading")
            state = self._world.disk.read(order.restore, unit)
            self._take_state(Pulled(order.view, unit, order.step, state))

    def _serve(self, pull: Pull) -> None:
        assert self._order is not None
        answer = Pulled(pull.view, pull.unit, self.applied, self.states[pull.unit])
        self._world.network.send(self.node, pull.node, answer)
        self._world.point(self.node, "state sent")

    def _take_state(self, pulled: Pulled) -> None:
        if pulled.unit not in self._awaited:
            return
        assert pulled.step == self.applied, f"{self.node} wants {pulled.unit} at {self.applied}, got it at {pulled.step}"
        self.states[pulled.unit] = pulled.state
        self._awaited.discard(pulled.unit)
        self._world.point(self.node, "state arrived")
        self._tell_if_moved()

    def _tell_if_moved(self) -> None:
        if not self._awaited and self._order is not None and self.member.phase is member.Phase.MOVING:
            self._handle(member.StateMoved(self._order.view))
            if not self._world.rules.free_on_resume:
                self._free(self._order)

    def _free(self, order: PlanOrdered) -> None:
        wanted = self._model.units_of(order.plan.placement[self.node])
        self.states = {unit: self.states[unit] for unit in wanted}

    def _resume(self, order: PlanOrdered) -> None:
        self._free(order)
        self._flags = set()
        self._world.note(Resumed(self.node, order, dict(self.states)))
        self._begin(order.attempt)

    # A step.

    def _begin(self, attempt: int) -> None:
        order, view = self._order, self._view
        assert order is not None and view is not None
        if self.applied >= self._world.num_steps:
            return
        self._attempt = attempt
        self._world.note(Begun(self.node, view.number, self.applied, attempt))
        mine = [(m, k) for m, route in enumerate(order.plan.routes) for k, hop in enumerate(route) if hop.node == self.node]
        exchange = commit.Exchange(
            node=self.node, view=view, step=self.applied, attempt=attempt, pairs=self._model.pairs,
            micro_batches=self._model.micro_batches,
        )
        header = Header(view.number, self.applied, attempt)
        self._run = _Run(header, order, exchange, len(mine), {unit: {} for unit in self.states})
        for micro_batch, hop in mine:
            if hop == 0:
                self._start(micro_batch)
        if self._sums is not None and not self._world.rules.drop_begun:
            self._announce(self._run, self._sums)
        elif not mine:
            self._post(self._run)
        self._look_again()

    def _start(self, micro_batch: int) -> None:
        self._later(lambda run: self._forward(run, micro_batch, 0, first_trace(run.header.step, micro_batch)))

    def _later(self, action: Callable[[_Run], None]) -> None:
        """Compute for a while, unless the step is interrupted meanwhile."""
        run = self._run
        assert run is not None

        def unless_interrupted() -> None:
            if self.alive and self._run is run:
                action(run)

        self._kernel.after(self._kernel.between(0.0005, 0.003), unless_interrupted)

    def _send(self, target: NodeId, message: StepMessage | ExchangeMessage) -> None:
        if target == self.node:
            self.receive(self.node, message)
        else:
            self._world.network.send(self.node, target, message)

    def _forward(self, run: _Run, micro_batch: int, hop: int, trace: str) -> None:
        route = run.order.plan.routes[micro_batch]
        values = {unit: state.value for unit, state in self.states.items()}
        for layer in route[hop].layers:
            trace = self._model.forward(trace, layer, values)
        if hop + 1 < len(route):
            self._send(route[hop + 1].node, Activation(run.header, micro_batch, hop + 1, trace))
            self._world.point(self.node, "activation sent")
            return
        run.losses[micro_batch] = loss(micro_batch, trace)
        self._later(lambda same: self._backward(same, micro_batch, hop, trace))

    def _backward(self, run: _Run, micro_batch: int, hop: int, trace: str) -> None:
        route = run.order.plan.routes[micro_batch]
        for layer in route[hop].layers:
            for unit in self._model.units_of([layer]):
                pair = (layer, micro_batch)
                assert pair not in run.local[unit], f"{self.node} counts {unit} {pair} twice"
                run.local[unit][pair] = contribution(run.header.step, micro_batch, layer, trace)
        if hop:
            self._send(route[hop - 1].node, Gradient(run.header, micro_batch, hop - 1, trace))
        run.backwards_left -= 1
        if run.backwards_left == 0:
            self._post(run)

    def _holders(self, run: _Run, unit: UnitName) -> tuple[NodeId, ...]:
        placement = run.order.plan.placement
        return tuple(node for node in sorted(placement) if unit in self._model.units_of(placement[node]))

    def _post(self, run: _Run) -> None:
        if not self.states:
            self._announce(run, {})
            return
        for unit, contributions in run.local.items():
            holders = self._holders(run, unit)
            for chunk in range(self._model.chunks[unit]):
                owner = holders[chunk % len(holders)]
                self._send(owner, LocalSum(run.header, unit, chunk, self.node, contributions))
                self._world.point(self.node, "sums posted")

    def _gather(self, message: LocalSum) -> None:
        run = self._run
        assert run is not None
        posted = run.posted.setdefault((message.unit, message.chunk), {})
        posted[message.node] = message.contributions
        holders = self._holders(run, message.unit)
        if len(posted) < len(holders):
            return
        total = {pair: text for contributions in posted.values() for pair, text in contributions.items()}
        assert len(total) == sum(map(len, posted.values())), f"{message.unit}: holders counted the same pair"
        bits = digest(run.header, message.unit, message.chunk, self.node)
        answer = ReducedSum(run.header, message.unit, message.chunk, Reduced(total, bits))
        for holder in holders:
            if holder != self.node:
                self._send(holder, answer)
                self._world.point(self.node, "reduced chunk sent")
        self._write_back(answer)

    def _write_back(self, message: ReducedSum) -> None:
        run = self._run
        assert run is not None
        run.reduced[message.unit, message.chunk] = message.reduced
        if len(run.reduced) < sum(self._model.chunks[unit] for unit in self.states):
            return
        sums: dict[UnitName, Reduced] = {}
        for unit in self.states:
            chunks = [run.reduced[unit, chunk] for chunk in range(self._model.chunks[unit])]
            sums[unit] = Reduced(chunks[0].contributions, digest(*(chunk.bits for chunk in chunks)))
        self._announce(run, sums)

    def _announce(self, run: _Run, sums: dict[UnitName, Reduced]) -> None:
        """Every own sum is complete."""
        self._sums = sums
        self._world.point(self.node, "prepared")
        self._perform(run.exchange.prepared(Prepared(
            view=run.header.view, step=run.header.step, attempt=run.header.attempt, nodes=(self.node,),
            units={unit: self._model.sums(reduced) for unit, reduced in sums.items()}, losses=run.losses,
            flags=tuple(sorted(self._flags)), times={self.node: {"step": 1.0}},
        )))

    # The commit.

    def _perform(self, effects: list[commit.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, commit.Committed):
                self._hold(effect.union)
                return
            what = "union" if isinstance(effect.message, Union) else "record"
            self._world.point(self.node, f"{what} to send")
            self._world.network.send(self.node, effect.target, effect.message)
            self._world.point(self.node, f"{what} sent")

    def _hold(self, union: Union) -> None:
        self.union = union
        self._world.point(self.node, "union held")
        self._later(self._applied_in_time)

    def _applied_in_time(self, run: _Run) -> None:
        self._run = None
        self._apply_what_is_held()
        if run.exchange.union is not None and CHANGE in run.exchange.union.flags:
            self._handle(member.BoundaryHeld(run.header.view, self.applied))
        else:
            self._begin(first_attempt(self.applied, run.order.rollbacks))

    def _apply_what_is_held(self) -> None:
        """Whoever holds the union of the step that it has complete sums of applies it, also when it is interrupted."""
        if self.union is not None and self._sums is not None and self.union.step == self.applied:
            self._apply()

    def _apply(self) -> None:
        union, sums = self.union, self._sums
        assert union is not None and sums is not None
        self._world.point(self.node, "applying")
        self.states = {
            unit: self._model.apply(state, sums[unit], union) for unit, state in self.states.items() if unit in sums
        }
        self.applied += 1
        self._sums, self._attempt = None, -1
        self._flags -= set(union.flags)
        self._world.note(Applied(self.node, union, dict(self.states)))
        self._world.network.send(self.node, LEADER, Progress(union.step, union.flags))
        if self.applied % self._world.checkpoint_every == 0:
            self._world.disk.write(self.applied, self.states)
        if not self._world.rules.keep_union:
            self.union = None
        self._world.point(self.node, "applied")


def _as_event(message: ToMember) -> member.Event:
    match message:
        case ViewOrdered(view, token):
            return member.ViewSeen(view, token)
        case PlanOrdered():
            return member.PlanSeen(message)
        case ResumeOrdered(view_number, token):
            return member.ResumeSeen(view_number, token)
        case BoundaryOrdered(view_number, token, flag):
            return member.BoundarySeen(view_number, token, flag)


def _header_of(message: StepMessage | ExchangeMessage) -> Header:
    if isinstance(message, Prepared | Union):
        return Header(message.view, message.step, message.attempt)
    return message.header


def _view_of(message: Any) -> int:
    return message.view if isinstance(message, Pull | Pulled) else _header_of(message).view
