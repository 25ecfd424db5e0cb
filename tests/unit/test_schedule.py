"""Schedules as text and back, and every way one can be wrong for its plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import ConfigError
from everstep.plan import Hop, Order, Plan
from everstep.planner.step.schedules import order_of
from everstep.quantities import NodeId
from everstep.schedule import (
    REDUCE,
    Action,
    Kind,
    Schedule,
    for_micro_batches,
    needs,
    one_f_one_b,
    parse,
    parse_action,
    parse_order,
    peak_activations,
    problems,
    text,
)
from tests.unit.test_plan import n, plans
from tests.untimed import UNTIMED

actions = st.builds(
    Action, st.sampled_from([Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT]), st.integers(0, 99), st.integers(0, 999)
) | st.just(REDUCE)
schedules = st.dictionaries(st.integers(0, 40).map(n), st.lists(actions, max_size=12).map(tuple), max_size=5)


@given(schedules)
@UNTIMED
def test_a_schedule_prints_as_text_and_parses_back(schedule: Schedule) -> None:
    assert parse(text(schedule)) == schedule


def test_1f1b_is_warm_up_then_one_of_each_then_the_rest() -> None:
    assert " ".join(map(str, one_f_one_b(stage=1, num_stages=3, num_micro_batches=4))) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert one_f_one_b(0, 4, 2) == parse_order("0F0 0F1 0B0 0B1")


@pytest.mark.parametrize("word", ["2X0", "F0", "2F", "", "2f0", "-1F0", "2F0 ", "RR", "1R0", "2F0.5"])
def test_what_is_no_action_is_refused_as_it_was_written(word: str) -> None:
    with pytest.raises(ConfigError, match=r"not an action: .*\(want for example 2F0\)"):
        parse_action(word)


def test_a_line_without_a_node_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a line of a schedule: '0F0 0B0 R'"):
        parse("n0: 0F0 0B0 R\n0F0 0B0 R")
    assert parse("\n n0 :  0F0   R \n\n") == {n(0): (Action(Kind.FORWARD, 0, 0), REDUCE)}


@given(st.integers(1, 6), st.integers(1, 8))
@UNTIMED
def test_1f1b_holds_as_many_activations_as_stages_are_left(num_stages: int, num_micro_batches: int) -> None:
    plan = Plan(
        num_layers=num_stages, placement={n(stage): (stage,) for stage in range(num_stages)},
        routes=(tuple(Hop(n(stage), stage, stage + 1) for stage in range(num_stages)),) * num_micro_batches,
    )
    schedule = {n(stage): (*one_f_one_b(stage, num_stages, num_micro_batches), REDUCE) for stage in range(num_stages)}
    assert problems(schedule, plan) == []
    for stage in range(num_stages):
        assert peak_activations(schedule[n(stage)]) == min(num_stages - stage, num_micro_batches)


def test_activations_are_held_until_the_weights_are_done() -> None:
    assert peak_activations(parse_order("0F0 0B0 0F1 0B1")) == 1
    assert peak_activations(parse_order("0F0 0B0 0F1 0B1 0W0 0W1")) == 2
    assert peak_activations(parse_order("R")) == 0


@given(plans())
@UNTIMED
def test_the_order_made_for_a_plan_has_no_problems(plan: Plan) -> None:
    assert problems(order_of(plan), plan) == []


def test_a_partial_batch_runs_the_same_order_without_the_rest() -> None:
    assert for_micro_batches(parse_order("0F0 0F1 0B0 0F2 0B1 0B2 R"), 2) == parse_order("0F0 0F1 0B0 0B1 R")


PLAN = Plan(num_layers=2, placement={n(0): (0,), n(1): (1,)}, routes=((Hop(n(0), 0, 1), Hop(n(1), 1, 2)),) * 2)
GOOD = "n0: 0F0 0F1 0B0 0B1 R\nn1: 1F0 1B0 1F1 1B1 R"


@pytest.mark.parametrize(("lines", "said"), [
    ("n0: 0F0 0F1 0B0 R\nn1: 1F0 1B0 1F1 1B1 R", ["n0 never does 0B1"]),
    ("n0: 0F0 0F1 0B0 0B1 0F2 R\nn1: 1F0 1B0 1F1 1B1 R", ["n0 should not do 0F2"]),
    ("n0: 0F0 0F1 0B0 0B1 0W0 R\nn1: 1F0 1B0 1F1 1B1 R", ["n0 should not do 0W0"]),
    ("n0: 0F0 0F1 0B0 0B1 1F0 R\nn1: 1F0 1B0 1F1 1B1 R", ["n0 should not do 1F0"]),
    ("n0: 0F0 0F1 0B0 0B1 0F0 R\nn1: 1F0 1B0 1F1 1B1 R", ["an action appears twice"]),
    ("n0: 0F0 0F1 0B0 0B1\nn1: 1F0 1B0 1F1 1B1 R", ["n0 must reduce once, after everything else"]),
    ("n0: 0F0 0F1 0B0 R 0B1\nn1: 1F0 1B0 1F1 1B1 R", ["n0 must reduce once, after everything else"]),
    ("n0: 0F0 0F1 0B0 0B1 R R\nn1: 1F0 1B0 1F1 1B1 R", ["n0 must reduce once, after everything else"]),
    ("n0: 0F0 0B0 0F1 0B1 R\nn1: 1F0 1F1 1B0 1B1 R", ["n0 waits for ever before 0B0", "n1 waits for ever before 1F1"]),
    ("n0: 0B0 0F0 0F1 0B1 R\nn1: 1F0 1B0 1F1 1B1 R", ["n0 waits for ever before 0B0", "n1 waits for ever before 1F0"]),
])
def test_a_fault_in_a_schedule_is_found(lines: str, said: list[str]) -> None:
    assert problems(parse(GOOD), PLAN) == []
    assert problems(parse(lines), PLAN) == said


def test_a_holder_that_the_schedule_forgot_is_found_also_when_it_computes_nothing() -> None:
    plan = replace(PLAN, placement={**PLAN.placement, n(2): (0,), n(3): ()})
    assert problems(parse(GOOD), plan) == ["n2 must reduce once, after everything else"]
    assert problems(parse(f"{GOOD}\nn2: R"), plan) == []
    assert problems(parse(f"{GOOD}\nn2: R\nn3:"), plan) == []


def test_weights_have_actions_of_their_own_only_when_the_order_is_split() -> None:
    split = replace(PLAN, order=Order(split=True))
    assert problems(parse(GOOD), split)[0] == "n0 never does 0W0"
    whole = parse("n0: 0F0 0F1 0B0 0W0 0B1 0W1 R\nn1: 1F0 1B0 1F1 1B1 1W0 1W1 R")
    assert problems(whole, split) == []
    early = parse("n0: 0F0 0F1 0W0 0B0 0B1 0W1 R\nn1: 1F0 1B0 1F1 1B1 1W0 1W1 R")
    assert problems(early, split) == ["n0 waits for ever before 0W0"]


def test_what_an_action_needs() -> None:
    def said(action: str, num_hops: int = 3) -> str:
        return " ".join(map(str, needs(parse_action(action), num_hops)))

    assert [said(action) for action in ("0F1", "1F1", "2B1", "1B1", "0W1", "R")] == [
        "", "0F1", "2F1", "1F1 2B1", "0B1", "",
    ]


@given(plans(), st.data())
@UNTIMED
def test_an_action_that_is_left_out_or_swapped_with_what_it_needs_is_found(plan: Plan, data: st.DataObject) -> None:
    schedule = {node: list(order) for node, order in order_of(plan).items()}
    node = data.draw(st.sampled_from([node for node, order in schedule.items() if len(order) > 1]))
    at = data.draw(st.integers(0, len(schedule[node]) - 2))
    gone = schedule[node].pop(at)
    assert problems({k: tuple(order) for k, order in schedule.items()}, plan) == [f"{node} never does {gone}"]
    backward = next(a for a in order_of(plan)[node] if a.kind is Kind.BACKWARD)
    order = [a for a in order_of(plan)[node] if a != backward]
    forward = order.index(Action(Kind.FORWARD, backward.hop, backward.micro_batch))
    order.insert(forward, backward)
    found = problems({**order_of(plan), NodeId(node): tuple(order)}, plan)
    assert f"{node} waits for ever before {backward}" in found
