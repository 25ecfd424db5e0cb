"""How long a step takes, by closed forms: what a study can afford for a million layouts.

Three schedule families. Of a stage with forward F and work F + B of all its layers, m micro-batches and r stages behind it:

============  ======================================================================================================
``fused``     one 1F1B schedule, backward in one piece: ``before + m·(F+B) + max(0, behind - w·F)
              + [m > r+1]·max(0, behind - w·B)``, w = min(m-1, r); before and behind are F + B of the other stages
``split``     backward in two pieces, enough slots: ``forward time before + m·(F+B)``
``staggered`` and an optimizer that waits for nobody: ``m·(F+B)``
============  ======================================================================================================

A pipeline takes as long as its slowest stage, a step as long as its slowest pipeline. A grid of D pipelines with holes
(F_s of stage s) reroutes whole stages: ``W_s = ceil(M/(D-F_s))·(F+B)`` in place of m·(F+B); fused takes Chameleon's
equation 13 instead. Other layouts reroute layer by layer: see ``Times.rerouted_s``.

Communication, reductions and updates are not in these forms. How far the forms are from schedules is tested.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from everstep.planner.baselines import chameleon
from everstep.simulator.study.layout import Bounds, Layout

Family = Literal["fused", "split", "staggered"]
FAMILIES: tuple[Family, ...] = get_args(Family)

_Array = NDArray[np.float64]
_TOLERANCE = 1e-9

ENUMERATED_NODES = 40
"""Up to so many nodes equally fast sets of pipelines are all compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained: layers with their times for one micro-batch, the batch, and the grid it starts as."""

    forward_s: tuple[float, ...]
    work_s: tuple[float, ...]
    """Forward and both halves of backward."""
    num_micro_batches: int
    """Of all pipelines together."""
    num_stages: int
    """Of the grid. It also bounds what a node may hold: no more layers (or bytes) than in the grid."""
    batch: int
    longest: int = 16
    """Most stages of a pipeline."""
    layer_bytes: tuple[int, ...] | None = None
    """What a node holds of each layer; None: all layers are equal."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_stages <= min(self.longest, len(self.work_s)) or self.num_micro_batches < 1:
            raise ValueError(f"no grid of {self.num_stages} stages for {len(self.work_s)} layers")

    @property
    def num_layers(self) -> int:
        return len(self.work_s)


