"""A pretend model: what training would make of it, with hashes in place of numbers.

Each unit has a *value* and *bits*. The value after a step follows from the value before, the set of contributions and the
clip factor, so it is the same on any placement if and only if each micro-batch was counted once and with the right
parameters; ``reference`` gives it for the undisturbed run. The bits follow from who added the sums up, and in which view:
sums made twice differ in them, so holders of a unit must have copied and not added again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from everstep.protocol.commit import clip_factor, count
from everstep.protocol.messages import Union, UnitSums
from everstep.quantities import NodeId, UnitName

Pair = tuple[int, int]
"""(layer, micro-batch): one use of a unit in one micro-batch."""


def digest(*parts: object) -> str:
    return hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class State:
    """What a holder has of a unit."""

    value: str
    bits: str


@dataclass(frozen=True, slots=True)
class Reduced:
    """Sums of a unit over all of its holders: what was counted, and whose addition it was."""

    contributions: Mapping[Pair, str]
    bits: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Units and the layers that use them."""

    num_layers: int
    units: Mapping[UnitName, tuple[int, ...]]
    chunks: Mapping[UnitName, int]
    """In how many pieces a unit's sums are reduced."""
    micro_batches: int
    clip_norm: float

    def units_of(self, layers: Iterable[int]) -> tuple[UnitName, ...]:
        wanted = set(layers)
        return tuple(unit for unit, users in self.units.items() if not wanted.isdisjoint(users))

    @property
    def pairs(self) -> dict[UnitName, tuple[str, ...]]:
        """Unit → its uses, as the exchange counts them."""
        return {unit: tuple(map(use_name, layers)) for unit, layers in self.units.items()}

    def initial(self, unit: UnitName) -> State:
        return State(digest("initial", unit), digest("initial bits", unit))

    def forward(self, trace: str, layer: int, states: Mapping[UnitName, str]) -> str:
        """``trace`` after ``layer``: depends on the value of every unit that the layer uses."""
        return digest(trace, layer, *(states[unit] for unit in self.units_of([layer])))

    def sums(self, reduced: Reduced) -> UnitSums:
        """What a record says of a unit."""
        pairs: dict[str, tuple[int, ...]] = {}
        for layer, micro_batch in sorted(reduced.contributions):
            pairs[use_name(layer)] = (*pairs.get(use_name(layer), ()), micro_batch)
        square_norm = int(digest(*_in_order(reduced.contributions))[:6], 16) / 2**20
        return UnitSums(pairs=pairs, square_norms={"weight": square_norm})

    def apply(self, state: State, reduced: Reduced, union: Union) -> State:
        """A unit after the step that ``union`` commits."""
        factor = clip_factor(union, self.clip_norm, count(union))
        return State(
            digest(state.value, *_in_order(reduced.contributions), factor),
            digest(state.bits, reduced.bits, factor),
        )


def use_name(layer: int) -> str:
    return f"layer{layer}"


def contribution(step: int, micro_batch: int, layer: int, trace: str) -> str:
    """What one use of a unit in one micro-batch adds to its sums. ``trace`` is that of the whole forward."""
    return digest("gradient", step, micro_batch, layer, trace)


def loss(micro_batch: int, trace: str) -> tuple[float, float]:
    """Sum and count."""
    return int(digest(micro_batch, trace)[:6], 16) / 2**20, 2.0


def reference(model: Model, num_steps: int) -> list[dict[UnitName, str]]:
    """The value of each unit after 0, 1, … ``num_steps`` steps of the undisturbed run."""
    states = {unit: model.initial(unit) for unit in model.units}
    line = [{unit: state.value for unit, state in states.items()}]
    for step in range(num_steps):
        traces = {micro_batch: _whole_forward(model, step, micro_batch, line[-1]) for micro_batch in range(model.micro_batches)}
        reduced = {
            unit: Reduced(
                {(layer, m): contribution(step, m, layer, trace) for layer in layers for m, trace in traces.items()}, "",
            )
            for unit, layers in model.units.items()
        }
        union = Union(
            view=0, step=step, attempt=0, units={unit: model.sums(sums) for unit, sums in reduced.items()},
            losses={m: loss(m, trace) for m, trace in traces.items()}, flags=(), times={NodeId("one"): {}},
        )
        states = {unit: model.apply(state, reduced[unit], union) for unit, state in states.items()}
        line.append({unit: state.value for unit, state in states.items()})
    return line


def first_trace(step: int, micro_batch: int) -> str:
    return digest("sample", step, micro_batch)


def _whole_forward(model: Model, step: int, micro_batch: int, states: Mapping[UnitName, str]) -> str:
    trace = first_trace(step, micro_batch)
    for layer in range(model.num_layers):
        trace = model.forward(trace, layer, states)
    return trace


def _in_order(contributions: Mapping[Pair, str]) -> list[str]:
    return [f"{pair}{contributions[pair]}" for pair in sorted(contributions)]
