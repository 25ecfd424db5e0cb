"""A schedule that does not follow from the plan reaches the workers at a step boundary, and gives the same state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from everstep.controller import Controller
from everstep.plan import Order
from everstep.planner.idle.refine import Refined
from everstep.planner.layouts.search import Priced
from everstep.planner.step.memory import node_bytes
from everstep.planner.step.schedules import order_of
from everstep.records import PlanCommitted, StepSeen
from everstep.runtime import agent
from tests.integration.harness import assert_same_state, reference_of_small, train

STEPS = 16


class FindsAnotherSchedule(Controller):
    """Takes any other schedule for a better one: on cores that nodes share none is."""

    def refine(self) -> bool:
        assert self.plan is not None and self.workload is not None
        if self.schedule is None and self._better is None:
            roomy = order_of(replace(self.plan, order=Order(extra_slots=2)))
            assert roomy != order_of(self.plan)
            needed = node_bytes(self.plan, self.workload, roomy)
            answer = Priced(plan=self.plan, step_s=0.5 * self.predicted_step_s(), needed_bytes=needed)
            self._better = Refined(answer, roomy, self.predicted_step_s())
        return False


def test_a_better_schedule_takes_effect_at_a_step_boundary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "Controller", FindsAnotherSchedule)
    monkeypatch.setattr(agent, "THINK_EVERY_S", 0.01)
    run = train(
        tmp_path, "small.py", "--steps", str(STEPS), "--pace", "0.1", workers=4,
        settings={"planner": {"worker_memory_bytes": 60_000}},
    )
    assert run.outcome.exit_code == 0, run.outcome
    first, then = run.of(PlanCommitted)
    assert (first.policy, then.policy) == ("start", "schedule")
    assert then.plan == first.plan and "less time" in then.decision.cause
    assert {step.attempt for step in run.of(StepSeen)} == {0}, "no step was interrupted"
    run.assert_every_sample_once()
    run.assert_replicas_are_equal()
    assert_same_state(run, reference_of_small(STEPS))
