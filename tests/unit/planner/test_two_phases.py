"""One plan at once and another behind it; waiting; nodes that are known to go."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from everstep.cluster import Link
from everstep.decision import Candidate, Decision, text
from everstep.plan import Plan
from everstep.planner.objective import explained
from everstep.planner.policies.pricing import COPY_SLOWS
from everstep.planner.policies.situation import CheckpointInfo, Situation
from everstep.planner.policies.table import decide, propose
from everstep.planner.policies.waiting import wait
from everstep.quantities import NodeId

from .test_any_situation import EVERY_WAY, under
from .test_policies import load_of, situation_after
from .worlds import grid_plan, node, workload_of

SLOW_LINK = Link(alpha_s=0.0, bytes_per_s=10.0)


def after(lost: tuple[int, ...] = (), *, joined: int = 0, plan: Plan | None = None, policy: str = "auto") -> Situation:
    """Three pipelines of two nodes, a layer of 30 bytes each; what is moved goes at 10 bytes a second."""
    plan = plan or grid_plan(3, 2, 8)
    workload = workload_of(plan.num_layers, len(plan.routes))
    situation = situation_after(
        plan, lost, joined=joined, cores=None, link=SLOW_LINK, workload=workload, policy=policy,
        checkpoint=CheckpointInfo(step=39, path="c"),
    )
    return replace(situation, ways=EVERY_WAY, gap_s=600.0)


def taken(situation: Situation) -> Candidate:
    candidates, chosen = decide(situation)
    return candidates[chosen]


# Two phases.


def test_rerouting_bridges_the_copy_of_something_better() -> None:
    situation = after((1,), policy="two-phase")
    best = taken(situation)
    assert (best.policy, best.way) == ("two-phase", "behind")
    assert best.plan is not None and best.later is not None
    assert best.later_step_s < best.step_s
    alone = {each.policy: each for each in propose(situation) if each.feasible}
    later = next(each for each in propose(under(situation, "auto")) if each.plan == best.later)
    assert best.copy_s == pytest.approx(COPY_SLOWS * (later.stall_s - situation.switch_s))
    assert best.later_stall_s == situation.switch_s and best.moved_bytes == later.moved_bytes
    assert best.value > max(alone["reroute"].value, later.value)


def test_the_words_say_what_comes_first_and_what_then() -> None:
    candidates, chosen = decide(after((1,), policy="two-phase"))
    told = text(Decision(
        cause="n1 lost", view=2, step=40, gap_s=600.0, candidates=explained(candidates, chosen), chosen=chosen,
    ))
    row = next(line for line in told.splitlines() if line.startswith("two-phase"))
    best = candidates[chosen]
    assert re.search(r"  chosen: now (reroute|shrink), then repartition 2\+3×1 after 3.80 s$", row)
    assert row.split()[1:5] == [*f"{best.step_s:.2f} s →".split(), f"{best.later_step_s:.2f}"]


def test_where_state_cannot_be_copied_behind_training_it_is_said() -> None:
    situation = replace(after((1,)), ways=frozenset({"now", "blocking", "restore"}))
    (found,) = [each for each in propose(situation) if each.policy == "two-phase"]
    assert (found.plan, found.reason) == (None, "this run cannot copy state while it trains")


def test_both_plans_must_fit_at_once() -> None:
    roomy, tight = after((1,), policy="two-phase"), after((1,), policy="two-phase")
    needed = taken(roomy).peak_bytes
    nodes = {member: replace(each, memory_bytes=needed - 1) for member, each in tight.cluster.nodes.items()}
    found = taken(replace(tight, cluster=replace(tight.cluster, nodes=nodes)))
    assert found.way != "behind" or found.peak_bytes < needed


def test_a_newcomer_is_filled_in_while_the_others_train() -> None:
    holed = grid_plan(3, 2, 8, lost=[(1, 0)])
    best = taken(after(joined=1, plan=holed))
    assert best.way == "behind" and "now as it is, then" in best.reason
    assert best.later is not None and load_of(best.later)[node(6)] > 0
    assert best.plan is not None and best.plan.routes == holed.routes


# Waiting.


def test_who_is_back_in_a_moment_is_waited_for() -> None:
    situation = replace(after((1,)), expected={node(1): 2.0})
    (found,) = wait(situation)
    assert (found.way, found.reason) == ("wait", "n1 expected in 2.00 s")
    assert found.plan is not None and found.plan.routes == situation.plan.routes
    assert found.stall_s == pytest.approx(2.0 + 3.0 + situation.switch_s), "it comes back empty: 30 bytes at 10 a second"


def test_who_keeps_its_state_needs_none() -> None:
    situation = after((1,))
    flapping = replace(
        situation, expected={node(1): 2.0},
        holds={**situation.holds, node(1): situation.workload.units_of({1})},
    )
    (found,) = wait(flapping)
    assert found.stall_s == pytest.approx(2.0 + situation.switch_s)
    assert taken(flapping).way == "wait"


def test_a_replacement_takes_the_place_of_who_is_gone() -> None:
    (found,) = wait(replace(after((1,)), expected={node(9): 2.0}))
    assert found.plan is not None and found.plan.placement[node(9)] == (1,)
    assert load_of(found.plan)[node(9)] == load_of(found.plan)[node(0)]


def test_a_long_wait_is_not_worth_it() -> None:
    situation = replace(after((1,)), expected={node(1): 500.0})
    assert taken(situation).way != "wait"
    assert taken(under(situation, "wait")).way == "wait", "but whoever wants it gets it"


def test_nobody_is_waited_for_who_is_not_expected() -> None:
    assert wait(after((1,)))[0].reason == "nobody is expected"
    assert wait(replace(after((1,)), expected={node(1): 2.0}, ways=frozenset({"now"})))[0].reason == (
        "this run cannot wait for anybody"
    )


# Known ends.


def ending(seconds: float, *, member: int = 1, policy: str = "auto") -> Situation:
    return replace(after(policy=policy), ends={node(member): seconds})


def computes(plan: Plan | None, member: NodeId) -> bool:
    return plan is not None and load_of(plan)[member] > 0


def test_what_a_node_holds_is_copied_away_before_it_goes() -> None:
    best = taken(ending(60.0))
    assert best.way == "behind"
    assert computes(best.plan, node(1)) and not computes(best.later, node(1))


def test_a_node_that_goes_at_once_is_routed_around() -> None:
    best = taken(ending(0.0))
    assert not computes(best.plan, node(1))
    assert node(1) in best.plan.placement if best.plan else False, "it lives and is in the plan, with nothing to do"


def test_an_end_far_away_changes_nothing() -> None:
    best, without = taken(ending(36_000.0)), taken(after())
    assert (best.plan, best.later) == (without.plan, without.later)


def test_without_a_way_behind_training_the_end_is_weighed_against_the_stall() -> None:
    near = replace(ending(5.0), ways=frozenset({"now", "blocking", "restore"}))
    assert not computes(taken(near).plan, node(1))
    assert any("without n1" in each.reason for each in propose(near))


def test_the_only_holder_of_something_gives_it_away_first() -> None:
    plan = grid_plan(1, 2, 8)
    plan = replace(plan, placement={**plan.placement, node(2): ()})
    best = taken(replace(after(plan=plan), ends={node(1): 30.0}))
    assert best.way == "behind" and not computes(best.later, node(1)) and computes(best.plan, node(1))
    hasty = replace(after(plan=plan), ends={node(1): 1.0})
    for each in propose(hasty):
        assert each.later is None or computes(each.later, node(1)), "30 bytes at 10 a second are not away in a second"
