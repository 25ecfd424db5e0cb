"""What layers cost: guessed from bytes before anything ran, then from what the nodes measured.

Measured times are seconds of processor time, so a node that shares its core with others reports the same as one that does
not. ``F:layer``, ``B:layer`` and ``W:layer`` are per micro-batch, ``U:unit`` is per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from everstep.quantities import NodeId, UnitName
from everstep.workload import LayerCost, Unit, Workload

GUESSED_LAYER_S = 1e-4
"""What any layer takes forward, before anything is measured."""

GUESSED_BYTES_PER_S = 4e9
"""Bytes of parameters that a forward goes through in a second, before anything is measured."""


def from_bytes(
    layers: Sequence[str], units: Mapping[UnitName, Unit], *, num_micro_batches: int, micro_batch_samples: int = 1,
    output_bytes: Sequence[int] = (), activation_bytes: Sequence[int] = (), fixed_s: float = 0.0,
) -> Workload:
    """A workload whose times are bytes in disguise: a constant and a part that grows with a layer's parameters.

    Each backward half takes as long as the forward. A tie group's bytes count for each layer that uses it.
    ``output_bytes`` and ``activation_bytes`` are by layer; left out: none.
    """
    costs = []
    for index, name in enumerate(layers):
        parameters = sum(unit.parameter_bytes for unit in units.values() if index in unit.layers)
        state = sum(unit.state_bytes for unit in units.values() if index in unit.layers)
        forward_s = GUESSED_LAYER_S + parameters / GUESSED_BYTES_PER_S
        costs.append(LayerCost(
            name=name, forward_s=forward_s, backward_input_s=forward_s, backward_weight_s=forward_s,
            output_bytes=output_bytes[index] if output_bytes else 0,
            activation_bytes=activation_bytes[index] if activation_bytes else 0,
            optimizer_s=state / GUESSED_BYTES_PER_S,
        ))
    return Workload(
        layers=tuple(costs), units=dict(units), num_micro_batches=num_micro_batches,
        micro_batch_samples=micro_batch_samples, fixed_s=fixed_s,
    )


def measured(
    workload: Workload, times: Mapping[NodeId, Mapping[str, float]], weight: float = 0.3,
) -> Workload:
    """``workload`` moved towards ``times`` by ``weight``; what was guessed before is replaced whole.

    A node that reports ``B`` of a layer and no ``W`` computed both backwards in one: each gets half. Where the first
    measurement leaves a layer out, its guess is scaled like the guesses of the others.

    Splitting backward costs time of its own, so once something was measured, what split plans report changes how the time is
    divided and not how much it is in all: else each plan would be predicted by what the one before it did to backward. What
    splitting costs is learnt as the residual of its plan families (``calibrate``).
    """
    seen = _mean_times(times)
    if not any(key[0] in "FBW" for key in seen):
        return workload
    weight = weight if workload.measured else 1.0
    found = [_of_layer(layer.name, seen) for layer in workload.layers]
    scale = _scale(workload, found)
    if workload.measured and any(key.startswith("W:") for reported in times.values() for key in reported) and scale > 0:
        found = [None if new is None else (new[0] / scale, new[1] / scale, new[2] / scale) for new in found]
    layers = tuple(
        _moved(layer, new, weight, 1.0 if workload.measured else scale)
        for layer, new in zip(workload.layers, found, strict=True)
    )
    return replace(workload, layers=_with_updates(layers, workload, seen, weight), measured=True)


_Times = tuple[float, float, float]


def _mean_times(times: Mapping[NodeId, Mapping[str, float]]) -> dict[str, float]:
    """Over nodes. A fused backward is halved here, since only its own node knows that it was fused."""
    gathered: dict[str, list[float]] = {}
    for node_times in times.values():
        for key, seconds in node_times.items():
            kind, _, name = key.partition(":")
            if kind == "B" and f"W:{name}" not in node_times:
                gathered.setdefault(key, []).append(seconds / 2)
                gathered.setdefault(f"W:{name}", []).append(seconds / 2)
            elif kind in ("F", "B", "W", "U"):
                gathered.setdefault(key, []).append(seconds)
    return {key: fmean(values) for key, values in gathered.items()}


def _of_layer(name: str, seen: Mapping[str, float]) -> _Times | None:
    forward_s, input_s, weight_s = (seen.get(f"{kind}:{name}") for kind in "FBW")
    if forward_s is None or input_s is None or weight_s is None:
        return None
    return forward_s, input_s, weight_s


def _scale(workload: Workload, found: Sequence[_Times | None]) -> float:
    pairs = [(sum(new), layer.total_s) for layer, new in zip(workload.layers, found, strict=True) if new is not None]
    guessed_s = sum(guess for _, guess in pairs)
    return sum(new for new, _ in pairs) / guessed_s if guessed_s > 0 else 1.0


def _moved(layer: LayerCost, new: _Times | None, weight: float, scale: float) -> LayerCost:
    old = (layer.forward_s, layer.backward_input_s, layer.backward_weight_s)
    if new is None:
        forward_s, input_s, weight_s = (seconds * scale for seconds in old)
    else:
        forward_s, input_s, weight_s = (before + weight * (now - before) for before, now in zip(old, new, strict=True))
    return replace(layer, forward_s=forward_s, backward_input_s=input_s, backward_weight_s=weight_s)


def _with_updates(
    layers: tuple[LayerCost, ...], workload: Workload, seen: Mapping[str, float], weight: float,
) -> tuple[LayerCost, ...]:
    """The update of a unit counts for the first layer that uses it, so that a tie group counts once on most nodes."""
    found: dict[int, float] = {}
    for name, unit in workload.units.items():
        if f"U:{name}" in seen:
            first = min(unit.layers)
            found[first] = found.get(first, 0.0) + seen[f"U:{name}"]
    return tuple(
        replace(layer, optimizer_s=layer.optimizer_s + weight * (found[index] - layer.optimizer_s))
        if index in found else layer
        for index, layer in enumerate(layers)
    )
