"""Rules of the commit exchange, and what follows from a union."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import LocalProtocolError
from everstep.protocol import marks
from everstep.protocol.commit import Committed, Exchange, Send, clip_factor, count, mean_loss, merge
from everstep.protocol.messages import Prepared, Union
from everstep.quantities import NodeId
from tests.unit.protocol.makers import N0, N1, N2, PAIRS, U0, U1, record, sums, union, view

NODES = tuple(NodeId(f"n{number}") for number in range(7))


def exchange(node: NodeId, *nodes: NodeId) -> Exchange:
    return Exchange(node=node, view=view(1, *(nodes or (N0, N1, N2))), step=5, attempt=0, pairs=PAIRS, micro_batches=2)


FULL = {
    N0: record(N0, units={U0: sums("a")}, losses={0: (3.0, 2.0)}),
    N1: record(N1, units={U1: sums("a", "b", norm=12.0)}, losses={1: (5.0, 2.0)}),
    N2: record(N2, units={U0: sums("a")}),
}


def test_a_leaf_sends_its_record_to_its_parent() -> None:
    assert exchange(N1).prepared(FULL[N1]) == [Send(N0, FULL[N1])]


@pytest.mark.parametrize("arrivals", list(itertools.permutations(FULL)))
def test_the_root_hands_the_union_down_before_it_commits_whatever_comes_first(arrivals: tuple[NodeId, ...]) -> None:
    root = exchange(N0)
    effects = [
        effect
        for node in arrivals
        for effect in (root.prepared(FULL[node]) if node == N0 else root.received(FULL[node]))
    ]
    assert [type(effect) for effect in effects] == [Send, Send, Committed]
    assert [effect.target for effect in effects if isinstance(effect, Send)] == [N1, N2]
    committed = effects[-1]
    assert isinstance(committed, Committed)
    assert (committed.union.units, committed.union.losses) == (union().units, union().losses)


def test_an_inner_node_waits_for_its_whole_subtree_and_for_itself() -> None:
    inner = exchange(NODES[1], *NODES)
    assert inner.received(record(NODES[3])) == []
    assert inner.received(record(NODES[4])) == []
    (up,) = inner.prepared(record(NODES[1]))
    assert isinstance(up, Send) and up.target == NODES[0]
    assert isinstance(up.message, Prepared) and up.message.nodes == (NODES[1], NODES[3], NODES[4])


def test_a_node_hands_the_union_down_and_commits() -> None:
    inner = exchange(NODES[1], *NODES)
    inner.prepared(record(NODES[1]))
    answer = union()
    assert inner.received(answer) == [Send(NODES[3], answer), Send(NODES[4], answer), Committed(answer)]
    assert inner.union == answer


def test_a_second_union_is_dropped() -> None:
    leaf = exchange(N1)
    leaf.prepared(FULL[N1])
    leaf.received(union())
    with marks.expect("commit.second-union-dropped"):
        assert leaf.received(union()) == []


@pytest.mark.parametrize("other", [{"view": 2}, {"step": 6}, {"attempt": 1}])
def test_what_belongs_to_another_try_is_dropped(other: dict[str, int]) -> None:
    root = exchange(N0)
    with marks.expect("commit.other-try-dropped"):
        assert root.received(record(N1, **other)) == []
    assert not root.accepts(record(N1, **other))
    assert root.accepts(record(N1))


def test_a_record_that_comes_twice_changes_nothing() -> None:
    root = exchange(N0, N0, N1)
    assert root.received(FULL[N1]) == root.received(FULL[N1]) == []
    assert len(root.prepared(FULL[N0])) == 2
    with marks.expect("commit.late-record-dropped"):
        assert root.received(FULL[N1]) == []


def test_a_union_before_ones_own_record_is_an_error() -> None:
    with pytest.raises(LocalProtocolError, match="before the record of n1"):
        exchange(N1).received(union())


def test_a_node_is_prepared_once_and_for_its_own_try() -> None:
    root = exchange(N0)
    with pytest.raises(LocalProtocolError, match="expected the record of n0"):
        root.prepared(record(N1))
    with pytest.raises(LocalProtocolError, match="expected the record of n0"):
        root.prepared(record(N0, attempt=1))
    root.prepared(FULL[N0])
    with pytest.raises(LocalProtocolError, match="prepared twice"):
        root.prepared(FULL[N0])


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"units": {U1: sums("a", norm=12.0)}}, r"u1/b has the micro-batches \(\)"),
        ({"units": {U1: sums("a", "b", micro_batches=1)}}, r"u1/a has the micro-batches \(0,\)"),
        ({"losses": {}}, r"losses are those of the micro-batches \(0,\)"),
    ],
)
def test_no_union_is_made_without_each_pair_and_each_loss(broken: dict[str, object], words: str) -> None:
    root = exchange(N0, N0, N1)
    root.prepared(FULL[N0])
    whole = {"units": FULL[N1].units, "losses": FULL[N1].losses}
    with pytest.raises(LocalProtocolError, match=words):
        root.received(record(N1, **{**whole, **broken}))


def test_a_pair_counted_twice_is_an_error() -> None:
    doubled = sums("a", "b")
    doubled = type(doubled)(pairs={**doubled.pairs, "a": (0, 1, 1)}, square_norms=doubled.square_norms)
    root = exchange(N0, N0, N1)
    root.prepared(FULL[N0])
    with pytest.raises(LocalProtocolError, match="not each of 2 once"):
        root.received(record(N1, units={U1: doubled}, losses={1: (5.0, 2.0)}))


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [
        ({"units": {U0: sums("a", norm=1.0)}}, {"units": {U0: sums("a", norm=math.nextafter(1.0, 2.0))}}, "sums of unit u0"),
        ({"losses": {0: (1.0, 2.0)}}, {"losses": {0: (1.0, 3.0)}}, "loss of micro-batch 0"),
        ({"attempt": 1}, {"attempt": 2}, "two tries"),
    ],
)
def test_records_that_disagree_in_a_bit_cannot_be_merged(
    left: dict[str, object], right: dict[str, object], words: str,
) -> None:
    with pytest.raises(LocalProtocolError, match=words):
        merge(record(N0, **left), record(N1, **right))


def test_replicas_whose_norm_is_not_a_number_agree() -> None:
    both = merge(record(N0, units={U0: sums("a", norm=math.nan)}), record(N1, units={U0: sums("a", norm=math.nan)}))
    assert both.nodes == (N0, N1)


def test_flags_of_all_are_kept() -> None:
    assert merge(record(N0, flags=("stop",)), record(N1, flags=("change", "stop"))).flags == ("change", "stop")


@given(st.permutations(range(7)))
def test_merging_in_any_order_gives_the_same_record(numbers: list[int]) -> None:
    records = [record(NODES[n], losses={n: (float(n), 1.0)}, flags=("stop",) if n == 3 else ()) for n in range(7)]
    merged = records[numbers[0]]
    for number in numbers[1:]:
        merged = merge(merged, records[number])
    expected = records[0]
    for other in records[1:]:
        expected = merge(expected, other)
    assert merged == expected


def test_the_loss_is_the_sum_over_the_count() -> None:
    assert mean_loss(union()) == 2.0
    assert count(union()) == 4.0


def test_the_loss_does_not_depend_on_the_order_of_the_micro_batches() -> None:
    losses = {m: (0.1 * 3**m, 1.0) for m in range(12)}
    backwards = dict(reversed(losses.items()))
    assert mean_loss(union(losses=losses)) == mean_loss(union(losses=backwards))


def test_gradients_are_clipped_by_the_norm_of_all_units_each_once() -> None:
    assert clip_factor(union(), 0.5, 4.0) == 0.5 / (math.sqrt(16.0) / 4.0 + 1e-6)
    assert clip_factor(union(), 2.0, 4.0) == 1.0
    assert clip_factor(union(), None, 4.0) == 1.0


@pytest.mark.parametrize(("norm", "expected"), [(math.inf, 0.0), (1e308, 0.0)])
def test_an_endless_norm_clips_to_nothing(norm: float, expected: float) -> None:
    endless = union(units={U0: sums("a", norm=norm), U1: sums("a", "b", norm=1.7e308)})
    assert clip_factor(endless, 1.0, 1.0) == pytest.approx(expected, abs=1e-150)


def test_a_norm_that_is_not_a_number_makes_a_factor_that_is_none() -> None:
    broken: Union = union(units={U0: sums("a", norm=math.nan), U1: sums("a", "b", norm=math.inf)})
    assert math.isnan(clip_factor(broken, 1.0, 1.0))


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_the_factor_depends_on_norms_by_name_alone(norms: list[float], chance: object) -> None:
    units = {f"u{k}": sums("a", norm=norm) for k, norm in enumerate(norms)}
    shuffled = list(units.items())
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert clip_factor(union(units=units), 0.5, 3.0) == clip_factor(union(units=dict(shuffled)), 0.5, 3.0)
