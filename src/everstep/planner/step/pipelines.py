"""How long 1F1B takes on plain pipelines: exact, one at a time or many, with many numbers of micro-batches, in one pass.

Arrays are (pipeline, stage). Pipelines of different length stand flush at their last stage, because how many forwards a
stage does before its first backward depends on the stages behind it alone. In round j every stage that exists does the
forward of micro-batch j, and a stage with r stages behind it the backward of micro-batch j - r, which is 1F1B's order:

    end(F_j on s) = max over stages t up to s of  free(t) + forwards and messages from t to s
    end(B_i on s) = max(free(s), end(B_i on s+1) + message) + backward
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Whole = NDArray[np.int64]


def flush(rows: Sequence[Sequence[float]], width: int) -> Array:
    """``rows`` of different length as one array, each at the right end of its line, zeros before it."""
    found = np.zeros((len(rows), width))
    for line, row in zip(found, rows, strict=True):
        line[width - len(row):] = row
    return found


def stage_ends_s(forward_s: Array, backward_s: Array, message_s: Array, num_stages: Whole, num_micro_batches: Whole) -> Array:
    """When each stage is through with its last backward, by pipeline and stage, flush at the last stage.

    ``message_s``: what a message over the boundary in front of a stage takes, in either direction; 0 before the first.
    """
    order = np.argsort(-num_micro_batches, kind="stable")
    forward_s, backward_s, message_s = forward_s[order], backward_s[order], message_s[order]
    lengths, many = num_stages[order], num_micro_batches[order]
    width = forward_s.shape[1]
    behind = np.arange(width - 1, -1, -1)
    exists = behind[None, :] < lengths[:, None]
    passed_s = np.cumsum(forward_s + message_s, axis=1)
    headless_s = forward_s - passed_s
    free_s = np.zeros_like(forward_s)
    returned_s = np.zeros_like(forward_s)
    """Ends of the newest backward on the stage behind, message included."""
    for turn in range(int((many + lengths).max()) - 1):
        filling = int(np.searchsorted(-many, -turn, side="left"))
        if filling:
            free_s[:filling] = np.maximum.accumulate(free_s[:filling] + headless_s[:filling], axis=1) + passed_s[:filling]
        acting = exists & (behind <= turn) & (behind > (turn - many)[:, None])
        ended_s = np.maximum(free_s, returned_s) + backward_s
        free_s = np.where(acting, ended_s, free_s)
        returned_s[:, :-1] = np.where(acting[:, 1:], ended_s[:, 1:] + message_s[:, 1:], returned_s[:, :-1])
    found = np.empty_like(free_s)
    found[order] = free_s
    return found


def one_pipeline_ends_s(
    forward_s: Sequence[float], backward_s: Sequence[float], message_s: Sequence[float], num_micro_batches: int,
) -> list[float]:
    """The same for one pipeline, by stage: quicker than arrays up to some hundred actions."""
    num_stages = len(forward_s)
    free_s, ended_s = [0.0] * num_stages, [0.0] * (num_stages + 1)
    stages = range(num_stages)
    back_s = [*message_s[1:], 0.0]
    for turn in range(num_micro_batches + num_stages - 1):
        if turn < num_micro_batches:
            now = 0.0
            for stage in stages:
                now += message_s[stage]
                if free_s[stage] > now:
                    now = free_s[stage]
                now += forward_s[stage]
                free_s[stage] = now
        first = max(0, num_stages - 1 - turn)
        for stage in range(first, min(num_stages, num_micro_batches - 1 - turn + num_stages)):
            now = ended_s[stage + 1] + back_s[stage]
            if free_s[stage] > now:
                now = free_s[stage]
            free_s[stage] = ended_s[stage] = now + backward_s[stage]
    return free_s
