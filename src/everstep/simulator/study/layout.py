"""Who stands where at the level of the model: pipelines of places, places of layers, and who is idle.

A place whose node is gone is a hole. Nothing here knows times; layouts are values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

Bounds = tuple[tuple[int, int], ...]
"""First and end layer of each stage."""


@dataclass(frozen=True, slots=True)
class Place:
    """``node`` holds and computes the layers ``first`` up to, not including, ``end``; None: nobody does."""

    node: str | None
    first: int
    end: int


Pipeline = tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Pipelines, and the nodes that compute nothing (and hold nothing)."""

    pipelines: tuple[Pipeline, ...]
    idle: tuple[str, ...] = ()

    @property
    def busy(self) -> tuple[str, ...]:
        return tuple(place.node for pipeline in self.pipelines for place in pipeline if place.node is not None)

    @property
    def nodes(self) -> tuple[str, ...]:
        return (*self.busy, *self.idle)

    @property
    def whole(self) -> tuple[Pipeline, ...]:
        """The pipelines without a hole."""
        return tuple(pipeline for pipeline in self.pipelines if all(place.node is not None for place in pipeline))

    @property
    def is_whole(self) -> bool:
        return len(self.whole) == len(self.pipelines)

    @property
    def grid(self) -> Bounds | None:
        """The stages of all pipelines if they are alike, holes or not."""
        found = {bounds_of(pipeline) for pipeline in self.pipelines}
        return found.pop() if len(found) == 1 else None

    @property
    def kind(self) -> str:
        """The families of layouts whose errors are alike."""
        return f"{'grid' if self.grid else 'mixed'}{'' if self.is_whole else ' rerouted'}"

    @property
    def holes(self) -> tuple[int, ...]:
        """Of a grid: how many pipelines lack a node at each stage."""
        assert self.grid is not None, "only of a grid"
        return tuple(sum(place.node is None for place in column) for column in zip(*self.pipelines, strict=True))

    def has_all(self, num_layers: int) -> bool:
        """Whether every layer has a living holder."""
        held = {layer for line in self.pipelines for place in line if place.node for layer in range(place.first, place.end)}
        return len(held) == num_layers

    def without(self, lost: Iterable[str]) -> Layout:
        gone = set(lost)
        return Layout(
            tuple(
                tuple(replace(place, node=None) if place.node in gone else place for place in pipeline)
                if any(place.node in gone for place in pipeline) else pipeline
                for pipeline in self.pipelines
            ),
            tuple(node for node in self.idle if node not in gone),
        )

    def joined_by(self, nodes: Sequence[str]) -> Layout:
        """With ``nodes`` idle."""
        return Layout(self.pipelines, (*self.idle, *nodes))

    def bare(self) -> Layout:
        """The same nodes, all idle."""
        return Layout((), self.nodes)

    def filled(self, index: int, stage: int, node: str) -> Layout:
        """With ``node``, idle until now, in the hole at ``stage`` of pipeline ``index``."""
        line = self.pipelines[index]
        line = (*line[:stage], replace(line[stage], node=node), *line[stage + 1:])
        return Layout(
            (*self.pipelines[:index], line, *self.pipelines[index + 1:]), tuple(name for name in self.idle if name != node),
        )

    def swapped(self, source: tuple[int, int], target: tuple[int, int]) -> Layout:
        """With the node at ``source`` (pipeline, stage) gone to the hole at ``target``."""
        node = self.pipelines[source[0]][source[1]].node
        assert node is not None, "a node changes its role, a hole cannot"
        return self.without([node]).joined_by([node]).filled(*target, node)


def bounds_of(pipeline: Pipeline) -> Bounds:
    return tuple((place.first, place.end) for place in pipeline)


def built(splits: Sequence[Bounds], nodes: Sequence[str], before: Layout | None = None) -> Layout:
    """Pipelines of ``splits`` on ``nodes``; whole pipelines of ``before`` that are wanted again keep their nodes."""
    wanted = list(splits)
    kept: list[Pipeline] = []
    for pipeline in before.whole if before else ():
        if bounds_of(pipeline) in wanted:
            wanted.remove(bounds_of(pipeline))
            kept.append(pipeline)
    used = {place.node for pipeline in kept for place in pipeline}
    free = [node for node in nodes if node not in used]
    fresh: list[Pipeline] = []
    for split in wanted:
        members, free = free[: len(split)], free[len(split):]
        fresh.append(tuple(Place(node, first, end) for node, (first, end) in zip(members, split, strict=True)))
    return Layout((*kept, *fresh), tuple(free))
