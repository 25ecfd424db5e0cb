"""A plan as a candidate: everything that it is predicted to cost, or why it cannot be had."""

from __future__ import annotations

from collections import Counter

from everstep.decision import Candidate, Way
from everstep.errors import InfeasibleError
from everstep.plan import Plan
from everstep.planner import objective
from everstep.planner.calibrate import residual_of
from everstep.planner.cost import load_seconds, stall_seconds
from everstep.planner.memory import overfull
from everstep.planner.moves import moves_for
from everstep.planner.parts import grouped, holders_by_unit, kinds_of
from everstep.planner.policies.situation import Situation
from everstep.planner.search import Priced, priced
from everstep.transfer import Move
from everstep.workload import Workload


def candidate_of(situation: Situation, policy: str, plan: Plan | Priced, way: Way) -> Candidate:
    """``plan`` with everything that it is predicted to cost, or why it cannot be had."""
    answer = plan if isinstance(plan, Priced) else priced(plan, situation.workload, situation.cluster)
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
            moves, _ = moves_for(answer.plan, situation.holds, situation.workload)
        except InfeasibleError as error:
            return no_answer(policy, str(error))
        stall_s = stall_seconds(moves, situation.cluster, switch_s=situation.switch_s)
    return Candidate(
        policy=policy, plan=answer.plan, way="now" if way == "blocking" and not moves else way, step_s=step_s,
        stall_s=stall_s, moved_bytes=sum(move.num_bytes for move in moves), peak_bytes=answer.peak_bytes,
        restore_step=restore_step, reason=layout_words(answer.plan) if policy in ("repartition", "grow", "start") else "",
        value=objective.value(
            batch=situation.workload.batch, step_s=step_s, stall_s=stall_s, gap_s=situation.gap_s,
            at_risk=at_risk(answer.plan, situation.workload), redo_steps=situation.redo_steps,
        ),
    )


def at_risk(plan: Plan, workload: Workload) -> float:
    """The share of nodes that hold the only copy of some unit."""
    kinds = kinds_of(plan)
    counts = [len(nodes) for nodes in kinds.values()]
    lone = {
        indices[0] for indices in holders_by_unit(list(kinds), workload).values()
        if sum(counts[index] for index in indices) == 1
    }
    return len(lone) / len(plan.placement)


def layout_words(plan: Plan) -> str:
    """``4+3``, or ``2×3+12×2`` where there are many: how long the pipelines are, longest first."""
    lengths = Counter(len(route) for route in grouped(plan.routes))
    words = [f"{count}×{length}" if count > 2 else "+".join([str(length)] * count) for length, count in lengths.items()]
    return "+".join(word for _, word in sorted(zip(lengths, words, strict=True), reverse=True))


def no_answer(policy: str, reason: str) -> Candidate:
    return Candidate(policy=policy, plan=None, reason=reason)