def equal_layers(
    *, num_layers: int = 32, num_pipelines: int = 8, num_stages: int = 4, micro_batches: int = 8, step_s: float = 10.0,
    longest: int = 16,
) -> Job:
    """The job of the studies: equal layers, F = 1 and B = 2, and a fused step without failure of ``step_s``.

    ``micro_batches``: of each pipeline.
    """
    per_stage = num_layers / num_stages
    unit_s = step_s / ((num_stages + micro_batches - 1) * per_stage * 3)
    return Job(
        forward_s=(unit_s,) * num_layers, work_s=(3 * unit_s,) * num_layers, num_stages=num_stages, longest=longest,
        num_micro_batches=micro_batches * num_pipelines, batch=micro_batches * num_pipelines,
    )


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest set of pipelines of some number of nodes."""

    step_s: float
    splits: tuple[Bounds, ...]


@dataclass(slots=True)
class Times:
    """Step times of one job in one family. Everything is remembered: a study asks the same again and again."""

    job: Job
    family: Family
    slack: float = 0.0
    """By how much of a step schedules of layer-by-layer rerouting are taken to miss their bound."""
    _before_s: tuple[float, ...] = field(init=False)
    _forward_before_s: tuple[float, ...] = field(init=False)
    _grid_bounds: Bounds = field(init=False)
    _seconds: list[_Array] = field(init=False)
    _ends: list[NDArray[np.intp]] = field(init=False)
    _best: dict[int, Best | None] = field(init=False, default_factory=dict)
    known: dict[object, float] = field(init=False, default_factory=dict)
    remembered: dict[object, tuple[Bounds, ...] | None] = field(init=False, default_factory=dict)
    """What policies have worked out from these times."""

    def __post_init__(self) -> None:
        self._before_s = tuple(accumulate(self.job.work_s, initial=0.0))
        self._forward_before_s = tuple(accumulate(self.job.forward_s, initial=0.0))
        self._grid_bounds = even_bounds(self.job.work_s, self.job.num_stages)
        self._seconds, self._ends = self._tables()

    @property
    def shortest(self) -> int:
        """Fewest stages that hold all layers."""
        return next(length for length in range(1, len(self._seconds)) if np.isfinite(self._seconds[length][1]))

    def pipeline_s(self, length: int, micro_batches: int) -> float:
        """A pipeline of ``length`` stages with its best split; infinite where none fits."""
        return float(self._seconds[length][micro_batches]) if length < len(self._seconds) else math.inf

    def split(self, length: int, micro_batches: int) -> Bounds:
        """The best split; only for what ``pipeline_s`` calls finite."""
        found, first = [], 0
        for behind in reversed(range(length)):
            end = int(self._ends[behind][first, micro_batches - 1])
            found.append((first, end))
            first = end
        return tuple(found)

    def whole_s(self, lengths: Sequence[int]) -> float:
        """Pipelines of these lengths, the batch shared out so that the slowest is as fast as can be."""
        counts = Counter(lengths)
        if not counts or min(counts) < 1:
            return math.inf
        key = tuple(sorted(counts.items()))
        if key not in self.known:
            self.known[key] = self._least(
                lambda step_s: sum(count * self._capacity(length, step_s) for length, count in counts.items())
                >= self.job.num_micro_batches, sorted(counts),
            )
        return self.known[key]

    def best(self, num_nodes: int) -> Best | None:
        """The fastest pipelines of at most ``num_nodes`` nodes; None: too few. Exact, by knapsack on capacities."""
        if num_nodes not in self._best:
            lengths = [length for length in range(1, len(self._seconds)) if np.isfinite(self._seconds[length][1])]
            lengths = [length for length in lengths if length <= num_nodes]
            step_s = self._least(
                lambda limit_s: self._filled(num_nodes, lengths, limit_s)[0] >= self.job.num_micro_batches, lengths,
            )
            self._best[num_nodes] = None if math.isinf(step_s) else self._best_of(num_nodes, lengths, step_s)
        return self._best[num_nodes]

    def _best_of(self, num_nodes: int, lengths: Sequence[int], step_s: float) -> Best:
        """Of equally fast sets the one with most pipelines, so most replicas, as far as few nodes let all be looked at."""
        if num_nodes <= ENUMERATED_NODES:
            chosen = max(self._as_fast(num_nodes, step_s), key=lambda each: (len(each), -max(each)))
        else:
            chosen = self._filled(num_nodes, lengths, step_s)[1]
        return self._cut(chosen, step_s)

    def nearly_best(self, num_nodes: int, within: float) -> list[Best]:
        """Every set of pipelines whose step is at most ``within`` longer than the best; of many nodes the best alone."""
        best = self.best(num_nodes)
        if best is None or num_nodes > ENUMERATED_NODES:
            return [best] if best else []
        found = self._as_fast(num_nodes, best.step_s * (1 + within))
        return [self._cut(lengths, self.whole_s(lengths)) for lengths in found]

    def _as_fast(self, num_nodes: int, step_s: float) -> list[tuple[int, ...]]:
        usable = [length for length in range(1, min(len(self._seconds), num_nodes + 1)) if self._capacity(length, step_s) > 0]
        capacities = {length: self._capacity(length, step_s) for length in usable}
        return [
            lengths for lengths in _sets(num_nodes, tuple(usable))
            if sum(capacities[length] for length in lengths) >= self.job.num_micro_batches
        ]

    def _cut(self, lengths: Sequence[int], step_s: float) -> Best:
        return Best(step_s, tuple(self.split(length, self._capacity(length, step_s)) for length in lengths))

    def grid_s(self, bounds: Bounds, num_pipelines: int, holes: Sequence[int]) -> float:
        """``num_pipelines`` alike, ``holes[s]`` of them without a node at stage s; peers of the stage take its work whole."""
        if max(holes) >= num_pipelines:
            return math.inf
        key = (bounds, num_pipelines, *holes)
        if key not in self.known:
            self.known[key] = self._grid_s(bounds, num_pipelines, holes)
        return self.known[key]

    def _grid_s(self, bounds: Bounds, num_pipelines: int, holes: Sequence[int]) -> float:
        stages = [self._before_s[end] - self._before_s[first] for first, end in bounds]
        if self.family == "fused":
            micro_batches = self.job.num_micro_batches / num_pipelines
            slots = chameleon.rerouted_slots(num_pipelines, len(bounds), micro_batches, holes)
            return (slots + math.ceil(micro_batches - _TOLERANCE) - micro_batches) * max(stages)
        return max(
            math.ceil(self.job.num_micro_batches / (num_pipelines - missing) - _TOLERANCE) * seconds + self._head_s(first, end)
            for missing, seconds, (first, end) in zip(holes, stages, bounds, strict=True)
        )

    def rerouted_s(self, places: Sequence[tuple[int, int]]) -> float:
        """Any living places (first and end layer): each layer's passes go to whoever holds it.

        A node has the step less its head for passes; passes are whole. From the first layer on, those who hold it and
        whose layers end first serve it, which wastes nothing. Which pass follows which is not looked at, so this is a bound
        that a schedule may miss by some percent.
        """
        key = ("rerouted", *sorted(Counter(places).items()))
        if key not in self.known:
            self.known[key] = self._rerouted_s(Counter(places)) * (1 + self.slack)
        return self.known[key]

    def _rerouted_s(self, places: Counter[tuple[int, int]]) -> float:
        groups = [(end, first, count, self._head_s(first, end)) for (first, end), count in sorted(places.items())]
        groups.sort()
        covering = [
            [index for index, (end, first, _, _) in enumerate(groups) if first <= layer < end]
            for layer in range(self.job.num_layers)
        ]
        if not all(covering):
            return math.inf
        passes, work_s = self.job.num_micro_batches, self.job.work_s
        equal_s = work_s[0] if max(work_s) - min(work_s) <= _TOLERANCE * max(work_s) else None

        def possible(step_s: float) -> bool:
            if equal_s is None:
                left = [count * max(0.0, step_s - head_s) for _, _, count, head_s in groups]
            else:
                left = [count * math.floor(max(0.0, step_s - head_s) / equal_s + 1e-6) for _, _, count, head_s in groups]
            for layer, members in enumerate(covering):
                wanted = passes * (1 if equal_s is not None else work_s[layer])
                for index in members:
                    taken = min(wanted, left[index])
                    left[index] -= taken
                    wanted -= taken
                    if wanted <= _TOLERANCE * passes:
                        break
                else:
                    return False
            return True

        low_s = sum(work_s) * passes / sum(places.values())
        high_s = low_s * 1.1
        while not possible(high_s):
            low_s, high_s = high_s, high_s * 1.5
        while high_s - low_s > 1e-4 * high_s:
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, middle_s) if possible(middle_s) else (middle_s, high_s)
        return high_s

    def _head_s(self, first: int, end: int) -> float:
        """What a step spends besides a node's own work."""
        if self.family == "fused":
            return self._before_s[-1] - (self._before_s[end] - self._before_s[first])
        return self._forward_before_s[first] if self.family == "split" else 0.0

    def _capacity(self, length: int, step_s: float) -> int:
        """Most micro-batches that a pipeline of ``length`` does in ``step_s``."""
        found = int(np.searchsorted(self._seconds[length], step_s * (1 + _TOLERANCE), side="right")) - 1
        return min(found, self.job.num_micro_batches)

    def _least(self, is_enough: Callable[[float], bool], lengths: Sequence[int]) -> float:
        """The smallest table value that is enough; infinite if none is."""
        values = np.unique(np.concatenate([self._seconds[length][1:] for length in lengths])) if lengths else np.array([])
        values = values[np.isfinite(values)]
        low, high = 0, len(values)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if is_enough(float(values[middle])) else (middle + 1, high)
        return float(values[low]) if low < len(values) else math.inf

    def _filled(self, num_nodes: int, lengths: Sequence[int], step_s: float) -> tuple[int, tuple[int, ...]]:
        """Most micro-batches of ``num_nodes`` nodes within ``step_s``, and the lengths of the pipelines that do them."""
        worth = [(length, self._capacity(length, step_s)) for length in lengths]
        most, last = [0] * (num_nodes + 1), [0] * (num_nodes + 1)
        for nodes in range(1, num_nodes + 1):
            most[nodes] = most[nodes - 1]
            for length, capacity in worth:
                if length <= nodes and capacity and most[nodes - length] + capacity > most[nodes]:
                    most[nodes], last[nodes] = most[nodes - length] + capacity, length
        chosen, nodes = [], num_nodes
        while nodes:
            chosen += [last[nodes]] if last[nodes] else []
            nodes -= last[nodes] or 1
        return most[num_nodes], tuple(sorted(chosen))

    def _tables(self) -> tuple[list[_Array], list[NDArray[np.intp]]]:
        """By length: seconds by micro-batches (0 first); by stages behind: where the best first stage ends.

        A stage's time depends on its layers and on the stages behind it alone, so the best split of all layers from i on,
        with r more stages behind, is the best first stage in front of the best split of the rest.
        """
        count = self.job.num_micro_batches
        after = np.full((self.job.num_layers + 1, count), np.inf)
        after[-1] = 0.0
        seconds, ends = [np.full(count + 1, np.inf)], []
        for behind in range(min(self.job.longest, self.job.num_layers)):
            whole = np.maximum(self._stage_s(behind, count), after[None, :, :])
            ends.append(whole.argmin(axis=1))
            best = whole.min(axis=1)
            after = np.vstack([best, np.full((1, count), np.inf)])
            seconds.append(np.concatenate([[0.0], np.maximum.accumulate(best[0])]))
        return seconds, ends

    def _stage_s(self, behind: int, count: int) -> _Array:
        before, forward = np.array(self._before_s), np.array(self._forward_before_s)
        work = (before[None, :] - before[:-1, None])[:, :, None]
        ahead = (forward[None, :] - forward[:-1, None])[:, :, None]
        many = np.arange(1, count + 1, dtype=np.float64)[None, None, :]
        stage: _Array = many * work
        if self.family == "split":
            stage = stage + forward[:-1, None, None]
        elif self.family == "fused":
            warm_up, rest = np.minimum(many - 1, behind), (before[-1] - before)[None, :, None]
            stage = (
                stage + before[:-1, None, None] + np.maximum(0.0, rest - warm_up * ahead)
                + np.where(many > behind + 1, np.maximum(0.0, rest - warm_up * (work - ahead)), 0.0)
            )
        return np.where(self._forbidden()[:, :, None], np.inf, stage)

    def _forbidden(self) -> NDArray[np.bool_]:
        """Empty stages, and those that hold more than the fullest stage of the grid."""
        held = np.array([0, *accumulate(self.job.layer_bytes or (1,) * self.job.num_layers)])
        sizes = held[None, :] - held[:-1, None]
        fullest = max(held[end] - held[first] for first, end in self.grid_bounds())
        first, end = np.arange(self.job.num_layers)[:, None], np.arange(self.job.num_layers + 1)[None, :]
        forbidden: NDArray[np.bool_] = (sizes > fullest) | (first >= end)
        return forbidden

    def grid_bounds(self) -> Bounds:
        """The layers of each stage of the grid: as even as whole layers allow by their work, larger stages first."""
        return self._grid_bounds


