"""Chameleon's equations on cases worked out by hand, and its search against one that tries everything."""

import math
from itertools import product

import pytest

from everstep.planner.baselines.chameleon import (
    break_even_s,
    fastest_plan,
    pipeline_units,
    rerouted_slots,
    score,
    stage_bytes,
    symmetric_slots,
)


def test_a_short_window_is_for_rerouting_and_a_long_one_for_the_dynamic_plan():
    assert break_even_s(10, step_s=1, rerouted_step_s=2) == 20

    def dynamic_wins(window_s: float) -> bool:
        return score(10, 1, 10, window_s) > score(10, 2, 0, window_s)

    assert (dynamic_wins(15), dynamic_wins(40)) == (False, True)
    assert score(10, 1, 10, 20) == score(10, 2, 0, 20)


def test_what_is_not_through_before_the_window_ends_is_worth_nothing():
    assert score(10, 1, 10, 10) == score(10, 1, 12, 10) == 0


def test_a_transition_to_slower_steps_never_pays():
    assert break_even_s(10, step_s=2, rerouted_step_s=2) == math.inf


@pytest.mark.parametrize(("pipelines", "failed", "slots"), [
    (3, (0, 0, 0, 0), 9), (3, (0, 0, 1, 0), 12), (3, (0, 1, 1, 0), 15), (3, (0, 0, 2, 0), 21), (3, (0, 0, 3, 0), math.inf),
])
def test_rerouting_adds_the_lost_work_stage_by_stage(pipelines: int, failed: tuple[int, ...], slots: float):
    assert rerouted_slots(pipelines, 4, 6, failed) == slots


@pytest.mark.parametrize("micro_batches", [1, 4, 6, 16])
def test_of_equal_stages_the_dynamic_program_gives_the_symmetric_form(micro_batches: int):
    assert pipeline_units((2, 2, 2, 2), micro_batches) == symmetric_slots(4, micro_batches) * 6


def test_a_stage_holds_state_and_the_activations_in_flight():
    assert stage_bytes(3, 1, 4, parameter_bytes=10, optimizer_bytes=20, activation_bytes=5) == 3 * 40 + 3 * 3 * 5


@pytest.mark.parametrize(("nodes", "layers", "micro_batches"), [(4, 5, 4), (5, 6, 5), (6, 5, 4), (7, 4, 6)])
def test_the_search_finds_what_trying_everything_finds(nodes: int, layers: int, micro_batches: int):
    found = fastest_plan(nodes, layers, micro_batches, lengths=range(1, 5))
    assert found is not None
    assert found.units == brute_force(nodes, layers, micro_batches)
    assert sum(found.shares) == micro_batches
    assert all(sum(stages) == layers for stages in found.stages)


def test_a_node_that_holds_too_little_excludes_short_pipelines():
    found = fastest_plan(7, 8, 8, lengths=range(1, 8), most_layers=2)
    assert found is not None
    assert max(max(stages) for stages in found.stages) == 2
    assert fastest_plan(3, 8, 8, lengths=range(1, 8), most_layers=2) is None


def brute_force(nodes: int, layers: int, micro_batches: int) -> float:
    """All lengths up to 4, all ways to hand out what is left of the batch, all ways to place extra layers."""
    best = math.inf
    for count in range(1, nodes + 1):
        for parts in product(range(1, min(4, layers) + 1), repeat=count):
            if sum(parts) != nodes or count > micro_batches:
                continue
            floors = [micro_batches * part // nodes for part in parts]
            for extra in product(range(micro_batches + 1), repeat=count):
                shares = [floor + more for floor, more in zip(floors, extra, strict=True)]
                if sum(shares) == micro_batches and min(shares) > 0:
                    best = min(best, max(best_pipeline(layers, p, m) for p, m in zip(parts, shares, strict=True)))
    return best


def best_pipeline(layers: int, length: int, micro_batches: int) -> float:
    each = layers // length
    return min(
        pipeline_units(tuple(each + more for more in extra), micro_batches)
        for extra in product((0, 1), repeat=length) if sum(extra) == layers - each * length
    )
