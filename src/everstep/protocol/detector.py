"""Who has been silent for too long. A plain time-out: one host, so jitter is that of the scheduler alone.

No clock is read here: time comes in as an argument, and ``next_deadline_s`` says when to ask again.
"""

from __future__ import annotations

from everstep.config import DetectorConfig
from everstep.quantities import NodeId


class FailureDetector:
    """Suspects whoever was not heard for ``config.suspect_after_s`` seconds."""

    def __init__(self, config: DetectorConfig) -> None:
        self._suspect_after_s = config.suspect_after_s
        self._last_heard_s: dict[NodeId, float] = {}

    def heard(self, node: NodeId, now_s: float) -> None:
        """``node`` spoke. It is watched from its first word on."""
        self._last_heard_s[node] = max(now_s, self._last_heard_s.get(node, now_s))

    def forget(self, node: NodeId) -> None:
        """``node`` is not watched any more."""
        self._last_heard_s.pop(node, None)

    def suspects(self, now_s: float) -> frozenset[NodeId]:
        """Everybody whose silence is too long. They stay so until they speak or are forgotten."""
        return frozenset(node for node in self._last_heard_s if self._deadline_s(node) <= now_s)

    def next_deadline_s(self) -> float | None:
        """When the first silence becomes too long; None while nobody is watched."""
        return min(map(self._deadline_s, self._last_heard_s), default=None)

    def _deadline_s(self, node: NodeId) -> float:
        return self._last_heard_s[node] + self._suspect_after_s
