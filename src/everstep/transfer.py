"""Moves of state: new placement minus old, from live holders."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.quantities import NodeId, UnitName


@dataclass(frozen=True, slots=True)
class Move:
    """``target`` gets ``unit`` from ``source``, which holds it at the step in question."""

    unit: UnitName
    source: NodeId
    target: NodeId
    num_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.unit}: {self.source} → {self.target}"


@dataclass(frozen=True, slots=True)
class Load:
    """``target`` gets ``unit`` from the checkpoint that the plan restores."""

    unit: UnitName
    target: NodeId


def problems(moves: tuple[Move, ...], held: dict[NodeId, frozenset[UnitName]]) -> list[str]:
    """Everything wrong with ``moves`` when nodes hold ``held``; an empty list means they may be carried out."""
    found = [f"{m}: {m.source} does not hold it" for m in moves if m.unit not in held.get(m.source, frozenset())]
    found += [f"{m}: {m.target} holds it already" for m in moves if m.unit in held.get(m.target, frozenset())]
    targets = [(m.unit, m.target) for m in moves]
    if len(set(targets)) != len(targets):
        found.append("a unit is sent to one node twice")
    return found
