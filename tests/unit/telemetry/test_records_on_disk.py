"""What a run writes is read back as it was, also where JSON has no word for it and where the writer was killed."""

import math
from pathlib import Path

import pytest

from everstep import records
from everstep.errors import ConfigError
from everstep.telemetry import runs
from tests.unit.telemetry.story import N0, WHOLE, decision, whole_story


def read_back(record: records.Record, folder: Path) -> records.Record:
    (folder / "a.jsonl").write_bytes(records.line(record))
    return next(records.read(folder / "a.jsonl"))


def test_a_candidate_that_cannot_be_taken_keeps_its_infinite_cost(tmp_path: Path):
    plan = records.PlanCommitted(
        time_s=0.0, view=1, step=0, attempt=0, policy="start", plan=WHOLE, decision=decision("start", 1, 0, WHOLE, "start"),
    )
    assert read_back(plan, tmp_path) == plan
    assert plan.decision.candidates[2].step_s == math.inf


def test_a_loss_that_is_not_a_number_is_read_as_one_that_is_not(tmp_path: Path):
    back = read_back(records.Committed(node=N0, view=1, step=0, attempt=0, loss=math.nan), tmp_path)
    assert isinstance(back, records.Committed)
    assert math.isnan(back.loss)


def test_a_torn_last_line_ends_a_file(tmp_path: Path):
    line = records.line(records.Committed(node=N0, view=1, step=0, attempt=0, loss=1.0))
    (tmp_path / "a.jsonl").write_bytes(line + line[:20])
    assert len(list(records.read(tmp_path / "a.jsonl"))) == 1


def test_a_line_in_the_middle_that_is_no_record_is_named(tmp_path: Path):
    line = records.line(records.Committed(node=N0, view=1, step=0, attempt=0, loss=1.0))
    (tmp_path / "a.jsonl").write_bytes(line + b'{"type": "egg"}\n' + line)
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: not a record of a run"):
        list(records.read(tmp_path / "a.jsonl"))


def test_the_newest_run_is_found_also_one_level_deeper(tmp_path: Path):
    import os

    for age_s, name in ((30, "old"), (10, "demo/undisturbed"), (20, "other")):
        folder = whole_story().write(tmp_path / name)
        os.utime(folder / "agent.jsonl", (1_000_000 - age_s, 1_000_000 - age_s))
    assert runs.find(root=tmp_path) == tmp_path / "demo/undisturbed"


def test_a_folder_that_holds_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"not the folder of a run \(it has no agent\.jsonl\)"):
        runs.find(tmp_path)
    with pytest.raises(ConfigError, match="start one with 'everstep run'"):
        runs.find(root=tmp_path)


def test_a_run_that_has_not_begun_is_refused(tmp_path: Path):
    (tmp_path / "agent.jsonl").touch()
    with pytest.raises(ConfigError, match="does not begin with the start of a run"):
        runs.read(tmp_path)
