"""What it costs to compute forwards a second time, so that a neighbour can take over at once.

A node that shadows hops does their forwards beside its own work. They are spread evenly over the micro-batches that it
computes itself, each of which takes that much longer forward. What a shadow computes is moved out of the way, so it holds
no activations; what it holds of state is its placement's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.plan import Route
from everstep.planner.remembered import remembered
from everstep.planner.step.parts import grouped
from everstep.quantities import NodeId


@remembered(32)
def has_shadows(routes: tuple[Route, ...]) -> bool:
    return bool([hop for route in grouped(routes).routes for hop in route if hop.shadow is not None])


@remembered(32)
def shadowed(routes: tuple[Route, ...]) -> Mapping[NodeId, Sequence[tuple[int, int, float]]]:
    """By node that shadows and computes: layer ranges, and how many shadowed micro-batches there are for each of its own."""
    if not has_shadows(routes):
        return {}
    visits: dict[NodeId, int] = {}
    found: dict[NodeId, list[tuple[int, int, int]]] = {}
    for route, members in grouped(routes).items():
        for hop in route:
            visits[hop.node] = visits.get(hop.node, 0) + len(members)
            if hop.shadow is not None:
                found.setdefault(hop.shadow, []).append((hop.first, hop.end, len(members)))
    return {
        node: [(first, end, count / visits[node]) for first, end, count in ranges]
        for node, ranges in found.items() if node in visits
    }


def shadow_seconds(routes: tuple[Route, ...], forward_s: Sequence[float]) -> dict[NodeId, float]:
    """By node, how much longer each forward of its own takes at speed 1. ``forward_s``: running sums over the layers."""
    return {
        node: sum(share * (forward_s[end] - forward_s[first]) for first, end, share in ranges)
        for node, ranges in shadowed(routes).items()
    }
