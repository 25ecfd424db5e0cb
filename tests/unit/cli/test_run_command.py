"""``everstep run`` asks the agent for what was written on the command line, and names every mistake in it."""

from pathlib import Path

import msgspec
import pytest

from everstep.cli import launch
from everstep.errors import UserCodeError
from everstep.runtime.agent import RunOutcome, RunRequest
from everstep.runtime.kills import Kill, RandomKills
from tests.unit.cli.calling import Caller
from tests.unit.telemetry.test_views_of_a_run import SUMMARY_KEYS


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    return Path("train.py")


def test_options_may_stand_before_or_after_the_script_and_the_rest_is_the_scripts(
    call: Caller, requests: list[RunRequest], script: Path,
):
    assert call("run", "--spares", 1, script, "--steps", 5, "--workers", 4).code == 0
    assert requests[0].arguments == ("--steps", "5")
    assert (requests[0].workers, requests[0].spares, requests[0].resume) == (4, 1, False)


def test_all_after_two_dashes_is_the_scripts(call: Caller, requests: list[RunRequest], script: Path):
    assert call("run", script, "--workers", 4, "--", "--workers", 9, "--help", "x").code == 0
    assert requests[0].arguments == ("--workers", "9", "--help", "x")
    assert requests[0].workers == 4


@pytest.mark.parametrize("words", [("--worker", 4, "train.py"), ("train.py", "--worker=4")])
def test_a_misspelt_option_is_refused_with_the_nearest_name(call: Caller, script: Path, words: tuple[object, ...]):
    ended = call("run", *words)
    assert ended.code == 2
    assert "no option --worker; did you mean --workers?" in ended.err


def test_a_run_gets_a_folder_of_its_own(call: Caller, requests: list[RunRequest], script: Path):
    call("run", script)
    call("run", script)
    first, second = (request.directory for request in requests)
    assert first.parent == second.parent == Path("runs")
    assert first != second
    assert first.name.startswith("train-")


def test_the_command_line_wins_over_the_file_and_only_what_is_set_wins_over_the_script(
    call: Caller, requests: list[RunRequest], script: Path, tmp_path: Path,
):
    (tmp_path / "run.toml").write_text("[planner]\npolicy = 'shrink'\ngap_s = '1m'\n[engine]\nthreads = 3\n")
    call("run", "--config", "run.toml", "--set", "engine.threads=2", "--policy", "reroute", "--respawn", script)
    assert requests[0].settings == {
        "planner.policy": "reroute", "planner.gap_s": "1m", "engine.threads": 2, "respawn": True,
    }


def test_two_settings_that_are_right_only_together_are_accepted(
    call: Caller, requests: list[RunRequest], script: Path, tmp_path: Path,
):
    (tmp_path / "run.toml").write_text("detector.suspect_after_s = 20\n")
    assert call("run", "--config", "run.toml", "--set", "detector.heartbeat_interval_s=8", script).code == 0


def test_kills_are_passed_on(call: Caller, requests: list[RunRequest], script: Path):
    call("run", "--kill", "worker=2,step=7,phase=vote", "--kill", "random:3", "--workers", 2, "--spares", 1, script)
    assert requests[0].kills == (Kill(worker=2, step=7, phase="vote"), RandomKills(seed=3))


def test_the_summary_goes_to_a_file_and_as_json_to_standard_output(
    call: Caller, requests: list[RunRequest], script: Path, tmp_path: Path,
):
    answer = call("run", "--json", "--summary", "out/summary.json", script)
    assert set(msgspec.json.decode(answer.out)) == SUMMARY_KEYS
    assert msgspec.json.decode((tmp_path / "out/summary.json").read_bytes()) == msgspec.json.decode(answer.out)


def test_a_run_is_shown_and_ends_with_a_summary(call: Caller, requests: list[RunRequest], script: Path):
    said = call("run", "--dir", "here", script).out
    assert "worker 3 killed in step 3 (backward); reroute chosen: 3 candidates" in said
    assert "0 samples lost, 0 repeated, 20 counted" in said
    assert "All about it is in here" in said


def test_a_quiet_run_says_nothing(call: Caller, requests: list[RunRequest], script: Path):
    assert call("run", "--quiet", script).out == ""


def test_a_run_goes_on_only_where_it_is_asked_to(call: Caller, requests: list[RunRequest], script: Path):
    call("run", "--dir", "here", script)
    answer = call("run", "--dir", "here", script)
    assert (answer.code, answer.err) == (
        2, "everstep: here holds a run already; add --resume to go on with it, or name another folder\n",
    )
    assert len(requests) == 1


def test_a_run_that_fails_ends_with_its_message_and_its_code(
    call: Caller, script: Path, monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(launch, "run_agent", lambda request: RunOutcome(
        directory=request.directory, outcome="failed", exit_code=1, message="layers 3 and 4 are lost",
    ))
    answer = call("run", script)
    assert (answer.code, answer.err) == (1, "everstep: layers 3 and 4 are lost\n")


def test_an_error_of_the_scripts_is_one_message(call: Caller, script: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(request: RunRequest) -> RunOutcome:
        raise UserCodeError("block.2 raised ValueError: odd", layer="block.2", step=3, micro_batch=1, node="n4")

    monkeypatch.setattr(launch, "run_agent", fail)
    answer = call("run", script)
    assert (answer.code, answer.err) == (1, "everstep: block.2 raised ValueError: odd\n")


@pytest.mark.parametrize(("arguments", "complaint"), [
    (("nowhere.py",), "nowhere.py: no such script"),
    (("--kill", "worker=9,step=1", "train.py"), "worker=9,step=1,phase=backward: workers are 0 to 1"),
    (("--kill", "worker=0", "train.py"), "step is missing"),
    (("--set", "planner.polcy=reroute", "train.py"), "unknown key 'planner.polcy'; did you mean planner.policy?"),
    (("--set", "nonsense", "train.py"), "want key=value"),
    (("--policy", "rerute", "train.py"), "did you mean 'reroute'?"),
    (("--config", "absent.toml", "train.py"), "absent.toml: cannot be read"),
    (("--resume", "train.py"), "no run under runs/"),
    (("--resume", "--dir", "absent", "train.py"), "absent: not the folder of a run"),
])
def test_a_mistake_is_one_line_and_exit_code_2(
    call: Caller, requests: list[RunRequest], script: Path, arguments: tuple[str, ...], complaint: str,
):
    answer = call("run", *arguments)
    assert answer.code == 2
    assert complaint in answer.err
    assert answer.err.count("\n") == 1
    assert not requests


@pytest.mark.parametrize("arguments", [("run", "--workers", "0", "train.py"), ("run", "--egg", "train.py"), ("egg",)])
def test_a_wrong_option_is_exit_code_2(call: Caller, arguments: tuple[str, ...]):
    answer = call(*arguments)
    assert answer.code == 2
    assert "Traceback" not in answer.err
