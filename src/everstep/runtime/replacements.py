"""Fresh workers on their way into the places of lost ones, and how long such a way takes."""

from __future__ import annotations

from everstep.quantities import NodeId

WEIGHT = 0.3
"""Of one more replacement in what is usual."""

OVERDUE = 2.0
"""After so many times what is usual a worker is not counted on any more."""


class Replacements:
    """Fed by the agent. Nothing is expected before one replacement has been measured."""

    def __init__(self) -> None:
        self.usual_s: float | None = None
        """From a death to the replacement being ready: a moving average."""
        self._began_s: dict[NodeId, float] = {}

    def began(self, node: NodeId, now_s: float) -> None:
        """``node`` is started for one that has just died."""
        self._began_s[node] = now_s

    def ready(self, node: NodeId, now_s: float) -> None:
        """``node`` can be let in. Workers that replace nobody say nothing."""
        if node in self._began_s:
            took_s = now_s - self._began_s.pop(node)
            self.usual_s = took_s if self.usual_s is None else self.usual_s + WEIGHT * (took_s - self.usual_s)

    def gone(self, node: NodeId) -> None:
        """``node`` died on its way, or later."""
        self._began_s.pop(node, None)

    def expected(self, now_s: float) -> dict[NodeId, float]:
        """Who is on the way, and in how many seconds each should be there."""
        if self.usual_s is None:
            return {}
        found = {node: began_s + self.usual_s - now_s for node, began_s in self._began_s.items()}
        overdue_s = (OVERDUE - 1) * self.usual_s
        return {node: max(0.0, left_s) for node, left_s in found.items() if left_s >= -overdue_s}
