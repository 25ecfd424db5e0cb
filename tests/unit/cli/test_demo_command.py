"""The demonstration fails whenever the disturbed run is not as good as the undisturbed one."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from everstep import records
from everstep.cli import demo, launch
from everstep.runtime.agent import RunRequest
from everstep.runtime.kills import Kill
from everstep.telemetry.summary import Summary
from tests.unit.cli.calling import Caller

ENTROPY = 3.0


def value(steps: int = 200, deaths: tuple[str, ...] = ("n1", "n2", "n3,n4"), last: float = 2.2) -> Summary:
    events = tuple(
        records.EventSeen(
            time_s=1.0, step=9, phase="reduce", node=nodes, policy="reroute", decision="", detect_s=0.0, decide_s=0.0,
            stall_s=0.0, step_s_before=1.0, step_s_after=1.0, step_s_predicted=1.0,
        )
        for nodes in deaths
    )
    return Summary(
        steps=steps, loss=(5.0,) * (steps - 10) + (last,) * 10, samples_seen=0, samples_lost=0, samples_repeated=0,
        events=events, state_hash={}, seed=7, numerics="fp32", outcome="done", rolled_back=(), goodput=1.0, step_s_p50=1.0,
    )


def problems(disturbed: Summary, undisturbed: Summary | None = None, steps: int = 200) -> tuple[str, ...]:
    return demo.compare(disturbed, undisturbed or value(deaths=()), ENTROPY, steps, num_kills=4).problems


def test_two_runs_with_the_same_losses_have_no_problem():
    assert problems(value()) == ()


def test_losses_that_differ_by_what_a_double_count_gives_are_a_problem():
    counted_twice = replace(value(), loss=(5.0 + 1e-4, *value().loss[1:]))
    assert problems(counted_twice) == ("losses differ by up to 1.0e-04, allowed are 1e-05",)


def test_a_loss_that_is_not_a_number_is_a_problem():
    assert problems(replace(value(), loss=(float("nan"), *value().loss[1:])))[0].startswith("losses differ by up to inf")


def test_a_run_that_stops_early_is_a_problem():
    assert problems(replace(value(), loss=value().loss[:150])) == (
        "the disturbed run has 150 of 200 steps",
        "the last losses (5.000) are not clearly below the unigram entropy (3.000)",
    )


def test_a_kill_that_did_not_happen_is_a_problem():
    assert problems(value(deaths=("n1", "n3,n4"))) == ("3 workers died, 4 should have",)


def test_a_full_run_that_learned_nothing_is_a_problem_and_a_short_one_is_excused():
    assert problems(value(last=2.9), value(last=2.9, deaths=())) == (
        "the last losses (2.900) are not clearly below the unigram entropy (3.000)",
    )
    short = value(steps=20, last=2.9)
    assert problems(short, replace(short, events=()), steps=20) == ()


@pytest.mark.parametrize("steps", [10, 37, 200, 1000])
def test_the_kills_scale_with_the_steps_and_the_last_two_share_an_instant(steps: int):
    kills = launch.kills_of(demo.kills_for(steps), num_places=8)
    assert all(isinstance(kill, Kill) and kill.worker is None for kill in kills)
    instants = [kill.step for kill in kills if isinstance(kill, Kill)]
    assert 0 < instants[0] < instants[1] < instants[2] == instants[3] < steps
    assert kills[2] == kills[3]


def test_the_demonstration_runs_the_main_job_twice_and_reports_what_differs(
    call: Caller, requests: list[RunRequest], tmp_path: Path,
):
    answer = call("demo", "--steps", 10, "--dir", "out", "--json")
    disturbed, undisturbed = requests
    assert disturbed.script.name == "tiny_gpt.py"
    assert disturbed.arguments == ("--steps", "10")
    assert (len(disturbed.kills), len(undisturbed.kills), disturbed.workers) == (4, 0, 8)
    said = msgspec.json.decode(answer.out)
    assert said["max_difference"] == 0.0
    assert said["disturbed"]["loss"] == said["undisturbed"]["loss"]
    assert (tmp_path / "out/losses.png").is_file()
    assert answer.code == 1, "the pretending agent trains six steps only, and one worker dies"
    assert "the disturbed run has 6 of 10 steps" in answer.err


def test_a_folder_that_is_not_empty_is_refused(call: Caller, requests: list[RunRequest], tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").touch()
    answer = call("demo", "--dir", "out")
    assert (answer.code, answer.err) == (2, "everstep: out is not empty; name another folder\n")
    assert not requests
