"""Better schedules are offered where they pay, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep import schedule as schedules
from everstep.plan import Order
from everstep.planner.idle.refine import LEAST_GAIN, MOST_HOPS, refined
from everstep.planner.step.cost import step_seconds
from everstep.planner.step.memory import node_bytes

from .worlds import cluster_of, grid_plan, workload_of

CLUSTER, WORKLOAD = cluster_of(12), workload_of(4, 12)
REROUTED = grid_plan(3, 4, 4, lost=[(0, 1), (1, 2)])


def test_a_rerouted_plan_gets_a_faster_schedule_that_may_run_in_the_same_memory() -> None:
    *pieces, found = refined(REROUTED, WORKLOAD, CLUSTER)
    assert found is not None and len(pieces) > 50 and set(pieces) == {None}, "it comes in pieces"
    assert found.gain >= LEAST_GAIN and found.before_s == step_seconds(REROUTED, WORKLOAD, CLUSTER)
    assert found.answer.step_s == step_seconds(found.answer.plan, WORKLOAD, CLUSTER, found.schedule)
    assert schedules.problems(found.schedule, found.answer.plan) == []
    assert found.answer.plan.placement == REROUTED.placement, "nothing moves"
    assert max(found.answer.needed_bytes.values()) <= max(node_bytes(REROUTED, WORKLOAD).values())


def test_a_schedule_that_does_not_fit_is_not_offered() -> None:
    assert list(refined(REROUTED, WORKLOAD, CLUSTER, worker_memory_bytes=10))[-1] is None


@pytest.mark.parametrize("split", [False, True])
def test_a_plain_pipeline_is_not_changed(split: bool) -> None:
    found = list(refined(grid_plan(3, 4, 4, order=Order(split=split)), WORKLOAD, CLUSTER))
    assert not found or found[-1] is None


def test_on_shared_cores_no_order_is_faster_and_none_is_looked_for() -> None:
    assert list(refined(REROUTED, WORKLOAD, cluster_of(12, cores=2))) == []


def test_a_huge_plan_is_left_alone() -> None:
    huge = grid_plan(3, 4, MOST_HOPS // 12 + 1, lost=[(0, 1)])
    assert list(refined(huge, replace(WORKLOAD, num_micro_batches=len(huge.routes)), CLUSTER)) == []
