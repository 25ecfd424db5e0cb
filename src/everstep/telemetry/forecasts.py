"""What steps were predicted to take and what they took, plan by plan.

The prediction is the one the plan was chosen with, so made before any step under it was trained. The measure is the median
of full steps under the plan, without the first, which contains the stall before it. The first plan of a run is chosen before
anything was measured: its prediction is a guess from sizes, and is marked as one.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from everstep import records
from everstep.plan import Plan
from everstep.planner.policies.pricing import layout_words
from everstep.planner.step.calibrate import family_of
from everstep.telemetry.audit import micro_batch_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One plan that ran."""

    view: int
    step: int
    """The first one under it."""
    policy: str
    layout: str
    """In words: ``4+4``, ``rerouted, split backward, 1 spare``."""
    nodes: int
    steps: int
    """So many full steps were measured."""
    predicted_s: float
    measured_s: float | None
    """None: no full step was trained but the first."""
    guessed: bool
    """The prediction was made before anything had been measured."""

    @property
    def error_percent(self) -> float | None:
        """How much longer (+) or shorter (-) than the step that was measured the predicted one is."""
        return round((self.predicted_s / self.measured_s - 1) * 100, 2) if self.measured_s else None


@dataclass
class _Open:
    plan: records.PlanCommitted
    times_s: list[float] = field(default_factory=list)


class Forecasts:
    """Takes records of a run in order."""

    def __init__(self) -> None:
        self._started: records.RunStarted | None = None
        self._plans: list[_Open] = []

    def on(self, record: records.Record) -> None:
        """Take one more record."""
        match record:
            case records.RunStarted():
                self._started = record
            case records.PlanCommitted():
                self._plans.append(_Open(record))
            case records.StepSeen():
                if self._plans and self._started and sum(micro_batch_sizes(self._started, record.step)) == self._started.batch:
                    self._plans[-1].times_s.append(record.step_s)

    def so_far(self) -> tuple[Forecast, ...]:
        """One for each plan, in order."""
        return tuple(_forecast(opened.plan, opened.times_s[1:]) for opened in self._plans)


def _forecast(committed: records.PlanCommitted, times_s: list[float]) -> Forecast:
    chosen = committed.decision.candidate
    return Forecast(
        view=committed.view, step=committed.step, policy=committed.policy, layout=layout(committed.plan),
        nodes=len(committed.plan.nodes), steps=len(times_s), predicted_s=chosen.step_s,
        measured_s=statistics.median(times_s) if times_s else None, guessed=committed.policy == "start",
    )


def to_json(value: Forecast) -> dict[str, object]:
    """The fields, and ``error_percent``."""
    return {name: getattr(value, name) for name in (*Forecast.__dataclass_fields__, "error_percent")}


def layout(plan: Plan) -> str:
    """``4+4``, ``rerouted, split backward, 2 more slots, 1 spare``."""
    words = ["rerouted" if family_of(plan).shape == "rerouted" else layout_words(plan)]
    order, idle = plan.order, len(plan.spares)
    words += ["split backward"] if order.split else []
    words += [f"{order.extra_slots} more slot{'s' if order.extra_slots > 1 else ''}"] if order.extra_slots else []
    words += [f"{idle} spare{'s' if idle > 1 else ''}"] if idle else []
    return ", ".join(words)


def of(agent: tuple[records.Record, ...]) -> tuple[Forecast, ...]:
    """The forecasts of all plans in an agent's records."""
    forecasts = Forecasts()
    for record in agent:
        forecasts.on(record)
    return forecasts.so_far()
