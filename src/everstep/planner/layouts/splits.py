"""The best layer split of a pipeline of p stages for m micro-batches under fused 1F1B, exact, for all p and m.

A stage with F and B, with r stages behind it, ``before`` the total of F + B ahead of it and ``behind`` that after it, cannot
end a step of m micro-batches before

    before + m·(F + B) + max(0, behind - w·F) + [m > r + 1]·max(0, behind - w·B),   w = min(m - 1, r)

(it waits once for its first backward and once for its last). The bound of a split is the largest of its stages'; it depends
on a stage's layers and on r alone, so one dynamic program over suffixes gives the split with the least bound for all p and m.
Where the time of that split equals its bound, it is the best. Where not, splits with a bound below the best time so far are
tried, best first; what is not closed by a few is closed with a better bound, that of the last stages as a pipeline by
themselves (``suffixes``). Memory forbids stages: (layers, r, m) cells that do not fit are infinite.

Exact means: over all contiguous splits, for the time that stages compute. Messages between the stages are added to the
times of the table, not to what is minimised.

With split backward there is no fixed order to be exact about. What a list schedule with the memory of 1F1B takes is close to

    m·(F + B + W) of the slowest stage + F + B of all others

and with slots for twice as many micro-batches to the largest, over stages, of

    F of the stages before + m·(F + B + W)

or, where updates are staggered too and no stage waits for another, of ``m·(F + B + W)`` alone. These stand in for the time:
they choose splits and lengths, and the few layouts that remain are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, islice, pairwise

import numpy as np
from numpy.typing import NDArray

from everstep.cluster import Link
from everstep.planner.layouts.suffixes import Grown, grown
from everstep.planner.remembered import remembered
from everstep.planner.step.pipelines import Array, flush, stage_ends_s
from everstep.quantities import UnitName
from everstep.workload import Workload

TRIED_AT_MOST = 4_000
"""Splits that are tried to close the cells of one table, before the better bound is asked."""

GROWN_AT_MOST = 200_000
"""Suffixes that are looked at for all cells of one table."""

GROWN_FOR_ONE = 60_000
"""Suffixes that are looked at in one go for one cell; a cell that would need more counts as ``open``."""

BEAM = 16
"""Of each length so many suffixes are followed first: it mostly finds the best split, though it does not prove it."""

SHARES = (0.0, 0.03, 0.12, 0.5, 1.0)
"""How far between bound and best time all splits are looked for, one after the other: the first that finds any has the best."""

EQUAL = 1e-9
"""Relative difference below which two times are the same."""

Bounds = tuple[tuple[int, int], ...]
"""First and end layer of each stage."""

_Cell = tuple[int, int]
"""Stages and micro-batches."""


class Splits:
    """Times and splits for 1..``longest`` stages and 1..``columns`` micro-batches."""

    def __init__(
        self, workload: Workload, cap: int | None, *, columns: int | None = None, longest: int | None = None,
        link: Link | None = None, split: bool = False, roomy: bool = False, staggered: bool = False,
    ) -> None:
        """``cap``: bytes that state and activations of a stage may take; None: not limited. ``link``: None is free.

        ``split``: backward is split; ``roomy``: with it, slots for twice as many micro-batches as 1F1B holds; ``staggered``:
        with these, staggered updates.
        """
        self._split, self._roomy, self._staggered = split, roomy, staggered
        self.columns = min(workload.num_micro_batches, columns or workload.num_micro_batches)
        self.longest = min(workload.num_layers, longest or workload.num_layers)
        self.open = 0
        """Cells that are not proved to be best."""
        self._num_layers = workload.num_layers
        self._cap = cap
        self._link = link
        self._layers = workload.layers
        self._forward_s = tuple(accumulate((layer.forward_s for layer in workload.layers), initial=0.0))
        self._work_s = tuple(accumulate((layer.total_s for layer in workload.layers), initial=0.0))
        self._round_s = tuple(accumulate((layer.forward_s + layer.backward_input_s for layer in workload.layers), initial=0.0))
        """F and B, without W."""
        self._active_bytes = tuple(accumulate((layer.activation_bytes for layer in workload.layers), initial=0))
        self._held_bytes = _held_by_interval(workload)
        self._best, self._ends = self._least_bounds()
        self._cuts: dict[_Cell, Bounds] = {}
        self._given: dict[Bounds, Array] = {}
        self._rows = self._table()

    def seconds(self, num_stages: int) -> Array:
        """For 1, 2, … micro-batches the time of the best split; infinite where none fits. Never decreasing."""
        return self._rows[num_stages - 1]

    def bounds(self, num_stages: int, num_micro_batches: int) -> Bounds:
        """The best split. Only for what ``seconds`` calls finite."""
        return self._cuts[num_stages, num_micro_batches]

    def seconds_of(self, bounds: Bounds) -> Array:
        """The same for a given split; infinite where it does not fit."""
        if bounds not in self._given:
            times = self._times_s([((len(bounds), many), bounds) for many in range(1, self.columns + 1)], self._link)
            fits = [
                all(self._fits(first, end, len(bounds) - 1 - index, many) for index, (first, end) in enumerate(bounds))
                for many in range(1, self.columns + 1)
            ]
            self._given[bounds] = np.maximum.accumulate(np.where(fits, times, np.inf))
        return self._given[bounds]

    def least_bytes(self, num_stages: int, num_micro_batches: int = 1) -> int:
        """The least that the fullest stage of ``num_stages`` needs for so many micro-batches in 1F1B: why nothing fits."""
        best = np.full(self._num_layers + 1, np.inf)
        best[-1] = 0.0
        active = _intervals(self._active_bytes)
        for behind in range(num_stages):
            following = np.maximum(self._held_bytes + min(num_micro_batches, behind + 1) * active, best[None, :])
            best = np.append(following.min(axis=1), np.inf)
        return int(best[0]) if np.isfinite(best[0]) else 0

    def _least_bounds(self) -> tuple[list[Array], list[NDArray[np.intp]]]:
        """By stages behind: the least bound of all layers from each on, by micro-batches, and where its stage ends."""
        after = np.full((self._num_layers + 1, self.columns), np.inf)
        after[-1] = 0.0
        best, ends = [], []
        for behind in range(self.longest):
            whole = np.maximum(self._stage_bounds(behind), after[None, :, :])
            ends.append(whole.argmin(axis=1))
            best.append(whole.min(axis=1))
            after = np.vstack([best[-1], np.full((1, self.columns), np.inf)])
        return best, ends

    def _stage_bounds(self, behind: int) -> Array:
        """By first layer, end layer and micro-batches, with ``behind`` stages after this one."""
        many = np.arange(1, self.columns + 1, dtype=np.float64)[None, None, :]
        warm_up = np.minimum(many - 1, behind)
        total_s = np.array(self._work_s)
        forward_s, work_s = _intervals(self._forward_s)[:, :, None], _intervals(self._work_s)[:, :, None]
        after_s = (total_s[-1] - total_s)[None, :, None]
        if self._split and self._roomy:
            bound: Array = many * work_s + (0.0 if self._staggered else np.array(self._forward_s)[:-1, None, None])
        elif self._split:
            bound = many * work_s + self._round_s[-1] - _intervals(self._round_s)[:, :, None]
        else:
            bound = total_s[:-1, None, None] + many * work_s + np.maximum(0.0, after_s - warm_up * forward_s)
            bound += np.where(many > behind + 1, np.maximum(0.0, after_s - warm_up * (work_s - forward_s)), 0.0)
        if self._cap is not None:
            held = np.minimum(many, behind + 1) * _intervals(self._active_bytes)[:, :, None] + self._held_bytes[:, :, None]
            bound[np.broadcast_to(held > self._cap, bound.shape)] = np.inf
        empty = np.arange(self._num_layers)[:, None] >= np.arange(self._num_layers + 1)[None, :]
        bound[empty] = np.inf
        return bound

    def _stage_bound_s(self, first: int, end: int, behind: int, many: int) -> float:
        """One cell of ``_stage_bounds``."""
        if not self._fits(first, end, behind, many):
            return float("inf")
        work_s, forward_s = self._work_s[end] - self._work_s[first], self._forward_s[end] - self._forward_s[first]
        after_s, warm_up = self._work_s[-1] - self._work_s[end], min(many - 1, behind)
        bound = self._work_s[first] + many * work_s + max(0.0, after_s - warm_up * forward_s)
        return bound + (max(0.0, after_s - warm_up * (work_s - forward_s)) if many > behind + 1 else 0.0)

    def _fits(self, first: int, end: int, behind: int, many: int) -> bool:
        if self._cap is None:
            return True
        active = self._active_bytes[end] - self._active_bytes[first]
        return bool(min(many, behind + 1) * active + self._held_bytes[first, end] <= self._cap)

    def _table(self) -> list[Array]:
        cells = [
            (stages, many) for stages in range(1, self.longest + 1) for many in range(1, self.columns + 1)
            if np.isfinite(self._best[stages - 1][0, many - 1])
        ]
        self._cuts = {cell: self._traced(cell) for cell in cells}
        if not self._split:
            self._level_singles()
            self._close(dict(zip(cells, self._times_s(list(self._cuts.items()), None), strict=True)))
        rows = [np.full(self.columns, np.inf) for _ in range(self.longest)]
        for (stages, many), seconds in zip(cells, self._times_s(list(self._cuts.items()), self._link), strict=True):
            rows[stages - 1][many - 1] = seconds
        return [np.maximum.accumulate(row) for row in rows]

    def _level_singles(self) -> None:
        """A single micro-batch takes as long on any split: take the one for many, whose stages are even and light."""
        for stages, many in list(self._cuts):
            if many > 1:
                self._cuts[stages, 1] = self._cuts[stages, many]  # the last is for the most

    def _traced(self, cell: _Cell) -> Bounds:
        stages, many = cell
        found, first = [], 0
        for behind in reversed(range(stages)):
            end = int(self._ends[behind][first, many - 1])
            found.append((first, end))
            first = end
        return tuple(found)

    def _close(self, times_s: dict[_Cell, float]) -> None:
        """Try what might be better than the split with the least bound, all open cells in turn, a few splits at a time."""
        least_s = {cell: float(self._best[cell[0] - 1][0, cell[1] - 1]) for cell in times_s}
        trials = {
            cell: self._better(cell, times_s) for cell, seconds in times_s.items() if seconds > least_s[cell] * (1 + EQUAL)
        }
        tried, batch = 0, 4
        while trials and tried < TRIED_AT_MOST:
            offered = {cell: list(islice(trial, batch)) for cell, trial in trials.items()}
            trials = {cell: trials[cell] for cell, found in offered.items() if found}
            pairs = [(cell, bounds) for cell, found in offered.items() for bounds in found]
            for (cell, bounds), seconds in zip(pairs, self._times_s(pairs, None), strict=True):
                if seconds < times_s[cell] * (1 - EQUAL):
                    times_s[cell], self._cuts[cell] = seconds, bounds
            tried += len(pairs)
            batch = min(2 * batch, 256)
            trials = {cell: trial for cell, trial in trials.items() if times_s[cell] > least_s[cell] * (1 + EQUAL)}
        self.open = self._close_by_suffixes(sorted(trials), times_s, least_s) if trials else 0

    def _close_by_suffixes(self, cells: Sequence[_Cell], times_s: dict[_Cell, float], least_s: Mapping[_Cell, float]) -> int:
        """Prove the best of each of ``cells``, in this order; how many could not be proved."""
        wanted = {many for _, many in cells}
        bounds: dict[int, list[Array]] = {many: [] for many in wanted}
        for behind in range(max(stages for stages, _ in cells)):
            whole = self._stage_bounds(behind)
            for many in wanted:
                bounds[many].append(whole[:, :, many - 1].copy())
        left, unproved = GROWN_AT_MOST, 0
        sums = np.array(self._forward_s), np.array(self._work_s)

        def look(cell: _Cell, limit_s: float, widest: int | None = None) -> Grown:
            nonlocal left
            found = grown(bounds[cell[1]][:cell[0]], *sums, cell[1], limit_s, at_most=min(left, GROWN_FOR_ONE), widest=widest)
            left -= found.tried
            if found.edges is not None and found.seconds < times_s[cell] * (1 - EQUAL):
                times_s[cell], self._cuts[cell] = found.seconds, tuple(pairwise(found.edges))
            return found

        for cell in cells:
            look(cell, times_s[cell] * (1 - EQUAL), BEAM)
            best_s = times_s[cell]
            for share in SHARES:
                if best_s <= least_s[cell] * (1 + EQUAL):
                    break
                limit_s = (least_s[cell] + share * (best_s - least_s[cell])) * (1 + 2 * EQUAL)
                found = look(cell, min(limit_s, best_s * (1 - EQUAL)))
                unproved += not found.is_complete
                if found.edges is not None or not found.is_complete:
                    break
        return unproved

    def _better(self, cell: _Cell, times_s: dict[_Cell, float]) -> Iterator[Bounds]:
        """Splits whose bound is below the best time known of ``cell`` when they are asked for, smaller bounds first."""
        stages, many = cell

        def extend(first: int, behind: int, taken: Bounds) -> Iterator[Bounds]:
            if behind == 0:
                if self._stage_bound_s(first, self._num_layers, 0, many) < times_s[cell] * (1 - EQUAL):
                    yield (*taken, (first, self._num_layers))
                return
            options = []
            for end in range(first + 1, self._num_layers - behind + 1):
                bound = max(self._stage_bound_s(first, end, behind, many), self._best[behind - 1][end, many - 1])
                if bound < times_s[cell] * (1 - EQUAL):
                    options.append((bound, end))
            for bound, end in sorted(options):
                if bound < times_s[cell] * (1 - EQUAL):
                    yield from extend(end, behind - 1, (*taken, (first, end)))

        return extend(0, stages - 1, ())

    def _times_s(self, pairs: list[tuple[_Cell, Bounds]], link: Link | None) -> list[float]:
        """What 1F1B takes for each of these cells and splits, or what stands in for it with split backward."""
        if not pairs:
            return []
        if self._split:
            return [self._stand_in_s(many, cuts, link) for (_, many), cuts in pairs]
        forward_s, work_s = self._forward_s, self._work_s
        forwards = flush([[forward_s[end] - forward_s[first] for first, end in cuts] for _, cuts in pairs], self.longest)
        works = flush([[work_s[end] - work_s[first] for first, end in cuts] for _, cuts in pairs], self.longest)
        if link is None:
            messages = np.zeros_like(forwards)
        else:
            sent_s = [0.0, *(link.seconds(layer.output_bytes) for layer in self._layers)]
            messages = flush([[0.0, *(sent_s[first] for first, _ in cuts[1:])] for _, cuts in pairs], self.longest)
        stages, many = (np.array(column) for column in zip(*(cell for cell, _ in pairs), strict=True))
        found: list[float] = stage_ends_s(forwards, works - forwards, messages, stages, many).max(axis=1).tolist()
        return found


    def _stand_in_s(self, many: int, cuts: Bounds, link: Link | None) -> float:
        work_s, round_s = self._work_s, self._round_s
        sent_s = 0.0 if link is None else sum(2 * link.seconds(self._layers[first - 1].output_bytes) for first, _ in cuts[1:])
        if self._roomy:
            ahead_s = (0.0,) * (self._num_layers + 1) if self._staggered else self._forward_s
            return max(ahead_s[first] + many * (work_s[end] - work_s[first]) for first, end in cuts) + sent_s
        slowest_s = max(many * (work_s[end] - work_s[first]) - (round_s[end] - round_s[first]) for first, end in cuts)
        return slowest_s + round_s[-1] + sent_s


def splits_of(
    workload: Workload, cap: int | None, link: Link, *, columns: int, longest: int, split: bool = False, roomy: bool = False,
    staggered: bool = False,
) -> Splits:
    """``Splits``, made once for the same figures: a few of the newest are kept."""
    columns = min(columns, workload.num_micro_batches)
    return _splits(_figures(workload), columns, cap, link, longest, split, roomy, staggered)


class _Figures:
    """Layers and units, compared by value; hashed once, because that alone takes as long as a small search."""

    __slots__ = ("_hash", "layers", "units")

    def __init__(self, workload: Workload) -> None:
        self.layers = workload.layers
        self.units = tuple(sorted(workload.units.items()))
        self._hash = hash((self.layers, self.units))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Figures) and (self.layers, self.units) == (other.layers, other.units)


@remembered(16)
def _figures(workload: Workload) -> _Figures:
    return _Figures(workload)


@lru_cache(maxsize=16)
def _splits(
    figures: _Figures, columns: int, cap: int | None, link: Link, longest: int, split: bool, roomy: bool, staggered: bool,
) -> Splits:
    workload = Workload(layers=figures.layers, units=dict(figures.units), num_micro_batches=columns)
    return Splits(workload, cap, longest=longest, link=link, split=split, roomy=roomy, staggered=staggered)


def _intervals(running: tuple[float, ...] | tuple[int, ...]) -> Array:
    """From running sums: the sum over the layers first..end, by first and end."""
    sums = np.array(running, dtype=np.float64)
    found: Array = sums[None, :] - sums[:-1, None]
    return found


def _held_by_interval(workload: Workload) -> Array:
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
