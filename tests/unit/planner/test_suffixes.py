"""The bound of a pipeline's last stages, and what it closes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.catalog.files import load_cluster, load_workload
from everstep.planner.layouts import splits as splitting
from everstep.planner.layouts.splits import Splits
from everstep.planner.layouts.suffixes import grown
from everstep.workload import Workload

from .test_splits import all_splits, seconds_by_schedule, seconds_of_all, workloads
from .worlds import FREE_LINK


@settings(max_examples=40, deadline=None)
@given(workloads(), st.data())
def test_every_split_below_a_limit_is_found_and_none_is_dropped(workload: Workload, data: st.DataObject) -> None:
    """Without any other bound: what is dropped is dropped by the time of the last stages alone."""
    stages = data.draw(st.integers(1, workload.num_layers))
    every = {
        bounds: max(seconds_by_schedule(workload, bounds, workload.num_micro_batches, FREE_LINK))
        for bounds in all_splits(workload.num_layers, stages)
    }
    limit_s = data.draw(st.sampled_from(sorted(every.values()))) * data.draw(st.sampled_from([1 - 1e-6, 1 + 1e-6]))
    layers = workload.num_layers
    empty = np.arange(layers)[:, None] >= np.arange(layers + 1)[None, :]
    free = [np.where(empty, np.inf, 0.0)] * stages
    sums = (np.cumsum([0.0, *(layer.forward_s for layer in workload.layers)]),
            np.cumsum([0.0, *(layer.total_s for layer in workload.layers)]))
    found = grown(free, *sums, workload.num_micro_batches, limit_s, at_most=10**6)
    least_s = min(every.values())
    assert found.is_complete
    assert (found.edges is not None) == (least_s < limit_s)
    if found.edges is not None:
        assert found.seconds == pytest.approx(least_s)
        assert every[tuple(zip(found.edges, found.edges[1:], strict=False))] == pytest.approx(least_s)


@settings(max_examples=25, deadline=None)
@given(workloads(max_layers=7, max_micro_batches=6))
def test_the_bound_alone_proves_the_best_split(workload: Workload) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting, "TRIED_AT_MOST", 0)
        splits = Splits(workload, None)
    assert splits.open == 0
    for stages in range(1, workload.num_layers + 1):
        best_s = min(seconds_of_all(workload, stages, workload.num_micro_batches))
        assert splits.seconds(stages)[-1] == pytest.approx(best_s, rel=1e-9)


def test_what_is_given_up_counts_as_open() -> None:
    workload = load_workload("workload-gpt-6.7b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting, "TRIED_AT_MOST", 0)
        patch.setattr(splitting, "GROWN_AT_MOST", 100)
        assert Splits(workload, None, columns=8, longest=8).open > 0


def test_the_largest_shipped_model_is_split_exactly_on_the_cluster_it_is_shipped_for() -> None:
    cap = min(node.memory_bytes or 0 for node in load_cluster("cluster-16384").nodes.values())
    assert Splits(load_workload("workload-llama-70b"), cap, columns=16, longest=16).open == 0
