"""How evenly work can be shared by nodes that hold windows of layers, and routes that come near it.

``least_seconds`` is a bound that no schedule beats, from the windows alone. ``Levelled`` passes pieces of work on, from holder
to holder, until the busiest node is near that bound. The finer the pieces the more hops a route has, and every hop is a place
to wait at, so it stops at a distance from the bound that is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from everstep.plan import Hop, Route
from everstep.planner.remembered import Same
from everstep.quantities import NodeId, node_number
from everstep.workload import Workload


def least_seconds(
    available: Mapping[NodeId, frozenset[int]], workload: Workload, speeds: Mapping[NodeId, float], *, split: bool = True,
) -> float:
    """No schedule of a step is shorter, whatever its routes. Messages not counted.

    A node cannot begin before the forwards of all layers ahead of its first one (with fused backward, and cannot go on after
    their backwards), which is its ``head``. The work of the layers x..y can only be done by those who can compute some of
    them, so T satisfies

        work(x..y) <= sum over these nodes of speed · (T - head)

    for all x..y. The largest such T is also enough if work can be cut as finely as one likes, each node's layers are
    neighbours, and no node's layers lie inside those of another.
    """
    edges = {layers: (min(layers), max(layers) + 1) for layers in set(available.values()) if layers}
    windows = Counter((*edges[layers], speeds[node]) for node, layers in available.items() if layers)
    return _least_seconds(Same(workload), tuple(sorted(windows.items())), split)


@lru_cache(maxsize=1 << 8)
def _least_seconds(workload: Same[Workload], windows: tuple[tuple[tuple[int, int, float], int], ...], split: bool) -> float:
    """The same where so many nodes have a window (first and end layer) and a speed: who they are does not matter."""
    num_layers = workload.value.num_layers
    work_s = np.array(_running_s(workload.value)) * workload.value.num_micro_batches
    head_s = heads_s(workload.value, split=split)
    begun, over = np.zeros((2, num_layers + 1)), np.zeros((2, num_layers + 1))
    for (first, end, each), count in windows:
        weight = count * np.array([each, each * head_s[first]])
        begun[:, first] += weight
        over[:, end] += weight
    # those who can compute some of x..y: begun before y, and not over at x
    before, gone = np.cumsum(begun, axis=1) - begun, np.cumsum(over, axis=1)
    speed, heads = before[:, None, :] - gone[:, :, None]
    demand_s = work_s[None, :] - work_s[:, None] + heads
    some = np.triu(np.ones_like(speed, dtype=bool), 1) & (speed > 1e-12)
    return float(np.max(np.divide(demand_s, speed, out=np.zeros_like(speed), where=some)))


def heads_s(workload: Workload, *, split: bool = True) -> tuple[float, ...]:
    """By layer, seconds of a step that whoever begins with it cannot use."""
    each = [layer.forward_s if split else layer.total_s for layer in workload.layers]
    return tuple(accumulate(each, initial=0.0))


def _running_s(workload: Workload) -> tuple[float, ...]:
    return tuple(accumulate((layer.total_s for layer in workload.layers), initial=0.0))


_Piece = tuple[int, int, int]
"""A hop: the number of its node, first and end layer."""

CHAIN = 4
"""Over so many nodes work is passed on at most: one gives to the next, which gives to the next."""


class Levelled:
    """Routes whose work is passed on from the busiest node to those that end earlier, over nodes that can compute the same.

    A node *ends*, in this count, after its head (see ``least_seconds``) and its work. What is passed on is a hop, or its
    front or its rear; to a neighbour on the route if possible, since that makes no new hop. The busiest node's end never
    grows.
    """

    def __init__(
        self, routes: Sequence[Route], available: Mapping[NodeId, frozenset[int]], workload: Workload,
        speeds: Mapping[NodeId, float], *, split: bool = True,
    ) -> None:
        """``routes`` over nodes that are ``available``, without shadows; of all micro-batches that these nodes compute."""
        self._old = tuple(routes)
        if workload.num_micro_batches != len(self._old):
            workload = replace(workload, num_micro_batches=len(self._old))
        self._nodes = sorted((node for node in available if available[node]), key=node_number)
        self._least_s = least_seconds(available, workload, speeds, split=split)
        self._work_s = _running_s(workload)
        self._quantum_s = min(end - first for first, end in pairwise(self._work_s))
        numbers = {node: number for number, node in enumerate(self._nodes)}
        self._speed = [speeds[node] for node in self._nodes]
        runs = {layers: run_ends(layers, workload.num_layers) for layers in set(available.values())}
        self._until = [runs[available[node]] for node in self._nodes]
        by_window: dict[frozenset[int], list[int]] = {}
        for number, name in enumerate(self._nodes):
            by_window.setdefault(available[name], []).append(number)
        near = {
            ours: [number for theirs, members in by_window.items() if not ours.isdisjoint(theirs) for number in members]
            for ours in by_window
        }
        self._near = [near[available[node]] for node in self._nodes]
        """By node, who can compute some of the same layers; itself, too."""
        head_s = heads_s(workload, split=split)
        self._end_s = [head_s[min(available[node])] for node in self._nodes]
        self._pieces: list[list[_Piece]] = []
        self._on: list[dict[int, tuple[int, int]]] = [{} for _ in self._nodes]
        """By node: for each micro-batch that visits it, the layers."""
        known: dict[int, list[_Piece]] = {}
        for micro_batch, route in enumerate(self._old):
            if id(route) not in known:
                known[id(route)] = [(numbers[hop.node], hop.first, hop.end) for hop in route]
            self._pieces.append(known[id(route)])
            for node, first, end in known[id(route)]:
                self._end_s[node] += (self._work_s[end] - self._work_s[first]) / self._speed[node]
                self._on[node][micro_batch] = (first, end)
        self._changed: set[int] = set()

    @property
    def over(self) -> float:
        """By how much the busiest node ends after the bound, as a share of the bound."""
        return self._end_s[self._busiest()] / self._least_s - 1

    def pass_on(self, tolerated: float, times: int) -> int:
        """Until no node is more than ``tolerated`` above the bound, or so many ``times``; how many were needed."""
        for done in range(times):
            if self.over <= tolerated or not self._relieved(self._busiest()):
                return done
        return times

    def routes(self) -> tuple[Route, ...]:
        """As they are now; those that did not change are the same objects."""
        made: dict[tuple[_Piece, ...], Route] = {}
        found = list(self._old)
        for micro_batch in sorted(self._changed):
            pieces = tuple(self._pieces[micro_batch])
            if pieces not in made:
                made[pieces] = tuple([Hop(self._nodes[node], first, end) for node, first, end in pieces])
            found[micro_batch] = made[pieces]
        return tuple(found)

    def _busiest(self) -> int:
        return max((node for node, visits in enumerate(self._on) if visits), key=self._end_s.__getitem__)

    def _relieved(self, node: int) -> bool:
        """Whether some of what ``node`` does could be passed on."""
        shut: set[tuple[int, int]] = set()
        while (chain := self._chain(node, shut)) is not None:
            amount_s = self._amount_s(node, chain[0])
            for giver, taker in zip(chain[1:], chain, strict=False):  # the far end first, so that nobody gets more than it gave
                amount_s = self._give(giver, taker, amount_s)
                if not amount_s:
                    shut.add((giver, taker))
                    break
            else:
                return True
        return False

    def _amount_s(self, giver: int, taker: int) -> float:
        """Work that makes both end together, or the least that there is."""
        gap_s = self._end_s[giver] - self._end_s[taker]
        return max(self._quantum_s, gap_s / (1 / self._speed[giver] + 1 / self._speed[taker]))

    def _chain(self, node: int, shut: set[tuple[int, int]]) -> list[int] | None:
        """From somebody who ends early back to ``node``, each able to compute something that the next one can.

        Of all the one that ends earliest is taken, one that is nearer sooner. None: nobody ends early enough.
        """
        before = {node: node}
        depth = {node: 0}
        queue = [node]
        best, best_gain_s = node, 0.0
        for giver in queue:
            if depth[giver] == CHAIN:
                break
            for taker in self._near[giver]:
                if taker in before or (giver, taker) in shut:
                    continue
                before[taker], depth[taker] = giver, depth[giver] + 1
                queue.append(taker)
                gap_s = self._end_s[node] - self._end_s[taker]
                gain_s = gap_s / (depth[taker] + 0.5)
                if gain_s > best_gain_s and gap_s > 1.01 * self._quantum_s / self._speed[taker]:
                    best, best_gain_s = taker, gain_s
        if best == node:
            return None
        chain = [best]
        while chain[-1] != node:
            chain.append(before[chain[-1]])
        return chain

    def _give(self, giver: int, taker: int, most_s: float) -> float:
        """Seconds of work, at speed 1, that ``taker`` does from now on: about ``most_s``, or what could be passed on at once.

        Large pieces first, and such that make no new hop.
        """
        limit_s, work_s = 1.05 * most_s, self._work_s
        fine_s = 3 * self._quantum_s
        offers = [
            (hops * fine_s - work_s[end] + work_s[first], micro_batch, first, end)
            for micro_batch, (first, end, hops) in self._offers(giver, taker, limit_s)
        ]
        offers.sort()
        passed_s = 0.0
        touched = set()
        for _, micro_batch, first, end in offers:
            seconds = work_s[end] - work_s[first]
            if passed_s + seconds <= limit_s and micro_batch not in touched:
                touched.add(micro_batch)
                self._pass(micro_batch, giver, taker, first, end)
                passed_s += seconds
                if most_s - passed_s < self._quantum_s:
                    break
        return passed_s

    def _offers(self, giver: int, taker: int, most_s: float) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """By micro-batch, layers of a hop of ``giver`` that ``taker`` could do, and how many hops more that would make."""
        until, work_s, visits = self._until[taker], self._work_s, self._on[taker]
        for micro_batch, (first, end) in self._on[giver].items():
            visited = visits.get(micro_batch)
            if visited is None or visited[1] == first:
                reach, most = first, min(until[first], end)
                while reach < most and work_s[reach + 1] - work_s[first] <= most_s:
                    reach += 1
                if reach > first:
                    yield micro_batch, (first, reach, (visited is None) - (reach == end))
                if reach == end:
                    continue
            if visited is None or visited[0] == end:
                reach = end
                while reach > first and until[reach - 1] >= reach and work_s[end] - work_s[reach - 1] <= most_s:
                    reach -= 1
                if reach < end:
                    yield micro_batch, (reach, end, (visited is None) - (reach == first))

    def _pass(self, micro_batch: int, giver: int, taker: int, first: int, end: int) -> None:
        seconds = self._work_s[end] - self._work_s[first]
        self._end_s[giver] -= seconds / self._speed[giver]
        self._end_s[taker] += seconds / self._speed[taker]
        found: list[_Piece] = []
        for node, begins, ends in self._pieces[micro_batch]:
            pieces = [(node, begins, ends)]
            if node == giver:
                pieces = [(giver, begins, first), (taker, first, end), (giver, end, ends)]
            for number, start, stop in pieces:
                if start == stop:
                    continue
                if found and found[-1][0] == number:
                    found[-1] = (number, found[-1][1], stop)
                else:
                    found.append((number, start, stop))
        self._pieces[micro_batch] = found
        self._changed.add(micro_batch)
        del self._on[giver][micro_batch]
        for node, begins, ends in found:
            if node in (giver, taker):
                self._on[node][micro_batch] = (begins, ends)


def run_ends(layers: frozenset[int], num_layers: int) -> tuple[int, ...]:
    """For each layer the end of the run of ``layers`` that begins there; the layer itself where it is not among them."""
    ends = list(range(num_layers + 1))
    for layer in reversed(range(num_layers)):
        if layer in layers:
            ends[layer] = max(ends[layer + 1], layer + 1)
    return tuple(ends)
