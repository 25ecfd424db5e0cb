"""How many pipelines of which length at which site: exact where every pipeline stays inside a site.

A step time T is reached if the sites together carry the batch: each has a knapsack of its own, on its own nodes and with its
own table of times, and what they carry adds up. Nodes may be left over at each. So the least T is found as for one site
(``lengths``); only the test whether a T is reached asks all of them. Pipelines that run and stay take their nodes from the
site that they are at.

What the sums between sites cost depends on how many pipelines each has, which the search does not know: the sites are also
tried in part, and the cost model prices what is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from everstep.planner.layouts.lengths import NONE, WITHIN, Choice, Kept, Lengths, most_first
from everstep.planner.step.pipelines import Array


@dataclass(frozen=True, slots=True)
class Site:
    """What there is at one site: times by length, nodes, and pipelines that run."""

    lengths: Lengths
    num_nodes: int
    kinds: tuple[Kept, ...] = ()


@dataclass(frozen=True, slots=True)
class _Option:
    """What may be done at some of the sites: what it leaves and carries, and the pipelines behind it, by site."""

    kept: int
    """Nodes in pipelines that stay."""
    idle: int
    pipelines: int
    """At least so many, counted up to what is asked for."""
    carried: int
    """Micro-batches, counted up to the batch."""
    choices: tuple[Choice, ...]

    def is_no_better_than(self, other: _Option) -> bool:
        return (
            other.kept >= self.kept and other.idle <= self.idle and other.pipelines >= self.pipelines
            and other.carried >= self.carried
        )


def front_of_sites(sites: Sequence[Site], total: int, least: int = 1, given_up: int = 2) -> list[tuple[Choice, ...]]:
    """As ``Lengths.front``, a choice for each site: less and less of what runs is kept, and steps are faster and faster.

    What runs has a micro-batch for each pipeline, so there are no more of those than of these.
    The last is the least time of all layouts whose pipelines are inside a site. Empty: there is none.
    """
    least = min(least, total)
    levels = np.unique(np.concatenate([site.lengths.levels for site in sites]))

    def first_of(some: Array, counts: Sequence[Sequence[int]] | None) -> int | None:
        """The first of ``some`` times that is reached, with just ``counts`` kept if that is given."""
        low, high = 0, len(some)
        while low < high:
            middle = (low + high) // 2
            reached = _carried(sites, float(some[middle]), counts, least) >= total
            low, high = (low, middle) if reached else (middle + 1, high)
        return low if low < len(some) else None

    fastest = first_of(levels, None)
    if fastest is None:
        return []
    within = levels[fastest:int(np.searchsorted(levels, levels[fastest] * WITHIN, side="right"))]
    counts = [[kind.count for kind in site.kinds] for site in sites]
    answers: list[tuple[Choice, ...]] = []
    reached_s = float("inf")
    for fewer in _one_by_one(counts, given_up):
        level = first_of(within, fewer)
        if level is not None and within[level] < reached_s:
            reached_s = float(within[level])
            answers.append(_choices(sites, reached_s, [[tuple(some)] for some in fewer], total, least))
        if level == 0:
            return answers
    return [*answers, _choices(sites, float(within[0]), [most_first(site.kinds) for site in sites], total, least)]


def _one_by_one(counts: Sequence[Sequence[int]], given_up: int) -> Iterator[list[list[int]]]:
    """How many of each kind are kept: all, then one less of the most numerous, and so on."""
    places = [(at, index) for at, some in enumerate(counts) for index in range(len(some))]
    if not places:
        return
    at, index = max(places, key=lambda place: counts[place[0]][place[1]])
    for fewer in range(min(given_up, counts[at][index]) + 1):
        kept = [list(some) for some in counts]
        kept[at][index] -= fewer
        yield kept


def _carried(sites: Sequence[Site], seconds: float, counts: Sequence[Sequence[int]] | None, least: int) -> int:
    """The most micro-batches that all sites carry in ``seconds`` in at least ``least`` pipelines; ``NONE``: not in so many."""
    best = [0] + [NONE] * least
    for at, site in enumerate(sites):
        kept = counts[at] if counts is not None else [0] * len(site.kinds)
        caps = _caps(site, seconds)
        if any(count and not cap for count, cap in zip(kept, caps, strict=True)):
            return NONE
        nodes = site.num_nodes - sum(kind.length * count for kind, count in zip(site.kinds, kept, strict=True))
        extra = sum(cap * count for cap, count in zip(caps, kept, strict=True))
        found = [NONE if cap == NONE else cap + extra for cap in site.lengths.carried(seconds, nodes, least)]
        joined = [NONE] * (least + 1)
        for before, carried in enumerate(best):
            for new, cap in enumerate(found):
                if carried != NONE and cap != NONE:
                    count = min(least, before + new + sum(kept))
                    joined[count] = max(joined[count], carried + cap)
        best = joined
    return best[least]


def _caps(site: Site, seconds: float) -> list[int]:
    return [int(np.searchsorted(kind.seconds, seconds * (1 + 1e-9), side="right")) for kind in site.kinds]


def _choices(
    sites: Sequence[Site], seconds: float, ways: Sequence[Sequence[tuple[int, ...]]], total: int, least: int,
) -> tuple[Choice, ...]:
    """At a time that is reached: what keeps the most nodes, then leaves the fewest idle. ``ways``: by site what may be kept."""
    found = [_Option(0, 0, 0, 0, ())]
    for site, kept in zip(sites, ways, strict=True):
        options = _best_of(_options(site, seconds, kept, total, least))
        found = _best_of([
            _Option(
                one.kept + other.kept, one.idle + other.idle, min(least, one.pipelines + other.pipelines),
                min(total, one.carried + other.carried), one.choices + other.choices,
            )
            for one in found for other in options
        ])
    reached = [option for option in found if option.carried >= total and option.pipelines >= least]
    return _no_more_than(total, min(reached, key=lambda option: (-option.kept, option.idle)).choices)


def _no_more_than(total: int, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Without new pipelines that would have no micro-batch."""
    spare = sum(sum(choice.kept) + len(choice.lengths) for choice in choices) - total
    found = []
    for choice in reversed(choices):
        dropped = choice.lengths[len(choice.lengths) - max(0, min(spare, len(choice.lengths))):]
        spare -= len(dropped)
        kept = choice.lengths[:len(choice.lengths) - len(dropped)]
        found.append(replace(choice, lengths=kept, idle=choice.idle + sum(dropped)))
    return tuple(reversed(found))


