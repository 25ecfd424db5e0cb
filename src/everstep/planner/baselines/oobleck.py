"""Oobleck: pipeline templates for every number of nodes, and three steps after a loss.

A template says how a pipeline of so many nodes is cut; which nodes it runs on does not matter. With at least f + 1
pipelines any f losses leave a whole copy of the model. After a loss each pipeline takes the template of its new size. One
that is too small for any borrows nodes one by one from the largest pipeline, as long as that one stays large enough; if
nobody can lend, small ones are merged with each other, and what is still too small with a healthy one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

Rank = TypeVar("Rank", int, str)


def reconfigured(pipelines: Sequence[Sequence[Rank]], lost: Iterable[Rank], smallest: int) -> list[list[Rank]] | None:
    """The nodes of each pipeline afterwards, by length and first node. None: too few are left for a single pipeline."""
    gone = set(lost)
    left = [kept for pipeline in pipelines if (kept := [rank for rank in pipeline if rank not in gone])]
    short = [pipeline for pipeline in left if len(pipeline) < smallest]
    for pipeline in short:
        _borrow(pipeline, left, smallest)
    short = [pipeline for pipeline in left if len(pipeline) < smallest]
    healthy = [pipeline for pipeline in left if len(pipeline) >= smallest]
    merged: list[list[Rank]] = [[]]
    for pipeline in short:
        merged[-1] = sorted(merged[-1] + pipeline)
        if len(merged[-1]) >= smallest:
            merged.append([])
    rest = merged.pop()
    if rest:
        others = healthy or merged
        if not others:
            return None
        into = min(reversed(others), key=len)
        into[:] = sorted(into + rest)
    return sorted(healthy + merged, key=lambda pipeline: (len(pipeline), pipeline[0]))


def _borrow(pipeline: list[Rank], all_of_them: list[list[Rank]], smallest: int) -> None:
    """Until ``pipeline`` is large enough or nobody can lend. Of equally large lenders the last lends its last node."""
    while len(pipeline) < smallest:
        lender = max(reversed(all_of_them), key=len)
        if len(lender) <= smallest:
            return
        pipeline.append(lender.pop())


def starts_with(num_nodes: int, failures: int, smallest: int) -> tuple[int, int] | None:
    """Smallest and largest template for ``num_nodes`` that always leave ``failures`` + 1 pipelines; None: too few nodes."""
    largest = num_nodes - failures * smallest
    return (smallest, largest) if largest >= smallest else None
