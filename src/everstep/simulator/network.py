"""A pretend network. Links keep the order of their messages; nothing is said about the order between links.

Of the messages that a dead node has in flight, a random prefix of each link arrives. A link that is cut loses what is in
flight on it, both ways, and works again at once, as a connection does that is reset and made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from everstep.quantities import NodeId
from everstep.simulator.kernel import Kernel

LEADER = NodeId("leader")
"""The agent's name on the network."""


@dataclass(slots=True)
class _Flight:
    message: Any
    lost: bool = False


class Network:
    """Delivers messages late, in order on each link, through ``deliver(source, target, message)``."""

    def __init__(self, kernel: Kernel, deliver: Callable[[NodeId, NodeId, Any], None]) -> None:
        self._kernel = kernel
        self._deliver = deliver
        self._flights: dict[tuple[NodeId, NodeId], list[_Flight]] = {}
        self._last_arrival_s: dict[tuple[NodeId, NodeId], float] = {}
        self.slow: dict[tuple[NodeId, NodeId], float] = {}
        """Link → what its delays are multiplied by. A link to everybody: ``(source, source)``."""

    def send(self, source: NodeId, target: NodeId, message: Any) -> None:
        """Put ``message`` on its way."""
        link = (source, target)
        factor = self.slow.get(link, 1.0) * self.slow.get((target, target), 1.0)
        arrival_s = max(
            self._kernel.now_s + self._kernel.between(0.0002, 0.002) * factor, self._last_arrival_s.get(link, 0.0),
        )
        self._last_arrival_s[link] = arrival_s
        flight = _Flight(message)
        self._flights.setdefault(link, []).append(flight)
        self._kernel.after(arrival_s - self._kernel.now_s, lambda: self._arrive(link, flight))

    def died(self, node: NodeId) -> None:
        """``node`` sends nothing more, and of what it has in flight only a prefix of each link arrives."""
        for (source, _), flights in self._flights.items():
            if source == node:
                for flight in flights[self._kernel.random.randint(0, len(flights)):]:
                    flight.lost = True

    def cut(self, a: NodeId, b: NodeId) -> None:
        """What is in flight between ``a`` and ``b`` is lost."""
        for link in ((a, b), (b, a)):
            for flight in self._flights.get(link, []):
                flight.lost = True

    def _arrive(self, link: tuple[NodeId, NodeId], flight: _Flight) -> None:
        self._flights[link].remove(flight)
        if not flight.lost:
            self._deliver(*link, flight.message)
