"""Which bytes go from whom to whom, so that every node holds the units of its placement.

Each unit comes from a living holder, holders taken in turn by the bytes that they already send; where links differ, from the
one that would be through first, so that state crosses a slow link only where nobody nearer has it. With a restore every unit of
every node comes from the checkpoint, because what is in memory belongs to another step.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from everstep.cluster import Cluster
from everstep.errors import InfeasibleError
from everstep.plan import Plan
from everstep.planner.step.parts import holders, units_by_layers
from everstep.quantities import NodeId, SiteId, UnitName, node_number
from everstep.transfer import Load, Move
from everstep.workload import Workload

Holds = Mapping[NodeId, frozenset[UnitName]]


def moves_for(
    plan: Plan, holds: Holds, workload: Workload, restore: bool = False, cluster: Cluster | None = None,
) -> tuple[tuple[Move, ...], tuple[Load, ...]]:
    """The moves and loads before ``plan`` can run, when living nodes hold ``holds``.

    ``cluster``: where links differ, near holders are asked before far ones. None: all are equally near.

    Raises:
        InfeasibleError: a unit that somebody lacks has no living holder; ``rejected`` names each.
    """
    by_layers = holders(plan.placement)
    units = units_by_layers(by_layers, workload)
    if restore:
        wanted = [(node, units[plan.placement[node]]) for node in plan.nodes]
        return (), tuple(Load(unit, node) for node, needed in wanted for unit in _in_order(needed, workload))
    absent = _absent(by_layers, holds, units)
    if not absent:
        return (), ()
    lacking = [(node, unit) for node in sorted(absent, key=node_number) for unit in _in_order(absent[node], workload)]
    sources = _sources({unit for _, unit in lacking}, plan, holds)
    lost = {unit: "no living holder" for unit in _in_order(frozenset(sources), workload) if not sources[unit]}
    if lost:
        raise InfeasibleError(f"no living holder of {', '.join(lost)}", {str(unit): why for unit, why in lost.items()})
    sending = _Sending(cluster if cluster is not None and cluster.one_link is None else None)
    chosen: dict[tuple[NodeId, UnitName], Move] = {}
    for node, unit in sorted(lacking, key=lambda pair: -workload.units[pair[1]].state_bytes):
        chosen[node, unit] = sending.from_nearest(unit, workload.units[unit].state_bytes, sources[unit], node)
    return tuple(chosen[pair] for pair in lacking), ()


def _sources(wanted: set[UnitName], plan: Plan, holds: Holds) -> dict[UnitName, tuple[NodeId, ...]]:
    """The living holders of each unit, by number. Units with the same holders, as those of one stage, share one tuple."""
    by_held: dict[frozenset[UnitName], list[NodeId]] = {}
    for node, held in holds.items():
        if node in plan.placement:
            by_held.setdefault(held, []).append(node)
    known: dict[tuple[bool, ...], tuple[NodeId, ...]] = {}
    found = {}
    for unit in wanted:
        holding = tuple([unit in held for held in by_held])
        if holding not in known:
            groups = [nodes for nodes, has_it in zip(by_held.values(), holding, strict=True) if has_it]
            known[holding] = tuple(sorted((node for nodes in groups for node in nodes), key=node_number))
        found[unit] = known[holding]
    return found


class _Sending:
    """Who sends how much already, and what is on the links between sites."""

    def __init__(self, cluster: Cluster | None) -> None:
        """``cluster`` None: all links are alike, so bytes say as much as seconds."""
        self._cluster = cluster
        self._sent: dict[NodeId, float] = {}
        self._crossing_s: dict[tuple[SiteId, SiteId], float] = {}
        self._queues: dict[int, list[tuple[float, int]]] = {}
        """Where links are alike, by ``id`` of holders a heap of what each sent when it was last looked at, and its index."""

    def from_nearest(self, unit: UnitName, num_bytes: int, sources: tuple[NodeId, ...], target: NodeId) -> Move:
        """From the one that would be through first, and it sends that much more from now on."""
        if self._cluster is None:
            source = self._least_busy(sources)
            self._sent[source] = self._sent.get(source, 0.0) + num_bytes
            return Move(unit, source, target, num_bytes)
        source = min(sources, key=lambda holder: max(self._after_s(holder, target, num_bytes)))
        way = self._way(source, target)
        self._sent[source], self._crossing_s[way] = self._after_s(source, target, num_bytes)
        return Move(unit, source, target, num_bytes)

    def _least_busy(self, sources: tuple[NodeId, ...]) -> NodeId:
        """The first of those that have sent least. Nobody sends less as time goes on, so old entries are too low at most."""
        if id(sources) not in self._queues:
            self._queues[id(sources)] = [(0.0, index) for index in range(len(sources))]
        queue = self._queues[id(sources)]
        while True:
            sent, index = queue[0]
            now = self._sent.get(sources[index], 0.0)
            if now == sent:
                return sources[index]
            heapq.heapreplace(queue, (now, index))

    def _after_s(self, source: NodeId, target: NodeId, num_bytes: int) -> tuple[float, float]:
        """Until when ``source`` and the link between the two sites would be busy."""
        assert self._cluster is not None, "only asked where links differ"
        seconds = self._cluster.link_between(source, target).seconds(num_bytes)
        here, there = self._way(source, target)
        crossing_s = self._crossing_s.get((here, there), 0.0) + seconds if here != there else 0.0
        return self._sent.get(source, 0.0) + seconds, crossing_s

    def _way(self, source: NodeId, target: NodeId) -> tuple[SiteId, SiteId]:
        assert self._cluster is not None, "only asked where links differ"
        return self._cluster.nodes[source].site, self._cluster.nodes[target].site


def _absent(
    by_layers: Mapping[tuple[int, ...], Sequence[NodeId]], holds: Holds, units: Mapping[tuple[int, ...], frozenset[UnitName]],
) -> dict[NodeId, frozenset[UnitName]]:
    """What nodes lack, of those that lack something; most have just what they need, and few different things are held."""
    nothing = frozenset[UnitName]()
    known: dict[tuple[frozenset[UnitName], frozenset[UnitName]], frozenset[UnitName]] = {}
    found: dict[NodeId, frozenset[UnitName]] = {}
    for layers, nodes in by_layers.items():
        needed = units[layers]
        for node in [node for node in nodes if holds.get(node) is not needed]:
            pair = (needed, holds.get(node, nothing))
            if pair not in known:
                known[pair] = needed - pair[1]
            if known[pair]:
                found[node] = known[pair]
    return found


def _in_order(units: frozenset[UnitName], workload: Workload) -> list[UnitName]:
    return sorted(units, key=lambda name: (workload.units[name].layers, name))
