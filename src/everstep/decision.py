"""What was considered after an event, what each choice would cost, and which was taken.

A decision is a value. The log, ``everstep explain``, the live display and the tests render it through ``table``, so they
show the same words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from everstep.plan import Plan
from everstep.quantities import NodeId, human_bytes, human_seconds

Way = Literal["start", "now", "blocking", "behind", "wait", "restore"]
"""How a plan is reached: at the start, by new routes only, by moving state first, by moving state while another plan trains,
by waiting for somebody who is expected, or from a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan and the way to it, with what it is predicted to cost. ``plan`` is None where a policy has no answer."""

    policy: str
    plan: Plan | None
    way: Way = "now"
    step_s: float = float("inf")
    """Predicted time of a step under the plan."""
    stall_s: float = 0.0
    """Predicted time without training before the first such step."""
    moved_bytes: int = 0
    peak_bytes: int = 0
    """Most memory that any node needs."""
    restore_step: int | None = None
    """With ``way="restore"``: the step to go back to."""
    later: Plan | None = None
    """With ``way="behind"``: the plan whose state is copied while ``plan`` trains."""
    later_step_s: float = float("inf")
    """Predicted time of a step under ``later``."""
    copy_s: float = 0.0
    """Predicted time from the first step under ``plan`` until ``later`` can be switched to."""
    later_stall_s: float = 0.0
    """Predicted time without training at that switch."""
    value: float = float("-inf")
    """Expected useful samples until the next event."""
    reason: str = ""
    """Why it cannot be taken, or why it lost."""
    note: str = ""
    """What whoever takes it should know."""

    @property
    def feasible(self) -> bool:
        return self.plan is not None

    @property
    def settled(self) -> Plan | None:
        """The plan that it ends with."""
        return self.plan if self.later is None else self.later

    @property
    def settled_step_s(self) -> float:
        """Predicted time of a step once it has come to an end."""
        return self.step_s if self.later is None else self.later_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The table of candidates and the one chosen."""

    cause: str
    """What happened, in words: ``n5 lost``."""
    view: int
    step: int
    lost: tuple[NodeId, ...] = ()
    gap_s: float
    """Expected time to the next event, from the run's own history."""
    candidates: tuple[Candidate, ...]
    chosen: int
    """Index into ``candidates``."""
    decide_s: float = 0.0

    @property
    def candidate(self) -> Candidate:
        return self.candidates[self.chosen]

    @property
    def plan(self) -> Plan:
        plan = self.candidate.plan
        assert plan is not None, "only a feasible candidate can be chosen"
        return plan


def table(decision: Decision) -> list[tuple[str, ...]]:
    """Header and rows: policy, step, stall, memory, samples, verdict. The chosen one first, then by value.

    Of a copy made behind training, the steps before and after it.
    """
    rows: list[tuple[str, ...]] = [("policy", "step", "stall", "memory", "samples", "verdict")]
    ranked = sorted(range(len(decision.candidates)), key=lambda i: (i != decision.chosen, -decision.candidates[i].value))
    for index in ranked:
        candidate = decision.candidates[index]
        if candidate.plan is None:
            rows.append((candidate.policy, "-", "-", "-", "-", candidate.reason))
            continue
        verdict = "; ".join(filter(None, [candidate.reason, candidate.note]))
        if index == decision.chosen:
            verdict = f"chosen: {verdict}" if verdict else "chosen"
        step = human_seconds(candidate.step_s)
        if candidate.later is not None:
            step += f" → {human_seconds(candidate.later_step_s)}"
        rows.append((
            candidate.policy, step, human_seconds(candidate.stall_s),
            human_bytes(candidate.peak_bytes), f"{candidate.value:,.0f}", verdict,
        ))
    return rows


def text(decision: Decision) -> str:
    """The table with aligned columns, under a line that says what happened."""
    rows = table(decision)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    head = (
        f"{decision.cause}: step {decision.step}, view {decision.view}; next event expected in {human_seconds(decision.gap_s)}"
    )
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([head, *lines])
