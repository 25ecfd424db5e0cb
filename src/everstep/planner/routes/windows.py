"""Layouts in which who is left of a broken pipeline holds other layers than before, so that all share what was lost.

After a loss the peers of the lost node have more to do than everybody else, and routes alone cannot change that: nobody else
holds those layers. But the other nodes of the broken pipeline can hold a *window* of layers that is moved towards the hole.
What no window covers then lies in several small gaps instead of one, each lent by other nodes, and all nodes get a little more
to do. In eight pipelines of four stages with eight layers each, one node of the last stage lost, for example:

    before      [0:8] [8:16] [16:24] [24:32]
    after       (0:3) [3:11] (11:13) [13:21] (21:23) [23:31] (31:32)         (in brackets: lent by seven others)

Few layers move, no pipeline but the broken one changes, and nobody holds more layers than before. Where the windows go is
found by a dynamic program over the windows of one pipeline: the node that ends last, of lenders and windows, ends as early as
can be, and of such ways the one that moves the fewest bytes is taken. A lender ends after its head (see ``level``), its own
work, and the most pieces of a gap that one of its peers gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from everstep.plan import Hop, Plan, Route
from everstep.planner.routes.level import heads_s
from everstep.planner.routes.router import Router
from everstep.planner.step.parts import Held
from everstep.planner.step.pipelines import Array
from everstep.planner.step.schedules import streams
from everstep.quantities import NodeId, node_number
from everstep.workload import Workload

NEARLY = 1.005
"""How much later than as early as can be the last node may end, if fewer bytes move."""

Window = tuple[int, int]
"""First and end layer."""


@dataclass(frozen=True, slots=True)
class Broken:
    """What is left of a pipeline: its nodes with their windows in order, and the micro-batches that started in it."""

    windows: tuple[tuple[NodeId, Window], ...]
    num_micro_batches: int
    name: NodeId
    """Of its stream."""


def shifted(
    plan: Plan, workload: Workload, speeds: Mapping[NodeId, float], can: Mapping[NodeId, frozenset[int]],
) -> list[Plan]:
    """Plans over the living nodes that ``can`` compute layers of ``plan``, with the windows of broken pipelines moved.

    One with the windows where the last node ends earliest, one with gaps of the same size: which of the two is faster
    depends on how much memory there is for activations. Empty where no pipeline is broken that has a node left.
    """
    names = streams(plan.routes)
    home = _homes(plan.routes, names)
    broken = _broken(names, home, can, plan.num_layers)
    found = []
    for place in (_best_places, _even_places):
        held = dict(can)
        for pipeline in broken:
            lenders = _Lenders.of(held, {node for node, _ in pipeline.windows}, plan, names, home, workload, speeds)
            for node, window in place(pipeline, lenders).items():
                held[node] = frozenset(range(*window))
        answer = _routed(plan, names, home, broken, held, workload, speeds) if broken else None
        if answer is not None and answer not in found:
            found.append(answer)
    return found


def _homes(routes: Sequence[Route], names: Sequence[NodeId]) -> dict[NodeId, NodeId]:
    """For each node the stream that visits it most."""
    visits = Counter((hop.node, name) for route, name in zip(routes, names, strict=True) for hop in route)
    found: dict[NodeId, NodeId] = {}
    for (node, name), _ in visits.most_common():
        found.setdefault(node, name)
    return found


def _broken(
    names: Sequence[NodeId], home: Mapping[NodeId, NodeId], can: Mapping[NodeId, frozenset[int]], num_layers: int,
) -> list[Broken]:
    """Pipelines whose nodes that are left do not hold all layers between them, each a window of neighbours of its own."""
    members: dict[NodeId, list[NodeId]] = {name: [] for name in names}
    for node in sorted(home, key=node_number):
        if can.get(node):
            members[home[node]].append(node)
    found = []
    for name, nodes in members.items():
        windows = sorted(((min(can[node]), max(can[node]) + 1), node) for node in nodes)
        are_apart = all(before[1] <= after[0] for (before, _), (after, _) in pairwise(windows))
        are_whole = all(end - first == len(can[node]) for (first, end), node in windows)
        covered = sum(end - first for (first, end), _ in windows)
        if windows and are_apart and are_whole and covered < num_layers:
            found.append(Broken(tuple((node, window) for window, node in windows), names.count(name), name))
    return found


@dataclass(frozen=True, slots=True)
class _Lenders:
    """When others end, by the gap that they lend, and when a window's own node does."""

    gap_s: Array
    """By first and end layer of a gap for all micro-batches of the broken pipeline; impossible ones are infinite."""
    head_s: tuple[float, ...]
    work_s: tuple[float, ...]
    """Running sums over layers of a micro-batch's time."""
    state_bytes: tuple[int, ...]
    """Running sums over layers."""
    speeds: Mapping[NodeId, float]

    @classmethod
    def of(
        cls, held: Mapping[NodeId, frozenset[int]], own: set[NodeId], plan: Plan, names: Sequence[NodeId],
        home: Mapping[NodeId, NodeId], workload: Workload, speeds: Mapping[NodeId, float],
    ) -> _Lenders:
        """``own``: the nodes of the pipeline itself."""
        num_layers = plan.num_layers
        work_s = tuple(accumulate((layer.total_s for layer in workload.layers), initial=0.0))
        head_s = heads_s(workload, split=plan.order.split)
        counts = Counter(names)
        many = counts[home[next(iter(own))]]
        others = {node: layers for node, layers in held.items() if layers and node not in own}
        peers = np.zeros(num_layers)
        for layers in others.values():
            peers[sorted(layers)] += 1
        each_s = np.diff(np.array(work_s)) * np.ceil(many / np.maximum(peers, 1))
        lent_s = np.concatenate([[0.0], np.cumsum(each_s)])
        missing = np.concatenate([[0], np.cumsum(peers == 0)])
        gap_s = np.zeros((num_layers + 1, num_layers + 1))
        firsts, ends = np.arange(num_layers + 1)[:, None], np.arange(num_layers + 1)[None, :]
        kinds = {(min(layers), max(layers) + 1, speeds[node], counts[home[node]] if node in home else 0)
                 for node, layers in others.items()}
        for first, end, speed, own_many in kinds:
            piece_s = lent_s[np.minimum(ends, end)] - lent_s[np.minimum(np.maximum(firsts, first), end)]
            own_s = head_s[first] + own_many * (work_s[end] - work_s[first]) / speed
            gap_s = np.maximum(gap_s, np.where(piece_s > 0, own_s + piece_s / speed, 0.0))
        gap_s[(firsts > ends) | (missing[ends] > missing[firsts])] = np.inf
        states = accumulate((Held.of(workload).held_bytes((layer,)) for layer in range(num_layers)), initial=0)
        return cls(gap_s, head_s, work_s, tuple(states), speeds)

    def window_s(self, node: NodeId, width: int, many: int) -> Array:
        """By first layer: when ``node`` ends with a window of ``width`` layers; infinite where it does not fit."""
        found = np.full(len(self.work_s), np.inf)
        for first in range(len(self.work_s) - width):
            work_s = self.work_s[first + width] - self.work_s[first]
            found[first] = self.head_s[first] + many * work_s / self.speeds[node]
        return found

    def moved(self, width: int, before: Window) -> Array:
        """By first layer of a window: bytes of it that are not in the window ``before``."""
        found = np.zeros(len(self.state_bytes))
        for first in range(len(self.state_bytes) - width):
            end = first + width
            kept = max(0, min(end, before[1]) - max(first, before[0]))
            start = max(first, before[0])
            stays = self.state_bytes[start + kept] - self.state_bytes[start] if kept else 0
            found[first] = self.state_bytes[end] - self.state_bytes[first] - stays
        return found


