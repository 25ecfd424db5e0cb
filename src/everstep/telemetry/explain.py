"""Why a run did what it did: the table of every decision, with the step time that was then measured beside it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from everstep import records
from everstep.decision import Decision
from everstep.decision import text as decision_text
from everstep.errors import ConfigError
from everstep.quantities import human_seconds
from everstep.telemetry.runs import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One decision of a run. ``number`` counts from 1: the first is the plan that the run began with."""

    number: int
    time_s: float
    view: int
    step: int
    policy: str
    decision: Decision
    step_s_measured: float | None
    """The median time of the steps trained under the plan; None when there was none."""


def explain(run: Run, number: int | None = None) -> tuple[Explanation, ...]:
    """All decisions of ``run``, or the one with ``number``.

    Raises:
        ConfigError: there is no decision of that number.
    """
    plans = [index for index, record in enumerate(run.agent) if isinstance(record, records.PlanCommitted)]
    if number is not None and not 1 <= number <= len(plans):
        raise ConfigError(f"no decision {number} in {run.directory}; there are 1 to {len(plans)}")
    found = []
    for position, (first, end) in enumerate(zip(plans, [*plans[1:], len(run.agent)], strict=True), start=1):
        record = run.agent[first]
        assert isinstance(record, records.PlanCommitted), "only such records were selected"
        times = [r.step_s for r in run.agent[first:end] if isinstance(r, records.StepSeen)]
        found.append(Explanation(
            number=position, time_s=record.time_s, view=record.view, step=record.step, policy=record.policy,
            decision=record.decision,
            # The first step under a plan contains the stall before it.
            step_s_measured=statistics.median(times[1:] or times) if times else None,
        ))
    return tuple(found) if number is None else (found[number - 1],)


def text(explanation: Explanation) -> str:
    """The decision's own table under its number, and what came of it."""
    measured = explanation.step_s_measured
    when = "" if explanation.number == 1 else f", after {human_seconds(explanation.time_s)}"
    lines = [f"decision {explanation.number}{when}", decision_text(explanation.decision)]
    if measured is not None:
        predicted = explanation.decision.candidate.step_s
        lines.append(f"a step was predicted to take {human_seconds(predicted)} and took {human_seconds(measured)} (median)")
    return "\n".join(lines)
