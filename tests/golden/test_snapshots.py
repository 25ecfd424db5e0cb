"""What each command prints, kept as text: the command, a line of dashes, the words, and its exit code if it is not 0.

``pytest tests/golden --rewrite`` accepts new output; read the difference before you commit it.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from everstep.cli import launch
from everstep.runtime.agent import RunOutcome, RunRequest
from tests.unit.cli.calling import Caller
from tests.unit.telemetry.story import N1, whole_story

SCENARIOS = sorted(Path(__file__).parent.glob("*.txt"))
DASHES = "-" * 40


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caller:
    """A folder with a script, a run that is right and one that is not, and an agent that only tells a story."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(launch, "run_agent", pretend)
    Path("train.py").touch()
    whole_story().write(Path("runs/train"))
    wrong = whole_story()
    wrong.change(N1, 4, pairs={"block/block": (0, 1, 1), "embed.weight/head": (0,), "head.bias/head": (0, 1)})
    wrong.write(Path("wrong"))
    return Caller(capsys)


def pretend(request: RunRequest) -> RunOutcome:
    story = whole_story()
    story.write(request.directory)
    (request.directory / "logs").mkdir()
    (request.directory / "logs" / "n0.txt").write_text("step 0  loss 5.0000\n")
    for record in story.agent:
        request.on_record(record)
    return RunOutcome(directory=request.directory, outcome="done", exit_code=0, message="")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.stem)
def test_a_command_prints_what_its_snapshot_says(scenario: Path, call: Caller, pytestconfig: pytest.Config):
    told = scenario.read_text()
    commands = [part.splitlines()[0] for part in told.split("$ ")[1:]]
    assert commands, f"{scenario.name} has no command; a line such as '$ everstep status' begins one"
    now = "\n".join(f"$ {command}\n{DASHES}\n{said(call, command)}" for command in commands)
    if pytestconfig.getoption("--rewrite"):
        scenario.write_text(now)
    assert now == scenario.read_text()


def said(call: Caller, command: str) -> str:
    program, *arguments = shlex.split(command)
    assert program == "everstep"
    answer = call(*arguments)
    words = re.sub(r"worked out in .*", "worked out in <time>", answer.out + answer.err)
    return words + (f"[exit {answer.code}]\n" if answer.code else "")
