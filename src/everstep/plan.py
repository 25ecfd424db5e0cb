"""Who holds what, and which way each micro-batch goes.

A plan is *placement* (the layers each node holds; holding more than one computes is redundancy, holding none is being a
spare), *routes* (for each micro-batch the hops that it visits, and the node that shadows a hop by computing its forward
too), and *order* (how the actions of a node are arranged). Every recovery policy is a plan of this shape: rerouting is
another route, re-partitioning another placement, redundancy an extra placement with shadowed hops.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from everstep.quantities import NodeId, node_number
from everstep.view import View


@dataclass(frozen=True, slots=True)
class Hop:
    """One stop of a micro-batch: ``node`` computes the layers ``first`` up to, not including, ``end``."""

    node: NodeId
    first: int
    end: int
    shadow: NodeId | None = None

    @property
    def layers(self) -> range:
        return range(self.first, self.end)

    def __str__(self) -> str:
        shadow = f"~{self.shadow}" if self.shadow else ""
        return f"{self.node}[{self.first}:{self.end}]{shadow}"


Route = tuple[Hop, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How a node arranges its actions."""

    split: bool = False
    """Backward for inputs (B) and for weights (W) as two actions, so that W can fill bubbles."""
    extra_slots: int = 0
    """Micro-batches that a node may hold activations of, beyond what 1F1B holds."""
    staggered: bool = False
    """A stage applies its update when its own sums are complete, and can take it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Placement, routes and order for a model of ``num_layers`` layers."""

    num_layers: int
    placement: Mapping[NodeId, tuple[int, ...]]
    routes: tuple[Route, ...]
    order: Order = field(default_factory=Order)
    room: Mapping[NodeId, int] = field(default_factory=dict)
    """Layers' activations that a node may hold at once, a micro-batch counting once for each layer of its hop. Absent: as
    ``order`` says."""

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Everybody in the plan, spares included, ``n2`` before ``n10``."""
        return tuple(sorted(self.placement, key=node_number))

    @property
    def spares(self) -> tuple[NodeId, ...]:
        """Nodes that compute nothing."""
        busy = {hop.node for route in self.routes for hop in route}
        return tuple(node for node in self.nodes if node not in busy)

    def holders(self, layer: int) -> tuple[NodeId, ...]:
        """The nodes that hold ``layer``, in the order of their numbers: its reduction group."""
        return tuple(node for node in self.nodes if layer in self.placement[node])

    def pipelines(self) -> dict[Route, tuple[int, ...]]:
        """Distinct routes and the micro-batches that take each."""
        found: dict[Route, list[int]] = {}
        for micro_batch, route in enumerate(self.routes):
            found.setdefault(route, []).append(micro_batch)
        return {route: tuple(members) for route, members in found.items()}

    def lost_layers(self, lost: frozenset[NodeId]) -> tuple[int, ...]:
        """Layers that nobody holds any more once ``lost`` are gone."""
        return tuple(layer for layer in range(self.num_layers) if lost.issuperset(self.holders(layer)))

    def hash(self) -> str:
        """What the store keeps of a large plan: SHA-256 of its canonical JSON."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()

    def __str__(self) -> str:
        lines = [
            f"{' → '.join(map(str, route))}  ×{len(members)}" for route, members in self.pipelines().items()
        ]
        if self.spares:
            lines.append(f"spare: {', '.join(self.spares)}")
        return "\n".join(lines)


def problems(plan: Plan, view: View, num_layers: int) -> list[str]:
    """Everything wrong with ``plan``; an empty list means it may run."""
    found: list[str] = []
    if plan.num_layers != num_layers:
        found.append(f"the plan is for {plan.num_layers} layers, the model has {num_layers}")
    found += [f"{node} is in the plan, not in view {view.number}" for node in plan.nodes if node not in view]
    found += [f"{node} is in view {view.number}, not in the plan" for node in view.nodes if node not in plan.placement]
    for node, layers in plan.placement.items():
        if any(not 0 <= layer < num_layers for layer in layers):
            found.append(f"{node} holds layers outside 0..{num_layers - 1}: {layers}")
        if tuple(sorted(set(layers))) != tuple(layers):
            found.append(f"{node}: layers must be ascending and once each, got {layers}")
    found += [f"nobody holds layer {layer}" for layer in range(num_layers) if not plan.holders(layer)]
    if not plan.routes:
        found.append("the plan has no routes")
    for micro_batch, route in enumerate(plan.routes):
        found += _route_problems(plan, micro_batch, route, num_layers)
    return found


def _route_problems(plan: Plan, micro_batch: int, route: Route, num_layers: int) -> list[str]:
    found: list[str] = []
    expected = 0
    for hop in route:
        if hop.first != expected or hop.end <= hop.first:
            found.append(f"micro-batch {micro_batch}: {hop} should begin at layer {expected}")
        expected = hop.end
        for node in (hop.node, hop.shadow):
            if node is not None and not set(hop.layers) <= set(plan.placement.get(node, ())):
                found.append(f"micro-batch {micro_batch}: {node} does not hold all of {hop}")
    if expected != num_layers:
        found.append(f"micro-batch {micro_batch}: the route ends at layer {expected} of {num_layers}")
    nodes = [hop.node for hop in route]
    if len(set(nodes)) != len(nodes):
        found.append(f"micro-batch {micro_batch}: visits a node twice")
    return found


def even_placement(nodes: tuple[NodeId, ...], bounds: tuple[tuple[int, int], ...]) -> dict[NodeId, tuple[int, ...]]:
    """One pipeline: node ``k`` of ``nodes`` holds the layers ``bounds[k]`` (first, end)."""
    return {node: tuple(range(first, end)) for node, (first, end) in zip(nodes, bounds, strict=True)}
