"""The pretend agent: it carries out what its ``Leader`` decides, slowly, so that answers come late."""

from __future__ import annotations

from typing import Any, Protocol

from everstep.protocol import leader
from everstep.protocol.messages import BoundaryReached, Report, StateReady, Stuck
from everstep.quantities import NodeId
from everstep.simulator.chooser import Chooser
from everstep.simulator.kernel import Kernel
from everstep.simulator.network import LEADER, Network
from everstep.simulator.node import Fact, Progress, Stranded
from everstep.simulator.store import Store

TOKEN = 7


class Surroundings(Protocol):
    """What the agent needs of the world around it."""

    kernel: Kernel
    network: Network
    store: Store
    chooser: Chooser

    def note(self, fact: Fact) -> None:
        """Something happened that checkers look at."""

    def moment(self, name: str) -> None:
        """The agent is at a moment of a change of view at which somebody may be ended."""

    def fence(self, node: NodeId) -> None:
        """End a process, as soon as the machine gets to it."""


class Agent:
    """The leader's driver."""

    def __init__(self, leads: leader.Leader, world: Surroundings) -> None:
        self.leader = leads
        self.end_reason: str | None = None
        self.would_wait_s: float | None = None
        """For how long the next answer is delayed; None: not at all."""
        self._world, self._kernel = world, world.kernel

    def handle(self, event: leader.Event) -> None:
        """Something happened."""
        before = self.leader.phase
        for effect in self.leader.handle(event, self._kernel.now_s):
            self._do(effect)
        if self.leader.phase is not before:
            self._kernel.say(f"leader: {before.value} → {self.leader.phase.value}")
            self._world.moment(self.leader.phase.value)
        deadline_s = self.leader.next_deadline_s()
        if deadline_s is not None and isinstance(event, leader.StuckCame | leader.AnswerDelayed):
            self._kernel.after(deadline_s - self._kernel.now_s, lambda: self.handle(leader.Ticked()))

    def receive(self, message: Any) -> None:
        """A message of a member arrives."""
        match message:
            case Report():
                self.handle(leader.ReportCame(message))
            case StateReady():
                self.handle(leader.ReadyCame(message))
            case BoundaryReached():
                self.handle(leader.BoundaryCame(message))
            case Stuck():
                self.handle(leader.StuckCame(message))
            case Progress(step, flags):
                self.handle(leader.StepHeard(step))
                for flag in flags:
                    self.handle(leader.FlagHeld(flag))

    def _do(self, effect: leader.Effect) -> None:
        match effect:
            case leader.SwapView():
                self._kernel.say(f"swap to view {effect.view.number} of {', '.join(effect.view.nodes)}: {effect.cause}")
                self._soon(lambda: self._swap(effect))
            case leader.SendMember(target, message):
                self._world.network.send(LEADER, target, message)
            case leader.ComputePlan():
                self._soon(lambda: self._plan(effect))
            case leader.WritePlan(order):
                self._soon(lambda: self._answer(leader.PlanWritten(order.view, self._world.store.write_plan(order))))
            case leader.Fence(node):
                self._world.fence(node)
            case leader.EndRun(reason):
                self._kernel.say(f"the run ends: {reason}")
                self.end_reason = reason

    def _soon(self, action: Any) -> None:
        self._kernel.after(self._kernel.between(0.0002, 0.005), action)

    def _answer(self, event: leader.Event) -> None:
        self._soon(lambda: self.handle(event))

    def _swap(self, effect: leader.SwapView) -> None:
        won = self._world.store.swap(effect.expected, effect.view)
        self._world.moment("swapped")
        self._answer(leader.SwapAnswered(effect.view.number, won, self._world.store.view))

    def _plan(self, effect: leader.ComputePlan) -> None:
        wait_s, self.would_wait_s = self.would_wait_s, None
        if wait_s is not None:
            self._kernel.say(f"no plan of view {effect.view.number} yet: somebody is expected within {wait_s:.3f} s")
            self._answer(leader.AnswerDelayed(effect.view.number, self._kernel.now_s + wait_s))
            return
        self._note_stranded(effect)
        order, reason = self._world.chooser(effect, TOKEN)
        if order is not None:
            routes = str(order.plan).replace("\n", "; ")
            self._kernel.say(f"plan of view {order.view}, step {order.step}.{order.attempt}, {reason}: {routes}")
        self._answer(leader.PlanAnswered(effect.view.number, order, reason))

    def _note_stranded(self, effect: leader.ComputePlan) -> None:
        """Somebody is prepared for a step that others have applied, and cannot follow."""
        holds, step = effect.resolution.holds, effect.resolution.step
        behind = tuple(
            report.node for report in effect.reports
            if step is not None and report.prepared and report.applied == step - 1 and report.holds and not holds[report.node]
        )
        if behind:
            self._world.note(Stranded(effect.view.number, behind))