def _options(
    site: Site, seconds: float, ways: Sequence[tuple[int, ...]], total: int, least: int,
) -> Iterator[_Option]:
    caps = _caps(site, seconds)
    for counts in ways:
        if any(count and not cap for count, cap in zip(counts, caps, strict=True)):
            continue
        kept = sum(kind.length * count for kind, count in zip(site.kinds, counts, strict=True))
        carried = sum(cap * count for cap, count in zip(caps, counts, strict=True))
        left = site.num_nodes - kept
        yield _Option(
            kept, left, min(least, sum(counts)), min(total, carried), (Choice(counts, (), seconds, left),),
        )
        sack = site.lengths.sack(seconds, left, least)
        if sack is None:
            continue
        for idle in range(sack.idle_at_most + 1):
            for count in range(least + 1):
                more = sack.capacity(left - idle, count)
                if more > 0:
                    lengths = sack.lengths(left - idle, count)
                    yield _Option(
                        kept, idle, min(least, sum(counts) + len(lengths)), min(total, carried + more),
                        (Choice(counts, lengths, seconds, idle),),
                    )


def _best_of(options: Iterable[_Option]) -> list[_Option]:
    """Those that no other is as good as in every respect."""
    ranked = sorted(options, key=lambda option: (-option.kept, option.idle, -option.pipelines, -option.carried))
    found: list[_Option] = []
    for option in ranked:
        if not any(option.is_no_better_than(other) for other in found):
            found.append(option)
    return found
