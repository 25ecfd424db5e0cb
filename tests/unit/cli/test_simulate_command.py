"""``everstep simulate`` plays policies against a trace and prints what came of it."""

from pathlib import Path

import msgspec
import pytest

from tests.unit.cli.calling import Caller

SMALL = ("simulate", "--cluster", "cluster-8", "--workload", "workload-tiny-gpt", "--trace")
HAND = "0,add,a\n0,add,b\n0,add,c\n0,add,d\n60000,remove,b\n120000,add,e\n"


def test_the_answer_as_json_has_exactly_the_keys_that_are_promised(call: Caller):
    said = msgspec.json.decode(call(*SMALL, "exponential", "--losses", 3, "--policy", "auto,repartition", "--json").out)
    assert list(said) == ["auto", "repartition"]
    assert {frozenset(row) for row in said.values()} == {
        frozenset({"samples", "goodput", "fse", "stall_s", "regret", "decisions"}),
    }
    assert sum(said["auto"]["decisions"].values()) == 3
    assert 0 < said["auto"]["fse"] <= 8 / 5        # on shared cores those who are left are faster


def test_the_same_question_has_the_same_answer_and_other_seeds_are_other_draws(call: Caller):
    one, again, more = (call(*SMALL, "bursty", "--losses", 3, "--seeds", seeds, "--json").out for seeds in (1, 1, 3))
    assert one == again != more


def test_in_words_the_best_policy_is_on_top(call: Caller):
    out = call(*SMALL, "exponential", "--losses", 4, "--gap", "1m", "--move", "5s", "--policy", "restore,auto").out
    assert "8 nodes, 4 losses, 0 joins" in out
    lines = out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("auto", "restore"))] == ["auto", "restore"]


def test_a_trace_of_ones_own_is_played_and_drawn(call: Caller):
    Path("mine.csv").write_text(HAND)
    answer = call(*SMALL, "mine.csv", "--stages", 2, "--png", "out/mine.png")
    assert "mine: 4 nodes, 1 losses, 1 joins" in answer.out
    assert Path("out/mine.png").read_bytes().startswith(b"\x89PNG")


def test_what_policies_know_of_the_gap_can_be_set_for_all(call: Caller):
    told, guessed = (
        msgspec.json.decode(call(
            *SMALL, "exponential", "--losses", 5, "--gap", "20s", "--move", "30s", "--gap-model", model, "--policy", "auto",
            "--stages", 2, "--model", "closed-form", "--schedules", "staggered", "--json",
        ).out)["auto"] for model in ("known", "history")
    )
    assert told != guessed


def test_the_planner_plays_unless_closed_forms_are_asked_for(call: Caller):
    planner, named, forms = (
        msgspec.json.decode(call(*SMALL, "exponential", "--losses", 3, "--policy", "reroute-published", *more, "--json").out)
        for more in ((), ("--model", "planner"), ("--model", "closed-form"))
    )
    assert planner == named != forms


@pytest.mark.parametrize(("arguments", "complaint"), [
    (("p4",), "no trace 'p4'"),
    (("exponential", "--policy", "rerout"), "did you mean reroute?"),
    (("exponential", "--gap", "1x"), "--gap 1x: not a duration"),
    (("exponential", "--move", "soon"), "--move soon: not a duration"),
    (("exponential", "--losses", 9), "9 losses leave nobody of 8 nodes"),
    (("exponential", "--policy", ","), "want at least one policy"),
])
def test_a_mistake_is_one_line(call: Caller, arguments: tuple[object, ...], complaint: str):
    answer = call(*SMALL, *arguments)
    assert answer.code == 2
    assert complaint in answer.err
    assert answer.err.count("\n") == 1


def test_a_wrong_trace_is_named_by_line(call: Caller):
    Path("bad.csv").write_text(HAND.replace("60000,remove,b", "60000,remove,z"))
    answer = call(*SMALL, "bad.csv")
    assert (answer.code, "bad.csv, line 5: 'z' is removed, but no such node is there" in answer.err) == (2, True)


def test_a_grid_that_does_not_fit_says_what_it_would_need(call: Caller):
    answer = call("simulate", "--cluster", "cluster-8", "--workload", "workload-gpt-124m", "--trace", "exponential")
    assert answer.code == 1
    assert "no grid fits: with 1 stage n0 needs 5.4 GB of 11.0 MB; with 2 stages n0 needs" in answer.err


def test_an_option_for_hazards_is_refused_with_a_recorded_trace(call: Caller):
    answer = call("simulate", "--cluster", "cluster-32", "--workload", "workload-gpt-124m", "--trace", "p3", "--gap", "5m")
    assert answer.code == 2
    assert "--gap 5m: is of a hazard" in answer.err and "p3 is a recorded trace" in answer.err


def test_traces_and_gaps_without_any_time_are_refused(call: Caller, tmp_path: Path):
    (tmp_path / "t.csv").write_text("0,add,n0\n")
    ground = ("simulate", "--cluster", "cluster-32", "--workload", "workload-gpt-124m")
    assert "want a trace with some time in it" in call(*ground, "--trace", str(tmp_path / "t.csv"), "--stages", "1").err
    assert "--gap 0: want more than 0" in call(*ground, "--trace", "exponential", "--gap", "0").err


def test_a_trace_in_which_nobody_is_left_is_played_to_its_end(call: Caller, tmp_path: Path):
    (tmp_path / "t.csv").write_text("0,add,n0\n1000000,remove,n0\n2000000,add,n1\n4000000,remove,n1\n")
    answer = call(
        "simulate", "--cluster", "cluster-32", "--workload", "workload-tiny-gpt", "--trace", str(tmp_path / "t.csv"),
        "--stages", "1", "--json",
    )
    assert answer.code == 0, answer.err
    assert msgspec.json.decode(answer.out)["auto"]["samples"] > 0


def test_more_stages_than_layers_are_refused(call: Caller):
    ground = ("simulate", "--cluster", "cluster-32", "--workload", "workload-tiny-gpt", "--trace", "exponential")
    answer = call(*ground, "--stages", "99")
    assert answer.code == 2
    assert "--stages 99: workload-tiny-gpt has" in answer.err
