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
def test_each_rung_of_the_ladder_is_there_and_the_last_is_the_best():
    (column,) = output_of("ablation_ladder.py").values()
    assert list(column) == [
        "R0", "R1", "R2", "R3", "+N", "+Dy", "Eq. 8", "hazard", "two-phase", "asymmetric", "look-ahead",
    ]
    assert column["R0"] == 1.0
    assert max(column, key=lambda rung: column[rung]) == "look-ahead"


@pytest.mark.slow
def test_the_trace_study_makes_all_its_tables():
    said = output_of("trace_study.py")
    assert len(said["tables"]) == 6
    assert all(len(table.splitlines()) >= 3 for table in said["tables"].values())
