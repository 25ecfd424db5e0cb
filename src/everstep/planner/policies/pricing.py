"""A plan as a candidate: everything that it is predicted to cost, or why it cannot be had."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from everstep.decision import Candidate, Way
from everstep.errors import InfeasibleError
from everstep.plan import Plan
from everstep.planner import objective
from everstep.planner.layouts.search import Priced, priced
from everstep.planner.policies.situation import Situation
from everstep.planner.remembered import Same, remembered
from everstep.planner.step.calibrate import residual_of
from everstep.planner.step.cost import load_seconds, stall_seconds
from everstep.planner.step.memory import overfull
from everstep.planner.step.moves import moves_for
from everstep.planner.step.parts import Held, grouped, holder_counts, holders_by_unit
from everstep.quantities import NodeId, human_seconds
from everstep.transfer import Move
from everstep.workload import Workload

COPY_SLOWS = 1.25
"""How much longer state takes that is copied while training goes on: the links are shared with its messages and sums."""

CANNOT = {
    "start": "a run starts only once",
    "now": "this run cannot change routes",
    "blocking": "this run cannot move state",
    "behind": "this run cannot copy state while it trains",
    "wait": "this run cannot wait for anybody",
    "restore": "this run has nothing to restore from",
}
"""What is said where the way to a plan is not open to whoever asks."""


def candidate_of(situation: Situation, policy: str, plan: Plan | Priced, way: Way, reason: str = "") -> Candidate:
    """``plan`` with everything that it is predicted to cost, or why it cannot be had. ``reason``: what to call it."""
    answer = plan if isinstance(plan, Priced) else priced_in(situation, plan)
    too_much = overfull(answer.needed_bytes, situation.cluster, situation.config.worker_memory_bytes)
    if too_much:
        return no_answer(policy, too_much)
    step_s = answer.step_s * residual_of(answer.plan, situation.residuals)
    moves: tuple[Move, ...] = ()
    restore_step = None
    if way == "restore":
        restore_step = situation.checkpoint.step if situation.checkpoint else 0
        stall_s = situation.switch_s + load_seconds(answer.plan, situation.workload)
        stall_s += max(0, situation.step - restore_step) * step_s
    else:
        try:
            moves, _ = moves_for(answer.plan, situation.holds, situation.workload, cluster=situation.cluster)
        except InfeasibleError as error:
            return no_answer(policy, str(error))
        stall_s = situation.switch_s + situation.move_ratio * stall_seconds(moves, situation.cluster, switch_s=0.0)
        way = "now" if way == "blocking" and not moves else way
    if way not in situation.ways:
        return no_answer(policy, CANNOT[way])
    found = Candidate(
        policy=policy, plan=answer.plan, way=way, step_s=step_s, stall_s=stall_s,
        moved_bytes=sum(move.num_bytes for move in moves), peak_bytes=answer.peak_bytes, restore_step=restore_step,
        reason=reason,
    )
    return valued(situation, found, sources={move.source for move in moves})


def priced_in(situation: Situation, plan: Plan) -> Priced:
    """``plan`` with its step time and its memory, looked at once however often it is asked for."""
    # what is kept holds on to the plan that was asked about, which may not be the one that was priced: no other takes its id
    limit = situation.config.worker_memory_bytes
    answer = situation.remembered(
        ("priced", id(plan)), lambda: (plan, priced(plan, situation.workload, situation.cluster, limit)),
    )
    return answer[1]


def valued(
    situation: Situation, candidate: Candidate, *, risk: float | None = None, later_risk: float | None = None,
    sources: Iterable[NodeId] = (),
) -> Candidate:
    """``candidate`` with the samples that it is expected to train until the next event.

    ``risk``, ``later_risk``: the share of nodes that hold an only copy, where it is known. ``sources``: who gives state away
    at the start. A node that is known to end does so for everybody; only a plan that needs it then ends with it.
    """
    assert candidate.plan is not None, "without a plan nothing is trained"
    workload = situation.workload
    risk = (at_risk(candidate.plan, workload) if risk is None else risk) + risk_after(situation, candidate.plan)
    until_s = _until_s(situation, candidate.plan)
    if any(situation.ends.get(node, math.inf) < candidate.stall_s for node in sources):
        until_s = 0.0
    if candidate.later is None:
        samples = objective.value(
            batch=workload.batch, step_s=candidate.step_s, stall_s=candidate.stall_s, gap=situation.gap, until_s=until_s,
            at_risk=risk, redo_steps=situation.redo_steps,
        )
    else:
        samples = objective.two_phase_value(
            batch=workload.batch, step_s=candidate.step_s, stall_s=candidate.stall_s, copy_s=candidate.copy_s,
            later_step_s=candidate.later_step_s, later_stall_s=candidate.later_stall_s, gap=situation.gap, until_s=until_s,
            later_until_s=_until_s(situation, candidate.later), at_risk=risk,
            later_at_risk=(at_risk(candidate.later, workload) if later_risk is None else later_risk)
            + risk_after(situation, candidate.later),
            redo_steps=situation.redo_steps,
        )
    return replace(candidate, value=samples)


def _until_s(situation: Situation, plan: Plan) -> float:
    """When the first node that computes in ``plan`` is known to end."""
    if not situation.ends:
        return math.inf
    needed = {hop.node for route in grouped(plan.routes) for hop in route}
    return min((end_s for node, end_s in situation.ends.items() if node in needed), default=math.inf)


def copied_behind(situation: Situation, policy: str, now: Candidate, later: Candidate) -> Candidate:
    """``now`` at once, and ``later`` as soon as its state has been copied while ``now`` trains.

    ``now`` needs no state moved, ``later`` is reached by moving some. The state of both is held for a while.
    """
    return if_both_fit(situation, in_two_phases(situation, policy, now, later))


def in_two_phases(situation: Situation, policy: str, now: Candidate, later: Candidate) -> Candidate:
    """The same, not looking whether memory is enough for both."""
    assert now.plan is not None and later.plan is not None, "both have a plan"
    copied_s = now.stall_s + COPY_SLOWS * (later.stall_s - situation.switch_s)
    first = "as it is" if _goes_on(situation, now.plan) else now.policy
    reason = f"now {first}, then {' '.join(filter(None, [later.policy, later.reason]))} after {human_seconds(copied_s)}"
    return valued(situation, replace(
        now, policy=policy, way="behind", later=later.plan, later_step_s=later.step_s, moved_bytes=later.moved_bytes,
        copy_s=copied_s - now.stall_s, later_stall_s=situation.switch_s, peak_bytes=later.peak_bytes, reason=reason,
    ))


def _goes_on(situation: Situation, plan: Plan) -> bool:
    """Whether every micro-batch takes the way it took."""
    same = situation.remembered(("goes on", id(plan)), lambda: (plan, plan.routes == situation.plan.routes))
    return same[1]


def if_both_fit(situation: Situation, pair: Candidate) -> Candidate:
    """``pair`` with the memory that it takes, or why it cannot be had."""
    assert pair.plan is not None and pair.later is not None, "two phases have two plans"
    too_early = _gone_before(situation, pair.later, pair.stall_s + pair.copy_s)
    if too_early:
        return no_answer(pair.policy, f"{pair.reason}: {too_early} would be gone before what it holds is copied")
    needed = dict(priced_in(situation, pair.plan).needed_bytes)
    held = Held.of(situation.workload)
    sizes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for node, layers in pair.later.placement.items():
        both = (pair.plan.placement[node], layers)
        if both not in sizes:
            new = held.units(layers) - held.units(both[0])
            sizes[both] = sum(situation.workload.units[name].held_bytes for name in new)
        needed[node] = needed.get(node, 0) + sizes[both]
    too_much = overfull(needed, situation.cluster, None)  # the limit set for all is on plans; this is for a while
    if too_much:
        return no_answer(pair.policy, f"{pair.reason}: while copying, {too_much}")
    return replace(pair, peak_bytes=max(pair.peak_bytes, *needed.values()))


def _gone_before(situation: Situation, plan: Plan, copied_s: float) -> NodeId | None:
    """Who gives state away for ``plan`` and is known to end before ``copied_s``."""
    if not any(end_s < copied_s for end_s in situation.ends.values()):
        return None
    moves, _ = moves_for(plan, situation.holds, situation.workload, cluster=situation.cluster)
    return next((move.source for move in moves if situation.ends.get(move.source, math.inf) < copied_s), None)


@remembered(64)
def at_risk(plan: Plan, workload: Workload) -> float:
    """The share of nodes that hold the only copy of some unit."""
    counts = holder_counts(plan.placement)
    return _lone(Same(workload), counts) / len(plan.placement)


@lru_cache(maxsize=1 << 10)
def _lone(workload: Same[Workload], counts: tuple[tuple[tuple[int, ...], int], ...]) -> int:
    """How many nodes hold the only copy of some unit, where so many hold which layers."""
    by_unit = holders_by_unit([(layers, 1.0) for layers, _ in counts], workload.value)
    return len({indices[0] for indices in by_unit.values() if sum(counts[index][1] for index in indices) == 1})


def risk_after(situation: Situation, plan: Plan) -> float:
    """The chance that the next two losses take both holders of some unit, the second before it was copied anew."""
    counts = holder_counts(plan.placement)
    pairs = _only_pairs(Same(situation.workload), counts)
    if not pairs:
        return 0.0
    held, num_nodes = Held.of(situation.workload), len(plan.placement)
    copied_s = situation.switch_s + situation.cluster.link.seconds(max(held.held_bytes(layers) for layers, _ in counts))
    return pairs / (num_nodes * (num_nodes - 1) / 2) * (1 - situation.gap.survival(copied_s))


@lru_cache(maxsize=1 << 10)
def _only_pairs(workload: Same[Workload], counts: tuple[tuple[tuple[int, ...], int], ...]) -> int:
    """How many pairs of nodes are the two holders of some unit, where so many hold which layers."""
    by_unit = holders_by_unit([(layers, 1.0) for layers, _ in counts], workload.value)
    return len({indices for indices in by_unit.values() if sum(counts[index][1] for index in indices) == 2})


def layout_words(plan: Plan) -> str:
    """``4+3``, or ``2×3+12×2`` where there are many: how long the pipelines are, longest first."""
    lengths = Counter(len(route) for route in grouped(plan.routes))
    words = [f"{count}×{length}" if count > 2 else "+".join([str(length)] * count) for length, count in lengths.items()]
    return "+".join(word for _, word in sorted(zip(lengths, words, strict=True), reverse=True))


def no_answer(policy: str, reason: str) -> Candidate:
    return Candidate(policy=policy, plan=None, reason=reason)
