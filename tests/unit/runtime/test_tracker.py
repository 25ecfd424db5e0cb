"""What the agent measures steps by."""

from __future__ import annotations

from everstep.records import Record
from everstep.runtime.tracker import EventTracker


def test_a_step_with_a_change_of_plan_in_it_measures_no_plan() -> None:
    records: list[Record] = []
    tracker = EventTracker(records.append)
    tracker.planned(0.0)
    tracker.step_done(0, 0, 5.0, 1.0)
    assert tracker.last_step_s is None, "nobody knows when the first one began"
    tracker.step_done(1, 0, 5.0, 2.0)
    assert tracker.last_step_s == 1.0
    tracker.planned(2.1)
    tracker.step_done(2, 0, 5.0, 3.5)
    assert tracker.last_step_s is None
    tracker.step_done(3, 0, 5.0, 4.5)
    assert tracker.last_step_s == 1.0
    assert len(records) == 4
