"""A slice of the campaign of random kills; all of it is ``python benchmarks/campaign.py``."""

from __future__ import annotations

import pytest
from benchmarks.campaign import campaign


@pytest.mark.slow
def test_five_runs_with_kills_at_random_instants_end_right() -> None:
    rows = campaign(range(1000, 1005), steps=16, tell=False)
    assert len(rows) == 5
    assert [row.problems for row in rows] == [()] * 5, [row.seed for row in rows if not row.is_right]
    assert sum(row.killed for row in rows) >= 5
