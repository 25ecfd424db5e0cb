"""Pretend time: a queue of things to do, and the one source of chance. The same seed tells the same story."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable


class Died(Exception):
    """Raised inside a pretend process that was ended at this very point; nothing after it happens."""


class Kernel:
    """Runs what was scheduled, in the order of pretend time; what was scheduled first goes first at the same moment."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.log: list[str] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do ``action`` once ``delay_s`` seconds have passed."""
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._number), action))

    def between(self, low_s: float, high_s: float) -> float:
        """A random duration in seconds."""
        return self.random.uniform(low_s, high_s)

    def say(self, text: str) -> None:
        """Write a line of the story."""
        self.log.append(f"{self.now_s:.6f} {text}")

    def run(self, until_s: float, done: Callable[[], bool] | None = None) -> None:
        """Go on until pretend time ``until_s``, or until there is nothing to do or ``done`` says so."""
        while self._queue and self._queue[0][0] <= until_s and not (done and done()):
            self.now_s, _, action = heapq.heappop(self._queue)
            try:
                action()
            except Died:
                continue
