"""Who takes which place of a layout: the assignment of nodes that moves the fewest bytes, given what each node holds.

Places of a site are for nodes of that site. Nodes that hold just what a place needs take it, which loses nothing; the
Hungarian method does the rest. Then nodes of different hosts change places where all holders of a layer would be on one host,
if no more bytes move: the loss of a host takes all of its nodes at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
from scipy.optimize import linear_sum_assignment

from everstep.cluster import Cluster
from everstep.plan import Hop, Order, Plan
from everstep.planner.layouts.catalogue import Layout
from everstep.planner.remembered import remembered
from everstep.planner.step.parts import units_by_layers
from everstep.planner.step.pipelines import Array
from everstep.quantities import HostId, NodeId, UnitName
from everstep.workload import Workload

ASSIGNED_TOGETHER = 2048
"""So many nodes are assigned to places at once; more in turns of so many, which may miss the fewest bytes."""

Holds = Mapping[NodeId, frozenset[UnitName]]


def assigned(layout: Layout, nodes: Sequence[NodeId], workload: Workload, cluster: Cluster, holds: Holds) -> list[NodeId]:
    """The node for each new place of ``layout``. Equal choices follow the order of ``nodes``."""
    staying = {hop.node for route in layout.kept for hop in route}
    free = [node for node in nodes if node not in staying]
    layers = [tuple(range(*bounds)) for bounds in layout.places]
    units = units_by_layers(layers, workload)
    wanted = [units[some] for some in layers]
    if not layout.sites:
        return apart(layout, assign(wanted, free, workload, holds), wanted, free, workload, cluster, holds)
    sites = [site for some in layout.sites for site in some]
    chosen: dict[int, NodeId] = {}
    for site in dict.fromkeys(sites):
        places = [place for place, name in enumerate(sites) if name == site]
        here = [node for node in free if cluster.nodes[node].site == site]
        chosen |= zip(places, assign([wanted[place] for place in places], here, workload, holds), strict=True)
    return apart(layout, [chosen[place] for place in range(len(wanted))], wanted, free, workload, cluster, holds)


def apart(
    layout: Layout, chosen: Sequence[NodeId], wanted: Sequence[frozenset[UnitName]], free: Sequence[NodeId], workload: Workload,
    cluster: Cluster, holds: Holds,
) -> list[NodeId]:
    """``chosen`` with nodes exchanged, two at a time, while that leaves fewer layers on a single host and moves no more bytes.

    ``wanted``: the units of each place; ``free``: those who may take one, at the same site.
    """
    if not 1 < len(layout.shares) <= _most_at_a_host(cluster):
        return list(chosen)  # one holder is on one host, more than a host has nodes are not
    staying = [{cluster.nodes[hop.node].host for hop in route} for route in layout.kept[:4]]
    if any(one.isdisjoint(other) for one, other in combinations(staying, 2)):
        return list(chosen)  # these two hold all layers
    seats = _Seats(layout, chosen, wanted, free, workload, cluster, holds)
    while (at_stake := sum(seats.alone())) and seats.exchange() < at_stake:
        pass
    return seats.nodes[:len(chosen)]


class _Seats:
    """Nodes on places, and behind them those who have none."""

    def __init__(
        self, layout: Layout, chosen: Sequence[NodeId], wanted: Sequence[frozenset[UnitName]], free: Sequence[NodeId],
        workload: Workload, cluster: Cluster, holds: Holds,
    ) -> None:
        taken = set(chosen)
        self.nodes = [*chosen, *(node for node in free if node not in taken)]
        self._places = layout.places
        self._wanted = [*wanted, *[frozenset[UnitName]()] * (len(self.nodes) - len(chosen))]
        self._workload, self._cluster, self._holds = workload, cluster, holds
        self._staying: list[set[HostId]] = [set() for _ in workload.layers]
        for route in layout.kept:
            for hop in route:
                for layer in hop.layers:
                    self._staying[layer].add(cluster.nodes[hop.node].host)

    def alone(self) -> list[bool]:
        """By layer whether all holders are on one host."""
        found = [set(hosts) for hosts in self._staying]
        for (first, end), node in zip(self._places, self.nodes, strict=False):
            for layer in range(first, end):
                found[layer].add(self._cluster.nodes[node].host)
        return [len(hosts) < 2 for hosts in found]

    def exchange(self) -> int:
        """Let those two change places that leave the fewest layers on one host; how many that are, as before if none may."""
        at_stake = self.alone()
        touched = [place for place, (first, end) in enumerate(self._places) if any(at_stake[first:end])]
        best: int = sum(at_stake)
        pair: tuple[int, int] | None = None
        for one in touched:
            for other in range(len(self.nodes)):
                if self._may_change(one, other):
                    self._swap(one, other)
                    count = sum(self.alone())
                    self._swap(one, other)
                    if count < best:
                        best, pair = count, (one, other)
        if pair is not None:
            self._swap(*pair)
        return best

    def _swap(self, one: int, other: int) -> None:
        self.nodes[one], self.nodes[other] = self.nodes[other], self.nodes[one]

    def _may_change(self, one: int, other: int) -> bool:
        here, there = self._cluster.nodes[self.nodes[one]], self._cluster.nodes[self.nodes[other]]
        if here.host == there.host or here.site != there.site:
            return False
        after = self._lacking(one, there.node_id) + self._lacking(other, here.node_id)
        return after <= self._lacking(one, here.node_id) + self._lacking(other, there.node_id)

    def _lacking(self, place: int, node: NodeId) -> int:
        lacking = self._wanted[place] - self._holds.get(node, frozenset())
        return sum(self._workload.units[name].state_bytes for name in lacking)


@remembered(16)
def _most_at_a_host(cluster: Cluster) -> int:
    """Nodes of the host that has most; 0 where all are on one, so that nothing can be kept apart."""
    counts = Counter(node.host for node in cluster.nodes.values())
    return max(counts.values()) if len(counts) > 1 else 0


def assign(
    wanted: Sequence[frozenset[UnitName]], nodes: Sequence[NodeId], workload: Workload, holds: Holds,
) -> list[NodeId]:
    """The node for each place, of those at least as many, so that the fewest bytes move.

    ``wanted``: the units that each place needs. Equal choices follow the order of ``nodes``. A node that holds just what a
    place needs takes it: if it went elsewhere, the two could change places and would move no more. The others are assigned
    by the Hungarian method.
    """
    if not any(holds.get(node) for node in nodes):
        return list(nodes[: len(wanted)])
    holding: dict[frozenset[UnitName], list[NodeId]] = {}
    for node in reversed(nodes):
        holding.setdefault(holds.get(node, frozenset()), []).append(node)
    chosen: dict[int, NodeId] = {}
    for place, units in enumerate(wanted):
        if holding.get(units):
            chosen[place] = holding[units].pop()
    taken = set(chosen.values())
    rest, places = [node for node in nodes if node not in taken], [p for p in range(len(wanted)) if p not in chosen]
    if len(rest) == len(places) == 1:
        return [chosen.get(place, rest[0]) for place in range(len(wanted))]
    while places:
        some, places = places[:ASSIGNED_TOGETHER], places[ASSIGNED_TOGETHER:]
        offered = rest if not places else rest[:ASSIGNED_TOGETHER]
        rows, columns = linear_sum_assignment(lacking_bytes([wanted[p] for p in some], offered, workload, holds))
        chosen |= {some[int(column)]: offered[int(row)] for row, column in zip(rows, columns, strict=True)}
        gone = set(chosen.values())
        rest = [node for node in rest if node not in gone]
    return [chosen[place] for place in range(len(wanted))]


def lacking_bytes(
    wanted: Sequence[frozenset[UnitName]], nodes: Sequence[NodeId], workload: Workload, holds: Holds,
) -> Array:
    """By node and place: bytes of the place's units that the node does not hold."""
    held = [holds.get(node, frozenset()) for node in nodes]
    rows, columns = list(dict.fromkeys(held)), list(dict.fromkeys(wanted))
    table = _Table.of(workload)
    lacks, needs = 1.0 - np.stack([table.row(units) for units in rows]), np.stack([table.row(units) for units in columns])
    row_of, column_of = ({units: index for index, units in enumerate(kinds)} for kinds in (rows, columns))
    lacking = (lacks * table.sizes) @ needs.T  # by what is held and what is wanted, of which there are few
    found: Array = lacking[np.ix_([row_of[units] for units in held], [column_of[units] for units in wanted])]
    return found


