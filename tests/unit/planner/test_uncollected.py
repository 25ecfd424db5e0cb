"""The collector rests while a decision is made, and only then."""

from __future__ import annotations

import gc

import pytest

from everstep.planner.uncollected import uncollected


def test_nothing_is_collected_within_and_as_before_afterwards() -> None:
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_does_not_leave_the_collector_off() -> None:
    with pytest.raises(ValueError, match="within"), uncollected():
        raise ValueError("within")
    assert gc.isenabled()
