"""Costs guessed from bytes, and replaced by what was measured."""

from __future__ import annotations

import pytest

from everstep.planner.step.measure import from_bytes, measured
from everstep.quantities import UnitName
from everstep.workload import Unit, problems

from .worlds import node

UNITS = {
    UnitName("small"): Unit(name=UnitName("small"), layers=(0,), parameter_bytes=1_000, state_bytes=3_000),
    UnitName("large"): Unit(name=UnitName("large"), layers=(1,), parameter_bytes=4_000_000, state_bytes=12_000_000),
}
GUESS = from_bytes(["a", "b"], UNITS, num_micro_batches=4, output_bytes=[8, 0], activation_bytes=[16, 32])


def test_a_guess_grows_with_the_bytes_of_a_layer_and_has_a_constant_part() -> None:
    small, large = GUESS.layers
    assert 0 < small.forward_s < large.forward_s < 4_000 * small.forward_s
    assert (small.output_bytes, large.activation_bytes) == (8, 32)
    assert not GUESS.measured and problems(GUESS) == []


def test_the_first_measurement_replaces_the_guess() -> None:
    times = {node(0): {"F:a": 1.0, "B:a": 2.0, "W:a": 3.0, "U:small": 0.5}, node(1): {"F:b": 4.0, "B:b": 5.0, "W:b": 6.0}}
    first, second = measured(GUESS, times).layers
    assert (first.forward_s, first.backward_input_s, first.backward_weight_s, first.optimizer_s) == (1.0, 2.0, 3.0, 0.5)
    assert (second.forward_s, second.backward_input_s, second.backward_weight_s) == (4.0, 5.0, 6.0)


def test_later_measurements_are_averaged_in() -> None:
    once = measured(GUESS, {node(0): {"F:a": 1.0, "B:a": 2.0, "W:a": 2.0}})
    twice = measured(once, {node(0): {"F:a": 2.0, "B:a": 4.0}}, weight=0.25)
    assert twice.layers[0].forward_s == 1.25


def test_once_measured_a_split_backward_changes_how_time_is_divided_and_not_how_much_it_is() -> None:
    once = measured(GUESS, {node(0): {"F:a": 1.0, "B:a": 4.0, "F:b": 1.0, "B:b": 2.0}})
    split = {node(0): {"F:a": 2.0, "B:a": 6.0, "W:a": 2.0, "F:b": 2.0, "B:b": 2.0, "W:b": 2.0}}
    found = measured(once, split, weight=1.0)
    assert sum(layer.total_s for layer in found.layers) == pytest.approx(8.0)
    first = found.layers[0]
    assert first.backward_input_s == pytest.approx(3 * first.backward_weight_s)


def test_a_fused_backward_is_halved() -> None:
    layer = measured(GUESS, {node(0): {"F:a": 1.0, "B:a": 4.0}}).layers[0]
    assert (layer.backward_input_s, layer.backward_weight_s) == (2.0, 2.0)


def test_replicas_are_averaged_also_when_one_splits_and_one_does_not() -> None:
    times = {node(0): {"F:a": 1.0, "B:a": 4.0}, node(1): {"F:a": 3.0, "B:a": 4.0, "W:a": 2.0}}
    layer = measured(GUESS, times).layers[0]
    assert (layer.forward_s, layer.backward_input_s, layer.backward_weight_s) == (2.0, 3.0, 2.0)


def test_a_layer_that_was_not_measured_keeps_its_guess_in_proportion() -> None:
    workload = measured(GUESS, {node(0): {"F:a": 1.0, "B:a": 1.0, "W:a": 1.0}})
    guessed = GUESS.layers[1].total_s / GUESS.layers[0].total_s
    assert workload.layers[1].total_s / workload.layers[0].total_s == pytest.approx(guessed)


def test_times_of_no_layer_change_nothing() -> None:
    assert measured(GUESS, {node(0): {"step": 0.2}}) == GUESS
