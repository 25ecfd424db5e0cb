"""The benchmarks run and say what they should; their numbers are for quiet machines and long runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def output_of(script: str, *arguments: str) -> Any:
    command = [sys.executable, str(BENCHMARKS / script), *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "pipelines"), [("one-process", 1), ("replicas-2", 2), ("pipeline-2", 1)])
def test_the_steady_state_benchmark_compares_trainings_that_do_the_same_work(case: str, pipelines: int):
    (result,) = output_of("steady_state.py", "--quick", "--case", case)
    assert result["case"] == case
    assert result["plan"].count("×") == pipelines
    assert result["ratio"] > 0 and result["everstep_step_s"] > 0 and result["torch_step_s"] > 0
    assert result["loss_difference"] < 1e-5


@pytest.mark.slow
def test_a_random_plan_without_failures_stays_within_rounding_of_one_process():
    (row,) = output_of("rounding.py", "--plans", "1", "--steps", "3")
    assert 0 < row["largest"]["fp32"] < 1e-6
    assert row["largest"]["fp64-sum"] < 1e-6


@pytest.mark.slow
def test_predictions_are_judged_on_plans_that_they_have_not_seen():
    said = output_of("prediction.py", "--plans", "3", "--steps", "2")
    assert len(said["rows"]) == 4
    assert said["rows"][0]["online_s"] is None and said["rows"][1]["frozen_s"] is None
    assert all(row["measured_s"] > 0 and row["worked_s"] > 0 for row in said["rows"])
    assert {figures["plans"] for figures in said["figures"].values()} == {2}
