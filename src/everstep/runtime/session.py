"""One worker's part in a run: the script's loop on top, the protocol's member below, the engine in between.

Two threads matter. The *main* thread runs the script and the engine; it waits in the mailbox or for orders, never on a lock
held for long. The *control* thread hears the agent and drives the member. What the member wants done by the main thread goes
into a queue; a new view also wakes the mailbox, so that a step in flight is interrupted at its next wait. Between two steps
the main thread belongs to the user's code, and orders wait for it.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from everstep import schedule as schedules
from everstep.engine.executor import Executor
from everstep.engine.links import InterruptedByView, Key, Mailbox, Parcel
from everstep.engine.state import Packed
from everstep.engine.tcp import TcpLinks
from everstep.errors import TransferError, UserCodeError
from everstep.plan import Plan, problems
from everstep.planner.step.schedules import order_of
from everstep.protocol import member as m
from everstep.protocol.codec import decode_to_member, encode
from everstep.protocol.commit import mean_loss
from everstep.protocol.leader import CHANGE
from everstep.protocol.messages import (
    BoundaryOrdered,
    PlanOrdered,
    ResumeOrdered,
    Union,
    ViewOrdered,
    first_attempt,
)
from everstep.quantities import NodeId, UnitName
from everstep.records import Committed, Counted, line
from everstep.runtime import restore
from everstep.runtime.control import Carried, Declared, Finished, FromWorker, Quit, Saved, SaveFailed, StepDone
from everstep.runtime.job import Declaration, Position, StepResult
from everstep.runtime.local import nan_message
from everstep.runtime.saver import Saver
from everstep.schedule import Schedule, parse_order
from everstep.view import View
from everstep.workload import Unit

STOP, CHECKPOINT = "stop", "checkpoint"

Work = m.Drain | m.ChangeState | m.Resume | m.Halt | Quit
"""What the main thread is asked to do."""


class RunOver(BaseException):
    """The run is over: leaves the script from wherever it is, also through its ``except Exception``.

    ``well``: it is done or was stopped in order; then the loop just ends, and what the script does behind it is done.
    """

    def __init__(self, reason: str, *, well: bool = False) -> None:
        super().__init__(reason)
        self.well = well


def schedule_of(order: PlanOrdered) -> Schedule:
    """Every node's actions: as ordered, else as they follow from the plan."""
    if order.schedule is None:
        return order_of(order.plan)
    return {node: parse_order(text) for node, text in order.schedule.items()}


