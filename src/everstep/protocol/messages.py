"""What crosses the wire between members, and between members and their leader.

Every message names the view it belongs to; ``codec`` turns them into bytes and back.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from everstep.plan import Plan
from everstep.quantities import NodeId, UnitName
from everstep.transfer import Load, Move
from everstep.view import View


class UnitSums(msgspec.Struct, frozen=True, tag="unit-sums"):
    """What is in the reduced sums of a unit: pairs by use (layer name), and the squared norm of each parameter."""

    pairs: Mapping[str, tuple[int, ...]]
    square_norms: Mapping[str, float]


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """Up the tree: sums are complete at every node whose record is merged here (``nodes``).

    Merged by unit and by micro-batch, never added. ``losses``: micro-batch → (sum, count). ``flags``: what must stop
    everybody after this step. ``times``: node → action times measured in this step (seconds of processor time), a
    dictionary ``"F:layer" | "B:layer" | "W:layer" | "U:unit" | "step"`` → seconds; ``step`` is all that the process has worked
    since its record before.
    """

    view: int
    step: int
    attempt: int
    nodes: tuple[NodeId, ...]
    units: Mapping[UnitName, UnitSums]
    losses: Mapping[int, tuple[float, float]]
    flags: tuple[str, ...]
    times: Mapping[NodeId, Mapping[str, float]]


class Union(msgspec.Struct, frozen=True, tag="union"):
    """Down the tree: the answer that commits a step. Clip factor and loss follow from it in one fixed order.

    ``view`` says whose records made it; nothing computed from a union depends on it.
    """

    view: int
    step: int
    attempt: int
    units: Mapping[UnitName, UnitSums]
    losses: Mapping[int, tuple[float, float]]
    flags: tuple[str, ...]
    times: Mapping[NodeId, Mapping[str, float]]


ExchangeMessage = Prepared | Union


class Report(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """A promise made on adopting a view: nothing of older views is used any more.

    ``applied`` is the number of steps in the state, so also the number of the step to run next; -1: no state at all.
    ``attempt`` is the last try of that step that was begun, -1: none. ``prepared``: its sums are complete and kept.
    ``union``: that of step ``applied - 1``, if held. ``holds``: units held at ``applied``.
    """

    view: int
    node: NodeId
    incarnation: int
    applied: int
    attempt: int
    prepared: bool
    union: Union | None
    holds: tuple[UnitName, ...]


class StateReady(msgspec.Struct, frozen=True, tag="state-ready"):
    """Every byte that ``node`` needs for the plan of ``view`` is there and verified."""

    view: int
    node: NodeId


class BoundaryReached(msgspec.Struct, frozen=True, tag="boundary"):
    """A union with the flag ``change`` was held: ``node`` has applied it and does not begin ``step``."""

    view: int
    node: NodeId
    step: int


class Stuck(msgspec.Struct, frozen=True, tag="stuck"):
    """A link to a peer that may well be alive was lost; only a new view helps."""

    view: int
    node: NodeId
    peer: NodeId
    what: str


class ViewOrdered(msgspec.Struct, frozen=True, tag="view-ordered"):
    """The store holds this view. ``token`` is the leader's fencing token."""

    view: View
    token: int


class PlanOrdered(msgspec.Struct, frozen=True, kw_only=True, tag="plan-ordered"):
    """The plan of ``view``, written once in the store, made from reports of this view by all its members.

    ``step`` runs next under it, as try ``attempt``. ``union``: of step ``step - 1``, handed on to those who are one step
    behind. ``moves`` bring state that live holders have; ``loads`` come from the checkpoint ``restore`` (a path, or
    ``"initial"`` for the weights made from the seed), and then all state is that of ``step``. ``rollbacks``: for each
    roll-back of the run (from_step, to_step, attempt): the first try of the steps in between has this number. ``schedule``:
    the order of every node's actions, as the text that ``schedule.parse_order`` reads, where it is another than the one that
    follows from the plan.
    """

    view: int
    token: int
    step: int
    attempt: int
    plan: Plan
    union: Union | None
    moves: tuple[Move, ...]
    loads: tuple[Load, ...] = ()
    restore: str | None = None
    rollbacks: tuple[tuple[int, int, int], ...] = ()
    schedule: Mapping[NodeId, str] | None = None


class ResumeOrdered(msgspec.Struct, frozen=True, tag="resume-ordered"):
    """Everybody's state is ready: old copies may go, training may go on."""

    view: int
    token: int


class BoundaryOrdered(msgspec.Struct, frozen=True, tag="boundary-ordered"):
    """Put the flag ``flag`` (change, checkpoint, stop) into the next prepared record."""

    view: int
    token: int
    flag: str


ToLeader = Report | StateReady | BoundaryReached | Stuck
ToMember = ViewOrdered | PlanOrdered | ResumeOrdered | BoundaryOrdered


def first_attempt(step: int, rollbacks: tuple[tuple[int, int, int], ...]) -> int:
    """The number of the first try of ``step`` on the present line: 0, or what the last roll-back over it set."""
    return max((attempt for from_step, to_step, attempt in rollbacks if to_step <= step <= from_step), default=0)
