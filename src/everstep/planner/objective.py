"""Which candidate is worth most: expected useful samples until the next event, and in words why the others lost.

Let G be the gap to the next event, and S(u) the chance that it is longer than u. The time between a and b that no event
spoils is, on average,

    E[min(G, b) - min(G, a)] = ∫_a^b S(u) du          exponential with mean g:  g · (exp(-a / g) - exp(-b / g))

A plan that trains ``batch / step_s`` samples a second after a stall of ``stall_s`` gets, until the event,

    value = batch / step_s · ∫_{stall_s}^until S(u) du

where ``until_s`` is when a node that it needs is known to go; mostly never. Two phases, the second one's state copied
behind the first:

    value = batch / step_s · ∫_{stall_s}^copied S(u) du + batch / later_step_s · ∫_{copied + later_stall_s}^later_until S(u) du
    copied = stall_s + copy_s

From this goes what the event itself would cost: if a share ``at_risk`` of the nodes holds the only copy of something, the
next loss goes back to a checkpoint with that probability, and ``redo_steps`` are trained again. A restore pays for its own
lost work through its stall.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from everstep.decision import Candidate
from everstep.errors import InfeasibleError
from everstep.quantities import human_seconds

NOISE = 1e-6


class Gap(Protocol):
    """What is known of the time to the next event."""

    def survival(self, after_s: float) -> float:
        """The chance that nothing has happened ``after_s`` from now."""
        ...

    def undisturbed_s(self, start_s: float, end_s: float) -> float:
        """Expected seconds between ``start_s`` and ``end_s``, which may be infinite, before the event."""
        ...


@dataclass(frozen=True, slots=True)
class Exponential:
    """An event is as likely at any moment, whatever was before."""

    mean_s: float

    def survival(self, after_s: float) -> float:
        return math.exp(-after_s / self.mean_s)

    def undisturbed_s(self, start_s: float, end_s: float) -> float:
        return max(0.0, self.mean_s * (math.exp(-start_s / self.mean_s) - math.exp(-end_s / self.mean_s)))


class Curve:
    """Any survival function, never rising, that ends within ``longest_s``; integrated by trapezoids between its ``points``."""

    def __init__(self, survival: Callable[[float], float], longest_s: float, *, points: int = 4000) -> None:
        self._survival = survival
        self._longest_s = longest_s
        self._times = np.linspace(0.0, longest_s, points)
        chances = np.array([survival(float(time_s)) for time_s in self._times])
        pieces = (chances[1:] + chances[:-1]) / 2 * np.diff(self._times)
        self._until: NDArray[np.float64] = np.concatenate([[0.0], np.cumsum(pieces)])

    def survival(self, after_s: float) -> float:
        return self._survival(after_s) if after_s < self._longest_s else 0.0

    def undisturbed_s(self, start_s: float, end_s: float) -> float:
        start, end = np.interp([min(start_s, self._longest_s), min(end_s, self._longest_s)], self._times, self._until)
        return max(0.0, float(end - start))


def expected_gap_s(prior_gap_s: float, events: int, elapsed_s: float) -> float:
    """Expected seconds to the next event after ``events`` in ``elapsed_s``.

    The rate has a gamma prior worth one event in ``prior_gap_s``; counts are Poisson. So the mean rate afterwards is
    (1 + events) / (prior_gap_s + elapsed_s), and this is its inverse.
    """
    return (prior_gap_s + elapsed_s) / (1 + events)


def value(
    *, batch: float, step_s: float, stall_s: float, gap: Gap, until_s: float = math.inf, at_risk: float = 0.0,
    redo_steps: float = 0.0,
) -> float:
    """Expected useful samples until the next event, that event's own cost taken off."""
    return batch / step_s * gap.undisturbed_s(stall_s, max(stall_s, until_s)) - at_risk * redo_steps * batch


def two_phase_value(
    *, batch: float, step_s: float, stall_s: float, copy_s: float, later_step_s: float, later_stall_s: float, gap: Gap,
    until_s: float = math.inf, later_until_s: float = math.inf, at_risk: float = 0.0, later_at_risk: float = 0.0,
    redo_steps: float = 0.0,
) -> float:
    """The same for one plan while the state of another is copied, and that one from then on.

    A plan that ends before the copy is made, at ``until_s``, never leads to the other.
    """
    copied_s = stall_s + copy_s
    switched_s = copied_s + later_stall_s
    samples = batch / step_s * gap.undisturbed_s(stall_s, max(stall_s, min(copied_s, until_s)))
    if copied_s <= until_s:
        samples += batch / later_step_s * gap.undisturbed_s(switched_s, max(switched_s, later_until_s))
    too_early = 1 - gap.survival(switched_s)
    return samples - (too_early * at_risk + (1 - too_early) * later_at_risk) * redo_steps * batch


def choose(candidates: Sequence[Candidate]) -> int:
    """Index of the best: most samples, then the smaller stall, then the earlier.

    Values within a millionth of each other are equal: which of them is larger is rounding.

    Raises:
        InfeasibleError: there is no candidate with a plan; ``rejected`` has each one's reason.
    """
    feasible = [index for index, candidate in enumerate(candidates) if candidate.feasible]
    if not feasible:
        rejected = {candidate.policy: candidate.reason for candidate in candidates}
        by_reason: dict[str, list[str]] = {}
        for policy, why in rejected.items():
            by_reason.setdefault(why, []).append(policy)
        raise InfeasibleError("; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason.items()), rejected)
    most = max(candidates[index].value for index in feasible)
    equal = [index for index in feasible if most - candidates[index].value <= NOISE * abs(most)]
    return min(equal, key=lambda index: (candidates[index].stall_s, index))


def explained(candidates: Sequence[Candidate], chosen: int) -> tuple[Candidate, ...]:
    """``candidates`` with the reason why each feasible loser lost to ``chosen``; other reasons stay."""
    best = candidates[chosen]
    return tuple(
        candidate if index == chosen or not candidate.feasible else replace(candidate, reason=_why(candidate, best))
        for index, candidate in enumerate(candidates)
    )


def _why(loser: Candidate, best: Candidate) -> str:
    words = [f"{loser.reason}: " if loser.reason else ""]
    fewer = (best.value - loser.value) / abs(best.value) if best.value else 0.0
    if fewer <= -0.001:
        why_not = "waiting was asked for" if best.way == "wait" else "less would be left after the next loss"
        return "".join([*words, f"{_percent(-fewer)} more samples, but {why_not}"])
    words.append(f"{_percent(fewer)} fewer samples" if fewer >= 0.001 else "no more samples")
    causes = []
    slower = loser.settled_step_s / best.settled_step_s - 1
    if slower >= 0.001:
        causes.append(f"steps {_percent(slower)} slower")
    if loser.stall_s - best.stall_s >= 0.001:
        causes.append(f"stall {human_seconds(loser.stall_s - best.stall_s)} longer")
    if not causes and loser.later is not None and fewer > NOISE:
        causes.append(f"steps of {human_seconds(loser.step_s)} for {human_seconds(loser.copy_s)} first")
    if not causes and fewer > NOISE:
        causes.append("more would be lost with the next node")
    return "".join(words) + (f": {', '.join(causes)}" if causes else "")


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share < 0.1 else f"{share * 100:.0f} %"
