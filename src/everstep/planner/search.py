"""Which pipelines to build from n nodes: lengths, layer split, share of the batch, and who takes which place.

1. Layer split: exact for 1F1B (``splits``). 2. Lengths: exact over all sets of them for those times (``lengths``), each with
what its fullest stage needs for its sums and its update. 3. Batch: the slowest pipeline is as fast as can be. 4. Places: the
assignment of nodes that moves the fewest bytes, given what each node holds.

After a change the search goes along the front from keeping every pipeline that is whole to the least step time of all: ties
in step time hide huge moves. A handful of layouts is then priced with the whole cost model, which also knows messages in
list schedules, the number of replicas in a reduction, unequal speeds and cores that nodes share; the search does not.

A layout in which each layer has two holders comes before any that would not survive every single loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from scipy.optimize import linear_sum_assignment

from everstep.cluster import Cluster
from everstep.config import PlannerConfig
from everstep.errors import InfeasibleError
from everstep.plan import Hop, Order, Plan, Route
from everstep.planner.cost import is_shared, seconds_after, staggered_seconds
from everstep.planner.lengths import Choice, Kept, Lengths
from everstep.planner.memory import cap_bytes, needed_bytes, overfull, rooms
from everstep.planner.pace import pace
from everstep.planner.parts import units_by_layers
from everstep.planner.pipelines import Array
from everstep.planner.splits import Bounds, Splits, splits_of
from everstep.quantities import NodeId, UnitName, human_bytes, node_number
from everstep.workload import Workload

COMPARED = 6
"""So many layouts are priced with the whole cost model."""

ASSIGNED_TOGETHER = 2048
"""So many nodes are assigned to places at once; more in turns of so many, which may miss the fewest bytes."""

Holds = Mapping[NodeId, frozenset[UnitName]]


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
        self._workload, self._cluster, self._order = workload, cluster, order
        self._cap = _cap(nodes, cluster, config)
        self._longest = min(config.max_stages, workload.num_layers)
        self._shared_s = _shared_s(workload, cluster)
        self.columns = 16
        while self.columns < min(workload.num_micro_batches, 1.5 * workload.num_micro_batches * self._longest / len(nodes)):
            self.columns *= 2

    @property
    def splits(self) -> Splits:
        return splits_of(
            self._workload, self._cap, self._cluster.link, columns=self.columns, longest=self._longest,
            split=self._order.split, roomy=self._order.split and self._order.extra_slots > 2,
            staggered=self._order.staggered,
        )

    def layouts(self, num_nodes: int, keep: Sequence[Route], least: int) -> list[Layout]:
        """The most promising layouts of at most ``num_nodes`` nodes, from the front and, on shared cores, of even ones."""
        total = self._workload.num_micro_batches
        besides = _besides_s(self._workload, self._cluster, self._longest)
        running = _by_split(keep, self._longest)
        kinds = tuple([(bounds, len(routes)) for bounds, routes in running.items()])
        while True:
            splits = self.splits
            front = _front(splits, besides, num_nodes, total, kinds, least)
            if front is not None:
                break
            self.columns *= 2
        found = [self._layout(splits, outline, list(running.values())) for outline in front]
        if self._shared_s is not None or not keep:
            even = [_filled(splits, besides, Choice((), lengths, 0.0, 0), (), total) for lengths in
                    _even(num_nodes, self._longest, least, total)]
            found += [self._layout(splits, outline, ()) for outline in even if outline is not None]
        unique: dict[object, Layout] = {}
        for layout in found:  # kept or put together again, it is the same: the first, which keeps more, stays
            unique.setdefault(frozenset(Counter(layout.shapes).items()), layout)
        return sorted(unique.values(), key=lambda layout: _rounded(layout.estimate_s))[:COMPARED]

    def _layout(self, splits: Splits, outline: _Outline, running: Sequence[Sequence[Route]]) -> Layout:
        kept = tuple([route for routes, count in zip(running, outline.kept, strict=True) for route in routes[:count]])
        new = zip(outline.lengths, outline.shares[len(kept):], strict=True)
        estimate_s = outline.seconds
        if self._shared_s is not None:
            work_s, update_s = self._shared_s
            estimate_s = max(estimate_s, work_s + len(outline.shares) * update_s)
        return Layout(
            kept=kept, splits=tuple([splits.bounds(length, share) for length, share in new]), shares=outline.shares,
            estimate_s=estimate_s,
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


def _even(num_nodes: int, longest: int, least: int, most: int) -> list[tuple[int, ...]]:
    """For each length the pipelines that come of it when the rest of the nodes is shared out among them."""
    found = []
    for length in range(1, min(longest, num_nodes) + 1):
        count = num_nodes // length
        short, long = divmod(num_nodes, count)
        if least <= count <= most and short + (long > 0) <= longest:
            found.append((short + 1,) * long + (short,) * (count - long))
    return list(dict.fromkeys(found))


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


def _rounded(seconds: float) -> float:
    """Differences below half a per mill are noise and must not choose."""
    return float(f"{seconds:.3g}")


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
    names = list(workload.units)
    sizes = np.array([workload.units[name].state_bytes for name in names], dtype=np.float64)
    needs = np.array([[name in units for name in names] for units in columns], dtype=np.float64)
    lacks = np.array([[name not in units for name in names] for units in rows], dtype=np.float64)
    row_of, column_of = ({units: index for index, units in enumerate(kinds)} for kinds in (rows, columns))
    lacking = (lacks * sizes) @ needs.T  # by what is held and what is wanted, of which there are few
    found: Array = lacking[np.ix_([row_of[units] for units in held], [column_of[units] for units in wanted])]
    return found


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A plan with its predicted step time and the bytes of its fullest node."""

    plan: Plan
    step_s: float
    needed_bytes: Mapping[NodeId, int] = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        return max(self.needed_bytes.values(), default=0)


