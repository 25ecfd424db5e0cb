"""A run in this process alone: ``python train.py``. The same engine and the same numbers, one worker, no agent."""

from __future__ import annotations

import time

import torch

from everstep.engine.executor import Executor
from everstep.engine.links import LocalPost, Mailbox
from everstep.errors import UserCodeError
from everstep.plan import Hop, Order, Plan
from everstep.planner.step.schedules import order_of
from everstep.protocol.commit import mean_loss
from everstep.quantities import NodeId
from everstep.records import Committed, Counted
from everstep.runtime.job import Declaration, Position, StepResult
from everstep.view import Member, View

_NODE = NodeId("n0")


class _Unwatched:
    """Nobody audits a run in one process, and nobody kills it at an instant."""

    def write(self, record: Counted | Committed) -> None:
        pass

    def reached(self, phase: str, step: int) -> None:
        pass


class LocalSession:
    """One worker that holds everything."""

    def __init__(self, declaration: Declaration) -> None:
        self._declaration = declaration
        torch.set_num_threads(declaration.config.engine.threads)
        num_layers = len(declaration.facts.layers)
        held = declaration.held()
        held.hold(range(num_layers))
        self._plan = Plan(
            num_layers=num_layers, placement={_NODE: tuple(range(num_layers))},
            routes=((Hop(_NODE, 0, num_layers),),) * declaration.samples.num_micro_batches,
            order=Order(split=declaration.config.engine.split_backward == "on"),
        )
        mailbox = Mailbox()
        mailbox.adopt(1)
        self.executor = Executor(
            node=_NODE, spec=declaration.spec(), held=held, mailbox=mailbox, post=LocalPost({_NODE: mailbox}),
            ledger=_Unwatched(), instants=_Unwatched(),
        )
        self.executor.follow(self._plan, order_of(self._plan)[_NODE], View(1, (Member(_NODE),)))
        self._step = 0

    def position(self, until: int) -> Position | None:
        return Position(self._step) if self._step < until else None

    def run(self, position: Position) -> StepResult:
        began_s = time.monotonic()
        union = self.executor.run(position.step, position.attempt)
        loss = mean_loss(union)
        if loss != loss:
            raise UserCodeError(nan_message(position.step), step=position.step)
        self._step += 1
        samples = sum(map(len, self._declaration.samples.micro_batches(position.step)))
        return StepResult(
            step=position.step, attempt=position.attempt, loss=loss, samples=samples, seconds=time.monotonic() - began_s
        )

    def checkpoint(self) -> None:
        """There is no run's folder to keep one in."""

    @property
    def plan(self) -> Plan | None:
        return self._plan

    @property
    def is_reporter(self) -> bool:
        return True

    def close(self) -> None:
        pass


def nan_message(step: int) -> str:
    """The one sentence for a loss that is not a number."""
    return (
        f"the loss of step {step} is not a number: training has diverged, or a layer makes NaN. Nothing after it would be "
        "worth keeping; lower the learning rate, clip gradients (clip_norm=1.0), or resume from a checkpoint before it"
    )
