"""Which candidate is worth most: expected useful samples until the next event, and in words why the others lost.

Let the gap G to the next event be exponential with mean g. A plan that trains ``batch / step_s`` samples a second after a
stall of ``stall_s`` gets, until then,

    value = batch / step_s · E[(G - stall_s)+] = batch / step_s · ∫_{stall_s}^∞ exp(-u / g) du
          = batch / step_s · g · exp(-stall_s / g)

From this goes what the event itself would cost: if a share ``at_risk`` of the nodes holds the only copy of something, the
next loss goes back to a checkpoint with that probability, and ``redo_steps`` are trained again. A restore pays for its own
lost work through its stall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from everstep.decision import Candidate
from everstep.errors import InfeasibleError
from everstep.quantities import human_seconds

NOISE = 1e-6


def expected_gap_s(prior_gap_s: float, events: int, elapsed_s: float) -> float:
    """Expected seconds to the next event after ``events`` in ``elapsed_s``.

    The rate has a gamma prior worth one event in ``prior_gap_s``; counts are Poisson. So the mean rate afterwards is
    (1 + events) / (prior_gap_s + elapsed_s), and this is its inverse.
    """
    return (prior_gap_s + elapsed_s) / (1 + events)


def value(
    *, batch: float, step_s: float, stall_s: float, gap_s: float, at_risk: float = 0.0, redo_steps: float = 0.0,
) -> float:
    """Expected useful samples until the next event, that event's own cost taken off."""
    return batch / step_s * gap_s * math.exp(-stall_s / gap_s) - at_risk * redo_steps * batch


def choose(candidates: Sequence[Candidate]) -> int:
    """Index of the best: most samples, then the smaller stall, then the earlier.

    Values within a millionth of each other are equal: which of them is larger is rounding.

    Raises:
        InfeasibleError: there is no candidate with a plan; ``rejected`` has each one's reason.
    """
    feasible = [index for index, candidate in enumerate(candidates) if candidate.feasible]
    if not feasible:
        rejected = {candidate.policy: candidate.reason for candidate in candidates}
        raise InfeasibleError("; ".join(f"{policy}: {why}" for policy, why in rejected.items()), rejected)
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
    shares = [f"{loser.reason}: " if loser.reason else ""]
    fewer = (best.value - loser.value) / abs(best.value) if best.value else 0.0
    shares.append(f"{_percent(fewer)} fewer samples" if fewer >= 0.001 else "no more samples")
    causes = []
    slower = loser.step_s / best.step_s - 1
    if slower >= 0.001:
        causes.append(f"steps {_percent(slower)} slower")
    if loser.stall_s - best.stall_s >= 0.001:
        causes.append(f"stall {human_seconds(loser.stall_s - best.stall_s)} longer")
    if not causes and fewer > NOISE:
        causes.append("more would be lost with the next node")
    return "".join(shares) + (f": {', '.join(causes)}" if causes else "")


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share < 0.1 else f"{share * 100:.0f} %"
