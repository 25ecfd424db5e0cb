"""The four reference cases of Oobleck's artifact, and what always holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.planner.baselines.oobleck import reconfigured, starts_with

START = [[0, 1], [2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12, 13]]


@pytest.mark.parametrize(("lost", "after"), [
    ({2}, [[0, 1], [3, 4], [5, 6, 7, 8], [9, 10, 11, 12, 13]]),
    ({1, 3, 4}, [[0, 13], [2, 12], [9, 10, 11], [5, 6, 7, 8]]),
    ({2, 4, 6, 7, 8}, [[0, 1], [3, 13], [5, 12], [9, 10, 11]]),
    ({1, 2, 3, 5, 6, 7, 9, 10, 11}, [[0, 4], [8, 12, 13]]),
], ids=["smaller template", "borrow for two", "borrow twice from one", "merge"])
def test_the_reference_cases_come_out_exactly(lost: set[int], after: list[list[int]]):
    assert reconfigured(START, lost, smallest=2) == after


@given(st.sets(st.integers(0, 13)), st.integers(1, 5))
def test_nobody_is_left_out_and_every_pipeline_is_large_enough(lost: set[int], smallest: int):
    after = reconfigured(START, lost, smallest)
    left = set(range(14)) - lost
    if len(left) < smallest:
        assert after is None or not left
        return
    assert after is not None
    assert sorted(rank for pipeline in after for rank in pipeline) == sorted(left)
    assert all(len(pipeline) >= smallest for pipeline in after)


def test_what_is_too_small_even_merged_is_no_pipeline():
    assert reconfigured([[0, 1, 2]], {0}, smallest=3) is None


@pytest.mark.parametrize(("failures", "sizes"), [(1, (2, 28)), (3, (2, 24)), (14, (2, 2)), (15, None)])
def test_templates_leave_one_pipeline_more_than_failures(failures: int, sizes: tuple[int, int] | None):
    assert starts_with(30, failures, smallest=2) == sizes
