"""A system of which only measurements are known: how fast it is on so many nodes, and how long it stands after a loss.

With the published figures of a system the world must give that system's published results: this is what holds the world
to something that was not made here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from everstep.simulator.study.layout import Layout, Place
from everstep.simulator.study.player import Option, Situation


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Plays as a policy: all living nodes in one pipeline, and after each change a stop."""

    name: str
    batch: int
    samples_per_s: Mapping[int, float]
    """By living nodes; 0 or absent: it does not run on so many."""
    stop_s: float
    loses_work: bool = False
    """Whether it goes back to its last checkpoint."""

    is_free: bool = False
    rethinks: bool = False

    def bare(self, nodes: tuple[str, ...]) -> Layout:
        return Layout((), nodes)

    def true_step_s(self, layout: Layout, factor: Callable[[str], float]) -> float:
        return self.step_s(layout) * max(map(factor, layout.nodes))

    def kept(self, option: Option[Layout], copied_s: float, layout: Layout) -> Layout:
        return layout

    def start(self, nodes: tuple[str, ...]) -> Layout:
        return Layout((tuple(Place(node, index, index + 1) for index, node in enumerate(nodes)),))

    def step_s(self, layout: Layout) -> float:
        pace = self.samples_per_s.get(len(layout.nodes), 0.0)
        return self.batch / pace if pace else math.inf

    def react(self, situation: Situation[Layout]) -> Option[Layout]:
        target = self.start(situation.layout.nodes)
        return Option(policy=self.name, way="blocking", target=target, step_s=self.step_s(target), stall_s=self.stop_s)

    def pace_of_a_node(self, num_nodes: int) -> float:
        return self.samples_per_s[num_nodes] / num_nodes
