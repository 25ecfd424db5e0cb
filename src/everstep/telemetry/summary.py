"""A run in one JSON object: what ``run --summary`` writes, and what benchmarks and comparisons read."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from everstep import records
from everstep.telemetry import forecasts
from everstep.telemetry.audit import audit
from everstep.telemetry.line import Line, Rollback, surviving
from everstep.telemetry.runs import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Losses and samples follow the line of steps that survives; what was rolled back stands beside it."""

    steps: int
    """Committed, on the line that survives."""
    loss: tuple[float, ...]
    """One a step, in order."""
    samples_seen: int
    samples_lost: int
    samples_repeated: int
    events: tuple[records.EventSeen, ...]
    state_hash: Mapping[str, Mapping[str, str]]
    """The final hash of each unit on each node."""
    seed: int
    numerics: str
    outcome: str
    """done, stopped, failed; ``unfinished`` while it goes on, or when its agent was killed."""
    rolled_back: tuple[Rollback, ...]
    goodput: float
    """Samples of surviving steps per second, from the begin of the first step to the end of the last; stalls included."""
    step_s_p50: float
    """The median time of a step."""
    plans: tuple[forecasts.Forecast, ...] = ()
    """What steps were predicted to take and took, for each plan that ran."""


def summary(run: Run) -> Summary:
    """The summary of ``run``, accounted by ``audit``."""
    line = surviving(run)
    account = audit(run, line)
    return Summary(
        steps=len(line.tries), loss=line.losses, samples_seen=account.samples_seen,
        samples_lost=account.samples_lost, samples_repeated=account.samples_repeated,
        events=tuple(r for r in run.agent if isinstance(r, records.EventSeen)),
        state_hash={} if run.ended is None else run.ended.state_hash,
        seed=run.started.seed, numerics=run.started.numerics,
        outcome="unfinished" if run.ended is None else run.ended.outcome,
        rolled_back=line.rolled_back, goodput=_goodput(run, line, account.samples_seen), step_s_p50=_step_s_p50(run),
        plans=forecasts.of(run.agent),
    )


def to_json(value: Summary) -> dict[str, Any]:
    """Exactly the fields of ``Summary`` as keys; an event has its fields, without the record's tag. NaN becomes null."""
    fields = {key: getattr(value, key) for key in Summary.__dataclass_fields__} | {
        "events": [event_to_json(event) for event in value.events],
        "plans": [forecasts.to_json(forecast) for forecast in value.plans],
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(fields))
    return plain


def event_to_json(event: records.EventSeen) -> dict[str, Any]:
    """The fields of an event."""
    return {field: getattr(event, field) for field in event.__struct_fields__}


def _step_s_p50(run: Run) -> float:
    return statistics.median([r.step_s for r in run.agent if isinstance(r, records.StepSeen)] or [0.0])


def _goodput(run: Run, line: Line, samples: int) -> float:
    training_s = 0.0
    for session in run.sessions:
        steps = [r for r in session if isinstance(r, records.StepSeen)]
        if steps:
            training_s += steps[-1].time_s - (steps[0].time_s - steps[0].step_s)
    return samples / training_s if training_s > 0 and line.tries else 0.0
