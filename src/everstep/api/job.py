"""A training job, declared; and its steps.

Three promises, each held by tests:

1. *Committed means committed everywhere.* When ``step.run()`` returns, the update is applied on every living worker, or
   will be before that worker does anything else.
2. *Every sample once.* Whatever dies, a step trains on its samples exactly once, and an epoch on all of its samples.
3. *No silent wait.* A worker that dies is noticed through its process in a fraction of a second; one that stops speaking
   after ``detector.suspect_after_s``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from everstep.config import RunConfig, from_mapping
from everstep.engine.model import Layers, facts_of
from everstep.engine.samples import Samples
from everstep.engine.stage import Loss
from everstep.engine.state import OptimizerFactory
from everstep.errors import ConfigError
from everstep.plan import Plan
from everstep.runtime.job import CONTEXT, Declaration, Position, Session, StepResult
from everstep.runtime.local import LocalSession


class Step:
    """One step of the loop. ``number`` counts committed updates from 0; ``attempt`` counts the tries of this number."""

    def __init__(self, session: Session, position: Position) -> None:
        self._session, self._position = session, position
        self.result: StepResult | None = None

    @property
    def number(self) -> int:
        return self._position.step

    @property
    def attempt(self) -> int:
        return self._position.attempt

    def run(self) -> StepResult:
        """Train on the step's samples. Returns when the step is committed; the same result on every worker."""
        if self.result is None:
            self.result = self._session.run(self._position)
        return self.result


class Job:
    """A model given as layers, and what it is trained on. The loop around the steps stays the script's."""

    def __init__(
        self, *, layers: Layers, loss: Loss, optimizer: OptimizerFactory, data: Samples,
        ties: Sequence[tuple[str, ...]] = (), lr: Callable[[int], float] | None = None, clip_norm: float | None = None,
        config: RunConfig | Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            layers: a function that yields (name, module) in the order they run; called wherever layers are built, so it
                must give the same each time. ``everstep.sequential`` makes one from an ``nn.Sequential``.
            loss: ``loss(output, item)``: the mean over the micro-batch's samples, or (sum, count), for example over tokens.
            optimizer: ``optimizer(named_parameters)``, called once for each unit of state with its (name, parameter) pairs.
            data: ``everstep.Indexed(...)``.
            ties: groups of parameters that are one, by name: ``[("embed.weight", "head.weight")]``.
            lr: ``lr(step)`` is a factor on each parameter group's own rate, as in ``LambdaLR``.
            clip_norm: largest norm of the whole gradient, over all layers.
            config: settings, as ``RunConfig`` or as nested or dotted keys; those of the command line win.

        Raises:
            ConfigError: something is missing, of the wrong kind, or cannot be trained this way (UnsupportedError).
        """
        for name, value in (("layers", layers), ("loss", loss), ("optimizer", optimizer)):
            if not callable(value):
                raise ConfigError(f"Job: {name} must be a function, got a {type(value).__name__}{_HINTS.get(name, '')}")
        if not isinstance(data, Samples):
            raise ConfigError(f"Job: data must be everstep.Indexed(dataset, batch=…, micro=…), got a {type(data).__name__}")
        if lr is not None and not callable(lr):
            raise ConfigError("Job: lr must be a function of the step; a fixed rate belongs to the optimizer")
        if clip_norm is not None and not clip_norm > 0:
            raise ConfigError(f"Job: clip_norm must be positive, got {clip_norm}")
        self._declaration = Declaration(
            layers=layers, facts=facts_of(layers, data.seed, tuple(tuple(group) for group in ties)), loss=loss,
            optimizer=optimizer, samples=data, clip_norm=clip_norm, rate=lr or _constant,
            config=config if isinstance(config, RunConfig) else from_mapping(config or {}, source="Job(config=…)"),
        )
        self._session: Session | None = None

    def steps(self, until: int) -> Iterator[Step]:
        """The steps up to, not including, ``until``. Joins, repairs or resumes before it yields.

        A step must be run (``step.run()``) before the next is taken.
        """
        if until < 0:
            raise ConfigError(f"steps: until must not be negative, got {until}")
        CONTEXT.opened = True
        if self._session is None or CONTEXT.open is not None:
            self._session = (CONTEXT.open or LocalSession)(self._declaration)
        session = self._session
        try:
            while (position := session.position(until)) is not None:
                step = Step(session, position)
                yield step
                if step.result is None:
                    raise ConfigError(f"step {step.number} was taken from job.steps() but not run: call step.run()")
        finally:
            session.close()

    def checkpoint(self) -> None:
        """Write a checkpoint after the next step. To be called on every worker alike."""
        if self._session is not None:
            self._session.checkpoint()

    @property
    def is_reporter(self) -> bool:
        """True on one worker: what happens once, such as printing, goes under it. Another takes over if it dies.

        Under ``everstep run`` False until the first step is handed out: before, nobody knows who is in.
        """
        return CONTEXT.open is None if self._session is None else self._session.is_reporter

    @property
    def layout(self) -> Plan | None:
        """The plan that is being trained under; None before the first step."""
        return self._session.plan if self._session else None


_HINTS = {
    "layers": " (everstep.sequential makes one from an nn.Sequential)",
    "optimizer": ": give a function that makes it, for example lambda named: torch.optim.AdamW(named, lr=1e-3)",
}


def _constant(step: int) -> float:
    return 1.0
