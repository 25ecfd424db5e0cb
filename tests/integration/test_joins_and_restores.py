"""Spares, fresh processes, and state that was lost everywhere: what comes back, and from where."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from everstep.engine.shards import from_bytes
from everstep.records import PlanCommitted, Record, RolledBack, StepSeen
from everstep.runtime import checkpoints
from tests.engine.reference import Reference
from tests.integration.harness import SCRIPTS, assert_same_state, processes_of, reference_of_small, train

STEPS = 16


@pytest.fixture(scope="module")
def reference() -> Reference:
    return reference_of_small(STEPS)


def test_a_spare_takes_the_lost_place(reference: Reference, tmp_path: Path) -> None:
    run = train(
        tmp_path, "small.py", "--steps", str(STEPS), workers=6, spares=1, kills=("worker=1,step=4,phase=backward",),
        settings={"planner": {"policy": "spare"}},
    )
    assert run.outcome.exit_code == 0, run.outcome
    first, then = run.of(PlanCommitted)
    assert first.plan.spares and then.policy == "spare" and not then.plan.spares
    run.assert_every_sample_once()
    assert_same_state(run, reference)


def test_a_fresh_process_joins_at_a_step_boundary_and_is_placed(reference: Reference, tmp_path: Path) -> None:
    run = train(
        tmp_path / "run", "small.py", "--steps", str(STEPS), "--pace", "0.1", "--rally", f"{tmp_path}:5", workers=4,
        kills=("worker=1,step=2,phase=backward",), settings={"respawn": True, "planner": {"policy": "repartition"}},
    )
    assert run.outcome.exit_code == 0, run.outcome
    joined = [view for view in run.views if "joins" in view.cause]
    assert len(joined) == 1
    last = run.of(PlanCommitted)[-1].plan
    assert "n4" in last.nodes and "n4" not in last.spares
    redone = [record for record in run.of(StepSeen) if record.attempt > 0]
    assert [record.step for record in redone] == [2]  # the kill; the join interrupted no step
    run.assert_every_sample_once()
    run.assert_replicas_are_equal()
    assert_same_state(run, reference)


def test_a_run_that_waits_goes_on_with_the_replacement_in_the_lost_place(tmp_path: Path) -> None:
    steps, joined, killed = 40, [], []

    def kill_another(record: Record) -> None:
        """As soon as the first replacement is in and trains, so that how long one takes has been measured."""
        if isinstance(record, PlanCommitted) and "n4" in record.plan.nodes:
            joined.append(record)
        if isinstance(record, StepSeen) and joined and not killed:
            killed.extend(processes_of(tmp_path, "n2"))
            os.kill(killed[0], signal.SIGKILL)

    run = train(
        tmp_path, "small.py", "--steps", str(steps), "--pace", "0.1", workers=4, kills=("worker=1,step=2,phase=backward",),
        settings={"respawn": True, "planner": {"policy": "wait"}}, on_record=kill_another,
    )
    assert run.outcome.exit_code == 0, run.outcome
    assert run.policies[:2] == ["start", "reroute"], "how long a replacement takes is not known yet"
    before, waited = run.of(PlanCommitted)[-2:]
    assert waited.policy == "wait" and "n2 lost" in waited.decision.cause and "n5 joins" in waited.decision.cause
    assert waited.plan.placement["n5"] == before.plan.placement["n2"]
    run.assert_every_sample_once()
    run.assert_replicas_are_equal()
    assert_same_state(run, reference_of_small(steps))


@pytest.mark.parametrize(("every", "goes_back_to"), [(5, 5), (100, 0)])
def test_a_layer_lost_everywhere_comes_from_the_newest_checkpoint_or_the_seed(
    every: int, goes_back_to: int, reference: Reference, tmp_path: Path
) -> None:
    run = train(
        tmp_path, "small.py", "--steps", str(STEPS), "--pace", "0.05", workers=3, kills=("worker=0,step=8,phase=backward",),
        settings={"checkpoint": {"every_steps": every}},
    )
    assert run.outcome.exit_code == 0, run.outcome
    (back,) = run.of(RolledBack)
    assert (back.from_step, back.to_step) == (8, goes_back_to)
    assert run.policies == ["start", "restore"]
    again = [record for record in run.of(StepSeen) if record.step == 7]
    assert [record.attempt > 0 for record in again] == [False, True]
    assert again[0].loss == pytest.approx(again[1].loss, abs=1e-10)
    run.assert_every_sample_once()
    assert len(run.losses) == STEPS
    assert max(abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True)) < 1e-10


def test_a_run_goes_on_from_its_checkpoint_with_other_workers(reference: Reference, tmp_path: Path) -> None:
    train(tmp_path, "small.py", "--steps", "6", workers=3)
    run = train(tmp_path, "small.py", "--steps", str(STEPS), workers=5, resume=True)
    assert run.outcome.exit_code == 0, run.outcome
    assert min(record.step for record in run.of(StepSeen)) == 6
    found, wanted = run.tensors(), reference.tensors()
    for name, tensor in wanted.items():
        assert float((found[name] - tensor).abs().max()) <= 1e-10 * max(float(tensor.abs().max()), 1e-30), name


def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path: Path) -> None:
    train(tmp_path, "small.py", "--steps", "8", workers=3, settings={"checkpoint": {"every_steps": 4}})
    newest = checkpoints.complete(tmp_path / "checkpoints")[0]
    assert newest.step == 8
    shard = newest.path / next(iter(newest.manifest.shards.values())).file
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    run = train(tmp_path, "small.py", "--steps", "10", workers=3, resume=True)
    assert run.outcome.exit_code == 0, run.outcome
    assert min(record.step for record in run.of(StepSeen)) == 4
    assert "checksum" in (tmp_path / "agent.jsonl").read_text()


def test_checkpoints_hold_the_state_of_their_step(tmp_path: Path) -> None:
    run = train(tmp_path, "small.py", "--steps", "4", workers=3, settings={"checkpoint": {"every_steps": 2}})
    assert run.outcome.exit_code == 0
    reference = reference_of_small(2)
    (older,) = [c for c in checkpoints.complete(tmp_path / "checkpoints") if c.step == 2]
    for unit, shard in older.manifest.shards.items():
        for name, tensor in from_bytes(checkpoints.check_shard(older, unit), shard.scalars).tensors.items():
            assert float((tensor - reference.tensors()[name]).abs().max()) < 1e-12, name


def test_hundred_view_changes_in_one_run_read_nothing_stale(tmp_path: Path) -> None:
    """Each view stands for a restart: with addresses, messages and answers of older ones about."""
    script = SCRIPTS / "retries.py"
    run = train(tmp_path, str(script), "--steps", "160", workers=3)
    assert run.outcome.exit_code == 0, run.outcome
    assert len(run.views) > 100
    run.assert_every_sample_once()
    run.assert_replicas_are_equal()
    reference = reference_of_small(160)
    assert max(abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True)) < 1e-9