class NodeLedger:
    """Appends this node's account to its file, one write a record."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, record: Counted | Committed) -> None:
        os.write(self._file, line(record))


class WorkerSession:
    """Implements ``runtime.job.Session`` for a worker process."""

    def __init__(
        self, *, node: NodeId, incarnation: int, declaration: Declaration, links: TcpLinks, mailbox: Mailbox,
        directory: Path, send: Callable[[FromWorker], None], instant: Callable[[str, int], None],
    ) -> None:
        self._node, self._declaration, self._directory = node, declaration, directory
        self._mailbox, self._links, self._send, self._instant = mailbox, links, send, instant
        self._member = m.Member(node, incarnation)
        self._lock = threading.RLock()
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._digest = declaration.digest()
        self._held = declaration.held()
        self.phase = "start"
        self._executor = Executor(
            node=node, spec=declaration.spec(), held=self._held, mailbox=mailbox, post=links,
            ledger=NodeLedger(directory / "nodes" / f"{node}.jsonl"), instants=self,
        )
        self._saver = Saver(
            node=node, root=directory / "checkpoints", digest=self._digest, keep=declaration.config.checkpoint.keep,
            on_saved=lambda step, view, path: send(Saved(step, view, str(path))),
            on_failed=lambda step, why: send(SaveFailed(step, why)),
        )
        self._view: View | None = None
        self._plan: Plan | None = None
        self._applied = -1
        self._attempt = 0
        self._begun = (-1, -1)  # the last step begun, and its try
        self._union: Union | None = None
        self._result_union: Union | None = None  # of the step that the script waits for, also once the state is restored
        self._valid: set[UnitName] = set()  # units that are whole, at step ``_applied``
        self._rollbacks: tuple[tuple[int, int, int], ...] = ()
        self._orphaned = False
        self._is_over = False
        self._told = -1
        self._declared = False

    # What the script calls.

    def position(self, until: int) -> Position | None:
        try:
            if not self._declared:
                self._declare(until)
                self._reconfigure()
            while True:
                self._follow_orders()
                if self._stopped or self._applied >= until:
                    self._finish()
                    continue  # a member was lost while the others finished: there is something to do again
                return Position(self._applied, self._attempt)
        except RunOver as over:
            self._is_over = True
            if over.well:
                return None
            raise

    def run(self, position: Position) -> StepResult:
        began_s = time.monotonic()
        while True:
            try:
                self._begun = (self._applied, self._attempt)
                self._committed(self._executor.run(self._applied, self._attempt))
            except InterruptedByView:
                self._reconfigure()
            if self._applied > position.step:
                return self._result(position, began_s)
            if self._applied < position.step:
                return StepResult(
                    step=position.step, attempt=position.attempt, loss=float("nan"), samples=0,
                    seconds=time.monotonic() - began_s, committed=False, rolled_back_to=self._applied,
                )

    def checkpoint(self) -> None:
        self._executor.raise_flag(CHECKPOINT)

    def leave(self) -> None:
        """The script has ended: if it left the loop early, the run is over, on every worker after the same step."""
        with suppress(RunOver):
            while not self._is_over:
                self._finish()

    @property
    def plan(self) -> Plan | None:
        return self._plan

    @property
    def is_reporter(self) -> bool:
        return self._view is not None and self._view.nodes[0] == self._node

    def close(self) -> None:
        self._saver.finish(within_s=60.0)

    # A step.

    @property
    def _stopped(self) -> bool:
        """The union of the last step says stop; also where it was handed on."""
        return self._union is not None and self._union.step == self._applied - 1 and STOP in self._union.flags

    def reached(self, phase: str, step: int) -> None:
        """The engine passes an instant: remembered for the heartbeat, and told where a drill has armed it."""
        self.phase = phase
        self._instant(phase, step)

    @property
    def step(self) -> int:
        return self._applied

    def _committed(self, union: Union) -> None:
        self._union = self._result_union = union
        self._applied = union.step + 1
        self._attempt = first_attempt(self._applied, self._rollbacks)
        loss = mean_loss(union)
        self._tell_step(union)
        if loss != loss:
            raise UserCodeError(nan_message(union.step), step=union.step)
        assert self._view is not None and self._plan is not None, "a step is committed in a view, under a plan"
        if self._stopped:
            return
        every = self._declaration.config.checkpoint.every_steps
        if CHECKPOINT in union.flags or (every and self._applied % every == 0):
            self._saver.save(self._applied, self._view.number, self._plan, self._held, self.is_reporter)
        if CHANGE in union.flags:
            self._handle(m.BoundaryHeld(self._view.number, self._applied))
            self._reconfigure()

    def _tell_step(self, union: Union) -> None:
        if self.is_reporter and self._told < union.step:
            self._told = union.step
            self._send(StepDone(
                step=union.step, attempt=union.attempt, loss=mean_loss(union), samples=self._samples_in(union.step),
                flags=union.flags, times={node: dict(times) for node, times in union.times.items()},
            ))

    def _result(self, position: Position, began_s: float) -> StepResult:
        union = self._result_union
        assert union is not None and union.step == position.step, "who advances by a step has held its union"
        return StepResult(
            step=union.step, attempt=union.attempt, loss=mean_loss(union), samples=self._samples_in(union.step),
            seconds=time.monotonic() - began_s,
        )

    def _samples_in(self, step: int) -> int:
        return sum(map(len, self._declaration.samples.micro_batches(step)))

    # Reconfiguration, on the main thread.

    def _declare(self, until: int) -> None:
        declaration = self._declaration
        facts = declaration.facts
        units = tuple(
            Unit(
                name=name, layers=unit.layers, parameter_bytes=unit.parameter_bytes,
                # Before an optimizer has stepped, two moments a parameter are the fair guess.
                state_bytes=3 * unit.parameter_bytes, gradient_bytes=unit.parameter_bytes,
            )
            for name, unit in facts.units.items()
        )
        self._declared = True
        self._send(Declared(
            digest=self._digest, layers=facts.layers, uses=facts.uses(), units=units,
            dataset_samples=len(declaration.samples.dataset), batch=declaration.samples.batch,
            micro=declaration.samples.micro, seed=declaration.seed, until=until, config=declaration.config,
        ))

    def _follow_orders(self) -> None:
        """Do what was ordered while the main thread was in user code."""
        if not self._work.empty():
            self._reconfigure()

    def _reconfigure(self) -> None:
        """Answer orders until training may go on. Raises RunOver when it never will."""
        while True:
            match self._work.get():
                case m.Drain(view):
                    self._drain(view)
                case m.ChangeState() as change:
                    try:
                        self._change(change)
                    except InterruptedByView:
                        continue  # the order to drain for the newer view is in the queue already
                    except TransferError as error:
                        self._handle(m.MoveFailed(change.order.view, self._node, str(error)))
                        continue
                    self._handle(m.StateMoved(change.order.view))
                case m.Resume(order):
                    self._resume(order)
                    return
                case m.Halt(reason):
                    raise RunOver(reason)
                case Quit(reason, well):
                    raise RunOver(reason, well=well)

    def _drain(self, view: View) -> None:
        if self._applied >= 0:
            self.reached("recover", self._applied)
        self._view = view
        current = self._executor.current
        self._handle(m.Drained(
            view=view.number, applied=self._applied,
            attempt=self._begun[1] if self._begun[0] == self._applied else -1,
            prepared=current is not None and current.prepared and current.step == self._applied,
            union=self._union, holds=tuple(sorted(self._valid)),
        ))

    def _change(self, change: m.ChangeState) -> None:
        order = change.order
        assert self._view is not None, "a plan comes in a view"
        wrong = problems(order.plan, self._view, len(self._declaration.facts.layers))
        assert not wrong, wrong
        wrong = schedules.problems(schedule_of(order), order.plan) if order.schedule is not None else []
        assert not wrong, wrong
        if change.follow:
            assert order.union is not None, "following means applying the union"
            self._executor.apply(order.union)
            self._result_union = order.union
        elif change.drop_begun:
            self._executor.give_up()
        if change.discard:
            self._held.drop(())
            self._valid.clear()
        self._applied = order.step
        self._union = order.union or (None if change.discard else self._union)
        self._held.hold(order.plan.placement[self._node])
        if order.restore is not None:
            mine = [load.unit for load in order.loads if load.target == self._node]
            restore.load(self._held, mine, order.restore, self._digest)
            self._valid.update(mine)
        self._move(order)

    def _move(self, order: PlanOrdered) -> None:
        """Give what others need and get what this node needs; each unit is checked against its sender's hash."""
        for move in order.moves:
            if move.source == self._node:
                packed = self._held.units[move.unit].pack()
                note = {"names": list(packed.tensors), "scalars": packed.scalars, "sha256": packed.digest()}
                key = Key(order.view, order.step, order.attempt, "state", 0, 0, self._node, move.unit)
                self._links.send(move.target, Parcel(key, list(packed.tensors.values()), note))
        self.reached("switch", order.step)
        for move in order.moves:
            if move.target == self._node:
                key = Key(order.view, order.step, order.attempt, "state", 0, 0, move.source, move.unit)
                parcel = self._mailbox.receive(key, f"state of {move.unit}")
                packed = Packed(dict(zip(parcel.note["names"], parcel.tensors, strict=True)), parcel.note["scalars"])
                if packed.digest() != parcel.note["sha256"]:
                    raise TransferError(f"{move.unit} from {move.source} is not what was sent")
                self._held.units[move.unit].unpack(packed)
                self._valid.add(move.unit)

    def _resume(self, order: PlanOrdered) -> None:
        assert self._view is not None, "training resumes in a view"
        layers = order.plan.placement[self._node]
        self._held.drop(layers)
        self._held.require(self._declaration.facts.units_of(layers))
        self._valid = set(self._held.units)
        self._plan, self._attempt, self._rollbacks = order.plan, order.attempt, order.rollbacks
        self._executor.follow(order.plan, schedule_of(order)[self._node], self._view)
        if order.restore is not None:
            self._told = order.step - 1
        if self._union is not None and self._union.step == order.step - 1:
            self._tell_step(self._union)  # the reporter that should have said it may be gone

    def _finish(self) -> None:
        """Nothing is left to do here; but others may still need this node, so stay until the agent ends the run."""
        assert self._view is not None and self._plan is not None, "a run that ends has begun"
        self.phase = "finished"
        if self._stopped:
            self._saver.finish(within_s=60.0)  # this one must be written, whatever waits
            self._saver.save(self._applied, self._view.number, self._plan, self._held, self.is_reporter)
            self._saver.finish(within_s=60.0)
        if self._orphaned:
            raise RunOver("the agent is gone", well=True)
        self._send(Finished(
            view=self._view.number, step=self._applied, stopped=self._stopped, digests=self._held.digests(),
        ))
        self._reconfigure()

    # The control thread.

    def ordered(self, data: bytes) -> None:
        """An order of the leader came."""
        match decode_to_member(data):
            case ViewOrdered(view, token):
                self._handle(m.ViewSeen(view, token))
            case PlanOrdered() as order:
                self._handle(m.PlanSeen(order))
            case ResumeOrdered(view_number, token):
                self._handle(m.ResumeSeen(view_number, token))
            case BoundaryOrdered(view_number, token, flag):
                self._handle(m.BoundarySeen(view_number, token, flag))

    def link_lost(self, peer: NodeId, what: str) -> None:
        """A connection broke. The member says whether that matters."""
        with self._lock:
            if self._member.phase in (m.Phase.TRAINING, m.Phase.AT_BOUNDARY, m.Phase.MOVING) and self._member.view:
                event = m.MoveFailed if self._member.phase is m.Phase.MOVING else m.LinkLost
                self._handle(event(self._member.view.number, peer, what))

    def quit(self, order: Quit) -> None:
        self._work.put(order)
        self._mailbox.adopt(2**62)

    def agent_gone(self) -> None:
        """End the step, write a checkpoint of it, and exit: everybody, after the same step."""
        self._orphaned = True
        self._executor.raise_flag(STOP)

    def _handle(self, event: m.Event) -> None:
        with self._lock:
            for effect in self._member.handle(event, time.monotonic()):
                self._perform(effect)

    def _perform(self, effect: m.Effect) -> None:
        match effect:
            case m.Tell(message):
                self._send(Carried(encode(message)))
            case m.RaiseFlag(flag):
                self._executor.raise_flag(flag)
            case m.Drain(view):
                self._links.know({member.node_id: member.address for member in view.members})
                self._saver.adopt(view.number)
                self._mailbox.adopt(view.number)
                self._work.put(effect)
            case _:
                if isinstance(effect, m.Halt):
                    self._mailbox.adopt(2**62)
                elif isinstance(effect, m.Resume):
                    # Here, before the leader's next order is heard: where it still wants a boundary it asks again.
                    self._executor.lower_flag(CHANGE)
                self._work.put(effect)
