"""Sizes, durations and names as people write them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.quantities import NodeId, human_bytes, human_seconds, node_number, parse_bytes, parse_seconds
from tests.untimed import UNTIMED


@pytest.mark.parametrize(("text", "count"), [
    ("24MB", 24_000_000), ("2GiB", 2**31), ("1.5 KiB", 1536), (" 7 ", 7), ("0B", 0), (12, 12), (2.0, 2), ("0.1KB", 100),
    ("2TB", 2 * 10**12), ("1TiB", 2**40),
])
def test_sizes_are_read(text: str | int | float, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MB", "2mb", "2 G", "-1MB", "1e3", "nan", "inf", "1.MB", "1 2", "２０MB3"])
def test_what_is_no_size_is_refused_as_it_was_written(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a size: .*\(want for example 24MB or 2GiB\)"):
        parse_bytes(text)


@pytest.mark.parametrize("number", [-1, -0.5, math.nan, math.inf, -math.inf])
def test_a_number_that_counts_no_bytes_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="bytes"):
        parse_bytes(number)


@pytest.mark.parametrize(("text", "duration_s"), [
    ("10m", 600.0), ("10min", 600.0), ("30s", 30.0), ("1.5h", 5400.0), ("250ms", 0.25), ("2d", 172800.0), ("3", 3.0), (4, 4.0),
    (math.inf, math.inf),
])
def test_durations_are_read(text: str | int | float, duration_s: float) -> None:
    assert parse_seconds(text) == duration_s


@pytest.mark.parametrize("text", ["", "s", "5 minutes", "1H", "-3s", "nan", True])
def test_what_is_no_duration_is_refused_as_it_was_written(text: str | bool) -> None:
    with pytest.raises(ValueError, match=r"not a duration: .*\(want for example 30s, 10m or 1h\)"):
        parse_seconds(text)


@pytest.mark.parametrize("number", [-1, -0.1, math.nan])
def test_a_number_that_is_no_duration_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="a duration"):
        parse_seconds(number)


def test_truth_is_no_size() -> None:
    with pytest.raises(ValueError, match="not a size: True"):
        parse_bytes(True)


@given(st.integers(0, 10**6), st.sampled_from(["B", "KB", "MB", "GB", "KiB", "MiB", "GiB"]))
@UNTIMED
def test_whole_sizes_are_exact(count: int, suffix: str) -> None:
    assert parse_bytes(f"{count}{suffix}") == count * parse_bytes(f"1{suffix}")


@given(st.integers(0, 10**9))
@UNTIMED
def test_nodes_sort_by_their_number(number: int) -> None:
    assert node_number(NodeId(f"n{number}")) == number


@pytest.mark.parametrize("name", ["", "n", "7", "m7", "n-1", "n7 ", "n7.0", "worker=3"])
def test_what_is_no_node_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"not a node: .*\(want for example n7\)"):
        node_number(NodeId(name))


@pytest.mark.parametrize(("count", "text"), [
    (0, "0 B"), (999, "999 B"), (24e6, "24.0 MB"), (1500, "1.5 KB"), (2.5e12, "2.5 TB"), (9e15, "9000.0 TB"),
])
def test_bytes_are_said(count: float, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(("duration_s", "text"), [
    (0.004, "4.0 ms"), (0.21, "0.21 s"), (119, "119.00 s"), (120, "2 min"),
    (125, "2 min 5 s"), (600, "10 min"), (7200, "2.0 h"), (math.inf, "inf h"), (0, "0.0 ms"),
])
def test_seconds_are_said(duration_s: float, text: str) -> None:
    assert human_seconds(duration_s) == text


def test_bytes_that_have_to_be_enough_are_rounded_up() -> None:
    assert human_bytes(2_140_000_000, up=True) == "2.2 GB"
    assert human_bytes(2_100_000_000, up=True) == "2.1 GB"


@given(st.integers(0, 10**15))
@UNTIMED
def test_what_is_rounded_up_is_enough(count: int) -> None:
    assert parse_bytes(human_bytes(count, up=True)) >= count


@pytest.mark.parametrize(("parse", "said"), [(parse_bytes, "bytes cannot be endless: 9999"), (parse_seconds, "308 digits")])
def test_a_number_beyond_all_bounds_is_refused(parse: Callable[[str | int], float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse("9" * 400 + "GB" if parse is parse_bytes else 10**400)
