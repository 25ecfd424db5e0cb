"""Pipelines inside sites against all ways to cut each site's nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.planner.layouts.lengths import Kept, Lengths
from everstep.planner.layouts.sites import Site, front_of_sites
from everstep.planner.step.pipelines import Array

from .test_lengths import Tables, partitions, tables_of


def least_seconds(rows: Sequence[Array], total: int) -> float:
    """Of all ways to share ``total`` micro-batches among these pipelines, at least one each."""
    shares = {0: 0.0}
    for row in rows:
        found: dict[int, float] = {}
        for done, seconds in shares.items():
            for m in range(1, min(len(row), total - done) + 1):
                found[done + m] = min(found.get(done + m, float("inf")), max(seconds, float(row[m - 1])))
        shares = found
    return shares.get(total, float("inf"))


Way = tuple[int, list[Array]]
"""Nodes in pipelines that stay, and the times of all pipelines."""


def ways_at(tables: Tables, num_nodes: int, kinds: Sequence[Kept]) -> Iterator[Way]:
    for counts in product(*(range(kind.count + 1) for kind in kinds)):
        kept = sum(kind.length * count for kind, count in zip(kinds, counts, strict=True))
        rows = [kind.seconds for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
        for busy in range(num_nodes - kept + 1):
            for lengths in partitions(busy, max(tables)):
                if set(lengths) <= set(tables):
                    yield kept, [*rows, *(tables[length] for length in lengths)]


def brute_force(sites: Sequence[tuple[Tables, int, Sequence[Kept]]], total: int, least: int) -> tuple[float, int]:
    """The least time, and the most nodes that can be kept at it."""
    best = (float("inf"), 0)
    for combination in product(*(list(ways_at(*site)) for site in sites)):
        rows = [row for _, some in combination for row in some]
        if min(least, total) <= len(rows) <= total:
            best = min(best, (least_seconds(rows, total), -sum(kept for kept, _ in combination)))
    return best[0], -best[1]


@st.composite
def sites_of(draw: st.DrawFn) -> tuple[list[tuple[Tables, int, list[Kept]]], int]:
    first, total = draw(tables_of())
    second = {length: row * draw(st.sampled_from([1.0, 2.0])) for length, row in first.items()}
    found = []
    running = 0
    for tables in (first, second):
        num_nodes = draw(st.integers(0, 4))
        length = draw(st.sampled_from(sorted(tables)))
        count = draw(st.integers(0, min(num_nodes // length, total - running)))  # each runs, so it has a micro-batch
        running += count
        slower = tables[length] * draw(st.sampled_from([1.0, 1.5]))
        found.append((tables, num_nodes, [Kept(length, count, slower)] if count else []))
    return found, total


@settings(max_examples=80, deadline=None)
@given(sites_of(), st.integers(1, 3))
def test_pipelines_inside_sites_are_the_best_of_all_ways_to_cut_the_nodes_of_each(
    drawn: tuple[list[tuple[Tables, int, list[Kept]]], int], least: int,
) -> None:
    sites, total = drawn
    best_s, most_kept = brute_force(sites, total, least)
    asked = [Site(Lengths(tables), num_nodes, tuple(kinds)) for tables, num_nodes, kinds in sites]
    front = front_of_sites(asked, total, least)
    assert (not front) == (best_s == float("inf"))
    for choices in front:
        rows, kept = [], 0
        for choice, (tables, num_nodes, kinds) in zip(choices, sites, strict=True):
            assert sum(choice.lengths) + choice.nodes_kept(kinds) + choice.idle == num_nodes
            rows += [kind.seconds for kind, count in zip(kinds, choice.kept, strict=True) for _ in range(count)]
            rows += [tables[length] for length in choice.lengths]
            kept += choice.nodes_kept(kinds)
        assert min(least, total) <= len(rows) <= total
        assert least_seconds(rows, total) <= choices[0].step_s * (1 + 1e-9), "what stays may be faster than the tables"
        if choices is front[-1]:
            assert least_seconds(rows, total) == pytest.approx(best_s)
            assert kept == most_kept


@settings(max_examples=60, deadline=None)
@given(tables_of(), st.integers(1, 8), st.integers(1, 3))
def test_a_single_site_is_the_search_without_sites(drawn: tuple[Tables, int], num_nodes: int, least: int) -> None:
    tables, total = drawn
    alone = Lengths(tables).best(num_nodes, total, least)
    front = front_of_sites([Site(Lengths(tables), num_nodes)], total, least)
    assert [choices[0].step_s for choices in front] == ([alone.step_s] if alone else [])


@settings(max_examples=60, deadline=None)
@given(sites_of(), st.integers(0, 1))
def test_one_node_more_at_a_site_never_raises_the_step_time(
    drawn: tuple[list[tuple[Tables, int, list[Kept]]], int], where: int,
) -> None:
    sites, total = drawn
    before = [Site(Lengths(tables), num_nodes) for tables, num_nodes, _ in sites]
    after = [Site(site.lengths, site.num_nodes + (index == where)) for index, site in enumerate(before)]
    fewer, more = front_of_sites(before, total), front_of_sites(after, total)
    if fewer:
        assert more and more[-1][0].step_s <= fewer[-1][0].step_s * (1 + 1e-9)
