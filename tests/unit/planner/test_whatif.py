"""The planner's answer without a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.catalog.files import load_cluster, load_workload
from everstep.config import PlannerConfig
from everstep.errors import ConfigError, InfeasibleError
from everstep.planner.step.memory import node_bytes
from everstep.planner.whatif import named, needs_of, nodes_named, runs, what_if
from everstep.quantities import HostId, NodeId

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
    with pytest.raises(ConfigError, match=r"n9 not in the cluster; nodes are n0, n1$"):
        what_if(cluster_of(2), workload_of(2, 2), PlannerConfig(), lose=(node(9),))
    with pytest.raises(ConfigError, match="no node would be left"):
        what_if(cluster_of(2), workload_of(2, 2), PlannerConfig(), lose=(node(0), node(1)))


def test_what_fits_nowhere_says_why() -> None:
    with pytest.raises(InfeasibleError, match="1 stage: n0 needs"):
        what_if(cluster_of(1), workload_of(2, 2), PlannerConfig(worker_memory_bytes=10))


def test_thirty_two_accelerators_are_planned_for() -> None:
    answer = what_if(load_cluster("cluster-32"), load_workload("workload-gpt-124m"), PlannerConfig(), lose=(node(5), node(9)))
    assert len(answer.plan.nodes) == 30 and answer.step_s > answer.before_step_s


MIXED = load_cluster("cluster-48")


def test_a_host_or_a_site_stands_for_all_of_its_nodes() -> None:
    assert nodes_named("host:old1, n3,n37", MIXED) == tuple(map(node, (36, 37, 38, 39, 3)))
    assert len(nodes_named("site:west", load_cluster("cluster-2x16"))) == 16
    assert nodes_named(" , ", MIXED) == ()


@pytest.mark.parametrize(("text", "said"), [
    ("host:old9", r"no host 'old9' in the cluster; hosts are new0, .*, old3; did you mean old\d\?"),
    ("site:west", "no site 'west' in the cluster; sites are here$"),
    ("rack:3", "rack:3: want a node such as n3, host:NAME or site:NAME"),
])
def test_what_names_no_nodes_is_told_what_there_is(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        nodes_named(text, MIXED)


def test_the_loss_of_a_host_is_told_by_its_name() -> None:
    lost = nodes_named("n9,host:new0", MIXED)
    answer = what_if(MIXED, load_workload("workload-gpt-6.7b"), PlannerConfig(policy="shrink"), lose=lost)
    assert answer.decision.cause == "host new0 (n0–n7), n9 lost"
    assert not set(lost) & set(answer.plan.nodes)
    assert set(answer.cluster.nodes) == set(MIXED.nodes) - set(lost)


def test_the_loss_of_a_site_is_told_by_its_name_and_not_host_by_host() -> None:
    cluster = load_cluster("cluster-2x16")
    assert named(nodes_named("n3,site:west", cluster), cluster) == "site west (n16–n31), n3"


def test_a_node_that_is_all_of_its_host_is_told_by_its_own_name() -> None:
    cluster = cluster_of(3)
    assert named((node(1),), cluster) == "n1"
    alone = replace(cluster, nodes={name: replace(each, host=HostId(f"h{name}")) for name, each in cluster.nodes.items()})
    assert named((node(1),), alone) == "n1"


def test_neighbours_are_told_together() -> None:
    assert runs([node(k) for k in (9, 0, 1, 2, 5, 6)]) == "n0–n2, n5, n6, n9"
    assert runs([node(k) for k in range(0, 40, 2)], most=3) == "n0, n2, n4 and 17 more"


def test_all_ways_to_a_plan_are_asked_for() -> None:
    cluster, workload = load_cluster("cluster-32"), load_workload("workload-gpt-2.7b")
    lost, config = (node(3), node(7), node(11)), PlannerConfig(policy="two-phase")
    answer = what_if(cluster, workload, config, lose=lost)
    assert answer.chosen.way == "behind"
    less = what_if(cluster, workload, config, lose=lost, ways=frozenset({"now", "blocking", "restore"}))
    assert not any(candidate.way == "behind" for candidate in less.candidates)


def test_what_nodes_need_adds_up_to_what_the_plan_needs() -> None:
    workload = load_workload("workload-gpt-6.7b")
    answer = what_if(MIXED, workload, PlannerConfig(), lose=(node(3),))
    needs = needs_of(answer.plan, workload, answer.cluster)
    needed = {name: need.total_bytes for need in needs for name in need.nodes}
    assert needed == node_bytes(answer.plan, workload)
    assert [need.total_bytes for need in needs] == sorted(needed[need.nodes[0]] for need in needs)[::-1]
    caps = {name: need.cap_bytes for need in needs for name in need.nodes}
    assert (caps[NodeId("n0")], caps[NodeId("n47")]) == (72_000_000_000, 36_000_000_000)
    assert needs_of(answer.plan, workload, answer.cluster, worker_memory_bytes=10)[0].cap_bytes == 10
