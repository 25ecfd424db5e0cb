"""``everstep plan`` asks the planner and prints its answer; nothing runs."""

from pathlib import Path

import msgspec
import pytest

from tests.unit.cli.calling import Caller

TINY = ("plan", "--cluster", "cluster-8", "--workload", "workload-tiny-gpt")


def test_the_answer_as_json_has_exactly_the_keys_that_are_promised(call: Caller):
    said = msgspec.json.decode(call(*TINY, "--lose", "n3", "--json").out)
    assert set(said) == {"plan", "step_s", "search_s", "candidates", "chosen"}
    assert {frozenset(candidate) for candidate in said["candidates"]} == {
        frozenset({"policy", "step_s", "stall_s", "value", "feasible", "reason"}),
    }
    chosen = said["candidates"][said["chosen"]]
    assert chosen["feasible"]
    assert chosen["step_s"] == said["step_s"]
    assert "n3" not in said["plan"]["placement"]


def test_without_an_event_the_answer_is_the_first_plan(call: Caller):
    said = msgspec.json.decode(call(*TINY, "--json").out)
    assert set(said["plan"]["placement"]) == {f"n{number}" for number in range(8)}
    assert said["candidates"][said["chosen"]]["policy"] == "start"


def test_in_words_it_shows_the_plan_before_the_table_and_the_plan_after(call: Caller):
    out = call(*TINY, "--lose", "n3, n4", "--policy", "shrink", "--gap", "1m").out
    assert out.startswith("before: a step takes")
    assert "next event expected in 60.00 s" in out
    assert "lost: n3, n4" in out.splitlines()


def test_a_newcomer_is_part_of_the_answer(call: Caller):
    said = msgspec.json.decode(call(*TINY, "--add", 1, "--json").out)
    assert "n8" in said["plan"]["placement"]


def test_the_schedule_is_drawn_as_text_and_to_a_file(call: Caller, tmp_path: Path):
    out = call(*TINY, "--lose", "n3", "--png", tmp_path / "plan.png").out
    assert "FFF" in out and (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "cannot be written" in call(*TINY, "--png", tmp_path / "no" / "plan.png").err


@pytest.mark.parametrize(("arguments", "code", "complaint"), [
    (("--lose", "n30"), 2, "n30 not in the cluster"),
    (("--gap", "1x"), 2, "--gap 1x: not a duration: '1x'"),
    (("--policy", "rerute"), 2, "did you mean 'reroute'?"),
    (("--cluster", "cluster-9"), 2, "did you mean cluster-8?"),
    (("--workload", "workload-gpt-124m"), 1, "1 stage: n0 needs"),
])
def test_a_question_that_has_no_answer_is_one_line(call: Caller, arguments: tuple[str, ...], code: int, complaint: str):
    answer = call(*TINY, *arguments)
    assert answer.code == code
    assert complaint in answer.err
    assert answer.err.count("\n") == 1
