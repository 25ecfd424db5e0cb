"""The planner's answer without a run."""

from __future__ import annotations

import pytest

from everstep.catalog.files import load_cluster, load_workload
from everstep.config import PlannerConfig
from everstep.errors import ConfigError, InfeasibleError
from everstep.planner.whatif import what_if

from .worlds import cluster_of, node, workload_of

LAPTOP, TINY = load_cluster("cluster-8"), load_workload("workload-tiny-gpt")


def test_a_loss_is_answered_with_the_table_that_a_run_would_show() -> None:
    answer = what_if(LAPTOP, TINY, PlannerConfig(), lose=(node(5),))
    assert node(5) in answer.before.nodes and node(5) not in answer.plan.nodes
    assert {candidate.policy for candidate in answer.candidates} == {
        "reroute", "normalize", "spare", "heal", "shrink", "rebalance", "repartition", "two-phase", "redundant", "wait",
        "restore",
    }
    assert answer.chosen.value == max(candidate.value for candidate in answer.candidates)
    assert answer.decision.cause == "n5 lost" and answer.step_s == answer.chosen.step_s


def test_a_policy_and_a_gap_can_be_asked_for() -> None:
    answer = what_if(LAPTOP, TINY, PlannerConfig(), lose=(node(5),), policy="reroute", gap_s=30.0)
    assert (answer.chosen.policy, answer.decision.gap_s) == ("reroute", 30.0)


def test_newcomers_are_numbered_on() -> None:
    answer = what_if(LAPTOP, TINY, PlannerConfig(), add=2)
    assert answer.decision.cause == "n8, n9 joined"
    assert {node(8), node(9)} <= set(answer.plan.nodes)


def test_losses_and_newcomers_may_come_together() -> None:
    answer = what_if(LAPTOP, TINY, PlannerConfig(policy="spare"), lose=(node(2),), add=1)
    assert answer.decision.cause == "n2 lost; n8 joined"
    assert answer.plan.placement[node(8)] == answer.before.placement[node(2)]


def test_without_an_event_the_first_plan_is_explained() -> None:
    answer = what_if(LAPTOP, TINY, PlannerConfig())
    assert answer.plan == answer.before and answer.step_s == answer.before_step_s
    assert answer.chosen.way == "start"


def test_a_node_that_is_not_there_cannot_be_lost() -> None:
    with pytest.raises(ConfigError, match="n9 not in the cluster; nodes are n0, n1"):
        what_if(cluster_of(2), workload_of(2, 2), PlannerConfig(), lose=(node(9),))
    with pytest.raises(ConfigError, match="no node would be left"):
        what_if(cluster_of(2), workload_of(2, 2), PlannerConfig(), lose=(node(0), node(1)))


def test_what_fits_nowhere_says_why() -> None:
    with pytest.raises(InfeasibleError, match="1 stage: n0 needs"):
        what_if(cluster_of(1), workload_of(2, 2), PlannerConfig(worker_memory_bytes=10))


def test_thirty_two_accelerators_are_planned_for() -> None:
    answer = what_if(load_cluster("cluster-32"), load_workload("workload-gpt-124m"), PlannerConfig(), lose=(node(5), node(9)))
    assert len(answer.plan.nodes) == 30 and answer.step_s > answer.before_step_s
