"""Which pipelines to build from n nodes: lengths, layer split, share of the batch, and who takes which place.

1. Lengths: every way to cut n nodes into pipelines (all partitions for few nodes; for many, those of at most two
   different lengths), fewest idle nodes first.
2. Layer split: exact for a lower bound of 1F1B's step time, by a dynamic program over suffixes that also obeys the memory
   limit. Equal stages are a special case; larger stages come early, where their fill hides behind the round trip.
3. Batch: micro-batches go one by one to the pipeline that ends first with one more, so the slowest is as fast as can be.
4. Places: the assignment of nodes to places that moves the fewest bytes, given what each node holds.

A layout in which each layer has two holders comes before any that would not survive every single loss.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from everstep.cluster import Cluster
from everstep.config import PlannerConfig
from everstep.errors import InfeasibleError
from everstep.plan import Hop, Order, Plan
from everstep.planner.cost import step_seconds
from everstep.planner.memory import cap_bytes, node_bytes, overfull
from everstep.planner.schedules import order_of
from everstep.quantities import NodeId, UnitName, human_bytes, node_number
from everstep.workload import Workload

ENUMERATED_NODES = 14
"""Up to so many nodes all partitions are tried (135 for 14 nodes); beyond, at most two different lengths."""

COMPARED = 6
"""So many layouts, the best by a rough estimate, are priced with the whole cost model."""

_Array = NDArray[np.float64]
_UNREACHABLE = float("inf")

Lengths = tuple[int, ...]
Bounds = tuple[tuple[int, int], ...]
"""First and end layer of each stage."""


class Splits:
    """Best layer split of a pipeline of p stages for m micro-batches, for all p and m at once.

    A stage with F and B, with r stages behind it, ``before`` the total of F + B ahead of it and ``behind`` that after it,
    cannot end a step of m micro-batches before

        before + m·(F + B) + max(0, behind - w·F) + [m > r + 1]·max(0, behind - w·B),   w = min(m - 1, r)

    (it waits once for its first backward and once for its last). The bound of a split is the largest of its stages'; it
    depends on a stage's layers and on r alone, so the best split of all layers from i on, with r more stages behind, is
    the best first stage in front of the best split of the rest.
    """

    def __init__(self, workload: Workload, cap: int | None) -> None:
        """``cap``: bytes that state and activations of a stage may take; None: not limited."""
        self._num_layers = workload.num_layers
        self._micro_batches = np.arange(1, workload.num_micro_batches + 1, dtype=np.float64)
        total = np.array([0.0, *accumulate(layer.total_s for layer in workload.layers)])
        forward = np.array([0.0, *accumulate(layer.forward_s for layer in workload.layers)])
        self._work_s, self._forward_s = _intervals(total), _intervals(forward)
        self._before_s, self._behind_s = total[:-1], total[-1] - total
        self._activation_bytes = _intervals(np.array([0.0, *accumulate(x.activation_bytes for x in workload.layers)]))
        self._held_bytes = _held_by_interval(workload)
        self._cap = cap
        self._best: list[_Array] = []
        self._ends: list[NDArray[np.intp]] = []

    def seconds(self, num_stages: int) -> list[float]:
        """For 1, 2, … micro-batches the bound of the best split; infinite where no split fits. Never decreasing."""
        self._extend(num_stages)
        found: list[float] = np.maximum.accumulate(self._best[num_stages - 1][0]).tolist()
        return found

    def bounds(self, num_stages: int, num_micro_batches: int) -> Bounds:
        """The best split. Only for what ``seconds`` calls finite."""
        self._extend(num_stages)
        found, first = [], 0
        for behind in reversed(range(num_stages)):
            end = int(self._ends[behind][first, num_micro_batches - 1])
            found.append((first, end))
            first = end
        return tuple(found)

    def least_bytes(self, num_stages: int) -> int:
        """The least that the fullest stage of ``num_stages`` needs for one micro-batch: why nothing fits."""
        best = np.full(self._num_layers + 1, np.inf)
        best[-1] = 0.0
        for _ in range(num_stages):
            following = np.maximum(self._held_bytes + self._activation_bytes, best[None, :])
            best = np.append(following.min(axis=1), np.inf)
        return int(best[0]) if np.isfinite(best[0]) else 0

    def _extend(self, num_stages: int) -> None:
        while len(self._best) < num_stages:
            behind = len(self._best)
            bound = self._stage_bound(behind)
            if behind == 0:
                after = np.full((self._num_layers + 1, self._micro_batches.size), np.inf)
                after[-1] = 0.0
            else:
                after = np.vstack([self._best[-1], np.full((1, self._micro_batches.size), np.inf)])
            whole = np.maximum(bound, after[None, :, :])
            self._ends.append(whole.argmin(axis=1))
            self._best.append(whole.min(axis=1))

    def _stage_bound(self, behind: int) -> _Array:
        """By first layer, end layer and micro-batches, with ``behind`` stages after this one."""
        many = self._micro_batches[None, None, :]
        warm_up = np.minimum(many - 1, behind)
        forward, work = self._forward_s[:, :, None], self._work_s[:, :, None]
        after = self._behind_s[None, :, None]
        bound: _Array = (
            self._before_s[:, None, None] + many * work + np.maximum(0.0, after - warm_up * forward)
            + np.where(many > behind + 1, np.maximum(0.0, after - warm_up * (work - forward)), 0.0)
        )
        if self._cap is not None:
            held = np.minimum(many, behind + 1) * self._activation_bytes[:, :, None] + self._held_bytes[:, :, None]
            bound = np.where(held > self._cap, np.inf, bound)
        empty = np.arange(self._num_layers)[:, None] >= np.arange(self._num_layers + 1)[None, :]
        return np.where(empty[:, :, None], np.inf, bound)


def _intervals(running: _Array) -> _Array:
    """From running sums: the sum over the layers first..end, by first and end."""
    found: _Array = running[None, :] - running[:-1, None]
    return found


def _held_by_interval(workload: Workload) -> _Array:
    by_layer: list[list[UnitName]] = [[] for _ in workload.layers]
    for name, unit in workload.units.items():
        for layer in set(unit.layers):
            by_layer[layer].append(name)
    held = np.zeros((workload.num_layers, workload.num_layers + 1))
    for first in range(workload.num_layers):
        seen: set[UnitName] = set()
        total = 0
        for layer in range(first, workload.num_layers):
            total += sum(workload.units[name].held_bytes for name in by_layer[layer] if name not in seen)
            seen.update(by_layer[layer])
            held[first, layer + 1] = total
    return held


def partitions(total: int, longest: int) -> Iterator[Lengths]:
    """Every way to write ``total`` as a sum of lengths up to ``longest``, longest first; few lengths if it is large."""
    if total > ENUMERATED_NODES:
        yield from _of_two_lengths(total, longest)
    elif total == 0:
        yield ()
    else:
        for length in range(min(total, longest), 0, -1):
            for rest in partitions(total - length, length):
                yield (length, *rest)


def _of_two_lengths(total: int, longest: int) -> Iterator[Lengths]:
    for long in range(min(total, longest), 0, -1):
        if total % long == 0:
            yield (long,) * (total // long)
        for short in range(1, long):
            for count in range(1, (total - 1) // long + 1):
                if (total - count * long) % short == 0:
                    yield (long,) * count + (short,) * ((total - count * long) // short)


def water_fill(tables: Sequence[Sequence[float]], total: int) -> tuple[tuple[int, ...], float] | None:
    """Shares of ``total`` micro-batches, at least one a pipeline, so that the slowest is as fast as can be.

    ``tables[d][m - 1]``: seconds of pipeline d for m micro-batches, never decreasing. None: it cannot be done.
    """
    if not 0 < len(tables) <= total:
        return None
    shares = [1] * len(tables)
    heap = [(table[1] if len(table) > 1 else _UNREACHABLE, index) for index, table in enumerate(tables)]
    heapq.heapify(heap)
    for _ in range(total - len(tables)):
        _, index = heap[0]
        shares[index] += 1
        following = tables[index][shares[index]] if shares[index] < len(tables[index]) else _UNREACHABLE
        heapq.heapreplace(heap, (following, index))
    seconds = max(table[share - 1] for table, share in zip(tables, shares, strict=True))
    return (tuple(shares), seconds) if seconds < _UNREACHABLE else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Pipelines without names: how long, how the layers are split, how many micro-batches each gets."""

    lengths: Lengths
    splits: tuple[Bounds, ...]
    shares: tuple[int, ...]
    estimate_s: float

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The layer range of every place, pipeline by pipeline."""
        return tuple(bounds for split in self.splits for bounds in split)


def layouts(num_nodes: int, splits: Splits, workload: Workload, cluster: Cluster, max_stages: int) -> list[Layout]:
    """The most promising layouts of exactly ``num_nodes`` nodes that fit; more even ones first where they are equal."""
    longest = min(max_stages, workload.num_layers, num_nodes)
    tables = {length: splits.seconds(length) for length in range(1, longest + 1)}
    besides = _Besides.of(workload, cluster)
    found: list[tuple[float, int, Lengths, tuple[int, ...]]] = []
    for lengths in partitions(num_nodes, longest):
        filled = water_fill([tables[length] for length in lengths], workload.num_micro_batches)
        if filled is not None:
            estimate_s = _rounded(besides.step_s(filled[1], lengths))
            found.append((estimate_s, max(lengths) - min(lengths), lengths, filled[0]))
    found.sort(key=lambda entry: entry[:2])
    several = [entry for entry in found if len(entry[2]) > 1]
    return [
        Layout(
            lengths=lengths, shares=shares, estimate_s=estimate_s,
            splits=tuple(splits.bounds(length, share) for length, share in zip(lengths, shares, strict=True)),
        )
        for estimate_s, _, lengths, shares in (several or found)[:COMPARED]
    ]


@dataclass(frozen=True, slots=True)
class _Besides:
    """What a layout costs besides its pipelines, roughly: enough to tell which are worth the whole cost model."""

    optimizer_s: float
    work_s: float
    gradient_s: float
    alpha_s: float
    cores: int | None
    """Of all hosts together, if all are shared."""

    @classmethod
    def of(cls, workload: Workload, cluster: Cluster) -> _Besides:
        hosts = [cluster.host_cores.get(host) for host in {node.host for node in cluster.nodes.values()}]
        return cls(
            optimizer_s=sum(layer.optimizer_s for layer in workload.layers),
            work_s=sum(layer.total_s for layer in workload.layers) * workload.num_micro_batches,
            gradient_s=sum(unit.gradient_bytes or unit.parameter_bytes for unit in workload.units.values())
            / cluster.link.bytes_per_s,
            alpha_s=cluster.link.alpha_s,
            cores=None if None in hosts else sum(cores for cores in hosts if cores is not None),
        )

    def step_s(self, pipeline_s: float, lengths: Lengths) -> float:
        """The slowest pipeline, one ring per stage, the update of the fullest stage; or the work on all cores."""
        replicas, shortest = len(lengths), min(lengths)
        ring_s = 2 * (replicas - 1) / replicas * self.gradient_s / shortest + 2 * self.alpha_s * (replicas > 1)
        path_s = pipeline_s + ring_s + self.optimizer_s / shortest
        shared_s = (self.work_s + replicas * self.optimizer_s) / self.cores if self.cores else 0.0
        return max(path_s, shared_s)


def _rounded(seconds: float) -> float:
    """Differences below half a per mill are noise and must not choose."""
    return float(f"{seconds:.3g}")


Holds = Mapping[NodeId, frozenset[UnitName]]


def assign(
    wanted: Sequence[frozenset[UnitName]], nodes: Sequence[NodeId], workload: Workload, holds: Holds,
) -> list[NodeId]:
    """The node for each place, of those at least as many, so that the fewest bytes move.

    ``wanted``: the units that each place needs. Equal choices follow the order of ``nodes``.
    """
    lacking = lacking_bytes(wanted, nodes, workload, holds)
    if not any(holds.get(node) for node in nodes):
        return list(nodes[: len(wanted)])
    rows, columns = linear_sum_assignment(lacking)
    chosen = {int(column): nodes[int(row)] for row, column in zip(rows, columns, strict=True)}
    return [chosen[place] for place in range(len(wanted))]


def lacking_bytes(
    wanted: Sequence[frozenset[UnitName]], nodes: Sequence[NodeId], workload: Workload, holds: Holds,
) -> _Array:
    """By node and place: bytes of the place's units that the node does not hold."""
    names = list(workload.units)
    sizes = np.array([workload.units[name].state_bytes for name in names], dtype=np.float64)
    needs = np.array([[name in units for name in names] for units in wanted], dtype=np.float64)
    lacks = np.array([[name not in holds.get(node, frozenset()) for name in names] for node in nodes], dtype=np.float64)
    found: _Array = (lacks * sizes) @ needs.T
    return found


