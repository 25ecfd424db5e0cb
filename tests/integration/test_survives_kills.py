"""Real SIGKILLs at each phase: the run ends with the state of one plain process, to 1e-10 in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.reference import Reference
from tests.integration.harness import assert_same_state, reference_of_small, train

STEPS = 16


@pytest.fixture(scope="module")
def reference() -> Reference:
    return reference_of_small(STEPS)


CASES = {
    "nobody": (),
    "in forward": ("worker=1,step=4,phase=forward",),
    "in backward": ("worker=2,step=4,phase=backward",),
    "in a reduction": ("worker=0,step=4,phase=reduce",),
    "between vote and apply": ("worker=1,step=4,phase=vote",),
    "the root before it applies": ("worker=0,step=4,phase=apply",),
    "two at once": ("worker=survivable,step=5,phase=backward", "worker=survivable,step=5,phase=backward"),
    "during a switch": ("worker=survivable,step=4,phase=backward", "worker=survivable,step=4,phase=switch"),
    "during the recovery of another": ("worker=survivable,step=4,phase=vote", "worker=survivable,step=4,phase=recover"),
    "three, one after another": tuple(f"worker=survivable,step={step},phase=reduce" for step in (3, 7, 11)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_state_is_that_of_one_process_after_a_kill(case: str, reference: Reference, tmp_path: Path) -> None:
    kills = CASES[case]
    run = train(tmp_path, "small.py", "--steps", str(STEPS), workers=6, kills=kills)
    assert run.outcome.exit_code == 0, run.outcome
    assert sum(len(event.node.split(",")) for event in run.events if event.node) == len(kills)
    run.assert_every_sample_once()
    run.assert_replicas_are_equal()
    assert_same_state(run, reference)
