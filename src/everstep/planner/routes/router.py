"""Other ways for micro-batches whose route meets somebody who is gone, over living nodes that hold the same layers.

1. Hops that are whole stay as they are. A gap is filled by holders of its layers, in pieces where their cuts differ; a
   piece next to a hop of the same node lengthens that hop.
2. No route visits a node twice.
3. Of the ways to fill a gap the one whose busiest node has least to do is taken, so that peers share evenly.
4. Where nodes still have clearly more to do than if work could be cut as finely as one likes, pieces of it are passed on, from
   holder to holder (``level``). That changes routes that were whole, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from everstep.plan import Hop, Route
from everstep.planner.routes.level import Levelled, run_ends
from everstep.planner.step.parts import grouped
from everstep.quantities import NodeId, node_number
from everstep.workload import Workload

TOLERATED = 0.06
"""By how much the busiest node may be above the bound before work is passed on: finer pieces make more hops."""

PASSED_ON = 24
"""So many times work is passed on at most while somebody waits for the answer: a millisecond or two for 32 nodes."""

LEVELLED_NODES = 128
"""With more nodes gaps are filled and nothing is passed on: peers are many, and a decision must stay quick."""


class Router:
    """Fills gaps one micro-batch after the other and counts what each node has to do."""

    def __init__(
        self, available: Mapping[NodeId, frozenset[int]], workload: Workload, speeds: Mapping[NodeId, float], *,
        split: bool = True,
    ) -> None:
        """``available``: the layers that each living node can compute. ``split``: backward is."""
        self._available, self._workload, self._split = available, workload, split
        self._num_layers = workload.num_layers
        self._work_s = tuple(accumulate((layer.total_s for layer in workload.layers), initial=0.0))
        self._speeds = speeds
        self._load_s = dict.fromkeys(sorted(available, key=node_number), 0.0)
        runs = {layers: run_ends(layers, self._num_layers) for layers in set(available.values())}
        self._until = {node: runs[available[node]] for node in self._load_s}
        self._alike: dict[tuple[tuple[int, ...], float], list[tuple[float, int, NodeId]]] = {}
        """Nodes that can compute the same at the same speed, a heap by load; loads there may be out of date."""
        for node in self._load_s:
            self._alike.setdefault((self._until[node], speeds[node]), []).append((0.0, node_number(node), node))

    def routes(self, old: Sequence[Route], *, passed_on: int = PASSED_ON) -> tuple[Route, ...] | None:
        """``old`` with every gap filled; None: some route cannot be completed without visiting a node twice.

        ``passed_on``: so many times work may be passed on after that.
        """
        routes = grouped(old)
        kept: list[Route] = []
        """What is left of each; the route itself where nothing has changed."""
        for route, members in zip(routes.routes, routes.micro_batches, strict=True):
            is_whole = all(hop.shadow is None and self._can_compute(hop) for hop in route)
            hops = route if is_whole else tuple([self._without_dead_shadow(hop) for hop in route if self._can_compute(hop)])
            kept.append(route if hops == route else hops)
            self._count(hops, len(members))
        has_gap = [sum([hop.end - hop.first for hop in hops]) < self._num_layers for hops in kept]
        found = []
        for number in map(routes.number.__getitem__, map(id, old)):
            whole = self._completed(kept[number]) if has_gap[number] else kept[number]
            if whole is None:
                return None
            found.append(whole)
        is_level = not passed_on or not any(has_gap) or len(self._load_s) > LEVELLED_NODES
        if is_level or any(hop.shadow for route in kept for hop in route):
            return tuple(found)
        level = Levelled(found, self._available, self._workload, self._speeds, split=self._split)
        level.pass_on(TOLERATED, passed_on)
        return level.routes()

    def _can_compute(self, hop: Hop) -> bool:
        until = self._until.get(hop.node)
        return until is not None and until[hop.first] >= hop.end

    def _without_dead_shadow(self, hop: Hop) -> Hop:
        return hop if hop.shadow is None or hop.shadow in self._until else replace(hop, shadow=None)

    def _completed(self, hops: Route) -> Route | None:
        """The kept ``hops`` and pieces between them; if that cannot be, a new way from the first layer to the last."""
        whole = self._filled(hops)
        if whole is None:
            self._count(hops, -1)
            whole = self._filled(())
            if whole is not None:
                self._count(whole)
        else:
            self._count(tuple(hop for hop in whole if hop not in hops))
            self._count(tuple(hop for hop in hops if hop not in whole), -1)
        return whole

    def _filled(self, hops: Route) -> Route | None:
        whole: list[Hop] = []
        position = 0
        for index in range(len(hops) + 1):
            following = hops[index] if index < len(hops) else None
            end = following.first if following else self._num_layers
            if position < end:
                used = {hop.node for hop in (*whole, *hops[index:])}
                pieces = self._cover(position, end, used, whole[-1].node if whole else None, following)
                if pieces is None:
                    return None
                whole += pieces
            if following:
                whole.append(following)
                position = following.end
        return merged(whole)

    def _cover(
        self, first: int, end: int, used: set[NodeId], before: NodeId | None, following: Hop | None,
    ) -> list[Hop] | None:
        """Pieces from ``first`` to ``end`` by nodes outside ``used``, but for the neighbours of the gap at its edges."""
        best: list[Hop] | None = None
        best_s = float("inf")

        def extend(position: int, taken: list[Hop], busiest_s: float) -> None:
            nonlocal best, best_s
            if position == end:
                best, best_s = taken, busiest_s
                return
            for load_s, node, until in options(position, taken):
                worst_s = max(busiest_s, load_s)
                if worst_s < best_s:
                    extend(until, [*taken, Hop(node, position, until)], worst_s)

        def options(position: int, taken: list[Hop]) -> list[tuple[float, NodeId, int]]:
            """Of nodes that are alike the least busy one that the route does not visit yet; and the gap's neighbours."""
            found = []
            visited = used.union(hop.node for hop in taken)
            for (until, speed), nodes in self._alike.items():
                reach = min(until[position], end)
                fresh = self._least_busy(nodes, visited) if reach > position else None
                if fresh is not None:
                    found.append((self._load_s[fresh] + (self._work_s[reach] - self._work_s[position]) / speed, fresh, reach))
            for node in {before if position == first else None, following.node if following else None} - {None}:
                assert node is not None, "taken out"
                reach = min(self._until[node][position], end)
                if reach > position and (node == before or reach == end):
                    seconds = (self._work_s[reach] - self._work_s[position]) / self._speeds[node]
                    found.append((self._load_s[node] + seconds, node, reach))
            return sorted(found, key=lambda option: (option[0], node_number(option[1])))

        extend(first, [], 0.0)
        return best

    def _least_busy(self, nodes: list[tuple[float, int, NodeId]], visited: set[NodeId]) -> NodeId | None:
        passed = []
        found: NodeId | None = None
        while nodes and found is None:
            load_s, number, node = nodes[0]
            if load_s != self._load_s[node]:
                heapq.heapreplace(nodes, (self._load_s[node], number, node))
            elif node in visited:
                passed.append(heapq.heappop(nodes))
            else:
                found = node
        for entry in passed:
            heapq.heappush(nodes, entry)
        return found

    def _count(self, hops: Route, times: int = 1) -> None:
        for hop in hops:
            node = hop.node
            self._load_s[node] += times * (self._work_s[hop.end] - self._work_s[hop.first]) / self._speeds[node]
            if times < 0:  # the entry in the heap says more than is true, which nothing else would find out
                alike = self._alike[self._until[node], self._speeds[node]]
                heapq.heappush(alike, (self._load_s[node], node_number(node), node))


def merged(hops: Sequence[Hop]) -> Route:
    """Neighbouring hops of one node as one."""
    found: list[Hop] = []
    for hop in hops:
        if found and found[-1].node == hop.node:
            found[-1] = Hop(hop.node, found[-1].first, hop.end)
        else:
            found.append(hop)
    return tuple(found)
