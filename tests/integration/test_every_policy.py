"""Every name that `planner.policy` may have carries a real run through a kill, to the state of one plain process.

What a policy does is decided by rules that are tested without processes; here is what is left: that its plans run.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from everstep.config import Policy
from tests.engine.reference import Reference
from tests.integration.harness import assert_same_state, reference_of_small, train

STEPS = 12
SLICE = ("auto", "recycle", "oobleck", "chameleon", "bamboo")
"""Those whose plans are least alike. All of them, a minute and a half, run with ``--thorough``."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "policy" in metafunc.fixturenames:
        metafunc.parametrize("policy", get_args(Policy) if metafunc.config.getoption("--thorough") else SLICE)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return reference_of_small(STEPS)


def test_a_run_under_any_policy_survives_a_kill(policy: str, reference: Reference, tmp_path: Path) -> None:
    run = train(
        tmp_path, "small.py", "--steps", str(STEPS), workers=4, kills=("worker=survivable,step=4,phase=backward",),
        settings={"planner": {"policy": policy}},
    )
    assert run.outcome.exit_code == 0, run.outcome
    (event,) = run.events
    assert event.kind == "lost" and event.policy
    run.assert_every_sample_once()
    run.assert_replicas_are_equal()
    assert_same_state(run, reference)
