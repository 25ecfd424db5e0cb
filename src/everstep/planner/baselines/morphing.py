"""Published systems that choose a new grid at every change, on plans: Varuna and Parcae."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.decision import Candidate
from everstep.plan import Order
from everstep.planner.baselines.grids import grids
from everstep.planner.baselines.rerouting import called
from everstep.planner.policies.foresight import choose_with_foresight
from everstep.planner.policies.pricing import candidate_of, layout_words, no_answer
from everstep.planner.policies.routes import keep, shrink, spare
from everstep.planner.policies.situation import Situation, is_broken


def varuna(situation: Situation) -> list[Candidate]:
    """The fastest grid whose depth divides the layers, fused 1F1B, and everything restarted.

    After a loss from the newest checkpoint. Where nobody was lost it writes one first, so nothing is trained again: that
    costs no less than moving the state, which is what is proposed.
    """
    if not is_broken(situation) and not situation.joined:
        return called("varuna", keep(situation))
    found = grids(situation, Order(), dividing=True)
    if not found:
        return [no_answer("varuna", "no grid of these nodes fits")]
    morphed = candidate_of(
        situation, "varuna", found[0], "restore" if is_broken(situation) else "blocking", layout_words(found[0].plan),
    )
    return [morphed] if is_broken(situation) else [*called("varuna", keep(situation)), morphed]


def parcae(situation: Situation) -> list[Candidate]:
    """Broken pipelines dropped, or a grid of any depth: the same one is their migration within or between stages."""
    now = shrink(situation) if is_broken(situation) else keep(situation)
    morphed = [
        candidate_of(situation, "parcae", answer, "blocking", layout_words(answer.plan))
        for answer in grids(situation, situation.order)
    ]
    return [*called("parcae", now), *morphed]


def by_liveput(situation: Situation, candidates: Sequence[Candidate]) -> int:
    """Throughput until the next preemption and after it, on average over who is hit."""
    return choose_with_foresight(situation, candidates, (_spare_or_whole, shrink), situation.gap_s)


def _spare_or_whole(situation: Situation) -> list[Candidate]:
    return spare(situation) if is_broken(situation) else keep(situation)
