"""Losses that are drawn, not recorded: the same seed gives the same trace.

================  ====================================================================================
``exponential``   gaps are exponential, victims uniform among the living
``bursty``        gaps are hyper-exponential: most short, some long (coefficient of variation 1.8)
``lemons``        gaps are exponential; a tenth of the nodes is hit ten times as often as the others
================  ====================================================================================
"""

from __future__ import annotations

import random
from typing import Literal, get_args

from everstep.trace import Change, Trace

Hazard = Literal["exponential", "bursty", "lemons"]
HAZARDS: tuple[str, ...] = get_args(Hazard)

_SHORT_SHARE, _SHORT, _LONG = 0.85, 0.55, 3.55
"""0.85 · 0.55 + 0.15 · 3.55 = 1, so the mean gap is the one asked for."""

_LEMON_SHARE, _LEMON_WEIGHT = 0.1, 10.0


def draw(
    hazard: Hazard, *, num_nodes: int, num_losses: int, gap_s: float, seed: int, back_after_s: float | None = None,
) -> Trace:
    """``num_losses`` single losses with a mean gap of ``gap_s``, and one more gap to the end.

    ``back_after_s``: mean of the exponential time after which a fresh node takes the place of a lost one; None: never.

    Raises:
        ValueError: more losses than nodes, and none comes back.
    """
    if back_after_s is None and num_losses >= num_nodes:
        raise ValueError(f"{num_losses} losses leave nobody of {num_nodes} nodes")
    chance = random.Random(f"{hazard} {seed}")
    nodes = [f"node{number}" for number in range(1, num_nodes + 1)]
    lemons = set(chance.sample(nodes, max(1, round(_LEMON_SHARE * num_nodes)))) if hazard == "lemons" else set()
    alive, fresh = dict.fromkeys(nodes), num_nodes
    due: list[float] = []
    changes: list[Change] = []
    now_s = 0.0

    def let_join(until_s: float) -> None:
        nonlocal fresh
        for at_s in sorted(moment for moment in due if moment <= until_s):
            fresh += 1
            alive[f"node{fresh}"] = None
            changes.append(Change(at_s=at_s, joined=(f"node{fresh}",)))
            due.remove(at_s)

    for _ in range(num_losses):
        now_s += _gap(hazard, chance) * gap_s
        let_join(now_s)
        if not alive:
            continue
        names = list(alive)
        victim = chance.choices(names, [_LEMON_WEIGHT if name in lemons else 1.0 for name in names])[0]
        del alive[victim]
        changes.append(Change(at_s=now_s, lost=(victim,)))
        if back_after_s is not None:
            due.append(now_s + chance.expovariate(1.0) * back_after_s)
    end_s = now_s + _gap(hazard, chance) * gap_s
    let_join(end_s)
    return Trace(name=f"{hazard}-{seed}", nodes=tuple(nodes), changes=tuple(changes), end_s=end_s)


def _gap(hazard: Hazard, chance: random.Random) -> float:
    mean = 1.0
    if hazard == "bursty":
        mean = _SHORT if chance.random() < _SHORT_SHARE else _LONG
    return chance.expovariate(1.0) * mean
