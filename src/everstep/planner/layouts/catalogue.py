"""Which pipelines to build from n nodes: how long they are, how layers are split, and their shares of the batch.

1. Layer split: exact for 1F1B (``splits``). 2. Lengths: exact over all sets of them for those times (``lengths``), each with
what its fullest stage needs for its sums and its update. 3. Batch: the slowest pipeline is as fast as can be.

Where nodes are at several sites every pipeline is inside one (``sites``), each site with a table for its own memory and speed.
All sites together are tried and some of them alone, since sums that cross slow links may cost more than nodes are worth. Only
if no pipeline fits into any site there is one over several of them, in one run at each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import numpy as np

from everstep.cluster import Cluster, site_pair
from everstep.config import PlannerConfig
from everstep.plan import Order, Route
from everstep.planner.layouts.lengths import Choice, Kept, Lengths
from everstep.planner.layouts.sites import Site, front_of_sites
from everstep.planner.layouts.splits import Bounds, Splits, splits_of
from everstep.planner.remembered import Same
from everstep.planner.step.cost import is_shared
from everstep.planner.step.memory import caps_of
from everstep.planner.step.pipelines import Array
from everstep.quantities import NodeId, SiteId
from everstep.workload import Workload

COMPARED = 6
"""So many layouts are priced with the whole cost model."""

SITES_IN_PART = 3
"""Of up to so many sites every part is tried alone; of more, each alone and all together."""


def water_fill(tables: Sequence[Array], total: int) -> tuple[tuple[int, ...], float] | None:
    """Shares of ``total`` micro-batches, at least one a pipeline, so that the slowest is as fast as can be.

    ``tables[d][m - 1]``: seconds of pipeline d for m micro-batches, never decreasing; pipelines that are alike share one
    table. None: it cannot be done.
    """
    if not 0 < len(tables) <= total:
        return None
    rows = {id(table): np.asarray(table) for table in tables}
    counts = Counter(map(id, tables))
    levels = np.unique(np.concatenate(list(rows.values())))
    levels = levels[np.isfinite(levels)]

    def caps(level: int) -> dict[int, int]:
        limit_s = levels[level] * (1 + 1e-9)
        return {name: int(np.searchsorted(row, limit_s, side="right")) for name, row in rows.items()}

    def carries(level: int) -> bool:
        found = caps(level)
        return min(found.values()) > 0 and sum(counts[name] * cap for name, cap in found.items()) >= total

    low, high = 0, len(levels)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if carries(middle) else (middle + 1, high)
    if low == len(levels):
        return None
    most = caps(low)
    below = caps(low - 1) if low else dict.fromkeys(most, 0)
    shares = np.array([max(1, below[id(table)]) for table in tables])
    room = np.array([most[id(table)] for table in tables]) - shares
    while (missing := total - int(shares.sum())) != 0:
        if missing > 0:
            index = np.flatnonzero(room > 0)[:missing]
            shares[index] += 1
            room[index] -= 1
        else:
            index = np.argsort(-shares, kind="stable")[:-missing]
            shares[index[shares[index] > 1]] -= 1
    seconds = max(float(rows[id(table)][share - 1]) for table, share in zip(tables, shares.tolist(), strict=True))
    return tuple(shares.tolist()), seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Pipelines: those that stay as they are, and new ones without names: how layers are split, and shares of the batch."""

    kept: tuple[Route, ...] = ()
    splits: tuple[Bounds, ...]
    shares: tuple[int, ...]
    """The kept pipelines first."""
    estimate_s: float
    sites: tuple[tuple[SiteId, ...], ...] = ()
    """By new pipeline the site of each place; empty: anywhere."""

    @property
    def shapes(self) -> list[tuple[Bounds, int]]:
        """Split and share of every pipeline."""
        kept = [tuple([(hop.first, hop.end) for hop in route]) for route in self.kept]
        return list(zip([*kept, *self.splits], self.shares, strict=True))

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The layer range of every place of the new pipelines, one pipeline after the other."""
        return tuple(bounds for split in self.splits for bounds in split)


class Catalogue:
    """Tables of times for one workload on one kind of cluster, and the layouts that they give."""

    def __init__(
        self, workload: Workload, cluster: Cluster, config: PlannerConfig, nodes: Sequence[NodeId], order: Order,
    ) -> None:
        self._workload, self._cluster, self._config, self._nodes, self._order = workload, cluster, config, nodes, order
        self._cap = smallest_cap(nodes, cluster, config)
        self._longest = min(config.max_stages, workload.num_layers)
        self._shared_s = _shared_s(workload, cluster)
        self._besides = _besides_s(workload, cluster, self._longest)
        self.columns = 16
        while self.columns < min(workload.num_micro_batches, 1.5 * workload.num_micro_batches * self._longest / len(nodes)):
            self.columns *= 2

    @property
    def splits(self) -> Splits:
        return self._splits_for(self._workload, self._cap)

    def _splits_for(self, workload: Workload, cap: int | None) -> Splits:
        return splits_of(
            workload, cap, self._cluster.link, columns=self.columns, longest=self._longest,
            split=self._order.split, roomy=self._order.split and self._order.extra_slots > 2,
            staggered=self._order.staggered,
        )

    def layouts(self, keep: Sequence[Route], least: int, idle: int = 0) -> list[Layout]:
        """The most promising layouts that leave at least ``idle`` nodes idle: from the front, and where all nodes are free or
        share cores, even ones. Those that may take all sites come first if they are equally fast."""
        found = self._at_sites(keep, least, idle) if self._cluster.site_links else self._anywhere(keep, least, idle)
        unique: dict[object, Layout] = {}
        for layout in found:  # kept or put together again, it is the same: the first, which keeps more, stays
            unique.setdefault((frozenset(Counter(layout.shapes).items()), layout.sites), layout)
        return sorted(unique.values(), key=lambda layout: rounded(layout.estimate_s))[:COMPARED]

    def _anywhere(self, keep: Sequence[Route], least: int, idle: int) -> list[Layout]:
        total, num_nodes = self._workload.num_micro_batches, len(self._nodes) - idle
        running = _by_split(keep, self._longest)
        kinds = tuple([(bounds, len(routes)) for bounds, routes in running.items()])
        while True:
            splits = self.splits
            front = _front(splits, self._besides, num_nodes, total, kinds, least)
            if front is not None:
                break
            self.columns *= 2
        found = [self._layout([splits], outline, list(running.values())) for outline in front]
        if self._shared_s is not None or not keep:
            even = [_filled(splits, self._besides, Choice((), lengths, 0.0, 0), (), total) for lengths in
                    _even(num_nodes, self._longest, least, total)]
            found += [self._layout([splits], outline, ()) for outline in even if outline is not None]
        return found

    def _at_sites(self, keep: Sequence[Route], least: int, idle: int) -> list[Layout]:
        nodes_at = self._nodes_at()
        counts = {site: len(nodes) for site, nodes in nodes_at.items()}
        counts[max(counts, key=lambda site: counts[site])] -= idle
        site_of = {node: site for site, nodes in nodes_at.items() for node in nodes}
        whole: dict[SiteId, list[Route]] = {site: [] for site in nodes_at}
        for route in keep:
            sites = {site_of[hop.node] for hop in route}
            if len(sites) == 1:
                whole[sites.pop()].append(route)
        found = []
        for some in _parts_of(list(nodes_at)):
            found += self._at({site: counts[site] for site in some}, {site: whole[site] for site in some}, least)
        return found

    def _at(self, counts: Mapping[SiteId, int], keep: Mapping[SiteId, Sequence[Route]], least: int) -> list[Layout]:
        """Layouts that use these sites, with so many nodes at each."""
        total, nodes_at = self._workload.num_micro_batches, self._nodes_at()
        running = {site: _by_split(routes, self._longest) for site, routes in keep.items()}
        while True:
            tables = [self._splits_at(nodes_at[site]) for site in counts]
            asked = tuple(
                (splits, counts[site], tuple([(bounds, len(routes)) for bounds, routes in running[site].items()]))
                for splits, site in zip(tables, counts, strict=True)
            )
            front = _front_of_sites(asked, self._besides, total, least)
            if front is not None:
                break
            self.columns *= 2
        groups = [routes for site in counts for routes in running[site].values()]
        found = [self._layout(tables, outline, groups, tuple(counts)) for outline in front]
        if self._shared_s is not None or not any(keep.values()):
            rows = [[splits.seconds(n) + self._besides[n - 1] for n in range(1, splits.longest + 1)] for splits in tables]
            for lengths in _even_at_each(list(counts.values()), self._longest, least, total):
                outline = _shared_out([((), some) for some in lengths], rows, [()] * len(rows), total)
                found += [self._layout(tables, outline, (), tuple(counts))] if outline is not None else []
        return found

    def _nodes_at(self) -> dict[SiteId, list[NodeId]]:
        found: dict[SiteId, list[NodeId]] = {}
        for node in self._nodes:
            found.setdefault(self._cluster.nodes[node].site, []).append(node)
        return found

    def _splits_at(self, nodes: Sequence[NodeId]) -> Splits:
        """Tables for the memory of a site's nodes, and for their speed if it is one."""
        speeds = {self._cluster.nodes[node].speed for node in nodes}
        workload = _at_speed(Same(self._workload), speeds.pop()) if len(speeds) == 1 else self._workload
        return self._splits_for(workload, smallest_cap(nodes, self._cluster, self._config))

    def straddling(self, idle: int = 0) -> list[Layout]:
        """One pipeline over several sites, the largest first, with one run at each. For when no site has room for any."""
        nodes_at = self._nodes_at()
        sites = sorted(nodes_at, key=lambda site: (-len(nodes_at[site]), site))
        places = [site for site in sites for _ in nodes_at[site]]
        splits, total = self.splits, self._workload.num_micro_batches
        found = []
        for length in range(1, min(splits.longest, len(places) - idle) + 1):
            seconds = float(splits.seconds(length)[-1])
            if np.isfinite(seconds):
                found.append(Layout(
                    splits=(splits.bounds(length, splits.columns),), shares=(total,), sites=(tuple(places[:length]),),
                    estimate_s=seconds * total / splits.columns + self._besides[length - 1],
                ))
        return sorted(found, key=lambda layout: rounded(layout.estimate_s))[:COMPARED]

    def _layout(
        self, tables: Sequence[Splits], outline: _Outline, running: Sequence[Sequence[Route]], sites: tuple[SiteId, ...] = (),
    ) -> Layout:
        kept = tuple([route for routes, count in zip(running, outline.kept, strict=True) for route in routes[:count]])
        at = outline.at or (0,) * len(outline.lengths)
        new = list(zip(outline.lengths, outline.shares[len(kept):], at, strict=True))
        estimate_s = outline.seconds
        if self._shared_s is not None:
            work_s, update_s = self._shared_s
            estimate_s = max(estimate_s, work_s + len(outline.shares) * update_s)
        names = tuple([(sites[where],) * length for length, _, where in new]) if sites else ()
        if sites:
            pipelines = Counter(sites[where] for _, _, where in new)
            pipelines.update(self._cluster.nodes[route[0].node].site for route in kept)
            estimate_s += _crossing_s(pipelines, self._workload, self._cluster)
        return Layout(
            kept=kept, splits=tuple([tables[where].bounds(length, share) for length, share, where in new]),
            shares=outline.shares, estimate_s=estimate_s, sites=names,
        )


