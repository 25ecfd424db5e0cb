"""How many losses a plan must survive, and what the next one would leave."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.config import PlannerConfig
from everstep.decision import Candidate, Decision, text
from everstep.errors import InfeasibleError
from everstep.plan import Plan
from everstep.planner.baselines.systems import SYSTEMS
from everstep.planner.first import first_plan
from everstep.planner.idle.ahead import renamed
from everstep.planner.objective import choose, explained
from everstep.planner.policies.foresight import choose_with_foresight, until_moved_s
from everstep.planner.policies.pricing import candidate_of, no_answer
from everstep.planner.policies.routes import reroute, shrink
from everstep.planner.policies.situation import Situation
from everstep.planner.policies.survivors import too_few_holders
from everstep.planner.policies.table import decide, propose
from everstep.quantities import HostId

from .test_any_situation import NAMES, situations
from .test_policies import situation_after
from .worlds import cluster_of, grid_plan, node, workload_of


def tolerating(situation: Situation, losses: int, policy: str = "auto") -> Situation:
    return replace(situation, config=replace(situation.config, tolerate=losses, policy=policy))  # type: ignore[arg-type]


def survives(plan: Plan, losses: int) -> bool:
    """Slowly: every set of so many nodes."""
    return all(not plan.lost_layers(frozenset(gone)) for gone in combinations(plan.nodes, min(losses, len(plan.nodes))))


# Tolerance.


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_too_few_holders_are_found_where_some_losses_take_a_layer_away(pipelines: int, stages: int, losses: int) -> None:
    plan = grid_plan(pipelines, stages, 1)
    assert (too_few_holders(plan, workload_of(stages, pipelines), losses) == "") == survives(plan, losses)


def test_what_would_not_survive_is_no_candidate_and_the_layer_is_named() -> None:
    situation = tolerating(situation_after(grid_plan(3, 2, 4), (1,), cores=None), 2)
    (rerouted,) = [each for each in propose(situation) if each.policy == "reroute"]
    assert (rerouted.plan, rerouted.reason) == (
        None, "the loss of any 2 nodes would not be survived: layer l1 has 2 holders",
    )
    candidates, chosen = decide(situation)
    assert candidates[chosen].plan is not None and survives(candidates[chosen].plan, 2)


def test_where_no_plan_survives_so_many_the_best_is_taken_and_it_is_said() -> None:
    workload = workload_of(2, 8, state_bytes=1000, gradient_bytes=0)
    situation = situation_after(grid_plan(2, 2, 4), (1,), cores=None, workload=workload, memory_bytes=1500)
    candidates, chosen = decide(tolerating(situation, 1))
    assert candidates[chosen].note == "the loss of any node cannot be survived: layer l1 has 1 holder"
    told = text(Decision(
        cause="n1 lost", view=2, step=40, gap_s=600.0, candidates=explained(candidates, chosen), chosen=chosen,
    ))
    assert "the loss of any node cannot be survived: layer l1 has 1 holder" in told.splitlines()[2]


def test_a_run_that_must_survive_more_starts_with_more_pipelines() -> None:
    workload, cluster = workload_of(4, 16, state_bytes=300), cluster_of(8, cores=None)

    def start(losses: int) -> Candidate:
        config = PlannerConfig(worker_memory_bytes=700, tolerate=losses)
        return first_plan(tuple(cluster.nodes), workload, cluster, config).candidate

    for losses in (1, 2, 3):
        found = start(losses)
        assert found.plan is not None and found.note == "" and survives(found.plan, losses)
    assert start(4).note == "the loss of any 4 nodes cannot be survived: layer l0 has 4 holders"


def test_hosts_that_would_take_both_holders_are_told_about() -> None:
    plan = grid_plan(2, 2, 4)
    situation = situation_after(grid_plan(2, 2, 4), cores=None, joined=1)
    hosts = {node(0): "a", node(2): "a", node(1): "b", node(3): "b", node(4): "c"}
    nodes = {member: replace(each, host=HostId(hosts[member])) for member, each in situation.cluster.nodes.items()}
    found = propose(tolerating(replace(situation, cluster=replace(situation.cluster, nodes=nodes)), 1, "reroute"))
    assert found[0].plan is not None and found[0].plan.routes == plan.routes
    assert found[0].note == "survives the loss of any node, not the loss of any host: layer l0 is on 1 host"


def test_of_two_phases_the_second_must_survive() -> None:
    situation = replace(
        situation_after(grid_plan(3, 2, 4), (1,), cores=None), ways=frozenset({"now", "blocking", "behind", "restore"}),
    )
    found = [each for each in propose(tolerating(situation, 2)) if each.way == "behind" and each.feasible]
    assert found
    for each in found:
        assert each.plan is not None and not survives(each.plan, 2)
        assert each.later is not None and survives(each.later, 2)


@settings(max_examples=25, deadline=None)
@given(situations(), st.integers(1, 2))
def test_what_is_taken_survives_if_anything_proposed_does(situation: Situation, losses: int) -> None:
    for name in NAMES:
        wanted = tolerating(situation, losses, name)
        before = propose(tolerating(situation, 0, name))
        could = [each for each in before if each.settled is not None and survives(each.settled, losses)]
        try:
            candidates, chosen = decide(wanted)
        except InfeasibleError:
            assert not could, name
            continue
        settled = candidates[chosen].settled
        assert settled is not None
        if could and not candidates[chosen].note.startswith("the loss of any"):
            assert survives(settled, losses), name
        if candidates[chosen].note.startswith("the loss of any"):
            assert not survives(settled, losses), name


# Foresight.


def two_plans(situation: Situation) -> list[Candidate]:
    """One pipeline of two nodes, a spare beside it; and two pipelines that share everything, a little slower."""
    alone = grid_plan(1, 2, 8)
    alone = replace(alone, placement={**alone.placement, node(2): (), node(3): ()})
    twice = grid_plan(2, 2, 4)
    return [
        replace(candidate_of(situation, "alone", alone, "blocking"), value=101.0),
        replace(candidate_of(situation, "twice", twice, "blocking"), value=100.0),
    ]


def test_what_the_next_loss_leaves_can_outweigh_a_little() -> None:
    situation = situation_after(grid_plan(2, 2, 4), cores=None)
    candidates = two_plans(situation)
    assert choose(candidates) == 0
    assert choose_with_foresight(situation, candidates, (reroute, shrink), 600.0) == 1, "a lone pipeline has no peers"
    assert choose_with_foresight(situation, candidates, (reroute, shrink), 0.0) == 0, "nothing is left for no time at all"


def test_a_node_that_often_fails_is_better_idle() -> None:
    """The same two pipelines with one spare; which node is the spare differs."""
    plain = grid_plan(2, 2, 4)
    busy = replace(plain, placement={**plain.placement, node(4): ()})
    names = {node(2): node(4), node(4): node(2)}
    situation = situation_after(busy, cores=None)
    candidates = [
        replace(candidate_of(situation, "lemon works", busy, "blocking"), value=101.0),
        replace(candidate_of(situation, "lemon idles", renamed(busy, names), "blocking"), value=100.0),
    ]
    assert choose_with_foresight(situation, candidates, (reroute, shrink), 600.0) == 0
    lemon = replace(situation, weights={node(2): 50.0})
    assert choose_with_foresight(lemon, candidates, (reroute, shrink), 600.0) == 1


def test_foresight_alone_does_not_bring_back_what_is_far_behind() -> None:
    situation = situation_after(grid_plan(2, 2, 4), cores=None)
    alone, twice = two_plans(situation)
    assert choose_with_foresight(situation, [replace(alone, value=1e9), twice], (reroute, shrink), 600.0) == 0


def test_the_switch_is_in_the_configuration() -> None:
    situation = situation_after(grid_plan(3, 2, 4), (1,), cores=None)
    ahead = replace(situation, config=replace(situation.config, look_ahead=True))
    candidates, chosen = decide(ahead)
    lasts_s = until_moved_s(ahead, candidates)
    assert 0 < lasts_s < ahead.gap_s
    assert candidates[chosen].feasible


def test_without_any_plan_foresight_says_so() -> None:
    situation = situation_after(grid_plan(2, 2, 4), cores=None)
    with pytest.raises(InfeasibleError, match="x: why"):
        choose_with_foresight(situation, [no_answer("x", "why")], (reroute,), 1.0)


def test_parcae_chooses_by_what_is_left_after_the_next_preemption() -> None:
    situation = situation_after(grid_plan(2, 2, 4), cores=None, policy="parcae")
    assert SYSTEMS["parcae"].choose(situation, two_plans(situation)) == 1
