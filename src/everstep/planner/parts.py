"""A plan cut into parts that share no node, so that what is alike is looked at once, whatever the number of nodes.

A part with a single route is a plain pipeline. Thousands of pipelines that are alike share one ``shape``: they take the same
time and the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep.plan import Plan, Route
from everstep.quantities import NodeId, UnitName
from everstep.workload import Workload


@dataclass(frozen=True, slots=True)
class Part:
    """Distinct routes that share nodes, and the micro-batches that take each, ascending."""

    routes: tuple[Route, ...]
    micro_batches: tuple[tuple[int, ...], ...]

    @property
    def is_plain(self) -> bool:
        return len(self.routes) == 1

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(dict.fromkeys(hop.node for route in self.routes for hop in route))

    def in_order(self) -> list[tuple[int, Route]]:
        """Micro-batches with their routes, ascending."""
        pairs = [(m, route) for route, members in zip(self.routes, self.micro_batches, strict=True) for m in members]
        return sorted(pairs, key=lambda pair: pair[0])


def grouped(routes: Sequence[Route]) -> dict[Route, list[int]]:
    """Distinct routes and the micro-batches of each. Routes that are one object are compared as objects first."""
    by_object: dict[int, list[int]] = {}
    for micro_batch, name in enumerate(map(id, routes)):
        if name in by_object:
            by_object[name].append(micro_batch)
        else:
            by_object[name] = [micro_batch]
    found: dict[Route, list[int]] = {}
    for members in by_object.values():
        route = routes[members[0]]
        if route in found:
            found[route] = sorted([*found[route], *members])
        else:
            found[route] = members
    return found


def parts(plan: Plan, num_micro_batches: int | None = None) -> list[Part]:
    """The parts of ``plan``, or of its first ``num_micro_batches``, each with the first micro-batch that takes it first."""
    found = grouped(plan.routes if num_micro_batches is None else plan.routes[:num_micro_batches])
    part_of: dict[NodeId, list[Route]] = {}
    for route in found:
        met = {id(part_of[hop.node]): part_of[hop.node] for hop in route if hop.node in part_of}
        if not met:
            whole = [route]
            part_of.update((hop.node, whole) for hop in route)
            continue
        whole, *others = met.values()
        whole.append(route)
        for other in others:
            whole += other
        touched = [route, *(member for other in others for member in other)]
        part_of.update((hop.node, whole) for member in touched for hop in member)
    unique = {id(routes): routes for routes in part_of.values()}
    return [
        Part(routes=tuple(routes), micro_batches=tuple(tuple(found[route]) for route in routes)) for routes in unique.values()
    ]


Kind = tuple[tuple[int, ...], float]
"""What a node holds, and its speed."""


def kinds_of(plan: Plan, speeds: Mapping[NodeId, float] | None = None) -> dict[Kind, list[NodeId]]:
    """The nodes of ``plan`` by what they hold and how fast they are; ``speeds`` None: by what they hold alone."""
    found: dict[Kind, list[NodeId]] = {}
    for node, layers in plan.placement.items():
        found.setdefault((layers, speeds[node] if speeds else 1.0), []).append(node)
    return found


def holders_by_unit(kinds: Sequence[Kind], workload: Workload) -> dict[UnitName, tuple[int, ...]]:
    """For each unit the indices of the ``kinds`` that hold it."""
    by_layer: list[list[int]] = [[] for _ in workload.layers]
    for index, (layers, _) in enumerate(kinds):
        for layer in layers:
            by_layer[layer].append(index)
    return {
        name: tuple(by_layer[unit.layers[0]]) if len(unit.layers) == 1
        else tuple(sorted({index for layer in unit.layers for index in by_layer[layer]}))
        for name, unit in workload.units.items()
    }


def units_by_layers(held: Iterable[tuple[int, ...]], workload: Workload) -> dict[tuple[int, ...], frozenset[UnitName]]:
    """For each tuple of layers the units that a holder of them holds."""
    kinds = [(layers, 1.0) for layers in dict.fromkeys(held)]
    units: list[list[UnitName]] = [[] for _ in kinds]
    for name, indices in holders_by_unit(kinds, workload).items():
        for index in indices:
            units[index].append(name)
    return {layers: frozenset(names) for (layers, _), names in zip(kinds, units, strict=True)}
