"""A plan cut into parts that share no node, so that what is alike is looked at once, whatever the number of nodes.

A part with a single route is a plain pipeline. Thousands of them that are ``Alike`` take the same time and the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from everstep.plan import Plan, Route
from everstep.planner.remembered import remembered
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
        pairs.sort(key=itemgetter(0))
        return pairs


class Grouped(Mapping[Route, tuple[int, ...]]):
    """Distinct routes, in the order in which micro-batches take them first, and the micro-batches of each, ascending.

    A mapping that hashes a route only when it is asked for one that was not grouped: hashing hops takes longest.
    """

    __slots__ = ("_by_route", "_grouped", "micro_batches", "number", "routes")

    def __init__(
        self, grouped: Sequence[Route], routes: tuple[Route, ...], micro_batches: tuple[tuple[int, ...], ...],
        number: Mapping[int, int],
    ) -> None:
        """``number``: by ``id`` of every route in ``grouped`` an index into ``routes``."""
        self._grouped = grouped
        """Kept, so that no other object takes an ``id`` of these."""
        self.routes, self.micro_batches, self.number = routes, micro_batches, number
        self._by_route: dict[Route, int] | None = None

    def __getitem__(self, route: Route) -> tuple[int, ...]:
        number = self.number.get(id(route))
        if number is None:
            if self._by_route is None:
                self._by_route = {each: index for index, each in enumerate(self.routes)}
            number = self._by_route[route]
        return self.micro_batches[number]

    def __iter__(self) -> Iterator[Route]:
        return iter(self.routes)

    def __len__(self) -> int:
        return len(self.routes)


@remembered(64)
def grouped(routes: Sequence[Route]) -> Grouped:
    """``routes`` grouped. Those that are one object are compared as objects first."""
    by_object: dict[int, list[int]] = {}
    for micro_batch, name in enumerate(map(id, routes)):
        if name in by_object:
            by_object[name].append(micro_batch)
        else:
            by_object[name] = [micro_batch]
    objects = [routes[members[0]] for members in by_object.values()]
    if len({route[0].node if route else "" for route in objects}) == len(objects):  # no two begin alike: none are equal
        members = tuple(map(tuple, by_object.values()))
        return Grouped(routes, tuple(objects), members, dict(zip(by_object, range(len(objects)), strict=True)))
    numbers: dict[Route, int] = {}
    number: dict[int, int] = {}
    found: list[list[int]] = []
    for name, taken in by_object.items():
        index = number[name] = numbers.setdefault(routes[taken[0]], len(found))
        if index == len(found):
            found.append(taken)
        else:
            found[index] = sorted(found[index] + taken)
    return Grouped(routes, tuple(numbers), tuple(map(tuple, found)), number)


def parts(plan: Plan, num_micro_batches: int | None = None) -> tuple[Part, ...]:
    """The parts of ``plan``, or of its first ``num_micro_batches``, each with the first micro-batch that takes it first."""
    return _parts(plan.routes if num_micro_batches is None else plan.routes[:num_micro_batches])


@remembered(32)
def _parts(routes: tuple[Route, ...]) -> tuple[Part, ...]:
    found = grouped(routes)
    nodes = [hop.node for route in found.routes for hop in route]
    if len(set(nodes)) == len(nodes) and all(found.routes):  # no node is met twice: all are plain
        return tuple([Part((route,), (members,)) for route, members in zip(found.routes, found.micro_batches, strict=True)])
    part_of: dict[NodeId, list[Route]] = {}
    for route in found.routes:
        met = [part_of[hop.node] for hop in route if hop.node in part_of]
        if not met:
            whole = [route]
            for hop in route:
                part_of[hop.node] = whole
            continue
        whole, *others = {id(routes): routes for routes in met}.values()
        whole.append(route)
        for other in others:
            whole += other
        touched = [route, *(member for other in others for member in other)]
        part_of.update((hop.node, whole) for member in touched for hop in member)
    unique = {id(whole): whole for whole in [part_of[route[0].node] for route in found.routes if route]}
    members = [[found.micro_batches[found.number[id(route)]] for route in whole] for whole in unique.values()]
    return tuple([Part(tuple(whole), tuple(taken)) for whole, taken in zip(unique.values(), members, strict=True)])


@dataclass(frozen=True, slots=True)
class Alike:
    """Plain pipelines that are cut alike and take as many micro-batches each."""

    routes: tuple[Route, ...]
    num_micro_batches: int
    """Of each."""
    nodes: tuple[NodeId, ...]
    """Those of the first route, then those of the second, and so on."""


@remembered(32)
def alike(routes: tuple[Route, ...]) -> tuple[tuple[Alike, ...], tuple[Part, ...]]:
    """Plain pipelines by their shape, and the parts that are not plain."""
    found: dict[tuple[int, tuple[tuple[int, int], ...]], list[Route]] = {}
    others = []
    for part in _parts(routes):
        if part.is_plain:
            (route,), (members,) = part.routes, part.micro_batches
            found.setdefault((len(members), tuple([(hop.first, hop.end) for hop in route])), []).append(route)
        else:
            others.append(part)
    shapes = [
        Alike(tuple(same), count, tuple([hop.node for route in same for hop in route])) for (count, _), same in found.items()
    ]
    return tuple(shapes), tuple(others)


Kind = tuple[tuple[int, ...], float]
"""What a node holds, and its speed."""


def kinds_of(plan: Plan, speeds: Mapping[NodeId, float] | None = None) -> Mapping[Kind, Sequence[NodeId]]:
    """The nodes of ``plan`` by what they hold and how fast they are; ``speeds`` None: by what they hold alone."""
    by_layers = holders(plan.placement)
    if speeds is None:
        return {(layers, 1.0): nodes for layers, nodes in by_layers.items()}
    found: dict[Kind, list[NodeId]] = {}
    for layers, nodes in by_layers.items():
        for node in nodes:
            found.setdefault((layers, speeds[node]), []).append(node)
    return found


@remembered(64)
def holders(placement: Mapping[NodeId, tuple[int, ...]]) -> Mapping[tuple[int, ...], Sequence[NodeId]]:
    """The nodes by what they hold."""
    found: dict[tuple[int, ...], list[NodeId]] = {}
    for node, layers in placement.items():
        if layers in found:
            found[layers].append(node)
        else:
            found[layers] = [node]
    return found


@remembered(64)
def holder_counts(placement: Mapping[NodeId, tuple[int, ...]]) -> tuple[tuple[tuple[int, ...], int], ...]:
    """How many hold which layers."""
    return tuple(sorted((layers, len(nodes)) for layers, nodes in holders(placement).items()))


def holders_by_unit(kinds: Sequence[Kind], workload: Workload) -> dict[UnitName, tuple[int, ...]]:
    """For each unit the indices of the ``kinds`` that hold it."""
    by_unit: dict[UnitName, list[int]] = {name: [] for name in workload.units}
    held = Held.of(workload)
    for index, (layers, _) in enumerate(kinds):
        for name in held.units(layers):
            by_unit[name].append(index)
    return {name: tuple(indices) for name, indices in by_unit.items()}


class Held:
    """What holders of layers hold of one workload, worked out once for each tuple of layers."""

    def __init__(self, workload: Workload) -> None:
        self._units = workload.units
        self._by_layer: list[list[UnitName]] = [[] for _ in workload.layers]
        for name, unit in workload.units.items():
            for layer in unit.layers:
                self._by_layer[layer].append(name)
        self._known: dict[tuple[int, ...], frozenset[UnitName]] = {}
        self._held_bytes: dict[tuple[int, ...], int] = {}

    @staticmethod
    @remembered(16)
    def of(workload: Workload) -> Held:
        return Held(workload)

    def units(self, layers: tuple[int, ...]) -> frozenset[UnitName]:
        """The units that a holder of ``layers`` holds."""
        found = self._known.get(layers)
        if found is None:
            found = self._known[layers] = frozenset([name for layer in layers for name in self._by_layer[layer]])
        return found

    def held_bytes(self, layers: tuple[int, ...]) -> int:
        """Memory for their state and gradient sums."""
        found = self._held_bytes.get(layers)
        if found is None:
            found = self._held_bytes[layers] = sum(self._units[name].held_bytes for name in self.units(layers))
        return found


def units_by_layers(held: Iterable[tuple[int, ...]], workload: Workload) -> dict[tuple[int, ...], frozenset[UnitName]]:
    """For each tuple of layers the units that a holder of them holds."""
    known = Held.of(workload)
    return {layers: known.units(layers) for layers in held}
