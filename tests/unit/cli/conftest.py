"""A caller of commands, and an agent that only pretends to train."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.cli import launch
from everstep.runtime.agent import RunOutcome, RunRequest
from tests.unit.cli.calling import Caller
from tests.unit.telemetry.story import whole_story


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caller:
    """Commands run in an empty folder, so that the newest run is the test's."""
    monkeypatch.chdir(tmp_path)
    return Caller(capsys)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[RunRequest]:
    """What the agent is asked for; it answers every request with the same six steps."""
    seen: list[RunRequest] = []

    def pretend(request: RunRequest) -> RunOutcome:
        seen.append(request)
        story = whole_story()
        story.write(request.directory)
        for record in story.agent:
            request.on_record(record)
        return RunOutcome(directory=request.directory, outcome="done", exit_code=0, message="")

    monkeypatch.setattr(launch, "run_agent", pretend)
    return seen