def _best_places(pipeline: Broken, lenders: _Lenders) -> dict[NodeId, Window]:
    """Windows of the same widths, in the same order, so that the last node ends as early as can be."""
    windows = pipeline.windows
    widths = [end - first for _, (first, end) in windows]
    many = pipeline.num_micro_batches
    own_s = [lenders.window_s(node, width, many) for (node, _), width in zip(windows, widths, strict=True)]
    ends_s = lenders.gap_s[:, -1]
    for width, window_s in zip(reversed(widths), reversed(own_s), strict=True):
        ends_s = np.maximum(lenders.gap_s, np.maximum(window_s, _from(ends_s, width))[None, :]).min(axis=1)
    limit_s = float(ends_s[0]) * NEARLY
    if not np.isfinite(limit_s):  # nobody else holds what no window could cover
        return dict(windows)
    # the same once more: of all that end by then, what moves least
    bytes_left = np.where(lenders.gap_s[:, -1] <= limit_s, 0.0, np.inf)
    choices = []
    for (_, window), width, window_s in reversed(list(zip(windows, widths, own_s, strict=True))):
        here = np.where(window_s <= limit_s, lenders.moved(width, window) + _from(bytes_left, width), np.inf)
        options = np.where(lenders.gap_s <= limit_s, here[None, :], np.inf)
        choices.append(options.argmin(axis=1))
        bytes_left = options.min(axis=1)
    found, position = {}, 0
    for (node, _), width, chosen in zip(windows, widths, reversed(choices), strict=True):
        first = int(chosen[position])
        found[node] = (first, first + width)
        position = first + width
    return found


def _from(values: Array, width: int) -> Array:
    """``values`` at the end of windows of ``width`` that begin at each layer; infinite beyond the last."""
    return np.concatenate([values[width:], np.full(width, np.inf)])


def _even_places(pipeline: Broken, lenders: _Lenders) -> dict[NodeId, Window]:
    """Windows of the same widths, in the same order, with gaps of the same size."""
    widths = [end - first for _, (first, end) in pipeline.windows]
    missing = len(lenders.work_s) - 1 - sum(widths)
    found, before = {}, 0
    for index, ((node, _), width) in enumerate(zip(pipeline.windows, widths, strict=True), start=1):
        first = before + round(index * missing / (len(widths) + 1))
        found[node] = (first, first + width)
        before += width
    return found


def _routed(
    plan: Plan, names: Sequence[NodeId], home: Mapping[NodeId, NodeId], broken: Sequence[Broken],
    held: Mapping[NodeId, frozenset[int]], workload: Workload, speeds: Mapping[NodeId, float],
) -> Plan | None:
    """``plan`` with the micro-batches of ``broken`` pipelines on their windows, and others in the gaps."""
    windows = {
        pipeline.name: tuple(Hop(node, min(held[node]), max(held[node]) + 1) for node, _ in pipeline.windows)
        for pipeline in broken
    }
    kept: dict[int, Route] = {}
    for route, name in zip(plan.routes, names, strict=True):
        if id(route) not in kept:
            kept[id(route)] = windows.get(name) or tuple([hop for hop in route if home[hop.node] == name])
    # gaps are small already: cutting them more finely would only add hops
    routes = Router(held, workload, speeds).routes([kept[id(route)] for route in plan.routes], passed_on=0)
    if routes is None:
        return None
    return replace(plan, routes=routes, placement={node: tuple(sorted(layers)) for node, layers in held.items()}, room={})