_Kinds = tuple[tuple[Bounds, int], ...]
"""Pipelines that run already: splits, and how many have each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outline:
    """How many pipelines of each kind stay, the lengths of new ones, the share of each, and the time of the slowest."""

    kept: tuple[int, ...]
    lengths: tuple[int, ...]
    shares: tuple[int, ...]
    seconds: float
    at: tuple[int, ...] = ()
    """Where there are several sites, the number of the one at which each new pipeline is."""


@lru_cache(maxsize=128)
def _front(
    splits: Splits, besides: tuple[float, ...], num_nodes: int, total: int, kinds: _Kinds, least: int,
) -> tuple[_Outline, ...] | None:
    """The front without names: one loss after another asks for the same. None: the table is too short to be sure."""
    lengths = _lengths(splits, besides)
    running = tuple([Kept(len(cuts), count, splits.seconds_of(cuts) + besides[len(cuts) - 1]) for cuts, count in kinds])
    choices = lengths.front(num_nodes, total, running, least)
    if choices and lengths.truncated(choices[-1], total):
        return None
    found = [_filled(splits, besides, choice, running, total) for choice in choices]
    return tuple([outline for outline in found if outline is not None])


def _filled(
    splits: Splits, besides: tuple[float, ...], choice: Choice, running: Sequence[Kept], total: int,
) -> _Outline | None:
    """``choice`` with the batch shared out; None: it cannot be done."""
    rows = [kind.seconds for kind, count in zip(running, choice.kept, strict=True) for _ in range(count)]
    tables = {length: splits.seconds(length) + besides[length - 1] for length in set(choice.lengths)}
    filled = water_fill([*rows, *(tables[length] for length in choice.lengths)], total)
    if filled is None:
        return None
    shares, seconds = filled
    return _Outline(kept=choice.kept, lengths=choice.lengths, shares=shares, seconds=seconds)


@lru_cache(maxsize=32)
def _lengths(splits: Splits, besides: tuple[float, ...]) -> Lengths:
    return Lengths({length: splits.seconds(length) + besides[length - 1] for length in range(1, splits.longest + 1)})


def _by_split(keep: Sequence[Route], longest: int) -> dict[Bounds, list[Route]]:
    """Pipelines that run already, by their split."""
    found: dict[Bounds, list[Route]] = {}
    for route in keep:
        found.setdefault(tuple([(hop.first, hop.end) for hop in route]), []).append(route)
    return {cuts: routes for cuts, routes in found.items() if len(cuts) <= longest}


_AtSite = tuple[Splits, int, _Kinds]
"""What is asked about a site: its table, its nodes, and what runs there."""


@lru_cache(maxsize=128)
def _front_of_sites(
    asked: tuple[_AtSite, ...], besides: tuple[float, ...], total: int, least: int,
) -> tuple[_Outline, ...] | None:
    """As ``_front``, for several sites."""
    sites, rows = [], []
    for splits, num_nodes, kinds in asked:
        running = tuple([Kept(len(cuts), count, splits.seconds_of(cuts) + besides[len(cuts) - 1]) for cuts, count in kinds])
        sites.append(Site(_lengths(splits, besides), num_nodes, running))
        rows.append([splits.seconds(length) + besides[length - 1] for length in range(1, splits.longest + 1)])
    front = front_of_sites(sites, total, least)
    if front and any(site.lengths.is_short(front[-1][0].step_s, total) for site in sites):
        return None
    kept = [[kind.seconds for kind in site.kinds] for site in sites]
    found = [_shared_out([(choice.kept, choice.lengths) for choice in choices], rows, kept, total) for choices in front]
    return tuple([outline for outline in found if outline is not None])


def _shared_out(
    chosen: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], rows: Sequence[Sequence[Array]],
    kept: Sequence[Sequence[Array]], total: int,
) -> _Outline | None:
    """The batch shared out over all sites. By site: how many of each kind stay and new lengths, times by length, by kind."""
    staying = [row for (counts, _), kinds in zip(chosen, kept, strict=True)
               for row, count in zip(kinds, counts, strict=True) for _ in range(count)]
    new = [rows[at][length - 1] for at, (_, lengths) in enumerate(chosen) for length in lengths]
    filled = water_fill([*staying, *new], total)
    if filled is None:
        return None
    return _Outline(
        kept=tuple([count for counts, _ in chosen for count in counts]),
        lengths=tuple([length for _, lengths in chosen for length in lengths]), shares=filled[0], seconds=filled[1],
        at=tuple([at for at, (_, lengths) in enumerate(chosen) for _ in lengths]),
    )


def _parts_of(sites: Sequence[SiteId]) -> Iterator[tuple[SiteId, ...]]:
    """All sites, then fewer of them."""
    yield tuple(sites)
    for count in range(len(sites) - 1, 0, -1):
        if count == 1 or len(sites) <= SITES_IN_PART:
            yield from combinations(sites, count)


@lru_cache(maxsize=32)
def _at_speed(workload: Same[Workload], speed: float) -> Workload:
    """``workload`` as it is for nodes of that speed."""
    if speed == 1.0:
        return workload.value
    layers = tuple(
        replace(
            layer, forward_s=layer.forward_s / speed, backward_input_s=layer.backward_input_s / speed,
            backward_weight_s=layer.backward_weight_s / speed, optimizer_s=layer.optimizer_s / speed,
        )
        for layer in workload.value.layers
    )
    return replace(workload.value, layers=layers)


def _even_at_each(counts: Sequence[int], longest: int, least: int, most: int) -> Iterator[list[tuple[int, ...]]]:
    """For each length even pipelines at every site that has nodes for one."""
    for length in range(1, min(longest, max(counts)) + 1):
        found = [_as_even_as_can_be(count, length) for count in counts]
        if least <= sum(map(len, found)) <= most and max(max(some, default=0) for some in found) <= longest:
            yield found


def _crossing_s(pipelines: Mapping[SiteId, int], workload: Workload, cluster: Cluster) -> float:
    """How long the sums of a step keep the busiest link between sites, with so many pipelines at each (``reductions``)."""
    num_bytes = sum(unit.gradient_bytes or unit.parameter_bytes for unit in workload.units.values())
    count = sum(pipelines.values())
    return max(
        (2 * pipelines[one] * pipelines[other] / count * num_bytes / cluster.site_links[site_pair(one, other)].bytes_per_s
         for one, other in combinations(pipelines, 2)),
        default=0.0,
    )


def _even(num_nodes: int, longest: int, least: int, most: int) -> list[tuple[int, ...]]:
    """For each length the pipelines that come of it when the rest of the nodes is shared out among them."""
    found = [_as_even_as_can_be(num_nodes, length) for length in range(1, min(longest, num_nodes) + 1)]
    return list(dict.fromkeys(some for some in found if least <= len(some) <= most and max(some) <= longest))


def _as_even_as_can_be(num_nodes: int, length: int) -> tuple[int, ...]:
    """All nodes in as many pipelines as can have that length; the rest of the nodes shared out among them."""
    count = num_nodes // length
    if not count:
        return ()
    short, long = divmod(num_nodes, count)
    return (short + 1,) * long + (short,) * (count - long)


def _besides_s(workload: Workload, cluster: Cluster, longest: int) -> tuple[float, ...]:
    """By length, what a step costs besides its pipelines: the sums and the update of a stage, taken as even."""
    gradient_s = sum(unit.gradient_bytes or unit.parameter_bytes for unit in workload.units.values()) / cluster.link.bytes_per_s
    optimizer_s = sum(layer.optimizer_s for layer in workload.layers)
    return tuple((2 * gradient_s + optimizer_s) / length for length in range(1, longest + 1))


def _shared_s(workload: Workload, cluster: Cluster) -> tuple[float, float] | None:
    """Seconds of a step's work, and of one replica's update, on all cores; None unless every host's nodes share some."""
    if not is_shared(cluster):
        return None
    cores = [cluster.host_cores.get(host) for host in {node.host for node in cluster.nodes.values()}]
    if None in cores:
        return None
    total = sum(count for count in cores if count is not None)
    work_s = sum(layer.total_s for layer in workload.layers) * workload.num_micro_batches
    return work_s / total, sum(layer.optimizer_s for layer in workload.layers) / total


def rounded(seconds: float) -> float:
    """Differences below half a per mill are noise and must not choose."""
    return float(f"{seconds:.3g}")


def smallest_cap(nodes: Sequence[NodeId], cluster: Cluster, config: PlannerConfig) -> int | None:
    """The least memory of ``nodes``; None: none is limited."""
    caps = set(caps_of(nodes, cluster, config.worker_memory_bytes).values())
    return min((cap for cap in caps if cap is not None), default=None)
