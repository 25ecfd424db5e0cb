"""1F1B in closed form against the schedule itself, and layer splits against every other split."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.cluster import Link
from everstep.plan import Hop, Plan
from everstep.planner.layouts.splits import Bounds, Splits
from everstep.planner.step.cost import finish_seconds
from everstep.planner.step.pipelines import flush, stage_ends_s
from everstep.planner.step.schedules import order_of
from everstep.workload import Workload

from .worlds import cluster_of, node, workload_of

TIMES = st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 3.7])


@st.composite
def workloads(draw: st.DrawFn, max_layers: int = 8, max_micro_batches: int = 8) -> Workload:
    workload = workload_of(draw(st.integers(1, max_layers)), draw(st.integers(1, max_micro_batches)))
    layers = tuple(
        replace(
            layer, forward_s=draw(TIMES) + 0.1, backward_input_s=draw(TIMES) + 0.1, backward_weight_s=draw(TIMES),
            output_bytes=draw(st.integers(0, 3)),
        )
        for layer in workload.layers
    )
    return replace(workload, layers=layers)


def all_splits(num_layers: int, num_stages: int) -> list[Bounds]:
    cuts = [(0, *chosen, num_layers) for chosen in combinations(range(1, num_layers), num_stages - 1)]
    return [tuple(pairwise(edges)) for edges in cuts]


def seconds_by_schedule(workload: Workload, bounds: Bounds, each: int, link: Link) -> list[float]:
    """By following 1F1B action by action; by stage."""
    route = tuple(Hop(node(stage), first, end) for stage, (first, end) in enumerate(bounds))
    plan = Plan(
        num_layers=workload.num_layers, placement={hop.node: tuple(hop.layers) for hop in route}, routes=(route,) * each,
    )
    ends = finish_seconds(plan, workload, cluster_of(len(bounds), link=link), order_of(plan))
    return [ends[hop.node] for hop in route]


def seconds_of_all(workload: Workload, num_stages: int, each: int) -> list[float]:
    every = all_splits(workload.num_layers, num_stages)
    forwards = [[sum(layer.forward_s for layer in workload.layers[first:end]) for first, end in cuts] for cuts in every]
    works = [[sum(layer.total_s for layer in workload.layers[first:end]) for first, end in cuts] for cuts in every]
    forward_s, work_s = flush(forwards, num_stages), flush(works, num_stages)
    count, many = np.full(len(every), num_stages), np.full(len(every), each)
    found: list[float] = stage_ends_s(forward_s, work_s - forward_s, 0 * forward_s, count, many).max(axis=1).tolist()
    return found


@settings(max_examples=100, deadline=None)
@given(workloads(), st.data())
def test_the_closed_form_is_what_the_schedule_takes(workload: Workload, data: st.DataObject) -> None:
    bounds = data.draw(st.sampled_from(all_splits(workload.num_layers, data.draw(st.integers(1, workload.num_layers)))))
    link = Link(alpha_s=0.25, bytes_per_s=2.0)
    forward = [sum(layer.forward_s for layer in workload.layers[first:end]) for first, end in bounds]
    backward = [sum(layer.total_s for layer in workload.layers[first:end]) for first, end in bounds]
    message = [link.seconds(workload.layers[first - 1].output_bytes) if first else 0.0 for first, _ in bounds]
    width, each = 9, workload.num_micro_batches
    forward_s = flush([forward, [1.0]], width)
    ends = stage_ends_s(
        forward_s, flush([backward, [2.0]], width) - forward_s, flush([message, [0.0]], width),
        np.array([len(bounds), 1]), np.array([each, each]),
    )
    assert ends[0][width - len(bounds):].tolist() == pytest.approx(seconds_by_schedule(workload, bounds, each, link))


@settings(max_examples=40, deadline=None)
@given(workloads())
def test_a_split_is_the_best_of_all_splits_for_every_number_of_stages_and_micro_batches(workload: Workload) -> None:
    splits = Splits(workload, None)
    assert splits.open == 0
    for stages in range(1, workload.num_layers + 1):
        for each in range(1, workload.num_micro_batches + 1):
            best_s = min(seconds_of_all(workload, stages, each))
            assert splits.seconds(stages)[each - 1] == pytest.approx(best_s, rel=1e-9)
            found = seconds_by_schedule(workload, splits.bounds(stages, each), each, Link(alpha_s=0.0, bytes_per_s=1e30))
            assert max(found) == pytest.approx(best_s, rel=1e-9)


def test_stages_as_even_as_can_be_may_lose_a_tenth() -> None:
    """Sixteen stages of 34 layers: the largest has three, wherever it stands, but it should stand early."""
    workload = workload_of(34, 16, seconds=[1.67, *[1.0] * 32, 1.83])
    splits = Splits(workload, None, longest=16)
    even = (*((first, first + 2) for first in range(0, 26, 2)), (26, 29), (29, 32), (32, 34))
    assert splits.open == 0 and len(even) == 16
    assert splits.seconds_of(even)[15] > 1.1 * splits.seconds(16)[15]


def test_a_split_obeys_the_memory_limit() -> None:
    workload = workload_of(6, 4, state_bytes=8, gradient_bytes=2, activation_bytes=1)
    splits = Splits(workload, 33)
    for stages, each in ((2, 1), (3, 4), (4, 2)):
        if np.isfinite(splits.seconds(stages)[each - 1]):
            for index, (first, end) in enumerate(splits.bounds(stages, each)):
                assert (10 + min(each, stages - index)) * (end - first) <= 33
    assert np.isfinite(splits.seconds(3)[3]) and not np.isfinite(splits.seconds(1)[0])


@settings(max_examples=30, deadline=None)
@given(workloads(max_layers=6, max_micro_batches=5), st.integers(20, 60))
def test_under_a_memory_limit_the_split_is_the_best_of_those_that_fit(workload: Workload, cap: int) -> None:
    workload = replace(workload, layers=tuple(replace(layer, activation_bytes=2) for layer in workload.layers))
    units = {name: replace(unit, state_bytes=7, gradient_bytes=3) for name, unit in workload.units.items()}
    workload = replace(workload, units=units)
    splits, each = Splits(workload, cap), workload.num_micro_batches
    for stages in range(1, workload.num_layers + 1):
        fitting = [
            seconds for seconds, bounds in zip(
                seconds_of_all(workload, stages, each), all_splits(workload.num_layers, stages), strict=True)
            if all((10 + 2 * min(each, stages - k)) * (end - first) <= cap for k, (first, end) in enumerate(bounds))
        ]
        assert splits.seconds(stages)[each - 1] == pytest.approx(min(fitting, default=float("inf")))


def test_messages_are_added_to_the_times_of_the_table() -> None:
    workload = workload_of(2, 1, output_bytes=3)
    assert Splits(workload, None, link=Link(alpha_s=1.0, bytes_per_s=1.0)).seconds(2)[0] == 6 + 2 * 4


def test_a_given_split_has_times_too() -> None:
    workload = workload_of(4, 6)
    splits = Splits(workload, None)
    assert splits.seconds_of(((0, 2), (2, 4))).tolist() == splits.seconds(2).tolist()
    assert splits.seconds_of(((0, 1), (1, 4)))[5] > splits.seconds(2)[5]
    assert not np.isfinite(Splits(workload, 81).seconds_of(((0, 2), (2, 4)))[1]), "the first stage would hold 84 bytes"


def test_what_the_fullest_stage_needs_at_least_is_told() -> None:
    workload = workload_of(5, 4, state_bytes=8, gradient_bytes=2, activation_bytes=0)
    assert [Splits(workload, None).least_bytes(stages) for stages in (1, 2, 5)] == [50, 30, 10]


def test_a_single_micro_batch_goes_over_stages_that_are_as_even_as_for_many() -> None:
    """It takes as long on any split, but sums, updates and memory do not."""
    splits = Splits(workload_of(12, 64), None, columns=16, longest=4)
    assert splits.bounds(4, 1) == splits.bounds(4, 16) == ((0, 3), (3, 6), (6, 9), (9, 12))
