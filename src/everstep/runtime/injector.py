"""Which worker to kill, and when. For demonstrations and tests; the kills are real SIGKILLs.

Kills of one (step, phase) belong together and strike at once. A worker that reaches an armed instant stands still until the
agent has decided, so the instant is exact. Victims that are drawn are drawn at that moment, from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from everstep.quantities import NodeId, node_number
from everstep.runtime.kills import Kill, RandomKills

AT_OR_AFTER = ("switch", "recover")
"""Phases that do not come in every step: the first one at or after the step that was named."""


class Injector:
    """Kills that are still to come."""

    def __init__(self, kills: tuple[Kill | RandomKills, ...], seed: int) -> None:
        self._exact = [kill for kill in kills if isinstance(kill, Kill)]
        self._seeds = [kill.seed for kill in kills if isinstance(kill, RandomKills)]
        self._random = random.Random(self._seeds[0] if self._seeds else seed)
        self._steps: list[tuple[int, float]] = []  # (step, part of a step after its begin)
        self._due_s: list[float] = []

    def begin(self, until: int) -> None:
        """The run is to have ``until`` steps: draw the random instants."""
        for seed in self._seeds:
            chance = random.Random(seed)
            for _ in range(chance.randint(1, 3)):
                self._steps.append((chance.randrange(1, max(2, until - 1)), chance.random()))

    def instants(self) -> tuple[tuple[str, int], ...]:
        """(phase, step) at which workers are to stand still."""
        return tuple(sorted({(kill.phase, kill.step) for kill in self._exact}))

    def reached(
        self, node: NodeId, phase: str, step: int, living: Mapping[NodeId, int],
        lost_layers: Callable[[frozenset[NodeId]], tuple[int, ...]],
    ) -> tuple[NodeId, ...]:
        """``node`` stands at an armed instant: the victims, if it is time."""
        group = [
            kill for kill in self._exact
            if kill.phase == phase and (step >= kill.step if phase in AT_OR_AFTER else step == kill.step)
        ]
        places = {kill.worker for kill in group if kill.worker is not None}
        if not group or (places and living.get(node) not in places):
            return ()
        if phase in AT_OR_AFTER:
            first = min(kill.step for kill in group)
            group = [kill for kill in group if kill.step == first]
        self._exact = [kill for kill in self._exact if kill not in group]
        victims = [n for n, place in living.items() if place in places]
        for _ in range(sum(kill.worker is None for kill in group)):
            bearable = [
                n for n in sorted(living, key=node_number)
                if n not in victims and len(victims) + 1 < len(living) and not lost_layers(frozenset([*victims, n]))
            ]
            if bearable:
                victims.append(self._random.choice(bearable))
        return tuple(victims)

    def step_begins(self, step: int, now_s: float, step_s: float) -> None:
        """Set the alarm for the random kills that fall into ``step``."""
        for kill in [kill for kill in self._steps if kill[0] <= step]:
            self._steps.remove(kill)
            self._due_s.append(now_s + kill[1] * step_s)

    def never_struck(self) -> str:
        """Kills that were asked for by instant and did not happen, in words; empty if there are none."""
        return f"never struck: {'; '.join(map(str, self._exact))}: no worker came by" if self._exact else ""

    def next_deadline_s(self) -> float | None:
        return min(self._due_s, default=None)

    def due(self, now_s: float, living: Mapping[NodeId, int]) -> tuple[NodeId, ...]:
        """Random victims whose time has come. The last worker is spared: nothing could go on without it."""
        count = sum(due_s <= now_s for due_s in self._due_s)
        self._due_s = [due_s for due_s in self._due_s if due_s > now_s]
        nodes = sorted(living, key=node_number)
        return tuple(self._random.sample(nodes, min(count, len(nodes) - 1))) if len(nodes) > 1 else ()