ROOMY_NODES = 1024
"""With more nodes ``Order.extra_slots`` alone counts: what each could hold besides takes too long to say."""


def with_room(plan: Plan, workload: Workload, cluster: Cluster, worker_memory_bytes: int | None = None) -> Plan:
    """``plan`` with leave for each node to fill its memory with activations, if that is limited and it has its device alone."""
    room: dict[NodeId, int] = {}
    if len(plan.placement) <= ROOMY_NODES and not is_shared(cluster):
        caps = {node: cap_bytes(node, cluster, worker_memory_bytes) for node in plan.placement}
        room = rooms(plan, workload, caps) if any(caps.values()) else room
    return plan if plan.room == room else replace(plan, room=room)


def priced(plan: Plan, workload: Workload, cluster: Cluster) -> Priced:
    """One schedule serves both figures. Nodes whose memory is limited get ``with_room``."""
    plan = with_room(plan, workload, cluster)
    found = pace(plan, workload, cluster)
    if plan.order.staggered:
        step_s = staggered_seconds(plan, workload, cluster)
    else:
        step_s = seconds_after(plan, workload, cluster, found.ends_s)
    return Priced(plan=plan, step_s=step_s, needed_bytes=needed_bytes(plan, workload, found.active_bytes))


def best_priced(
    nodes: Sequence[NodeId], workload: Workload, cluster: Cluster, config: PlannerConfig, *, holds: Holds | None = None,
    order: Order | None = None, idle: int = 0, keep: Sequence[Route] = (),
) -> list[Priced]:
    """A few distinct layouts of ``nodes`` by predicted step time, every node in each. Empty: nothing fits.

    Nodes beyond ``idle`` stay idle only where no faster layout uses them. ``holds``: what each node holds, so that it gets a
    place near it. ``keep``: pipelines of living nodes that run already and may stay as they are.
    """
    order = Order() if order is None else order
    catalogue = Catalogue(workload, cluster, config, nodes, order)
    numbered = sorted(nodes, key=node_number)
    ranked = sorted(numbered, key=lambda node: cluster.nodes[node].host)
    found: list[Layout] = []
    for least in sorted({config.tolerate + 1, 2, 1}, reverse=True):
        found = found or catalogue.layouts(len(ranked) - idle, keep, least)
    answers = []
    for layout in found:
        staying = {hop.node for route in layout.kept for hop in route}
        free = [node for node in ranked if node not in staying]
        units = units_by_layers((tuple(range(*bounds)) for bounds in layout.places), workload)
        chosen = assign([units[tuple(range(*bounds))] for bounds in layout.places], free, workload, holds or {})
        plan = plan_of(layout, chosen, numbered, workload.num_layers, order)
        for extra_slots in _slots_to_try(order, layout):
            answer = priced(replace(plan, order=replace(order, extra_slots=extra_slots)), workload, cluster)
            if not overfull(answer.needed_bytes, cluster, config.worker_memory_bytes):
                answers.append(answer)
                break
    return sorted(answers, key=lambda answer: _rounded(answer.step_s))


