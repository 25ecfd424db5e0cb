"""Follows steps and events as the agent sees them, and writes one ``EventSeen`` for each recovery once its cost is known.

Stall: the last good step's end to the next step's end, minus a median step. A loss during a recovery belongs to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from everstep.decision import Decision
from everstep.quantities import NodeId
from everstep.records import EventSeen, Record, StepSeen
from everstep.view import View

STEPS_AFTER = 3
"""Steps under the new plan whose median is the step time after the event."""


@dataclass
class _Open:
    """A recovery whose cost is not known yet."""

    time_s: float
    step: int
    phase: str
    kind: str
    nodes: list[NodeId] = field(default_factory=list)
    detect_s: list[float] = field(default_factory=list)
    decision: Decision | None = None
    decide_s: float = 0.0
    before_s: float = 0.0
    stall_s: float | None = None
    after_s: list[float] = field(default_factory=list)


class EventTracker:
    """Fed by the agent; ``record`` takes what it has to say."""

    def __init__(self, record: Callable[[Record], None]) -> None:
        self._record = record
        self.until: int | None = None
        self.steps = 0
        """Steps committed on the present line."""
        self.last_step_s: float | None = None
        """Of the last step; None where a change of plan is in it."""
        self._recent: deque[float] = deque(maxlen=15)
        self._last_end_s: float | None = None
        self._open: _Open | None = None
        self._killed: dict[NodeId, tuple[float, str | None]] = {}
        self._training_since_s = 0.0
        self._is_new_plan = False
        self._before_s = 0.0

    def median_step_s(self) -> float:
        """Of recent steps; 0 before there are any."""
        return median(self._recent) if self._recent else 0.0

    def killed(self, node: NodeId, phase: str | None, now_s: float) -> None:
        """The agent itself kills ``node``, so the time to detection can be told, and the instant if it was armed."""
        self._killed.setdefault(node, (now_s, phase))

    def suspected(self, node: NodeId, now_s: float) -> None:
        """``node`` was silent for too long and is fenced."""
        self._begin("silent", "", now_s)

    def lost(self, node: NodeId, phase: str, now_s: float) -> None:
        """The death of ``node`` was noticed."""
        killed_s, instant = self._killed.pop(node, (None, None))
        event = self._begin("lost", instant or phase, now_s)
        event.nodes.append(node)
        if killed_s is not None:
            event.detect_s.append(now_s - killed_s)

    def view_changed(self, view: View, cause: str, now_s: float) -> None:
        """A view without a loss is a join, or a retry."""
        if self._open is None and view.number > 1 and "joins" in cause:
            self._begin("joined", "", now_s).nodes.extend(m.node_id for m in view.members if f"{m.node_id} joins" in cause)

    def _begin(self, kind: str, phase: str, now_s: float) -> _Open:
        if self._open is not None and self._open.stall_s is not None:
            self._close()
        if self._open is None:
            self._open = _Open(now_s, self.steps, phase, kind, before_s=self._before_s)
        self._open.phase = self._open.phase or phase
        return self._open

    def decided(self, decision: Decision | None, decide_s: float) -> None:
        if self._open is not None and decision is not None:
            self._open.decision = decision
            self._open.decide_s += decide_s

    def planned(self, now_s: float) -> None:
        """A plan was written. The first step begins about now."""
        self._training_since_s = now_s
        self._is_new_plan = True

    def rolled_back(self, to_step: int) -> None:
        self.steps = to_step

    def step_done(self, step: int, attempt: int, loss: float, now_s: float) -> bool:
        """A step is committed; False if that was known already."""
        if step < self.steps:
            return False
        self.steps = step + 1
        took_s = None if self._last_end_s is None else now_s - self._last_end_s
        recovering = self._open is not None and self._open.stall_s is None
        self.last_step_s = None if recovering or self._is_new_plan else took_s
        self._is_new_plan = False
        if took_s is not None and self._open is not None:
            self._measure(self._open, took_s)
        elif took_s is not None:
            self._recent.append(took_s)
        # Steps right after an event may be none yet when the next one comes: then those before it are the measure.
        self._before_s = self.median_step_s() or self._before_s
        self._last_end_s = now_s
        began_s = self._training_since_s if took_s is None else now_s - took_s
        self._record(StepSeen(time_s=now_s, step=step, attempt=attempt, loss=loss, step_s=now_s - began_s))
        return True

    def _measure(self, event: _Open, took_s: float) -> None:
        if event.stall_s is None:
            event.stall_s = max(0.0, took_s - event.before_s)
            self._recent.clear()
            return
        event.after_s.append(took_s)
        self._recent.append(took_s)
        if len(event.after_s) >= STEPS_AFTER:
            self._close()

    def close(self, now_s: float) -> None:
        """The run is over: what is known of an open event is written."""
        self._close()

    def _close(self) -> None:
        event, self._open = self._open, None
        if event is None or event.decision is None:
            return
        decision = event.decision
        chosen = decision.candidate
        count = len(decision.candidates)
        self._record(EventSeen(
            time_s=event.time_s, step=event.step, phase=event.phase, node=",".join(event.nodes), policy=chosen.policy,
            decision=f"{chosen.policy} chosen: {count} candidate{'s' if count != 1 else ''}",
            detect_s=max(event.detect_s) if event.detect_s else None, decide_s=event.decide_s,
            stall_s=event.stall_s, step_s_before=event.before_s,
            step_s_after=median(event.after_s) if event.after_s else 0.0, step_s_predicted=chosen.step_s, kind=event.kind,
        ))
