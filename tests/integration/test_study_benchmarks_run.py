"""The benchmarks on pretend time run from one command and say what they should."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def output_of(script: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--quick", "--json"], capture_output=True, text=True, check=False,
        timeout=170, env=os.environ | {"PYTHONWARNINGS": "error"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_each_rung_of_the_ladder_is_there_and_they_lead_upwards():
    (column,) = output_of("ablation_ladder.py").values()
    assert list(column) == [
        "R0", "R1", "R2", "R3", "+N", "+Dy", "Eq. 8", "hazard", "two-phase", "asymmetric", "finer", "keep progress",
        "look-ahead", "half-layers",
    ]
    assert 1.0 == column["R0"] < column["R1"] < column["R2"] < column["R3"] < column["+N"] < column["finer"]
    assert max(column[rung] for rung in ("hazard", "two-phase", "asymmetric")) <= column["finer"]


@pytest.mark.slow
def test_the_trace_study_makes_all_its_tables():
    said = output_of("trace_study.py")
    assert len(said["tables"]) == 6
    assert all(len(table.splitlines()) >= 3 for table in said["tables"].values())