class _Table:
    """Sets of units as rows of zeros and ones, made once for each set."""

    def __init__(self, workload: Workload) -> None:
        self._names = list(workload.units)
        self.sizes: Array = np.array([unit.state_bytes for unit in workload.units.values()], dtype=np.float64)
        self._rows: dict[frozenset[UnitName], Array] = {}

    @staticmethod
    @remembered(16)
    def of(workload: Workload) -> _Table:
        return _Table(workload)

    def row(self, units: frozenset[UnitName]) -> Array:
        if units not in self._rows:
            self._rows[units] = np.array([name in units for name in self._names], dtype=np.float64)
        return self._rows[units]


def interleaved(shares: Sequence[int]) -> tuple[int, ...]:
    """Which pipeline each micro-batch takes: any first part of them is shared out as evenly as the whole.

    A partial last batch takes the first micro-batches only, and pipelines should start together.
    """
    counts = np.array(shares)
    owners = np.repeat(np.arange(len(counts)), counts)
    turns = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.lexsort((owners, (turns + 0.5) / counts[owners]))
    found: list[int] = owners[order].tolist()
    return tuple(found)


def plan_of(layout: Layout, chosen: Sequence[NodeId], nodes: Sequence[NodeId], num_layers: int, order: Order) -> Plan:
    """``layout`` with ``chosen`` on its new places and the rest of ``nodes``, which are in the order of their numbers, idle."""
    placement: dict[NodeId, tuple[int, ...]] = dict.fromkeys(nodes, ())
    routes = list(layout.kept)
    start = 0
    for split in layout.splits:
        members = chosen[start:start + len(split)]
        start += len(split)
        routes.append(tuple(Hop(node, first, end) for node, (first, end) in zip(members, split, strict=True)))
    layers: dict[tuple[int, int], tuple[int, ...]] = {}
    for route in routes:
        for hop in route:
            placement[hop.node] = layers.setdefault((hop.first, hop.end), tuple(hop.layers))
    return Plan(
        num_layers=num_layers, placement=placement, order=order,
        routes=tuple([routes[index] for index in interleaved(layout.shares)]),
    )