def interleaved(shares: Sequence[int]) -> tuple[int, ...]:
    """Which pipeline each micro-batch takes: any first part of them is shared out as evenly as the whole.

    A partial last batch takes the first micro-batches only, and pipelines should start together.
    """
    turns = sorted(((turn + 0.5) / share, index) for index, share in enumerate(shares) for turn in range(share))
    return tuple(index for _, index in turns)


def plan_of(layout: Layout, chosen: Sequence[NodeId], nodes: Sequence[NodeId], num_layers: int, order: Order) -> Plan:
    """``layout`` with ``chosen`` on its places and the rest of ``nodes`` idle."""
    placement: dict[NodeId, tuple[int, ...]] = dict.fromkeys(sorted(nodes, key=node_number), ())
    routes, start = [], 0
    for split in layout.splits:
        members = chosen[start:start + len(split)]
        start += len(split)
        routes.append(tuple(Hop(node, first, end) for node, (first, end) in zip(members, split, strict=True)))
        placement.update({node: tuple(range(first, end)) for node, (first, end) in zip(members, split, strict=True)})
    return Plan(
        num_layers=num_layers, placement=placement, order=order,
        routes=tuple(routes[index] for index in interleaved(layout.shares)),
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


def priced(plan: Plan, workload: Workload, cluster: Cluster) -> Priced:
    """One schedule serves both figures."""
    schedule = order_of(plan)
    return Priced(
        plan=plan, step_s=step_seconds(plan, workload, cluster, schedule),
        needed_bytes=node_bytes(plan, workload, schedule),
    )


def best_priced(
    nodes: Sequence[NodeId], workload: Workload, cluster: Cluster, config: PlannerConfig, *, holds: Holds | None = None,
    order: Order | None = None, idle: int = 0,
) -> list[Priced]:
    """A few distinct layouts of ``nodes`` by predicted step time, every node in each. Empty: nothing fits.

    Nodes beyond ``idle`` stay idle only where no layout uses them. ``holds``: what each node holds, so that it gets a
    place near it.
    """
    order = Order() if order is None else order
    splits = Splits(workload, _cap(nodes, cluster, config))
    ranked = sorted(nodes, key=lambda node: (cluster.nodes[node].host, node_number(node)))
    for busy in range(len(ranked) - idle, 0, -1):
        found = []
        for layout in layouts(busy, splits, workload, cluster, config.max_stages):
            wanted = [workload.units_of(frozenset(range(first, end))) for first, end in layout.places]
            chosen = assign(wanted, ranked, workload, holds or {})
            plan = plan_of(layout, chosen, ranked, workload.num_layers, order)
            answer = priced(plan, workload, cluster)
            if not overfull(answer.needed_bytes, cluster, config.worker_memory_bytes):
                found.append(answer)
        if found:
            return sorted(found, key=lambda answer: _rounded(answer.step_s))
    return []


def best_plans(
    nodes: Sequence[NodeId], workload: Workload, cluster: Cluster, config: PlannerConfig, *, holds: Holds | None = None,
    order: Order | None = None,
) -> list[Plan]:
    """The plans of ``best_priced``, fastest first."""
    return [answer.plan for answer in best_priced(nodes, workload, cluster, config, holds=holds, order=order)]


def with_best_order(found: Priced, workload: Workload, cluster: Cluster, config: PlannerConfig) -> Priced:
    """``found`` with split backward, if that is predicted faster and fits; else as it is."""
    other = priced(replace(found.plan, order=replace(found.plan.order, split=True)), workload, cluster)
    fits = not overfull(other.needed_bytes, cluster, config.worker_memory_bytes)
    return other if fits and _rounded(other.step_s) < _rounded(found.step_s) else found


def why_nothing_fits(
    nodes: Sequence[NodeId], workload: Workload, cluster: Cluster, config: PlannerConfig,
) -> InfeasibleError:
    """For each number of stages that was tried, what was in the way."""
    cap = _cap(nodes, cluster, config)
    splits = Splits(workload, None)
    tightest = min(nodes, key=lambda node: (_cap_or_more(node, cluster, config), node_number(node)))
    rejected: dict[str, str] = {}
    for num_stages in range(1, min(len(nodes), config.max_stages) + 1):
        if num_stages > workload.num_layers:
            rejected[_stages(num_stages)] = f"{_stages(num_stages)} but only {workload.num_layers} layers"
        elif cap is not None:
            needed = human_bytes(splits.least_bytes(num_stages))
            rejected[_stages(num_stages)] = f"{tightest} needs {needed} of {human_bytes(cap)}"
    if len(nodes) > config.max_stages:
        rejected[f"more than {_stages(config.max_stages)}"] = f"max_stages is {config.max_stages}"
    words = "; ".join(f"{tried}: {why}" for tried, why in rejected.items())
    return InfeasibleError(f"no plan for {len(nodes)} nodes and {workload.num_layers} layers fits: {words}", rejected)


def _stages(count: int) -> str:
    return "1 stage" if count == 1 else f"{count} stages"


def _cap(nodes: Sequence[NodeId], cluster: Cluster, config: PlannerConfig) -> int | None:
    caps = [cap_bytes(node, cluster, config.worker_memory_bytes) for node in nodes]
    return min((cap for cap in caps if cap is not None), default=None)


def _cap_or_more(node: NodeId, cluster: Cluster, config: PlannerConfig) -> float:
    cap = cap_bytes(node, cluster, config.worker_memory_bytes)
    return float("inf") if cap is None else cap
