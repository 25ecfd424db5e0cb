"""Rules for a step that was interrupted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import LocalProtocolError
from everstep.protocol.resolution import resolve
from tests.unit.protocol.makers import N0, N1, N2, N3, U0, U1, report, union


def test_when_nobody_is_ahead_the_step_is_tried_again_whole() -> None:
    found = resolve([report(N0, 5, attempt=0, prepared=True), report(N1, 5, attempt=0, union=union(4))])
    assert (found.step, found.attempt, found.union) == (5, 1, None)
    assert found.holds == {N0: {U0}, N1: {U0}}


def test_a_step_that_nobody_began_is_its_first_try() -> None:
    assert resolve([report(N0, 5), report(N1, 5)]).attempt == 0


def test_the_union_that_a_survivor_holds_is_handed_on() -> None:
    kept = union(5)
    found = resolve([
        report(N0, 6, attempt=0, union=kept), report(N1, 5, attempt=0, prepared=True, union=union(4), holds=(U0, U1)),
    ])
    assert (found.step, found.attempt, found.union) == (6, 1, kept)
    assert found.holds[N1] == {U0, U1}


def test_who_is_behind_follows_only_with_sums_of_the_same_try() -> None:
    ahead = report(N0, 6, union=union(5, attempt=1))
    found = resolve([ahead, report(N1, 5, attempt=0, prepared=True), report(N2, 5, attempt=1, prepared=True)])
    assert (found.holds[N1], found.holds[N2]) == (frozenset(), {U0})


def test_a_union_that_nobody_needs_is_not_handed_on() -> None:
    assert resolve([report(N0, 6, union=union(5)), report(N1, 6, union=union(5))]).union is None


def test_who_cannot_follow_holds_nothing() -> None:
    found = resolve([
        report(N0, 6, union=union(5)), report(N1, 5, attempt=0), report(N2, 3, attempt=0, prepared=True),
        report(N3, -1, holds=()),
    ])
    assert found.union == union(5), "the newcomer keeps it, as everybody at step 6 does"
    assert found.holds == {N0: {U0}, N1: frozenset(), N2: frozenset(), N3: frozenset()}


def test_tries_of_a_step_behind_do_not_count_for_the_next() -> None:
    found = resolve([report(N0, 6, union=union(5, attempt=7)), report(N1, 5, attempt=7, prepared=True)])
    assert found.attempt == 0


def test_after_a_roll_back_the_first_try_has_the_number_that_it_set() -> None:
    rollbacks = ((9, 4, 3),)
    assert resolve([report(N0, 6)], rollbacks).attempt == 3
    assert resolve([report(N0, 6, attempt=3)], rollbacks).attempt == 4
    assert resolve([report(N0, 10)], rollbacks).attempt == 0


def test_without_any_state_there_is_no_step() -> None:
    found = resolve([report(N0, -1, holds=()), report(N1, -1, holds=())])
    assert (found.step, found.union, found.holds) == (None, None, {N0: frozenset(), N1: frozenset()})


def test_without_the_union_who_is_behind_holds_nothing() -> None:
    found = resolve([report(N0, 6), report(N1, 5, attempt=0, prepared=True, union=union(4))])
    assert (found.step, found.union, found.holds[N1]) == (6, None, frozenset())


def test_reports_of_two_views_are_an_error() -> None:
    with pytest.raises(LocalProtocolError, match="of one view"):
        resolve([report(N0, 6), report(N1, 6, view=1)])
    with pytest.raises(LocalProtocolError, match="one report a node"):
        resolve([report(N0, 6), report(N0, 6)])


@given(st.permutations([
    report(N0, 6, attempt=2, union=union(5)), report(N1, 5, attempt=0, prepared=True), report(N2, 6, attempt=1), report(N3, -1),
]))
def test_the_order_of_reports_makes_no_difference(reports: list[object]) -> None:
    found = resolve(reports)  # type: ignore[arg-type]
    assert (found.step, found.attempt, found.union) == (6, 3, union(5))