def _slots_to_try(order: Order, layout: Layout) -> list[int]:
    """The most first. Where some are given, a long pipeline of small stages may use as many as it has stages.

    With staggered updates twice as many: it takes these until no stage waits for another.
    """
    if not order.extra_slots:
        return [0]
    longest = max(len(bounds) for bounds, _ in layout.shapes) * (2 if order.staggered else 1)
    return sorted({longest, order.extra_slots, order.extra_slots // 2, 0}, reverse=True)


def best_plans(
    nodes: Sequence[NodeId], workload: Workload, cluster: Cluster, config: PlannerConfig, *, holds: Holds | None = None,
    order: Order | None = None,
) -> list[Plan]:
    """The plans of ``best_priced``, fastest first."""
    return [answer.plan for answer in best_priced(nodes, workload, cluster, config, holds=holds, order=order)]


SPLIT_MUST_SAVE = 0.12
"""The part of a step that splitting backward must save. On CPU, with small layers, it takes that much more processor time
(``benchmarks/results/steady-state-cpu-2-cores-2026-11-30.md``)."""


def with_best_order(found: Priced, workload: Workload, cluster: Cluster, config: PlannerConfig) -> Priced:
    """``found`` with split backward, if that is predicted to be clearly faster and fits; else as it is.

    Clearly, since the prediction leaves out what splitting itself costs: more calls for each linear layer.
    """
    other = priced(replace(found.plan, order=replace(found.plan.order, split=True)), workload, cluster)
    fits = not overfull(other.needed_bytes, cluster, config.worker_memory_bytes)
    return other if fits and other.step_s < (1 - SPLIT_MUST_SAVE) * found.step_s else found


def why_nothing_fits(
    nodes: Sequence[NodeId], workload: Workload, cluster: Cluster, config: PlannerConfig,
) -> InfeasibleError:
    """For each number of stages that was tried, what was in the way, and what memory would do."""
    cap = _cap(nodes, cluster, config)
    splits = Splits(workload, None, columns=1, longest=min(config.max_stages, len(nodes)))
    tightest = min(nodes, key=lambda node: (_cap_or_more(node, cluster, config), node_number(node)))
    rejected: dict[str, str] = {}
    enough: list[tuple[int, int]] = []
    for num_stages in range(1, min(len(nodes), config.max_stages) + 1):
        if num_stages > workload.num_layers:
            rejected[_stages(num_stages)] = f"{_stages(num_stages)} but only {workload.num_layers} layers"
        elif cap is not None:
            num_pipelines = min(len(nodes) // num_stages, workload.num_micro_batches)
            needed = splits.least_bytes(num_stages, -(-workload.num_micro_batches // num_pipelines))
            enough.append((needed, num_stages))
            rejected[_stages(num_stages)] = f"{tightest} needs {human_bytes(needed)} of {human_bytes(cap)}"
    if len(nodes) > config.max_stages:
        rejected[f"more than {_stages(config.max_stages)}"] = f"max_stages is {config.max_stages}"
    words = "; ".join(f"{tried}: {why}" for tried, why in rejected.items())
    if enough:
        needed, num_stages = min(enough)
        words += f". It would fit with {human_bytes(needed, up=True)} on every node, in {_stages(num_stages)}"
    return InfeasibleError(f"no plan for {len(nodes)} nodes and {workload.num_layers} layers fits: {words}", rejected)


def _stages(count: int) -> str:
    return "1 stage" if count == 1 else f"{count} stages"


def _cap(nodes: Sequence[NodeId], cluster: Cluster, config: PlannerConfig) -> int | None:
    caps = [cap_bytes(node, cluster, config.worker_memory_bytes) for node in nodes]
    return min((cap for cap in caps if cap is not None), default=None)


def _cap_or_more(node: NodeId, cluster: Cluster, config: PlannerConfig) -> float:
    cap = cap_bytes(node, cluster, config.worker_memory_bytes)
    return float("inf") if cap is None else cap
