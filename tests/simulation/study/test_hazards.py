"""Drawn losses: repeatable, with the mean that was asked for."""

from itertools import pairwise
from statistics import mean, stdev

import pytest

from everstep import trace as traces
from everstep.simulator.study.hazards import draw


def gaps_s(hazard: str) -> list[float]:
    found: list[float] = []
    for seed in range(200):
        times = [0.0, *(change.at_s for change in draw(hazard, num_nodes=32, num_losses=10, gap_s=60.0, seed=seed).changes)]
        found += [later - earlier for earlier, later in pairwise(times)]
    return found


@pytest.mark.parametrize("hazard", ["exponential", "bursty", "lemons"])
def test_a_seed_tells_the_same_story_twice_and_another_seed_another(hazard: str):
    one, again, other = (draw(hazard, num_nodes=32, num_losses=10, gap_s=60.0, seed=seed) for seed in (3, 3, 4))
    assert one == again
    assert one.changes != other.changes
    assert traces.problems(one) == []
    assert one.num_losses == 10


@pytest.mark.parametrize(("hazard", "variation"), [("exponential", 1.0), ("lemons", 1.0), ("bursty", 1.8)])
def test_gaps_have_the_mean_asked_for_and_the_spread_of_their_law(hazard: str, variation: float):
    gaps = gaps_s(hazard)
    assert mean(gaps) == pytest.approx(60.0, rel=0.1)
    assert stdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.12)


def test_lemons_are_hit_more_often_than_the_others():
    hits: dict[str, int] = {}
    for seed in range(100):
        trace = draw("lemons", num_nodes=30, num_losses=3, gap_s=60.0, seed=seed)
        for change in trace.changes:
            hits[trace.name] = hits.get(trace.name, 0) + (change.lost[0] in lemons_of(seed))
    assert sum(hits.values()) > 100      # 3 lemons of 30 would be hit 30 times if all were equal


def lemons_of(seed: int) -> set[str]:
    import random

    return set(random.Random(f"lemons {seed}").sample([f"node{number}" for number in range(1, 31)], 3))


def test_lost_nodes_are_replaced_by_fresh_ones_where_that_is_asked_for():
    trace = draw("exponential", num_nodes=4, num_losses=20, gap_s=60.0, seed=1, back_after_s=30.0)
    assert traces.problems(trace) == []
    assert trace.num_joins >= 15


def test_more_losses_than_nodes_need_somebody_to_come_back():
    with pytest.raises(ValueError, match="leave nobody"):
        draw("exponential", num_nodes=4, num_losses=4, gap_s=60.0, seed=1)
