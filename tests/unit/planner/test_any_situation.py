"""What holds of every policy and every published system, whatever has happened."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import transfer
from everstep.config import PlannerConfig, Policy
from everstep.decision import Candidate
from everstep.errors import InfeasibleError
from everstep.plan import Plan
from everstep.planner.baselines.systems import SYSTEMS
from everstep.planner.first import first_plan
from everstep.planner.objective import NOISE
from everstep.planner.policies.situation import CheckpointInfo, Situation
from everstep.planner.policies.standing import with_redundancy
from everstep.planner.policies.table import POLICIES, decide, propose
from everstep.planner.step.moves import moves_for
from everstep.quantities import NodeId

from .test_policies import situation_after, wrong_with
from .worlds import cluster_of, node, workload_of
from .worlds import plans as any_plan

NAMES: tuple[str, ...] = get_args(Policy)
EVERY_WAY = frozenset({"start", "now", "blocking", "behind", "wait", "restore"})


def under(situation: Situation, policy: str) -> Situation:
    """The same situation with another policy, nothing remembered."""
    return replace(situation, config=replace(situation.config, policy=policy))  # type: ignore[arg-type]


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """After any losses and joins: slow nodes, known ends, somebody expected, redundancy, little memory.

    A plan has shadows only where they are computed: no run leads to another one.
    """
    plan, shadows = draw(any_plan(max_micro_batches=5)), draw(st.booleans())
    if draw(st.booleans()):
        plan = with_redundancy(plan, shadows=shadows and draw(st.booleans()))
    lost = draw(st.sets(st.sampled_from(plan.nodes), max_size=len(plan.nodes) - 1))
    situation = situation_after(
        plan, tuple(int(member[1:]) for member in lost), joined=draw(st.integers(0, 2)),
        memory_bytes=draw(st.sampled_from([None, 100, 160])), cores=draw(st.sampled_from([1, None])),
        checkpoint=CheckpointInfo(step=30, path="c"), workload=workload_of(plan.num_layers, len(plan.routes), optimizer_s=0.5),
    )
    nodes = {
        member: replace(each, speed=draw(st.sampled_from([1.0, 1.0, 0.5]))) for member, each in situation.cluster.nodes.items()
    }
    back = draw(st.sets(st.sampled_from(sorted(lost | {node(90)})), max_size=2))
    ending = draw(st.sets(st.sampled_from(situation.nodes), max_size=1))
    return replace(
        situation, cluster=replace(situation.cluster, nodes=nodes), ways=draw(st.sampled_from([situation.ways, EVERY_WAY])),
        expected=dict.fromkeys(back, 5.0), ends=dict.fromkeys(ending, 100.0), shadows=shadows, gap_s=60.0,
    )


def wrong_with_candidate(situation: Situation, candidate: Candidate) -> list[str]:
    """Everything wrong with its plans, in the view in which they would run, and with the moves that lead to them."""
    holds = {member: situation.holds.get(member, frozenset()) for member in situation.nodes}
    if candidate.way == "wait":
        like = next(iter(situation.cluster.nodes.values()))
        there = {**{member: replace(like, node_id=member) for member in situation.expected}, **situation.cluster.nodes}
        situation = replace(situation, cluster=replace(situation.cluster, nodes=there))
        holds = {**{member: frozenset() for member in situation.expected}, **holds}
    found: list[str] = []
    for plan in (candidate.plan, candidate.later):
        if plan is not None:
            moves, _ = moves_for(plan, holds, situation.workload, restore=candidate.way == "restore")
            found += wrong_with(situation, plan) + transfer.problems(moves, holds)
            if candidate.way == "now" or (candidate.way == "behind" and plan is candidate.plan):
                found += [f"moves {move}" for move in moves]
    return found


@settings(max_examples=60, deadline=None)
@given(situations())
def test_nothing_that_is_proposed_has_problems(situation: Situation) -> None:
    for name in NAMES:
        for candidate in propose(under(situation, name)):
            if candidate.plan is None:
                assert candidate.reason, name
                continue
            assert candidate.way in situation.ways, name
            assert wrong_with_candidate(situation, candidate) == [], (name, candidate)


@settings(max_examples=60, deadline=None)
@given(situations())
def test_auto_is_never_worth_less_than_the_best_of_a_single_policy(situation: Situation) -> None:
    """By the objective's own values; what auto takes is its best."""
    try:
        candidates, chosen = decide(under(situation, "auto"))
    except InfeasibleError:
        candidates, chosen = [], 0
    best = candidates[chosen].value if candidates else float("-inf")
    for name in set(NAMES) - set(SYSTEMS) - {"auto"}:
        values = [each.value for each in propose(under(situation, name)) if each.feasible]
        if values:
            assert best >= max(values) - NOISE * abs(best), name


@settings(max_examples=30, deadline=None)
@given(situations())
def test_who_cannot_be_answered_is_told_so_by_every_policy(situation: Situation) -> None:
    for name in NAMES:
        found = propose(under(situation, name))
        assert found, name
        if all(not each.feasible for each in found):
            assert all(each.reason for each in found), name
        if name in POLICIES and name != "restore" and not any(each.policy == name and each.feasible for each in found):
            assert any(each.policy != name for each in found), f"{name} has no answer, so something else is asked"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_each_alone_goes_through_losses_and_joins(name: str, seed: int) -> None:
    """Eight nodes, each event with one to three losses or joins. Where a copy of everything is left, a run goes on."""
    chance = random.Random(seed)
    workload = workload_of(6, 12, optimizer_s=0.1, state_bytes=1000)
    cluster = cluster_of(8, cores=None)
    config = PlannerConfig(policy=name, worker_memory_bytes=6000)  # type: ignore[arg-type]
    plan = first_plan(tuple(cluster.nodes), workload, cluster, config, shadows=seed == 1).plan
    newest = 7
    for _ in range(4):
        joins = chance.random() < 0.4
        count = chance.randint(1, 3 if joins or len(plan.nodes) > 5 else 1)
        if joins:
            situation = event(plan, (), count, newest, workload, config)
            newest += count
        else:
            lost = tuple(chance.sample(plan.nodes, min(count, len(plan.nodes) - 1)))
            situation = event(plan, lost, 0, newest, workload, config)
        situation = replace(
            situation, ways=EVERY_WAY if seed else situation.ways, shadows=seed == 1,
        )
        candidates, chosen = decide(situation)
        taken = candidates[chosen]
        assert wrong_with_candidate(situation, taken) == [], taken
        settled = taken.settled
        assert settled is not None
        plan = settled
        if not joins and taken.way != "restore":
            assert taken.restore_step is None


def event(plan: Plan, lost: tuple[NodeId, ...], joined: int, newest: int, workload, config: PlannerConfig) -> Situation:  # type: ignore[no-untyped-def]
    """What happens to a run of ``plan``; newcomers are numbered on."""
    newcomers = tuple(node(newest + number) for number in range(1, joined + 1))
    living = [member for member in plan.nodes if member not in lost] + list(newcomers)
    cluster = cluster_of(0, cores=None)
    one = cluster_of(1).nodes[node(0)]
    return Situation(
        cluster=replace(cluster, nodes={member: replace(one, node_id=member) for member in living}), workload=workload,
        plan=plan, holds={member: workload.units_of(frozenset(plan.placement.get(member, ()))) for member in living},
        lost=lost, joined=newcomers, step=40, checkpoint=CheckpointInfo(step=30, path="c"), config=config, redo_steps=25,
    )
