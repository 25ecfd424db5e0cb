"""Rules of the failure detector."""

from __future__ import annotations

from everstep.config import DetectorConfig
from everstep.protocol.detector import FailureDetector
from tests.unit.protocol.makers import N0, N1


def detector() -> FailureDetector:
    return FailureDetector(DetectorConfig(heartbeat_interval_s=0.1, suspect_after_s=1.0))


def test_nobody_is_watched_before_their_first_word() -> None:
    assert detector().next_deadline_s() is None
    assert detector().suspects(1e9) == frozenset()


def test_silence_makes_suspect_and_a_word_clears() -> None:
    watch = detector()
    watch.heard(N0, 10.0)
    watch.heard(N1, 10.5)
    assert watch.suspects(10.9) == frozenset()
    assert watch.suspects(11.2) == {N0}
    watch.heard(N0, 11.3)
    assert watch.suspects(11.4) == frozenset()


def test_the_next_deadline_is_that_of_whoever_is_silent_longest() -> None:
    watch = detector()
    watch.heard(N0, 10.0)
    watch.heard(N1, 9.0)
    deadline_s = watch.next_deadline_s()
    assert deadline_s == 10.0
    assert watch.suspects(deadline_s) == {N1}, "asked at the deadline, the answer is there"


def test_who_is_forgotten_is_not_suspected() -> None:
    watch = detector()
    watch.heard(N0, 10.0)
    watch.forget(N0)
    watch.forget(N1)
    assert watch.suspects(1e9) == frozenset()


def test_a_word_that_is_heard_late_does_not_turn_time_back() -> None:
    watch = detector()
    watch.heard(N0, 10.0)
    watch.heard(N0, 9.0)
    assert watch.next_deadline_s() == 11.0
