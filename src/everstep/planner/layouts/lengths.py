"""How many pipelines of which length: exact over all sets of lengths, without enumerating them.

For a step time T a pipeline of length p carries at most ``cap_p(T)`` micro-batches, the most whose time is within T. So n
nodes reach T with M micro-batches if the unbounded knapsack of weights p and values ``cap_p(T)`` holds M in n, each length
filled exactly; nodes may be left over. Only times of the table can be the least T. Below the level where the densest length
alone would carry M on n nodes, fractions allowed, none can, which leaves one or two knapsacks to solve.

For many nodes the first ``p*·(longest + 2)`` entries are enough, then copies of the densest length p*: of other lengths at
most p* - 1 pipelines are ever needed, because among p* of them some have a sum that p* divides, and copies of p* carry as
much on as many nodes. More than p* - 1 idle nodes are never needed either.

A table that ends at ``columns`` micro-batches is long enough if no capacity at the answer reaches its end; else ``Lengths``
says so through ``truncated`` and a longer table has to be made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from everstep.planner.step.pipelines import Array

COMBINED_AT_MOST = 4000
"""So many ways to keep some of each kind of pipeline are looked at; if there were more, the rarest kinds are given up."""

WITHIN = 1.3
"""Choices that keep more than the fastest are not looked for beyond this much slower."""

GIVEN_UP = 64
"""Of one kind up to so many pipelines are given up one by one; beyond, half or all of them."""

NONE = -1
"""Capacity of what cannot be filled exactly."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Pipelines of one kind that run already: how long, how many, and their times by micro-batches."""

    length: int
    count: int
    seconds: Array


@dataclass(frozen=True, slots=True)
class Choice:
    """Pipelines for n nodes: of each kind of kept ones how many stay, the lengths of new ones, and the time they reach."""

    kept: tuple[int, ...]
    lengths: tuple[int, ...]
    step_s: float
    idle: int

    def nodes_kept(self, kinds: Sequence[Kept]) -> int:
        return sum(kind.length * count for kind, count in zip(kinds, self.kept, strict=True))


