"""What became of the interrupted step, from the reports of all members of a view.

1. Nodes are at most one step apart, because a step is begun only by nodes that hold the union of the one before.
2. The newest state counts. Whoever is one step behind follows if the union of that step is among the reports and its own
   sums are complete and of the same try; the union of a step is kept until the next is held, so it is there.
3. If nobody is ahead, nobody alive has applied: the step is run again whole, as a new try.
4. Whoever cannot follow holds nothing: newcomers, and what was stranded on an older step. That costs state, not
   correctness; a restore that is interrupted can do it, when the checkpoint is ahead of the survivors.

Pure: reports in, resolution out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.errors import LocalProtocolError
from everstep.protocol.messages import Report, Union, first_attempt
from everstep.quantities import NodeId, UnitName


@dataclass(frozen=True, slots=True)
class Resolution:
    """Where training stands. ``step`` is the next to run, as try ``attempt``; None: nobody has any state.

    ``union``: of step ``step - 1``, to hand on; None where nobody follows or is new. ``holds``: the units each node holds at
    ``step``, once those who follow have applied.
    """

    step: int | None
    attempt: int
    union: Union | None
    holds: Mapping[NodeId, frozenset[UnitName]]


def may_follow(*, applied: int, attempt: int, prepared: bool, union: Union) -> bool:
    """Whether a node that has ``applied`` steps can apply ``union`` to the sums it keeps."""
    return prepared and (applied, attempt) == (union.step, union.attempt)


def resolve(reports: Sequence[Report], rollbacks: tuple[tuple[int, int, int], ...] = ()) -> Resolution:
    """What the members of one view hold, and what they run next.

    Raises:
        LocalProtocolError: reports of several views, or two of one node.
    """
    if len({report.view for report in reports}) > 1 or len({report.node for report in reports}) < len(reports):
        raise LocalProtocolError(f"expected one report a node, of one view; got {[(r.node, r.view) for r in reports]}")
    step = max((report.applied for report in reports), default=-1)
    if step < 0:
        return Resolution(None, first_attempt(0, rollbacks), None, {report.node: frozenset() for report in reports})
    union = next((r.union for r in reports if r.union is not None and r.union.step == step - 1), None)
    following = {report.node for report in reports if union is not None and _follows(report, union)}
    # A newcomer gets the union of its state's step too: what it says, such as a stop, holds for it as for the others.
    is_needed = bool(following) or any(report.applied < 0 for report in reports)
    begun = max((report.attempt for report in reports if report.applied == step), default=-1)
    return Resolution(
        step=step,
        attempt=max(first_attempt(step, rollbacks), begun + 1),
        union=union if is_needed else None,
        holds={
            report.node: frozenset(report.holds if report.applied == step or report.node in following else ())
            for report in reports
        },
    )


def _follows(report: Report, union: Union) -> bool:
    return may_follow(applied=report.applied, attempt=report.attempt, prepared=report.prepared, union=union)
