"""``everstep plan`` asks the planner and prints its answer; nothing runs."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from everstep.config import Policy
from tests.unit.cli.calling import Caller

TINY = ("plan", "--cluster", "cluster-8", "--workload", "workload-tiny-gpt")


def test_the_answer_as_json_has_the_keys_that_are_promised(call: Caller):
    said = msgspec.json.decode(call(*TINY, "--lose", "n3", "--json").out)
    assert {"plan", "step_s", "search_s", "candidates", "chosen"} <= set(said)
    for candidate in said["candidates"]:
        assert {"policy", "step_s", "stall_s", "value", "feasible", "reason"} <= set(candidate)
    chosen = said["candidates"][said["chosen"]]
    assert chosen["feasible"]
    assert (chosen["step_s"], chosen["way"]) == (said["step_s"], said["way"])
    assert "n3" not in said["plan"]["placement"]
    assert "n3" in said["before"]["plan"]["placement"]


def test_what_is_copied_behind_training_is_part_of_the_answer(call: Caller):
    asked = (
        "plan", "--cluster", "cluster-32", "--workload", "workload-gpt-2.7b", "--lose", "n3,n7,n11", "--policy", "two-phase",
    )
    said = msgspec.json.decode(call(*asked, "--json").out)
    chosen = said["candidates"][said["chosen"]]
    assert said["way"] == chosen["way"] == "behind"
    assert set(said["later"]["placement"]) == set(said["plan"]["placement"])
    assert chosen["copy_s"] > 0 and chosen["later_step_s"] < chosen["step_s"]
    assert " later, when its state has been copied behind training: a step takes " in call(*asked).out


def test_memory_is_shown_for_nodes_that_are_alike(call: Caller):
    said = msgspec.json.decode(call(*TINY, "--json").out)
    assert sorted(name for need in said["memory"] for name in need["nodes"]) == sorted(said["plan"]["placement"])
    for need in said["memory"]:
        assert need["state_bytes"] + need["activation_bytes"] == need["total_bytes"] <= need["cap_bytes"] == 11_000_000
    lines = call(*TINY).out.splitlines()
    (head,) = [index for index, line in enumerate(lines) if line.startswith("memory of")]
    assert lines[head].split() == ["memory", "of", "layers", "state", "activations", "together", "of"]
    assert lines[head + 1].endswith("11.0 MB")


def test_a_host_can_be_lost_by_name(call: Caller):
    out = call("plan", "--cluster", "cluster-48", "--workload", "workload-gpt-6.7b", "--lose", "host:old0",
               "--policy", "shrink").out
    assert "host old0 (n32–n35) lost: step 25" in out
    assert "lost: n32, n33, n34, n35" in out.splitlines()


def test_the_gap_counts_for_the_first_plan_too(call: Caller):
    values = [
        msgspec.json.decode(call(*TINY, "--gap", gap, "--json").out)["candidates"][0]["value"] for gap in ("1m", "1h")
    ]
    assert values[1] > 10 * values[0]


def test_how_many_losses_have_to_be_survived_can_be_asked_for(call: Caller):
    said = msgspec.json.decode(call(*TINY, "--tolerate", 1, "--json").out)
    holders = dict.fromkeys(range(said["plan"]["num_layers"]), 0)
    for layers in said["plan"]["placement"].values():
        for layer in layers:
            holders[layer] += 1
    assert min(holders.values()) >= 2


def test_without_an_event_the_answer_is_the_first_plan(call: Caller):
    said = msgspec.json.decode(call(*TINY, "--json").out)
    assert set(said["plan"]["placement"]) == {f"n{number}" for number in range(8)}
    assert said["candidates"][said["chosen"]]["policy"] == "start"


def test_in_words_it_shows_the_plan_before_the_table_and_the_plan_after(call: Caller):
    out = call(*TINY, "--lose", "n3, n4", "--policy", "shrink", "--gap", "1m").out
    assert out.startswith("before: a step takes")
    assert "next event expected in 60.00 s" in out
    assert "lost: n3, n4" in out.splitlines()


@pytest.mark.parametrize("policy", get_args(Policy))
def test_every_policy_can_be_asked_for_by_name(call: Caller, policy: str):
    asked = ("plan", "--cluster", "cluster-30", "--workload", "workload-gpt-350m", "--lose", "n3", "--policy", policy)
    answer = call(*asked, "--json")
    assert (answer.code, answer.err) == (0, "")
    said = msgspec.json.decode(answer.out)
    names = {candidate["policy"] for candidate in said["candidates"]}
    assert policy == "auto" or policy in names
    assert said["candidates"][said["chosen"]]["feasible"] and said["step_s"] > 0


def test_a_newcomer_is_part_of_the_answer(call: Caller):
    said = msgspec.json.decode(call(*TINY, "--add", 1, "--json").out)
    assert "n8" in said["plan"]["placement"]


def test_a_schedule_of_many_nodes_is_cut_and_says_so(call: Caller):
    asked = ("plan", "--cluster", "cluster-30", "--workload", "workload-gpt-350m")
    assert any(re.fullmatch(r"the first 16 of \d\d nodes:", line) for line in call(*asked).out.splitlines())
    assert "the first" not in call(*TINY).out


def test_the_schedule_is_drawn_as_text_and_to_a_file(call: Caller, tmp_path: Path):
    out = call(*TINY, "--lose", "n3", "--png", tmp_path / "plan.png").out
    assert "FFF" in out and (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "cannot be written" in call(*TINY, "--png", tmp_path).err, "a folder"
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.png"]


@pytest.mark.parametrize(("arguments", "code", "complaint"), [
    (("--lose", "n30"), 2, "n30 not in the cluster"),
    (("--lose", "host:nowhere"), 2, "no host 'nowhere' in the cluster; hosts are localhost"),
    (("--lose", "host:localhost"), 2, "no node would be left"),
    (("--gap", "1x"), 2, "--gap 1x: not a duration: '1x'"),
    (("--gap", "0"), 2, "--gap 0: want a duration above 0"),
    (("--gap", "9" * 400), 2, "want a duration above 0"),
    (("--policy", "rerute"), 2, "did you mean 'reroute'?"),
    (("--cluster", "cluster-9"), 2, "did you mean cluster-8?"),
    (("--workload", "workload-gpt-124m"), 1, "1 stage: n0 needs"),
    (("--workload", "workload-gpt-124m"), 1, "It would fit with 2.2 GB on every node, in 8 stages"),
])
def test_a_question_that_has_no_answer_is_one_line(call: Caller, arguments: tuple[str, ...], code: int, complaint: str):
    answer = call(*TINY, *arguments)
    assert answer.code == code
    assert complaint in answer.err
    assert answer.err.count("\n") == 1


def test_the_time_of_the_search_is_that_of_a_decision_with_warm_tables(call: Caller):
    said = msgspec.json.decode(call(*TINY, "--lose", "n5", "--json").out)
    assert said["search_s"] > 0 and said["first_search_s"] > 0
    assert re.search(r"worked out in [\d.]+ m?s, in [\d.]+ m?s when tables were cold\n", call(*TINY, "--lose", "n5").out)
