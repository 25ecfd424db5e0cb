"""Nodes that work slower than the others get less to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.plan import Hop, Plan
from everstep.planner.policies.pricing import priced_in
from everstep.planner.policies.routes import keep
from everstep.planner.policies.situation import Situation
from everstep.planner.policies.slow import fastest_ends, rebalance
from everstep.planner.policies.table import decide

from .test_policies import plan_of, situation_after
from .worlds import grid_plan, node, workload_of


def with_speeds(plan: Plan, speeds: Mapping[int, float], *, lost: tuple[int, ...] = (), policy: str = "auto") -> Situation:
    workload = workload_of(plan.num_layers, len(plan.routes))
    situation = situation_after(plan, lost, cores=None, workload=workload, policy=policy)
    nodes = {
        member: replace(each, speed=speeds.get(int(member[1:]), 1.0)) for member, each in situation.cluster.nodes.items()
    }
    return replace(situation, cluster=replace(situation.cluster, nodes=nodes))


def two_deep(num_pipelines: int, micro_batches: int, layers: int = 4) -> Plan:
    """Pipelines of two nodes, half the layers each."""
    placement = {}
    routes = []
    for d in range(num_pipelines):
        half = layers // 2
        hops = (Hop(node(2 * d), 0, half), Hop(node(2 * d + 1), half, layers))
        placement.update({hop.node: tuple(hop.layers) for hop in hops})
        routes.append(hops)
    return Plan(num_layers=layers, placement=placement, routes=tuple(routes) * micro_batches)


def test_where_all_are_equally_fast_nothing_is_rebalanced() -> None:
    assert rebalance(with_speeds(grid_plan(2, 2, 4), {}))[0].reason == "no node is slower than the others"


def test_a_pipeline_at_half_speed_gets_about_half_as_much_and_nothing_moves() -> None:
    situation = with_speeds(grid_plan(3, 1, 5), {0: 0.5})
    (found,) = rebalance(situation)
    load = Counter(hop.node for route in plan_of([found]).routes for hop in route)
    assert load == {node(0): 3, node(1): 6, node(2): 6}
    assert (found.way, found.moved_bytes) == ("now", 0)
    assert found.step_s == pytest.approx(0.6 * keep(situation)[0].step_s)


def test_a_pipeline_with_a_slow_node_is_cut_anew_and_only_its_nodes_change() -> None:
    situation = with_speeds(two_deep(2, 4), {1: 0.5})
    cut = next(each for each in rebalance(situation) if each.reason == "cut anew")
    after = plan_of([cut])
    assert after.placement == {node(0): (0, 1, 2), node(1): (3,), node(2): (0, 1), node(3): (2, 3)}
    assert cut.way == "blocking" and cut.moved_bytes == 30, "one layer goes from n1 to n0"
    assert cut.step_s < keep(situation)[0].step_s


def test_a_slow_node_is_answered_though_nobody_was_lost() -> None:
    candidates, chosen = decide(with_speeds(two_deep(2, 4), {1: 0.25}, policy="rebalance"))
    assert candidates[chosen].policy == "rebalance"
    assert {each.policy for each in decide(with_speeds(two_deep(2, 4), {1: 0.25}))[0]} >= {"rebalance"}


def test_after_a_loss_the_rest_is_balanced_too() -> None:
    situation = with_speeds(grid_plan(4, 1, 6), {0: 0.5}, lost=(1,), policy="rebalance")
    candidates, chosen = decide(situation)
    assert candidates[chosen].feasible
    assert node(1) not in plan_of([candidates[chosen]]).nodes


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=3, max_size=8),
    st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.5]), min_size=2, max_size=3),
)
def test_cuts_are_as_good_as_the_best_of_all(work: list[float], speeds: list[float]) -> None:
    ends = fastest_ends(work, speeds)

    def slowest_s(cuts: list[int]) -> float:
        return max(sum(work[a:b]) / speed for a, b, speed in zip([0, *cuts], cuts, speeds, strict=False))

    everything = [[*cuts, len(work)] for cuts in combinations(range(1, len(work)), len(speeds) - 1)]
    assert len(ends) == len(speeds) and sorted(set(ends)) == ends and ends[-1] == len(work)
    assert slowest_s(ends) == pytest.approx(min(map(slowest_s, everything)))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([0.3, 0.5, 1.0, 2.0]), min_size=6, max_size=6))
def test_what_is_proposed_is_faster_than_what_runs(speeds: list[float]) -> None:
    situation = with_speeds(two_deep(3, 4), dict(enumerate(speeds)))
    now_s = priced_in(situation, plan_of(keep(situation))).step_s
    for each in rebalance(situation):
        assert each.plan is None or each.step_s < now_s
