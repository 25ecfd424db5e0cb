"""A decision in one line; the whole table is ``decision.table``."""

from __future__ import annotations

from everstep.decision import Decision
from everstep.quantities import human_seconds


def summary(decision: Decision) -> str:
    """``reroute chosen of 6 candidates: step 0.21 s, stall 0.03 s``; of two phases also the second and when it begins."""
    chosen = decision.candidate
    count = len(decision.candidates)
    of = f" of {count} candidates" if count > 1 else ""
    back = f", back to step {chosen.restore_step}" if chosen.restore_step is not None else ""
    stall = f", stall {human_seconds(chosen.stall_s)}" if chosen.way != "start" else ""
    later = f", {human_seconds(chosen.later_step_s)} after {human_seconds(chosen.copy_s)}" if chosen.later is not None else ""
    return f"{chosen.policy} chosen{of}: step {human_seconds(chosen.step_s)}{later}{stall}{back}"
