"""Reductions that share no node go on at the same time, in one order for all nodes, about as soon as can be."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.planner.step.rounds import in_rounds, longest_path, rounds

Group = tuple[str, ...]


def groups_of(cuts: list[list[int]], sizes: list[int]) -> dict[Group, int]:
    """Pipelines with ``cuts`` of their own over layers of ``sizes``: bytes by holders, in the order of layers."""
    found: dict[Group, int] = {}
    for layer, size in enumerate(sizes):
        holders = tuple(f"{name}{sum(cut <= layer for cut in mine)}" for name, mine in zip("abcd", cuts, strict=False))
        found[holders] = found.get(holders, 0) + size
    return found


@st.composite
def layouts(draw: st.DrawFn, most_layers: int = 6) -> dict[Group, int]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=most_layers))
    cut = st.sets(st.integers(1, len(sizes) - 1), max_size=3).map(sorted)
    return groups_of(draw(st.lists(cut, min_size=2, max_size=4)), sizes)


def test_pipelines_that_are_cut_alike_need_one_round() -> None:
    found = rounds(groups_of([[2, 4], [2, 4], [2, 4]], [1] * 6))
    assert [len(alike) for alike in found] == [3]


def test_a_chain_of_neighbours_needs_two_rounds_instead_of_waiting_link_by_link() -> None:
    chain = groups_of([[2, 4], [1, 3, 5]], [1] * 6)
    assert longest_path(list(chain), chain) == 6
    found = rounds(chain)
    assert sorted(len(alike) for alike in found) == [3, 3]
    assert longest_path(in_rounds(chain), chain) == 2


def test_the_largest_group_does_not_wait() -> None:
    groups: dict[Group, int] = {("a", "b"): 1, ("b", "c"): 9, ("c", "d"): 1}
    assert rounds(groups) == ((("b", "c"),), (("a", "b"), ("c", "d")))


def test_no_groups_take_no_round() -> None:
    assert rounds({}) == ()
    assert longest_path([], {}) == 0


@settings(max_examples=150, deadline=None)
@given(layouts(most_layers=8))
def test_groups_of_a_round_share_no_node_and_every_group_has_a_round(groups: dict[Group, int]) -> None:
    found = rounds(groups)
    assert sorted(group for alike in found for group in alike) == sorted(groups)
    for alike in found:
        members = [member for group in alike for member in group]
        assert len(members) == len(set(members))


@settings(max_examples=150, deadline=None)
@given(layouts(most_layers=8))
def test_there_are_not_many_more_rounds_than_some_node_has_groups(groups: dict[Group, int]) -> None:
    most = max(sum(member in group for group in groups) for group in groups for member in group)
    assert most <= len(rounds(groups)) <= most + 1


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_the_order_is_the_best_of_all_or_close_to_it(groups: dict[Group, int]) -> None:
    best = min(longest_path(order, groups) for order in permutations(groups))
    assert best <= longest_path(in_rounds(groups), groups) <= 1.5 * best
    if len(set(groups.values())) == 1:
        assert longest_path(in_rounds(groups), groups) == best