class Lengths:
    """Answers for one table of times, ``seconds[p][m - 1]``: never decreasing in m, infinite where nothing fits."""

    def __init__(self, seconds: Mapping[int, Array]) -> None:
        self._lengths = tuple(seconds)
        self._columns = len(next(iter(seconds.values())))
        rows = np.stack(list(seconds.values()))
        found = np.unique(rows[np.isfinite(rows)])
        self._levels: Array = found[np.append(True, np.diff(found) > 1e-9 * found[1:])] if found.size else found
        self._caps = np.stack([np.searchsorted(row, _with_slack(self._levels), side="right") for row in rows])
        densities = self._caps / np.array(self._lengths)[:, None]
        self._density = densities.max(axis=0)
        self._densest = densities.argmax(axis=0)

    def best(self, num_nodes: int, num_micro_batches: int, least: int = 1) -> Choice | None:
        """The least step time of at most ``num_nodes`` nodes in at least ``least`` pipelines. None: nothing fits."""
        level = self._best_level(num_nodes, num_micro_batches, least)
        return None if level is None else self._choice(level, num_nodes, num_micro_batches, least, ())

    @property
    def levels(self) -> Array:
        """The times that can be the least, ascending."""
        return self._levels

    def carried(self, seconds: float, num_nodes: int, least: int) -> list[int]:
        """For at least 0, 1, … ``least`` pipelines the most micro-batches that at most ``num_nodes`` nodes carry in a time.

        ``NONE`` where there cannot be so many.
        """
        sack = self.sack(seconds, num_nodes, least)
        if sack is None:
            return [0] + [NONE] * least
        found = [
            max(sack.capacity(num_nodes - idle, count) for idle in range(sack.idle_at_most + 1)) for count in range(least + 1)
        ]
        return [max(0, found[0]), *found[1:]]

    def sack(self, seconds: float, num_nodes: int, least: int) -> Knapsack | None:
        """The knapsack at a time; None: no pipeline carries anything in it."""
        level = int(np.searchsorted(self._levels, _with_slack(np.array(seconds)), side="right")) - 1
        return None if level < 0 else self._sack(level, num_nodes, least)

    def is_short(self, seconds: float, num_micro_batches: int) -> bool:
        """Whether the end of the table may hide that more is carried in ``seconds``."""
        level = int(np.searchsorted(self._levels, _with_slack(np.array(seconds)), side="right")) - 1
        return level >= 0 and self._columns < num_micro_batches and int(self._caps[:, level].max()) >= self._columns

    def truncated(self, choice: Choice, num_micro_batches: int) -> bool:
        """Whether the end of the table may hide something better than ``choice``."""
        level = int(np.searchsorted(self._levels, choice.step_s * (1 - 1e-9)))
        return self._columns < num_micro_batches and int(self._caps[:, level].max()) >= self._columns

    def front(
        self, num_nodes: int, num_micro_batches: int, kinds: Sequence[Kept], least: int = 1, given_up: int = 2,
    ) -> list[Choice]:
        """Choices that keep less and less of what runs and are faster and faster, the fastest last.

        The least time that can be had with all ``kinds`` kept, with one to ``given_up`` of the most numerous kind given up,
        and the least time of all, with the most kept at that time.
        """
        level = self._best_level(num_nodes, num_micro_batches, least)
        if level is None:
            return []
        counts = [kind.count for kind in kinds]
        numerous = max(range(len(kinds)), key=lambda index: counts[index], default=None)
        found: list[Choice] = []
        while numerous is not None and counts[numerous] >= max(0, kinds[numerous].count - given_up):
            choice = self._with_kept(level, num_nodes, num_micro_batches, least, kinds, tuple(counts))
            if choice is not None and (not found or choice.step_s < found[-1].step_s):
                found.append(choice)
            if found and found[-1].step_s <= self._levels[level]:
                return found
            counts[numerous] -= 1
        return [*found, self._choice(level, num_nodes, num_micro_batches, least, kinds)]

    def _with_kept(
        self, lowest: int, num_nodes: int, num_micro_batches: int, least: int, kinds: Sequence[Kept], counts: tuple[int, ...],
    ) -> Choice | None:
        """The least time from the level ``lowest`` on with exactly ``counts`` kept."""
        high = int(np.searchsorted(self._levels, self._levels[lowest] * WITHIN, side="right"))
        left = num_nodes - sum(kind.length * count for kind, count in zip(kinds, counts, strict=True))
        at_most = self._density[lowest:high] * left
        for kind, count in zip(kinds, counts, strict=True):
            at_most += count * np.searchsorted(kind.seconds, _with_slack(self._levels[lowest:high]), side="right")
        low = lowest + int(np.searchsorted(at_most, num_micro_batches - 0.5))  # below it not even fractions would do
        best: Choice | None = None
        middle = low
        while low < high:
            found = self._at(middle, num_nodes, num_micro_batches, least, kinds, [counts])
            best = found or best
            low, high = (low, middle) if found else (middle + 1, high)
            middle = (low + high) // 2
        return best

    def _best_level(self, num_nodes: int, num_micro_batches: int, least: int) -> int | None:
        low = int(np.searchsorted(self._density * num_nodes, num_micro_batches - 0.5))
        high = low
        while high < len(self._levels) and not self._reaches(high, num_nodes, num_micro_batches, least):
            low, high = high + 1, 2 * high - low + 1
        if high >= len(self._levels):
            high = len(self._levels)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._reaches(middle, num_nodes, num_micro_batches, least) else (middle + 1, high)
        return low if low < len(self._levels) else None

    def _reaches(self, level: int, num_nodes: int, num_micro_batches: int, least: int) -> bool:
        least = min(least, num_micro_batches)
        sack = self._sack(level, num_nodes, least)
        return any(sack.capacity(num_nodes - idle, least) >= num_micro_batches for idle in range(sack.idle_at_most + 1))

    def _choice(
        self, level: int, num_nodes: int, num_micro_batches: int, least: int, kinds: Sequence[Kept],
    ) -> Choice:
        """At a level that is reached: what keeps the most nodes, then leaves the fewest idle."""
        found = self._at(level, num_nodes, num_micro_batches, least, kinds, most_first(kinds))
        assert found is not None, "asked of a level that is reached, where keeping nothing is an answer"
        return found

    def _at(
        self, level: int, num_nodes: int, num_micro_batches: int, least: int, kinds: Sequence[Kept],
        ways: Sequence[tuple[int, ...]],
    ) -> Choice | None:
        """The first of ``ways`` to keep so many of each kind that reaches the level, with the fewest idle nodes."""
        limit_s = float(_with_slack(self._levels[level]))
        carried = [int(np.searchsorted(kind.seconds, limit_s, side="right")) for kind in kinds]
        left = [num_nodes - sum(k.length * count for k, count in zip(kinds, counts, strict=True)) for counts in ways]
        sack = self._sack(level, max(left), least)
        for counts, nodes in zip(ways, left, strict=True):
            if any(count and not cap for count, cap in zip(counts, carried, strict=True)):
                continue
            wanted = max(0, num_micro_batches - sum(cap * count for cap, count in zip(carried, counts, strict=True)))
            others = max(0, min(least, num_micro_batches) - sum(counts))
            for idle in range(min(nodes, sack.idle_at_most) + 1):
                if sack.capacity(nodes - idle, others) >= wanted:
                    new = sack.lengths(nodes - idle, others)[:num_micro_batches - sum(counts)]
                    return Choice(
                        kept=counts, lengths=new, step_s=float(self._levels[level]), idle=nodes - sum(new),
                    )
        return None

    def _sack(self, level: int, num_nodes: int, least: int) -> Knapsack:
        return Knapsack(self._lengths, self._caps[:, level], int(self._densest[level]), num_nodes, least)


