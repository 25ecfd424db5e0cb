"""The knapsack over lengths against all ways to cut n nodes into pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.planner.layouts.lengths import Kept, Lengths
from everstep.planner.layouts.splits import Splits
from everstep.planner.step.pipelines import Array

from .test_splits import seconds_of_all, workloads
from .worlds import workload_of

Tables = Mapping[int, Array]


def partitions(total: int, longest: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for length in range(min(total, longest), 0, -1):
        for rest in partitions(total - length, length):
            yield (length, *rest)


def least_seconds(tables: Tables, lengths: tuple[int, ...], total: int) -> float:
    """Of all ways to share ``total`` micro-batches among these pipelines, at least one each."""
    shares = {0: 0.0}
    for length in lengths:
        row = tables[length]
        shares = {
            done + m: min(
                max(shares[d], row[done + m - d - 1]) for d in shares if 1 <= done + m - d <= len(row)
            )
            for done in shares for m in range(1, total - done + 1)
        }
    return shares.get(total, float("inf"))


def brute_force(tables: Tables, num_nodes: int, total: int, least: int) -> float:
    return min(
        (
            least_seconds(tables, lengths, total)
            for busy in range(1, num_nodes + 1) for lengths in partitions(busy, max(tables))
            if min(least, total) <= len(lengths) <= total and set(lengths) <= set(tables)
        ),
        default=float("inf"),
    )


@st.composite
def tables_of(draw: st.DrawFn) -> tuple[dict[int, Array], int]:
    total = draw(st.integers(1, 7))
    lengths = draw(st.sets(st.integers(1, 6), min_size=1))
    steps = st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0]), min_size=total, max_size=total)
    tables = {
        length: np.full(total, np.inf) if draw(st.integers(0, 9)) == 0 else 1.0 + np.cumsum(draw(steps))
        for length in sorted(lengths)
    }
    return tables, total


@settings(max_examples=150, deadline=None)
@given(tables_of(), st.integers(1, 8), st.integers(1, 3))
def test_lengths_are_the_best_of_all_ways_to_cut_the_nodes(drawn: tuple[Tables, int], num_nodes: int, least: int) -> None:
    tables, total = drawn
    best_s = brute_force(tables, num_nodes, total, least)
    found = Lengths(tables).best(num_nodes, total, least)
    assert (found.step_s if found else float("inf")) == pytest.approx(best_s)
    if found:
        assert sum(found.lengths) + found.idle == num_nodes
        assert least_seconds(tables, found.lengths, total) == pytest.approx(best_s)


@settings(max_examples=25, deadline=None)
@given(workloads(max_layers=8, max_micro_batches=8), st.integers(1, 8))
def test_the_step_time_is_the_least_over_all_splits_lengths_and_shares(workload, num_nodes: int) -> None:  # type: ignore[no-untyped-def]
    """The two halves of the search together, up to eight nodes and eight layers, against trying everything."""
    total = workload.num_micro_batches
    every = {
        stages: np.array([min(seconds_of_all(workload, stages, each)) for each in range(1, total + 1)])
        for stages in range(1, workload.num_layers + 1)
    }
    splits = Splits(workload, None)
    found = Lengths({stages: splits.seconds(stages) for stages in every}).best(num_nodes, total)
    assert found is not None
    assert found.step_s == pytest.approx(brute_force(every, num_nodes, total, 1))


@settings(max_examples=60, deadline=None)
@given(tables_of(), st.integers(1, 12), st.integers(1, 2))
def test_one_node_more_never_raises_the_step_time(drawn: tuple[Tables, int], num_nodes: int, least: int) -> None:
    tables, total = drawn
    lengths = Lengths(tables)
    fewer, more = lengths.best(num_nodes, total, least), lengths.best(num_nodes + 1, total, least)
    if fewer:
        assert more is not None and more.step_s <= fewer.step_s


def test_many_nodes_need_the_first_entries_of_the_knapsack_only() -> None:
    """The whole knapsack of 300 nodes, entry by entry, against what is used for them."""
    workload = workload_of(9, 40, seconds=[1.3, *[1.0] * 7, 1.9])
    splits = Splits(workload, None, longest=5)
    tables = {length: splits.seconds(length) for length in (2, 3, 5)}
    lengths = Lengths(tables)
    for num_nodes, total in ((299, 600), (300, 1500), (301, 2000)):
        found = lengths.best(num_nodes, total)
        assert found is not None
        levels = sorted({float(t) for row in tables.values() for t in row})
        for level in (found.step_s, max(t for t in levels if t < found.step_s)):
            caps = {length: int(np.searchsorted(row, level * (1 + 1e-9), side="right")) for length, row in tables.items()}
            most = [0] * (num_nodes + 1)
            for nodes in range(1, num_nodes + 1):
                most[nodes] = max([most[nodes - 1], *(most[nodes - p] + c for p, c in caps.items() if p <= nodes)])
            assert (most[num_nodes] >= total) == (level == found.step_s)


def test_the_front_goes_from_keeping_everything_to_the_least_time() -> None:
    splits = Splits(workload_of(34, 64, seconds=[1.67, *[1.0] * 32, 1.83]), None, longest=16)
    lengths = Lengths({length: splits.seconds(length) for length in range(4, 17)})
    kinds = [Kept(4, 7, splits.seconds(4))]
    front = lengths.front(31, 64, kinds)
    times, kept = [choice.step_s for choice in front], [choice.nodes_kept(kinds) for choice in front]
    assert kept[0] == 28 and times == sorted(times, reverse=True) and kept == sorted(kept, reverse=True)
    best = lengths.best(31, 64)
    assert best is not None and times[-1] == best.step_s
    assert all(sum(choice.lengths) + choice.nodes_kept(kinds) + choice.idle == 31 for choice in front)


def test_with_thousands_of_pipelines_nearly_all_are_kept() -> None:
    splits = Splits(workload_of(34, 64, seconds=[1.67, *[1.0] * 32, 1.83]), None, longest=16)
    lengths = Lengths({length: splits.seconds(length) for length in range(4, 17)})
    kinds = [Kept(4, 4095, splits.seconds(4))]
    assert lengths.front(16383, 32768, kinds)[-1].nodes_kept(kinds) > 16000


def test_a_table_that_is_too_short_to_be_sure_says_so() -> None:
    splits = Splits(workload_of(4, 64), None, columns=8)
    lengths = Lengths({length: splits.seconds(length) for length in (1, 2, 4)})
    few, many = lengths.best(40, 64), lengths.best(9, 64)
    assert few is not None and not lengths.truncated(few, 64)
    assert many is None or lengths.truncated(many, 64)
