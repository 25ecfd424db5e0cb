"""Other ways for micro-batches whose route meets somebody who is gone, over living nodes that hold the same layers.

1. Hops that are whole stay as they are. A gap is filled by holders of its layers, in pieces where their cuts differ; a
   piece next to a hop of the same node lengthens that hop.
2. No route visits a node twice.
3. Of the ways to fill a gap the one whose busiest node has least to do is taken, so that peers share evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from everstep.plan import Hop, Route
from everstep.quantities import NodeId, node_number
from everstep.workload import Workload


class Router:
    """Fills gaps one micro-batch after the other and counts what each node has to do."""

    def __init__(
        self, available: Mapping[NodeId, frozenset[int]], workload: Workload, speeds: Mapping[NodeId, float],
    ) -> None:
        """``available``: the layers that each living node can compute."""
        self._num_layers = workload.num_layers
        self._work_s = tuple(accumulate((layer.total_s for layer in workload.layers), initial=0.0))
        self._speeds = speeds
        self._load_s = dict.fromkeys(sorted(available, key=node_number), 0.0)
        self._until = {node: _run_ends(available[node], self._num_layers) for node in self._load_s}

    def routes(self, old: Sequence[Route]) -> tuple[Route, ...] | None:
        """``old`` with every gap filled; None: some route cannot be completed without visiting a node twice."""
        kept = [tuple(self._without_dead_shadow(hop) for hop in route if self._can_compute(hop)) for route in old]
        for hops in kept:
            self._count(hops)
        found = []
        for hops, route in zip(kept, old, strict=True):
            whole = hops if len(hops) == len(route) else self._completed(hops)
            if whole is None:
                return None
            found.append(whole)
        return tuple(found)

    def _can_compute(self, hop: Hop) -> bool:
        return hop.node in self._until and self._until[hop.node][hop.first] >= hop.end

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
        return _merged(whole)

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
            for load_s, node, until in sorted(options(position, taken), key=lambda option: option[0]):
                worst_s = max(busiest_s, load_s)
                if worst_s < best_s:
                    extend(until, [*taken, Hop(node, position, until)], worst_s)

        def options(position: int, taken: list[Hop]) -> list[tuple[float, NodeId, int]]:
            found = []
            for node, until in self._until.items():
                reach = min(until[position], end)
                meets_before = node == before and position == first
                meets_after = following is not None and node == following.node and reach == end
                fresh = node not in used and all(hop.node != node for hop in taken)
                if reach > position and (fresh or meets_before or meets_after):
                    seconds = (self._work_s[reach] - self._work_s[position]) / self._speeds[node]
                    found.append((self._load_s[node] + seconds, node, reach))
            return found

        extend(first, [], 0.0)
        return best

    def _count(self, hops: Route, sign: int = 1) -> None:
        for hop in hops:
            self._load_s[hop.node] += sign * (self._work_s[hop.end] - self._work_s[hop.first]) / self._speeds[hop.node]


def _run_ends(layers: frozenset[int], num_layers: int) -> tuple[int, ...]:
    """For each layer the end of the run of ``layers`` that begins there; the layer itself where it is not among them."""
    ends = list(range(num_layers + 1))
    for layer in reversed(range(num_layers)):
        if layer in layers:
            ends[layer] = max(ends[layer + 1], layer + 1)
    return tuple(ends)


def _merged(hops: Sequence[Hop]) -> Route:
    """Neighbouring hops of one node as one."""
    found: list[Hop] = []
    for hop in hops:
        if found and found[-1].node == hop.node:
            found[-1] = Hop(hop.node, found[-1].first, hop.end)
        else:
            found.append(hop)
    return tuple(found)
