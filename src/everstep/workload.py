"""What has to be computed: layers with their costs, units of state, and the batch.

A *layer* is the unit of placement; a *unit* is the piece of state that moves: a layer's own parameters and buffers, or
a tie group that several layers use. A tie group is held by every node that holds one of its layers, and is lost only
when all of them are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.quantities import UnitName


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer costs for one micro-batch, on a node of speed 1. Times in seconds of one core or device."""

    name: str
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    output_bytes: int = 0
    """What the next layer is sent (and what its gradient weighs on the way back)."""
    activation_bytes: int = 0
    """What stays in memory from the forward of a micro-batch until its weight gradient is done."""
    optimizer_s: float = 0.0
    """The update of the layer's own units, once a step on each holder."""

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_input_s + self.backward_weight_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A piece of state. ``layers`` are the indices of the layers that use it (one, or the members of a tie group)."""

    name: UnitName
    layers: tuple[int, ...]
    parameter_bytes: int
    state_bytes: int
    """What moves: parameters, buffers and optimizer state."""
    gradient_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """What a holder keeps in memory: state and gradient sum."""
        return self.state_bytes + self.gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Processor time of a step that is no layer's. It counts where nodes share cores; elsewhere messages and sums take the
    time of links, beside the work."""

    node_s: float = 0.0
    """Of every node in the plan: the exchange that commits the step, the loop around it, its share of looking after itself."""
    message_s: float = 0.0
    """At each end of a message to a neighbour and of its answer: an activation and its gradient."""
    summed_byte_s: float = 0.0
    """Of a byte of gradients that a member of a group sends, adds up and receives."""

    def seconds(self, message_ends: int, summed_bytes: float) -> float:
        """Of one node in a step."""
        return self.node_s + self.message_s * message_ends + self.summed_byte_s * summed_bytes

    def times(self, ratio: float) -> Beside:
        """All of it so many times longer."""
        return Beside(
            node_s=self.node_s * ratio, message_s=self.message_s * ratio, summed_byte_s=self.summed_byte_s * ratio,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Layers in order, units by name, and the global batch as ``num_micro_batches`` times ``micro_batch_samples``."""

    layers: tuple[LayerCost, ...]
    units: Mapping[UnitName, Unit]
    num_micro_batches: int
    micro_batch_samples: int = 1
    fixed_s: float = 0.0
    """What a step costs besides: the exchange, the loop around it."""
    beside: Beside = field(default_factory=Beside)
    """What nodes that share cores do besides."""
    measured: bool = False
    """False while times are only bytes in disguise."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def batch(self) -> int:
        """Samples a full step trains on."""
        return self.num_micro_batches * self.micro_batch_samples

    def units_of(self, layers: frozenset[int] | set[int]) -> frozenset[UnitName]:
        """The units that a holder of ``layers`` holds."""
        return frozenset(name for name, unit in self.units.items() if not layers.isdisjoint(unit.layers))

    def held_bytes(self, layers: frozenset[int] | set[int]) -> int:
        """Memory for the state of ``layers``, each unit once."""
        return sum(self.units[name].held_bytes for name in self.units_of(layers))


def problems(workload: Workload) -> list[str]:
    """Everything wrong with ``workload``; an empty list means it can be planned for."""
    found = [] if workload.layers else ["a workload needs at least one layer"]
    if workload.num_micro_batches < 1 or workload.micro_batch_samples < 1:
        found.append(
            f"need at least one micro-batch of one sample, got {workload.num_micro_batches} of {workload.micro_batch_samples}"
        )
    names = [layer.name for layer in workload.layers]
    found += [f"two layers are called {name}" for name, count in sorted(Counter(names).items()) if count > 1]
    for layer in workload.layers:
        figures = (layer.forward_s, layer.backward_input_s, layer.backward_weight_s, layer.optimizer_s,
                   layer.output_bytes, layer.activation_bytes)
        if min(figures) < 0:
            found.append(f"layer {layer.name}: times and bytes cannot be negative")
    if min(workload.beside.node_s, workload.beside.message_s, workload.beside.summed_byte_s) < 0:
        found.append(f"times cannot be negative, got {workload.beside}")
    for name, unit in workload.units.items():
        if unit.name != name:
            found.append(f"unit {name} is filed under another name: {unit.name}")
        if not unit.layers or not all(0 <= index < len(names) for index in unit.layers):
            found.append(f"unit {name}: layers must be in 0..{len(names) - 1}, got {unit.layers}")
        if min(unit.parameter_bytes, unit.state_bytes, unit.gradient_bytes) < 0:
            found.append(f"unit {name}: bytes cannot be negative")
    return found
