"""The line of steps that survives: which try of each step is part of the model that a run ends with.

Nodes say which tries they committed; three rules tell which of them count.

1. A rollback to step s in view v drops every try of a step ≥ s that an older view made. Resuming from step s drops them
   in the same way.
2. A step may have a second committed try without a rollback in one case: those who held the first union died before
   anybody else got it, and the others redid the step. The newest view's try counts, and none of those who
   committed the older one may have committed anything in that view or a later one.
3. The loss of a try is one number: all who committed it report the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep import records
from everstep.quantities import NodeId, node_number
from everstep.telemetry.runs import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One committed try of a step, and the loss that each node which committed it reports."""

    view: int
    step: int
    attempt: int
    losses: Mapping[NodeId, float]

    @property
    def loss(self) -> float:
        return next(iter(self.losses.values()))

    def __str__(self) -> str:
        return f"step {self.step} (view {self.view}, attempt {self.attempt})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """Steps that were trained again, ``to_step`` up to, not including, ``from_step``, and what their losses were."""

    from_step: int
    to_step: int
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The tries that count, by step, and those that do not any more."""

    tries: Mapping[int, Try]
    rolled_back: tuple[Rollback, ...]
    problems: tuple[str, ...]

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(self.tries[step].loss for step in sorted(self.tries))


def surviving(run: Run) -> Line:
    """The line of ``run``; ``problems`` says which rule of this module is broken, and where."""
    tries = _tries(run)
    problems = [problem for attempt in tries for problem in _loss_problems(attempt)]
    rolled_back: list[Rollback] = []
    for view, from_step, to_step in _returns(run):
        dropped = [t for t in tries if t.view < view and t.step >= to_step]
        tries = [t for t in tries if t not in dropped]
        if dropped or from_step is not None:
            last = max((t.step + 1 for t in dropped), default=to_step)
            losses = tuple(t.loss for t in sorted(dropped, key=lambda t: t.step))
            rolled_back.append(Rollback(from_step=from_step or last, to_step=to_step, losses=losses))
    by_step: dict[int, Try] = {}
    for newer in sorted(tries, key=lambda t: (t.view, t.attempt)):
        if (older := by_step.get(newer.step)) is not None:
            problems += _redo_problems(run, older, newer)
        by_step[newer.step] = newer
    return Line(tries=dict(sorted(by_step.items())), rolled_back=tuple(rolled_back), problems=tuple(problems))


def _tries(run: Run) -> list[Try]:
    found: dict[tuple[int, int, int], dict[NodeId, float]] = {}
    for node in sorted(run.nodes, key=node_number):
        for record in run.nodes[node]:
            if isinstance(record, records.Committed):
                found.setdefault((record.view, record.step, record.attempt), {})[node] = record.loss
    return [
        Try(view=view, step=step, attempt=attempt, losses=losses)
        for (view, step, attempt), losses in sorted(found.items())
    ]


def _returns(run: Run) -> list[tuple[int, int | None, int]]:
    """(first view after it, from_step, to_step) of every rollback and resumption, in order."""
    found: list[tuple[int, int | None, int]] = []
    resumed_at: int | None = None
    for record in run.agent[1:]:
        if isinstance(record, records.RunStarted):
            resumed_at = record.first_step
        elif isinstance(record, records.ViewCommitted) and resumed_at is not None:
            found.append((record.view.number, None, resumed_at))
            resumed_at = None
        elif isinstance(record, records.RolledBack):
            found.append((record.view, record.from_step, record.to_step))
    return found


def _loss_problems(attempt: Try) -> list[str]:
    # repr tells any two different floats apart, and NaN from nothing.
    told: dict[str, list[NodeId]] = {}
    for node, loss in attempt.losses.items():
        told.setdefault(repr(loss), []).append(node)
    if len(told) == 1:
        return []
    sides = "; ".join(f"{loss} on {', '.join(nodes)}" for loss, nodes in told.items())
    return [f"{attempt}: nodes report different losses: {sides}"]


def _redo_problems(run: Run, older: Try, newer: Try) -> list[str]:
    return [
        f"{node} committed {older} and went on in view {newer.view}, where the step was committed again "
        f"as attempt {newer.attempt}"
        for node in older.losses
        if any(isinstance(r, records.Committed) and r.view >= newer.view and r.step >= newer.step
               and (r.view, r.step, r.attempt) != (older.view, older.step, older.attempt)
               for r in run.nodes[node])
    ]
