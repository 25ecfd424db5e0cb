"""An agreed, numbered membership. Only grows; every message and every answer names its view."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.quantities import HostId, NodeId


@dataclass(frozen=True, slots=True)
class Member:
    """A node in a view: a name and an incarnation. A name that returns with another incarnation is somebody else."""

    node_id: NodeId
    incarnation: int = 0
    host: HostId = HostId("localhost")
    place: int = 0
    """Where it started: ``worker=3``."""
    address: str = ""
    """Where its mailbox listens, ``host:port``."""


@dataclass(frozen=True, slots=True)
class View:
    """Who is in, under one number."""

    number: int
    members: tuple[Member, ...]

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(member.node_id for member in self.members)

    def __contains__(self, node: object) -> bool:
        return any(member.node_id == node for member in self.members)

    def member(self, node: NodeId) -> Member:
        """Raises KeyError when ``node`` is not in the view."""
        for member in self.members:
            if member.node_id == node:
                return member
        raise KeyError(node)

    def rank_of(self, node: NodeId) -> int:
        """A node's position in this view. Means nothing in any other."""
        return self.nodes.index(node)


def problems(view: View) -> list[str]:
    """Everything wrong with ``view``; an empty list means it may be proposed."""
    found = [] if view.number >= 1 else [f"views are numbered from 1, got {view.number}"]
    if not view.members:
        found.append(f"view {view.number} has no members")
    nodes = view.nodes
    found += [f"{node} is in view {view.number} twice" for node in sorted({n for n in nodes if nodes.count(n) > 1})]
    return found
