"""Chameleon: two policies and one rule, after the equations of its performance model.

A step is measured in slots of one micro-batch's forward and backward on one stage. D pipelines of P stages do M
micro-batches each.

- Equation 8: ``score = B / step_s · (window_s - transition_s) / window_s``; the larger wins.
- Equation 9: a symmetric plan takes ``P + M - 1`` slots. Equation 10: an asymmetric one as long as its slowest pipeline,
  which equation 11 finds along the 1F1B order.
- Equation 13: rerouting adds ``sum over stages of M·F_s / (D - F_s)``; equation 12 is the case of one loss.
- Equation 14: a stage of l layers with i stages ahead needs ``l·(2·parameters + optimizer) + (P - i)·l·activations``.

Algorithm 1 looks for the fastest asymmetric plan and for nothing else: see ``fastest_plan``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from everstep.planner.step.pipelines import stage_ends_s


def score(batch: float, step_s: float, transition_s: float, window_s: float) -> float:
    """Equation 8. A candidate that would not be through before the window ends is worth nothing."""
    return batch / step_s * max(0.0, window_s - transition_s) / window_s


def break_even_s(transition_s: float, step_s: float, rerouted_step_s: float) -> float:
    """The window from which on a transition to ``step_s`` pays, against rerouting at ``rerouted_step_s`` without one."""
    return math.inf if step_s >= rerouted_step_s else transition_s / (1 - step_s / rerouted_step_s)


def symmetric_slots(num_stages: int, micro_batches: float) -> float:
    """Equation 9."""
    return num_stages + micro_batches - 1


def rerouted_slots(num_pipelines: int, num_stages: int, micro_batches: float, failed: Sequence[int]) -> float:
    """Equations 12 and 13; infinite when a stage has nobody left. ``failed``: by stage."""
    if any(count >= num_pipelines for count in failed):
        return math.inf
    extra = sum(micro_batches * count / (num_pipelines - count) for count in failed)
    return symmetric_slots(num_stages, micro_batches) + extra


def stage_bytes(
    num_layers: int, stage: int, num_stages: int, *, parameter_bytes: float, optimizer_bytes: float, activation_bytes: float,
) -> float:
    """Equation 14, bytes a layer on average; ``stage`` counts from 0."""
    return num_layers * (2 * parameter_bytes + optimizer_bytes) + (num_stages - stage) * num_layers * activation_bytes


def pipeline_units(layers: tuple[int, ...], micro_batches: int, forward: float = 1.0, backward: float = 2.0) -> float:
    """Equation 11: the end of a 1F1B schedule over stages of so many ``layers``; ``forward``, ``backward`` of one layer."""
    depth = len(layers)
    orders = [list(_one_f_one_b(depth - stage, micro_batches)) for stage in range(depth)]
    position, clock = [0] * depth, [0.0] * depth
    ends: dict[tuple[str, int, int], float] = {}
    stage, idle = 0, 0
    while idle < depth:
        if position[stage] == len(orders[stage]):
            idle, stage = idle + 1, (stage + 1) % depth
            continue
        kind, number = orders[stage][position[stage]]
        need = (kind, stage - 1, number) if kind == "F" else (kind, stage + 1, number)
        is_first = stage == (0 if kind == "F" else depth - 1)
        if not is_first and need not in ends:
            idle, stage = idle + 1, (stage + 1) % depth
            continue
        begin = max(clock[stage], 0.0 if is_first else ends[need])
        clock[stage] = ends[kind, stage, number] = begin + layers[stage] * (forward if kind == "F" else backward)
        position[stage] += 1
        idle = 0
    return max(clock)


def _one_f_one_b(warm_up: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    warm_up = min(warm_up, micro_batches)
    yield from (("F", number) for number in range(warm_up))
    for number in range(micro_batches):
        yield "B", number
        if warm_up + number < micro_batches:
            yield "F", warm_up + number


@dataclass(frozen=True, slots=True)
class DynamicPlan:
    """Lengths of the pipelines, layers of their stages and micro-batches, and the end of the slowest."""

    stages: tuple[tuple[int, ...], ...]
    shares: tuple[int, ...]
    units: float


def fastest_plan(
    num_nodes: int, num_layers: int, micro_batches: int, lengths: Sequence[int], *, most_layers: int | None = None,
) -> DynamicPlan | None:
    """Algorithm 1: all survivors in pipelines of allowed ``lengths``, the batch in proportion, layers spread evenly.

    The remainders of batch and layers are tried in every way that can matter: pipelines do not depend on each other once
    their micro-batches are known, so each takes its best placing of extra layers, and leftover micro-batches go where the
    slowest pipeline stays fastest. ``most_layers``: of one node. None: nothing fits.
    """
    best: DynamicPlan | None = None
    for parts in _partitions(num_nodes, tuple(sorted(lengths, reverse=True))):
        if len(parts) > micro_batches or any(part > num_layers for part in parts):
            continue
        if most_layers is not None and any(-(-num_layers // part) > most_layers for part in parts):
            continue
        shares = _shared_out(parts, num_nodes, num_layers, micro_batches)
        found = [_best_even(num_layers, part, share) for part, share in zip(parts, shares, strict=True)]
        units = max(ended for ended, _ in found)
        if best is None or units < best.units:
            best = DynamicPlan(tuple(stages for _, stages in found), shares, units)
    return best


def _partitions(total: int, lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for index, length in enumerate(lengths):
        if length <= total:
            for rest in _partitions(total - length, lengths[index:]):
                yield (length, *rest)


def _shared_out(parts: Sequence[int], num_nodes: int, num_layers: int, micro_batches: int) -> tuple[int, ...]:
    shares = [micro_batches * part // num_nodes for part in parts]
    for _ in range(micro_batches - sum(shares)):
        index = min(range(len(parts)), key=lambda d: _best_even(num_layers, parts[d], shares[d] + 1)[0])
        shares[index] += 1
    while 0 in shares:
        shares[shares.index(max(shares))] -= 1
        shares[shares.index(0)] += 1
    return tuple(shares)


@lru_cache(maxsize=4096)
def _best_even(num_layers: int, length: int, micro_batches: int) -> tuple[float, tuple[int, ...]]:
    """The best of all ways to give ``num_layers % length`` stages one layer more, tried all at once."""
    each, more = divmod(num_layers, length)
    placings = [
        tuple(each + (stage in longer) for stage in range(length)) for longer in combinations(range(length), more)
    ]
    layers, count = np.array(placings, dtype=np.float64), len(placings)
    ends = stage_ends_s(
        layers, 2 * layers, np.zeros_like(layers), np.full(count, length), np.full(count, micro_batches),
    ).max(axis=1)
    return min(zip(ends.tolist(), placings, strict=True))
