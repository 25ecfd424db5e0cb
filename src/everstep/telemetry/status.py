"""Where a run stands: a fold over the records of its agent, the same for a run on disk and for one that is watched live."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from everstep import records
from everstep.plan import Plan
from everstep.quantities import NodeId, human_seconds, node_number
from everstep.telemetry import forecasts, grid, words
from everstep.telemetry.audit import micro_batch_sizes
from everstep.telemetry.runs import Run

_RECENT_STEPS = 20
_RECENT_EVENTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What is known after some record. Times in seconds since the run, or its continuation, began."""

    script: str = ""
    outcome: str | None = None
    """done, stopped, failed; None: no end is recorded, so it goes on or its agent was killed."""
    message: str = ""
    time_s: float = 0.0
    step: int = 0
    """The next step to train: so many are committed."""
    until: int | None = None
    loss_first: float | None = None
    loss: float | None = None
    samples_per_s: float = 0.0
    """Over the last steps."""
    goodput: float = 0.0
    """Samples of steps that count, per second since the first step began; stalls included."""
    left_s: float | None = None
    """Until the last step, if it goes on as lately."""
    view: int = 0
    nodes: tuple[NodeId, ...] = ()
    lost: tuple[NodeId, ...] = ()
    policy: str = ""
    plan: Plan | None = None
    events: tuple[str, ...] = ()
    """The last ones, in words."""
    checkpoint: str = ""
    checkpoint_step: int | None = None
    plans: tuple[forecasts.Forecast, ...] = ()
    """What steps were predicted to take and took, for each plan that ran. Not followed live."""


class Tracker:
    """Takes records in order; ``status`` is where the run stands after them."""

    def __init__(self) -> None:
        self.status = Status()
        self._started: records.RunStarted | None = None
        self._samples: dict[int, int] = {}
        self._num_samples = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS)
        self._first_step_began_s: float | None = None
        self._places: dict[NodeId, int] = {}
        self._num_candidates: int | None = None

    def on(self, record: records.Record) -> None:
        """Take one more record."""
        match record:
            case records.RunStarted():
                self._start(record)
            case records.ViewCommitted():
                self._change_view(record)
            case records.PlanCommitted():
                self._num_candidates = len(record.decision.candidates)
                self.status = replace(self.status, policy=record.policy, plan=record.plan)
            case records.RolledBack():
                for step in range(record.to_step, record.from_step):
                    self._num_samples -= self._samples.pop(step, 0)
                self.status = replace(self.status, step=record.to_step)
                self._tell(words.rollback(record))
            case records.EventSeen():
                self._tell(words.event(record, self._places, self._num_candidates if record.policy else None))
            case records.StepSeen():
                self._count(record)
            case records.CheckpointWritten():
                self.status = replace(self.status, checkpoint=record.path, checkpoint_step=record.step)
            case records.CheckpointPassedOver():
                self._tell(f"passed over a checkpoint: {record.why}")
            case records.RunEnded():
                self.status = replace(self.status, outcome=record.outcome, message=record.message, left_s=None)
            case records.Counted() | records.Committed():
                return  # a node's account, not the agent's
        self.status = replace(self.status, time_s=record.time_s)

    def _start(self, record: records.RunStarted) -> None:
        self._started, self._first_step_began_s = record, None
        self._samples, self._num_samples = {}, 0
        self._recent.clear()
        self.status = replace(
            self.status, script=record.script, until=record.until, step=record.first_step, outcome=None, message="",
        )

    def _change_view(self, record: records.ViewCommitted) -> None:
        nodes = record.view.nodes
        self._places |= {member.node_id: member.place for member in record.view.members}
        lost = (set(self.status.lost) | set(self.status.nodes)) - set(nodes)
        self.status = replace(
            self.status, view=record.view.number, nodes=nodes, lost=tuple(sorted(lost, key=node_number)),
        )

    def _count(self, record: records.StepSeen) -> None:
        if self._started is None:
            return
        if self._first_step_began_s is None:
            self._first_step_began_s = record.time_s - record.step_s
        samples = sum(micro_batch_sizes(self._started, record.step))
        self._num_samples += samples - self._samples.get(record.step, 0)
        self._samples[record.step] = samples
        if record.step_s > 0:
            self._recent.append((samples, record.step_s))
        typical_s = statistics.median([step_s for _, step_s in self._recent] or [0.0])
        until = self.status.until
        self.status = replace(
            self.status, step=record.step + 1, loss=record.loss,
            loss_first=record.loss if self.status.loss_first is None else self.status.loss_first,
            samples_per_s=_rate(sum(n for n, _ in self._recent), sum(s for _, s in self._recent)),
            goodput=_rate(self._num_samples, record.time_s - self._first_step_began_s),
            left_s=None if until is None else max(0, until - record.step - 1) * typical_s,
        )

    def _tell(self, sentence: str) -> None:
        self.status = replace(self.status, events=(*self.status.events, sentence)[-_RECENT_EVENTS:])


def _rate(number: int, duration_s: float) -> float:
    return number / duration_s if duration_s > 0 else 0.0


def status(run: Run) -> Status:
    """Where ``run`` stands."""
    tracker = Tracker()
    for record in run.agent:
        tracker.on(record)
    return replace(tracker.status, plans=forecasts.of(run.agent))


def to_json(value: Status) -> dict[str, Any]:
    """Plain values; the plan as its routes in words and its placement."""
    plain = asdict(replace(value, plan=None))
    plain["plans"] = [forecasts.to_json(forecast) for forecast in value.plans]
    if value.plan is not None:
        plain["plan"] = {
            "pipelines": [
                {"hops": list(map(str, route)), "micro_batches": list(members)}
                for route, members in value.plan.pipelines().items()
            ],
            "placement": {node: list(layers) for node, layers in value.plan.placement.items()},
        }
    return plain


def text(value: Status, directory: Path) -> str:
    """What ``everstep status`` prints."""
    state = value.outcome or "no end is recorded: it goes on, or its agent was killed"
    lines = [f"{directory}: {value.script}", f"{state}{': ' + value.message if value.message else ''}", progress(value)]
    if value.loss is not None:
        lines.append(f"view {value.view} of {words.counted(len(value.nodes), 'node')}, {words.plan_by(value.policy)}")
    if value.plan is not None:
        lines += [f"  {line}" for line in grid.text(grid.grid(value.plan, frozenset(value.lost))).splitlines()]
    lines += [f"- {sentence}" for sentence in value.events]
    if value.checkpoint:
        lines.append(f"newest checkpoint: step {value.checkpoint_step}, {value.checkpoint}")
    return "\n".join(lines)


def progress(value: Status) -> str:
    """``step 41/200  loss 2.7312  312 samples/s, goodput 287  left 0:48``."""
    parts = [f"step {value.step}" + ("" if value.until is None else f"/{value.until}")]
    if value.loss is not None:
        parts += [f"loss {value.loss:.4f}", f"{value.samples_per_s:,.0f} samples/s, goodput {value.goodput:,.0f}"]
    if value.left_s:
        parts.append(f"{human_seconds(value.left_s)} left")
    return "  ".join(parts)
