"""When nodes were lost and came, as it happened somewhere or as it was drawn from a hazard.

1. Changes are in the order of time; what happens at one moment is one change, so a batch of losses stays a batch.
2. Only a node that is there can be lost, and only one that is away can join.
3. Names are the trace's own. A policy places them as it likes; who is lost does not depend on where it placed them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Who is lost and who comes at one moment."""

    at_s: float
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Nodes at the start, changes, and when the trace ends; times in seconds from its start."""

    name: str
    nodes: tuple[str, ...]
    changes: tuple[Change, ...]
    end_s: float

    @property
    def num_losses(self) -> int:
        return sum(len(change.lost) for change in self.changes)

    @property
    def num_joins(self) -> int:
        return sum(len(change.joined) for change in self.changes)

    @property
    def mean_gap_s(self) -> float:
        """Mean time between changes; the whole length if there are none."""
        return self.end_s / max(1, len(self.changes))

    def beginning_with(self, num_nodes: int) -> Trace:
        """From the first moment on at which ``num_nodes`` are there, as a trace of its own.

        Raises:
            ValueError: there never are so many.
        """
        alive = dict.fromkeys(self.nodes)
        if len(alive) >= num_nodes:
            return self
        for index, change in enumerate(self.changes):
            _apply(alive, change)
            if len(alive) >= num_nodes:
                return Trace(
                    name=self.name, nodes=tuple(alive), end_s=self.end_s - change.at_s,
                    changes=tuple(
                        Change(at_s=later.at_s - change.at_s, lost=later.lost, joined=later.joined)
                        for later in self.changes[index + 1:]
                    ),
                )
        raise ValueError(f"{self.name} never has {num_nodes} nodes at once")

    def from_first_change(self) -> Trace:
        """Without the time before anything happens: the first change is at 0 s."""
        start_s = self.changes[0].at_s if self.changes else 0.0
        return Trace(
            name=self.name, nodes=self.nodes, end_s=self.end_s - start_s,
            changes=tuple(Change(at_s=each.at_s - start_s, lost=each.lost, joined=each.joined) for each in self.changes),
        )

    def folded(self, num_nodes: int) -> Trace:
        """The same on at most ``num_nodes`` nodes: the k-th name stands for node k modulo their number.

        A node is there while any name that stands for it is there, so batches stay together. A trace that never has more
        nodes at once is left as it is.
        """
        if self.most_nodes <= num_nodes:
            return self
        order = dict.fromkeys((*self.nodes, *(name for change in self.changes for name in change.joined)))
        place = {name: f"node{index % num_nodes + 1}" for index, name in enumerate(order)}
        count = dict.fromkeys((f"node{index + 1}" for index in range(num_nodes)), 0)
        for name in self.nodes:
            count[place[name]] += 1
        at_start = tuple(node for node in count if count[node])
        changes = []
        for change in self.changes:
            before = {node for node in count if count[node]}
            for name in change.lost:
                count[place[name]] -= 1
            for name in change.joined:
                count[place[name]] += 1
            after = {node for node in count if count[node]}
            if before != after:
                changes.append(Change(
                    at_s=change.at_s, lost=tuple(node for node in count if node in before - after),
                    joined=tuple(node for node in count if node in after - before),
                ))
        return Trace(name=self.name, nodes=at_start, changes=tuple(changes), end_s=self.end_s)

    @property
    def most_nodes(self) -> int:
        """Most nodes that are there at once."""
        alive = dict.fromkeys(self.nodes)
        most = len(alive)
        for change in self.changes:
            _apply(alive, change)
            most = max(most, len(alive))
        return most


def _apply(alive: dict[str, None], change: Change) -> None:
    for name in change.lost:
        del alive[name]
    alive.update(dict.fromkeys(change.joined))


def problems(trace: Trace) -> list[str]:
    """Everything wrong with ``trace``; an empty list means it can be played."""
    found = [] if trace.nodes else ["nobody is there at the start"]
    alive, last_s = set(trace.nodes), 0.0
    if len(alive) != len(trace.nodes):
        found.append("a node is there twice at the start")
    for change in trace.changes:
        if change.at_s < last_s:
            found.append(f"not sorted by time: {change.at_s:g} s comes after {last_s:g} s")
        last_s = max(last_s, change.at_s)
        for name in change.lost:
            if name not in alive:
                found.append(f"at {change.at_s:g} s {name} is lost, but it is not there")
            alive.discard(name)
        for name in change.joined:
            if name in alive:
                found.append(f"at {change.at_s:g} s {name} joins, but it is there already")
            alive.add(name)
    if trace.end_s < last_s:
        found.append(f"ends at {trace.end_s:g} s, before its last change at {last_s:g} s")
    return found


def of_events(name: str, events: Iterable[tuple[float, bool, str]]) -> Trace:
    """From (seconds, joins, node) in the order of time; time begins with the first event. It ends one mean gap after the last.

    Who joins at the first moment is there at the start. A node that is lost and joins again at one moment, or the other
    way round, makes two changes.
    """
    nodes: list[str] = []
    changes: list[Change] = []
    start_s: float | None = None
    for at_s, joins, node in events:
        start_s = at_s if start_s is None else start_s
        moment_s = at_s - start_s
        if joins and moment_s == 0 and not changes:
            nodes.append(node)
            continue
        if not changes or changes[-1].at_s != moment_s or node in (*changes[-1].lost, *changes[-1].joined):
            changes.append(Change(at_s=moment_s))
        last = changes.pop()
        changes.append(Change(
            at_s=moment_s, lost=last.lost if joins else (*last.lost, node),
            joined=(*last.joined, node) if joins else last.joined,
        ))
    last_s = changes[-1].at_s if changes else 0.0
    return Trace(name=name, nodes=tuple(nodes), changes=tuple(changes), end_s=last_s + last_s / max(1, len(changes)))
