"""What a script declared, checked, and what a session of training looks like to it. The API builds on this."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from everstep.config import RunConfig
from everstep.engine.executor import JobSpec
from everstep.engine.model import Layers, ModelFacts
from everstep.engine.samples import Samples
from everstep.engine.stage import Loss
from everstep.engine.state import HeldState, OptimizerFactory
from everstep.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """A job as the user declared it."""

    layers: Layers
    facts: ModelFacts
    loss: Loss
    optimizer: OptimizerFactory
    samples: Samples
    clip_norm: float | None
    rate: Callable[[int], float]
    config: RunConfig

    @property
    def seed(self) -> int:
        return self.samples.seed

    def digest(self) -> str:
        """Equal on all workers whose scripts declare the same job."""
        data = self.samples
        text = (self.facts.digest(), len(data.dataset), data.batch, data.micro, self.seed, self.clip_norm)
        return hashlib.sha256(repr(text).encode()).hexdigest()

    def spec(self) -> JobSpec:
        return JobSpec(
            facts=self.facts, loss=self.loss, samples=self.samples, seed=self.seed, clip_norm=self.clip_norm,
            rate=self.rate, engine=self.config.engine,
        )

    def held(self) -> HeldState:
        """Room for state: nothing is held yet."""
        sums = torch.float64 if self.config.engine.numerics == "fp64-sum" else None
        return HeldState(self.facts, self.layers, self.seed, self.optimizer, sums)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The same on every worker.

    ``committed`` is False when state was lost in this step and training goes on from an earlier one: the loop gets these
    step numbers again, with ``step.attempt`` raised, and ``rolled_back_to`` says from where. Then ``loss`` is not a number.
    """

    step: int
    attempt: int
    loss: float
    samples: int
    seconds: float
    committed: bool = True
    rolled_back_to: int | None = None


@dataclass
class Position:
    """Where the loop stands: the step to run next, and its try."""

    step: int
    attempt: int = 0


class Session(Protocol):
    """One script's part in a run."""

    def position(self, until: int) -> Position | None:
        """Join, repair or resume, then say what comes next; None when the run is over."""

    def run(self, position: Position) -> StepResult:
        """Return when the step is committed, whatever fails meanwhile."""

    def checkpoint(self) -> None:
        """Ask for a checkpoint after the next step."""

    @property
    def plan(self) -> Plan | None: ...

    @property
    def is_reporter(self) -> bool: ...

    def close(self) -> None: ...


@dataclass
class Context:
    """How the session is made: set by a worker process before it runs the script; without it a script runs alone."""

    open: Callable[[Declaration], Session] | None = None
    opened: bool = field(default=False)


CONTEXT = Context()
