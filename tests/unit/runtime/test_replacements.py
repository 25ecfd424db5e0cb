"""How long a replacement takes is measured before anybody waits for one."""

from __future__ import annotations

import pytest

from everstep.quantities import NodeId
from everstep.runtime.replacements import OVERDUE, WEIGHT, Replacements

N8, N9 = NodeId("n8"), NodeId("n9")


def test_nobody_is_expected_before_one_replacement_was_measured() -> None:
    found = Replacements()
    found.ready(NodeId("n0"), 3.0)
    assert found.usual_s is None, "who starts with the run replaces nobody"
    found.began(N8, 10.0)
    assert found.expected(10.5) == {}
    found.ready(N8, 12.0)
    assert found.usual_s == 2.0 and found.expected(12.0) == {}


def test_who_is_on_the_way_is_expected_after_what_is_usual() -> None:
    found = Replacements()
    found.began(N8, 10.0)
    found.ready(N8, 12.0)
    found.began(N9, 20.0)
    assert found.expected(20.5) == {N9: 1.5}
    assert found.expected(22.5) == {N9: 0.0}, "a little late: any moment now"
    assert found.expected(20.0 + OVERDUE * 2.0 + 0.1) == {}, "something is wrong with it"
    found.ready(N9, 23.0)
    assert found.usual_s == pytest.approx(2.0 + WEIGHT * 1.0)


def test_who_died_on_the_way_is_not_expected() -> None:
    found = Replacements()
    found.began(N8, 10.0)
    found.ready(N8, 12.0)
    found.began(N9, 20.0)
    found.gone(N9)
    assert found.expected(20.1) == {}