def _sets(num_nodes: int, lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All sets of pipelines of at most ``num_nodes`` nodes, but the empty one."""
    for index, length in enumerate(lengths):
        if length <= num_nodes:
            yield (length,)
            for rest in _sets(num_nodes - length, lengths[index:]):
                yield (length, *rest)


def even_bounds(work_s: Sequence[float], num_stages: int) -> Bounds:
    """The contiguous split with the smallest slowest stage; of equals the one with larger stages first."""
    before = tuple(accumulate(work_s, initial=0.0))
    count = len(work_s)
    slowest = [math.inf] * count + [0.0]
    for _ in range(num_stages):
        slowest = [
            min((max(before[end] - before[first], slowest[end]) for end in range(first + 1, count + 1)), default=math.inf)
            for first in range(count)
        ] + [math.inf]
    limit_s = slowest[0] * (1 + _TOLERANCE)
    bounds, first = [], 0
    for behind in reversed(range(num_stages)):
        end = first + 1
        while end < count - behind and before[end + 1] - before[first] <= limit_s:
            end += 1
        bounds.append((first, end))
        first = end
    return tuple(bounds)


def signature(layout: Layout) -> tuple[tuple[int, int], ...]:
    """The layers of every living place: what the step time depends on."""
    return tuple((place.first, place.end) for pipeline in layout.pipelines for place in pipeline if place.node is not None)
