"""``status``, ``explain`` and ``audit`` read the newest run, or the one that is named, and print words or JSON."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from everstep import records
from tests.unit.cli.calling import Caller
from tests.unit.telemetry.story import N1, N2, Story, whole_story


@pytest.fixture
def story() -> Story:
    return whole_story()


def test_status_speaks_of_the_newest_run(call: Caller, story: Story, tmp_path: Path):
    story.write(tmp_path / "runs/a")
    said = msgspec.json.decode(call("status", "--json").out)
    assert (said["directory"], said["step"], said["outcome"]) == ("runs/a", 6, "done")


def test_explain_shows_all_decisions_or_one(call: Caller, story: Story, tmp_path: Path):
    story.write(tmp_path / "runs/a")
    assert [e["policy"] for e in msgspec.json.decode(call("explain", "--json").out)] == ["start", "reroute"]
    assert [e["number"] for e in msgspec.json.decode(call("explain", "--json", "-n", 2).out)] == [2]
    assert call("explain", "-n", 7).err == "everstep: no decision 7 in runs/a; there are 1 to 2\n"


def test_an_audit_that_finds_nothing_is_exit_code_0_and_one_that_does_is_1(call: Caller, story: Story, tmp_path: Path):
    story.write(tmp_path / "right")
    assert call("audit", "right").code == 0
    story.change(N1, 4, pairs={})
    story.write(tmp_path / "wrong")
    answer = call("audit", "wrong", "--json")
    assert answer.code == 1
    assert len(msgspec.json.decode(answer.out)["problems"]) == 2


def test_long_lists_of_problems_are_cut(call: Caller, story: Story, tmp_path: Path):
    story.nodes = {node: [r for r in lines if not isinstance(r, records.Counted)] for node, lines in story.nodes.items()}
    story.nodes[N2][-1] = records.Committed(node=N2, view=2, step=5, attempt=0, loss=1.0)
    story.write(tmp_path / "wrong")
    said = call("audit", "wrong").out
    assert said.splitlines()[-1] == "- and 1 more", "ten micro-batches lack pairs and samples, and one loss differs"


def test_where_there_is_no_run_the_reader_says_how_to_get_one(call: Caller):
    answer = call("status")
    assert answer.code == 2
    assert answer.err == "everstep: no run under runs/; start one with 'everstep run', or name the folder of a run\n"


@pytest.mark.parametrize("module", ["everstep", "everstep.cli.main", "everstep.cli.launch", "everstep.runtime.agent"])
def test_neither_the_command_line_nor_the_agent_imports_torch(module: str):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