def _with_slack(levels: Array) -> Array:
    """Times that differ by rounding are equal: capacities must not flip at equality."""
    return levels * (1 + 1e-9)


def most_first(kinds: Sequence[Kept]) -> list[tuple[int, ...]]:
    """How many of each kind to keep: most nodes first. Of many pipelines all but up to ``GIVEN_UP``, half, or none."""
    options = [
        sorted({*range(max(0, kind.count - GIVEN_UP), kind.count + 1), kind.count // 2, 0}, reverse=True) for kind in kinds
    ]
    while len(options) > 1 and math.prod(map(len, options)) > COMBINED_AT_MOST:
        rarest = min((index for index in range(len(kinds)) if len(options[index]) > 1), key=lambda i: kinds[i].count)
        options[rarest] = [0]
    lengths = [kind.length for kind in kinds]
    return sorted(product(*options), key=lambda kept: -sum(a * b for a, b in zip(lengths, kept, strict=True)))


class Knapsack:
    """Most micro-batches that exactly so many nodes carry, in at least so many pipelines, at one step time."""

    def __init__(self, lengths: Sequence[int], caps: NDArray[np.intp], densest: int, num_nodes: int, least: int) -> None:
        self._items = [(length, int(cap)) for length, cap in zip(lengths, caps, strict=True) if cap > 0]
        self._dense, self._dense_cap = lengths[densest], int(caps[densest])
        self.idle_at_most = min(num_nodes, self._dense - 1)
        longest = max((length for length, _ in self._items), default=1)
        base = self._dense * (longest + 2)
        self._least = least if num_nodes <= max(base, least * longest) else 0
        """Where there are many nodes there are many pipelines anyway."""
        self._size = min(num_nodes, max(base, least * longest))
        self._best = [[NONE] * (self._size + 1) for _ in range(self._least + 1)]
        self._best[0][0] = 0
        self._fill()

    def capacity(self, num_nodes: int, least: int) -> int:
        inner, copies = self._reduced(num_nodes)
        found = self._best[min(least, self._least)][inner]
        return NONE if found == NONE else found + copies * self._dense_cap

    def lengths(self, num_nodes: int, least: int) -> tuple[int, ...]:
        """The pipelines behind ``capacity``, longest first.

        Of equals short ones, since every pipeline is a replica more; then as few different ones as come by.
        """
        inner, copies = self._reduced(num_nodes)
        found = [self._dense] * copies
        count = min(least, self._least)
        while inner:
            candidates = [
                length for length, cap in self._items
                if length <= inner and self._best[max(0, count - 1)][inner - length] != NONE
                and self._best[max(0, count - 1)][inner - length] + cap == self._best[count][inner]
            ]
            used = Counter(found)
            length = max(candidates, key=lambda length: (used[length], -length))
            found.append(length)
            inner, count = inner - length, max(0, count - 1)
        return tuple(sorted(found, reverse=True))

    def _reduced(self, num_nodes: int) -> tuple[int, int]:
        copies = max(0, -((self._size - num_nodes) // self._dense))
        return num_nodes - copies * self._dense, copies

    def _fill(self) -> None:
        """``best[c]``: at least c pipelines; what needs at least none may have any number."""
        for count, row in enumerate(self._best):
            before = self._best[max(0, count - 1)]
            for length, cap in self._items:
                if count:
                    for nodes in range(length, self._size + 1):
                        if before[nodes - length] >= 0 and before[nodes - length] + cap > row[nodes]:
                            row[nodes] = before[nodes - length] + cap
                else:
                    for nodes in range(length, self._size + 1):  # the row itself: any number of this length
                        if row[nodes - length] >= 0 and row[nodes - length] + cap > row[nodes]:
                            row[nodes] = row[nodes - length] + cap
