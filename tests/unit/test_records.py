"""The account of a run: a line a record, whole or not at all, with numbers that are none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decision import Candidate, Decision
from everstep.errors import ConfigError
from everstep.quantities import NodeId
from everstep.records import (
    CheckpointWritten,
    Committed,
    Counted,
    EventSeen,
    PlanCommitted,
    Record,
    RolledBack,
    RunEnded,
    RunStarted,
    StepSeen,
    ViewCommitted,
    line,
    read,
    to_builtins,
)
from everstep.view import View
from tests.unit.protocol.makers import N0, N1, order, view
from tests.untimed import UNTIMED

PLAN = order(1, N0, N1).plan
DECISION = Decision(
    cause="n1 lost", view=2, step=7, lost=(N1,), gap_s=60.0, chosen=0, candidates=(
        Candidate(policy="shrink", plan=PLAN, step_s=0.5, value=100.0, moved_bytes=3, peak_bytes=9),
        Candidate(policy="spare", plan=None, reason="no spare"),
    ),
)
RECORDS: list[Any] = [
    RunStarted(time_s=0.0, script="train.py", arguments=("--x", "1"), workers=2, spares=0, seed=1, numerics="fp32", until=None,
               dataset_samples=10, batch=4, micro=2, layers=("a", "b"), uses={"a": ("a",)}),
    Counted(node=N0, view=1, step=3, attempt=0, pairs={"a/a": (0, 1)}, samples={0: (4, 2), 1: ()}),
    Committed(node=N0, view=1, step=3, attempt=0, loss=1.5),
    ViewCommitted(time_s=1.0, view=view(1, N0, N1), cause="start"),
    PlanCommitted(time_s=1.0, view=2, step=7, attempt=1, policy="shrink", plan=PLAN, decision=DECISION),
    RolledBack(time_s=1.0, view=2, from_step=9, to_step=5),
    EventSeen(time_s=1.0, step=7, phase="reduce", node="n1", policy="shrink", decision="shrink: 0.5 s", detect_s=None,
              decide_s=0.1, stall_s=0.2, step_s_before=0.4, step_s_after=0.5, step_s_predicted=0.5),
    StepSeen(time_s=2.0, step=8, attempt=0, loss=1.25, step_s=0.5),
    CheckpointWritten(time_s=2.0, step=8, view=2, path="checkpoints/step-00000008.view-2"),
    RunEnded(time_s=3.0, outcome="done", steps=9, state_hash={"n0": {"a": "ff"}}),
]


@pytest.mark.parametrize("record", RECORDS, ids=[type(record).__name__ for record in RECORDS])
def test_a_record_is_one_line_and_comes_back(tmp_path: Path, record: Record) -> None:
    text = line(record)
    assert text.endswith(b"\n") and text.count(b"\n") == 1
    (tmp_path / "file").write_bytes(text)
    assert list(read(tmp_path / "file")) == [record]
    assert to_builtins(record)["type"]


@given(st.integers(0, 400))
@UNTIMED
def test_a_torn_last_line_ends_the_file(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.getbasetemp() / "torn"
    last = line(RECORDS[1])
    path.write_bytes(line(RECORDS[2]) + last[: cut % len(last)])
    found = list(read(path))
    assert found == [RECORDS[2]] or found == RECORDS[2:3] + RECORDS[1:2]
    assert len(found) == 1 or cut % len(last) == len(last) - 1  # only the newline is missing: nothing is lost


@pytest.mark.parametrize("text", [
    b"{", b"[]", b"3", b'"text"', b"null", b"{}", b'{"type":"none"}', b'{"type":"step"}', b"\xff\xfe", b'{"type":"plan"}',
    b'{"type":"plan","decision":3}', b'{"type":"plan","decision":{"candidates":[1]}}', b'{"type":"step","time_s":"soon"}',
    b'{"type":"plan","decision":{"candidates":[{}]}}', b'{"type":3}', b'{"type":["plan"]}',
], ids=repr)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(line(RECORDS[2]) + text + b"\n" + line(RECORDS[2]))
    with pytest.raises(ConfigError, match="file, line 2: not a record of a run"):
        list(read(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing: cannot be read: No such file"):
        list(read(tmp_path / "nothing"))


def test_empty_lines_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\n" + line(RECORDS[2]) + b"\n\n")
    assert list(read(path)) == [RECORDS[2]]
    path.write_bytes(b"")
    assert list(read(path)) == []


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_comes_back_as_no_number(tmp_path: Path, loss: float) -> None:
    path = tmp_path / "file"
    path.write_bytes(line(Committed(node=NodeId("n0"), view=1, step=3, attempt=0, loss=loss)))
    (found,) = read(path)
    assert isinstance(found, Committed) and math.isnan(found.loss)


def test_what_may_be_nothing_stays_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(line(RECORDS[0]) + line(RECORDS[6]))
    started, event = read(path)
    assert isinstance(started, RunStarted) and started.until is None
    assert isinstance(event, EventSeen) and event.detect_s is None


def test_json_values_are_plain() -> None:
    assert to_builtins(RECORDS[1])["samples"] == {"0": (4, 2), "1": ()}
    assert to_builtins(View(1, ())) == {"number": 1, "members": ()}
