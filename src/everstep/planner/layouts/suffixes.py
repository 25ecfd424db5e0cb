"""All layer splits of a pipeline that may take less than a given time, grown stage by stage from the last one.

The last stages of a pipeline, taken as a pipeline by themselves, get the first forward no sooner than alone and after that of
all layers before; and when they are through with the last backward, its way through the layers before is still to go. So with
``before`` the F and B of all layers before them, and m micro-batches,

    T >= before + T(last stages alone, m)

which knows how stages wait for each other, as a bound of single stages does not. A suffix whose bound is not below the limit is
dropped with all splits that end in it. So is one whose remaining layers no split could bring below the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everstep.planner.step.pipelines import Array, stage_ends_s


class Grown(NamedTuple):
    """The best split below the limit, as edges from 0 to the number of layers; None: there is none."""

    edges: tuple[int, ...] | None
    seconds: float
    tried: int
    """Suffixes that were looked at."""
    is_complete: bool
    """Whether nothing was left out."""


def grown(
    bounds: Sequence[Array], forward_s: Array, work_s: Array, many: int, limit_s: float, *, at_most: int,
    widest: int | None = None,
) -> Grown:
    """``bounds``: for each stage, the last one first, what it cannot end before, by its first and end layer.

    ``forward_s`` and ``work_s``: running sums over the layers. ``at_most``: suffixes to look at before giving up; ``widest``:
    of each length the most promising so many are kept, others are left out.
    """
    num_layers = len(work_s) - 1
    ahead = _ahead(bounds, num_layers)
    edges: NDArray[np.int64] = np.array([[num_layers]])
    lowest_s = np.zeros(1)
    tried, is_complete = 0, True
    for behind, bound in enumerate(bounds):
        least_s = np.maximum(np.maximum(bound[:, edges[:, 0]].T, ahead[behind][None, :num_layers]), lowest_s[:, None])
        old, first = np.nonzero(least_s < limit_s)
        tried += len(first)
        if tried > at_most:
            return Grown(None, limit_s, tried, False)
        edges = np.concatenate([first[:, None], edges[old]], axis=1)
        lowest_s = np.maximum(_alone_s(edges, forward_s, work_s, many), least_s[old, first]) if len(first) else np.zeros(0)
        kept = np.flatnonzero(lowest_s < limit_s)
        if widest is not None and len(kept) > widest:
            kept = kept[np.argsort(lowest_s[kept], kind="stable")[:widest]]
            is_complete = False
        if not len(kept):
            return Grown(None, limit_s, tried, is_complete)
        edges, lowest_s = edges[kept], lowest_s[kept]
    best = int(lowest_s.argmin())
    return Grown(tuple(edges[best].tolist()), float(lowest_s[best]), tried, is_complete)


def _ahead(bounds: Sequence[Array], num_layers: int) -> list[Array]:
    """By stages behind, and by its first layer, the least bound of all stages ahead of a stage."""
    best = np.full(num_layers + 1, np.inf)
    best[0] = 0.0
    found = [best]
    for bound in reversed(bounds[1:]):
        best = np.maximum(best[:num_layers, None], bound).min(axis=0)
        found.append(best)
    return found[::-1]


def _alone_s(edges: NDArray[np.int64], forward_s: Array, work_s: Array, many: int) -> Array:
    """The bound of each suffix."""
    forwards, works = np.diff(forward_s[edges], axis=1), np.diff(work_s[edges], axis=1)
    count, stages = forwards.shape
    ends_s = stage_ends_s(
        forwards, works - forwards, np.zeros_like(forwards), np.full(count, stages), np.full(count, many),
    )
    found: Array = ends_s.max(axis=1) + work_s[edges[:, 0]]
    return found
