"""Each kind of instant of the commit exchange, with real processes; all cases in pretend time are in ``simulation``."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.quantities import NodeId
from everstep.records import StepSeen
from tests.engine.reference import Reference
from tests.integration.harness import SCRIPTS, assert_same_state, reference_of_small, train

STEPS = 10


@pytest.fixture(scope="module")
def reference() -> Reference:
    return reference_of_small(STEPS)


@pytest.mark.parametrize(
    ("instant", "rank"),
    [("before-record", 5), ("after-record", 5), ("before-record", 1), ("after-record", 1),
     ("between-unions", 0), ("between-unions", 1), ("inside-apply", 0), ("inside-apply", 3)],
)
def test_a_death_at_an_instant_of_the_commit_leaves_one_state(
    instant: str, rank: int, reference: Reference, tmp_path: Path
) -> None:
    """In a view of six the root has rank 0, and ranks 1 and 2 hand its union down."""
    run = train(tmp_path, str(SCRIPTS / "dies.py"), instant, f"n{rank}", "--steps", str(STEPS), workers=6)
    assert run.outcome.exit_code == 0, run.outcome
    assert run.views[0].view.rank_of(NodeId(f"n{rank}")) == rank
    assert [event.node for event in run.events] == [f"n{rank}"]
    assert sorted({record.step for record in run.of(StepSeen)}) == list(range(STEPS))
    run.assert_every_sample_once()
    run.assert_replicas_are_equal()
    assert_same_state(run, reference)
