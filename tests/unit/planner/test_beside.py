"""What nodes do besides computing layers: how much of it a plan has, and what it costs, learnt from what they report."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from everstep.plan import Plan
from everstep.planner.step.beside import TYPICAL, Rest, chores
from everstep.planner.step.calibrate import Calibration, calibrated
from everstep.planner.step.cost import shared_seconds, step_seconds
from everstep.quantities import HostId, NodeId
from everstep.workload import Beside, Workload, problems

from .worlds import cluster_of, grid_plan, node, workload_of

SPARED = replace(grid_plan(1, 4, 8), placement={**grid_plan(1, 4, 8).placement, node(4): ()})
WORKLOAD = workload_of(4, 8, gradient_bytes=1_000_000, optimizer_s=0.25)
TRUTH = Beside(node_s=0.004, message_s=0.001, summed_byte_s=2e-8)


def reports(
    plan: Plan, workload: Workload, truth: Beside, chance: random.Random | None = None,
) -> dict[NodeId, dict[str, float]]:
    """What the nodes of a fused ``plan`` would measure: layers as in ``workload``, and the rest as in ``truth``."""
    found: dict[NodeId, dict[str, float]] = {}
    for member, (ends, summed) in chores(plan, workload).items():
        hops = [hop for route in plan.routes for hop in route if hop.node == member]
        layers = [workload.layers[layer] for hop in hops for layer in hop.layers]
        times = {f"F:{layer.name}": layer.forward_s for layer in layers}
        times |= {f"B:{layer.name}": layer.backward_input_s + layer.backward_weight_s for layer in layers}
        times |= {f"U:l{layer}": 0.25 for layer in plan.placement[member]}
        noise = chance.uniform(0.97, 1.03) if chance else 1.0
        worked_s = sum(layer.total_s for layer in layers) + 0.25 * len(plan.placement[member])
        found[member] = {**times, "step": worked_s + noise * truth.seconds(ends, summed)}
    return found


def test_messages_have_two_ends_and_a_group_shares_its_bytes() -> None:
    found = chores(grid_plan(2, 4, 4), WORKLOAD)
    assert found[node(0)] == (4, 500_000), "the first stage has a neighbour on one side, and one other holder of its layer"
    assert found[node(1)] == (8, 500_000)
    assert chores(SPARED, WORKLOAD)[node(0)] == (8, 0) and chores(SPARED, WORKLOAD)[node(4)] == (0, 0)


def test_what_nodes_report_tells_the_costs_of_nodes_messages_and_sums_apart() -> None:
    chance, rest = random.Random(3), Rest()
    for plan in (grid_plan(2, 4, 4), SPARED, grid_plan(4, 4, 2)) * 10:
        rest = rest.after(plan, WORKLOAD, reports(plan, WORKLOAD, TRUTH, chance))
    found = rest.beside()
    assert found.node_s == pytest.approx(TRUTH.node_s, rel=0.25)
    assert found.message_s == pytest.approx(TRUTH.message_s, rel=0.1)
    assert found.summed_byte_s == pytest.approx(TRUTH.summed_byte_s, rel=0.1)


def test_one_plan_alone_is_predicted_right_though_its_costs_cannot_be_told_apart() -> None:
    plan = grid_plan(4, 4, 2)
    rest = Rest()
    for _ in range(10):
        rest = rest.after(plan, WORKLOAD, reports(plan, WORKLOAD, TRUTH))
    found = rest.beside()
    todo = chores(plan, WORKLOAD).values()
    assert sum(found.seconds(*each) for each in todo) == pytest.approx(sum(TRUTH.seconds(*each) for each in todo), rel=0.05)


def test_what_changes_is_followed() -> None:
    plan, rest = grid_plan(2, 4, 4), Rest()
    for truth in (TYPICAL, TRUTH):
        for _ in range(150):
            rest = rest.after(plan, WORKLOAD, reports(plan, WORKLOAD, truth))
    todo = chores(plan, WORKLOAD)[node(1)]
    assert rest.beside().seconds(*todo) == pytest.approx(TRUTH.seconds(*todo), rel=0.1)


def test_nothing_is_learnt_where_no_node_says_what_it_did_in_all() -> None:
    plan = grid_plan(1, 4, 8)
    silent = {member: {"F:l0": 1.0} for member in plan.nodes}
    assert Rest().after(plan, WORKLOAD, silent) == Rest()
    assert Rest().beside() == Beside()


def test_no_cost_is_below_zero() -> None:
    plan = grid_plan(2, 4, 4)
    rest = Rest().after(plan, WORKLOAD, {node(0): {"step": 0.0}, node(1): {"step": 1e-9}})
    assert min(rest.beside().node_s, rest.beside().message_s, rest.beside().summed_byte_s) >= 0.0


def test_it_counts_where_nodes_share_cores_and_nowhere_else() -> None:
    plan, dear = grid_plan(2, 4, 4), replace(WORKLOAD, beside=TRUTH)
    shared, own = cluster_of(8, cores=2), cluster_of(8)
    extra_s = sum(TRUTH.seconds(*each) for each in chores(plan, WORKLOAD).values())
    host = HostId("localhost")
    before_s, after_s = shared_seconds(plan, WORKLOAD, shared)[host], shared_seconds(plan, dear, shared)[host]
    assert after_s - before_s == pytest.approx(extra_s / 2)
    assert step_seconds(plan, dear, own) == step_seconds(plan, WORKLOAD, own)


def test_it_follows_the_machine_as_all_times_do() -> None:
    twice = calibrated(replace(WORKLOAD, beside=TRUTH), Calibration(ratio=2.0))
    assert twice.beside == Beside(node_s=0.008, message_s=0.002, summed_byte_s=4e-8)


def test_a_time_below_zero_is_a_problem_of_the_workload() -> None:
    assert "times cannot be negative" in problems(replace(WORKLOAD, beside=Beside(message_s=-1.0)))[0]
