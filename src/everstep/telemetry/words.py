"""Events and summaries in words: the live display, ``status`` and the end of a run say the same."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from everstep import records
from everstep.quantities import NodeId, human_seconds
from everstep.telemetry.summary import Summary

_HAPPENED = {"lost": "killed", "joined": "joined", "silent": "fell silent", "stopped": "stopped"}


def event(seen: records.EventSeen, places: Mapping[NodeId, int], num_candidates: int | None) -> str:
    """``worker 5 killed in step 41 (backward); reroute chosen: 6 candidates; stall 0.21 s``.

    ``places`` is where each node started; a node that is not in it keeps its own name.
    """
    parts = [f"{_who(seen.node, places)} {_HAPPENED.get(seen.kind, seen.kind)} in step {seen.step} ({seen.phase})"]
    if seen.policy:
        candidates = "" if num_candidates is None else f": {counted(num_candidates, 'candidate')}"
        parts.append(f"{seen.policy} chosen{candidates}")
    if seen.stall_s is not None:
        parts.append(f"stall {human_seconds(seen.stall_s)}")
    return "; ".join(parts)


def plan_by(policy: str) -> str:
    """``plan by reroute``; what a run begins with is the first plan."""
    return "first plan" if policy == "start" else f"plan by {policy}"


def rollback(record: records.RolledBack) -> str:
    """``state was lost; back from step 57 to step 50``."""
    return f"state was lost; back from step {record.from_step} to step {record.to_step}"


def summary(value: Summary, wall_s: float, directory: Path) -> str:
    """What a person reads when a run has ended. ``wall_s`` is how long it took."""
    ran = f"{value.outcome.capitalize()}: {counted(value.steps, 'step')} in {human_seconds(wall_s)}"
    lines = [f"{ran}, loss {value.loss[0]:.4f} → {value.loss[-1]:.4f}" if value.loss else ran]
    lost = [seen for seen in value.events if seen.kind in ("lost", "silent")]
    if lost:
        workers = sum(len(seen.node.split(",")) for seen in lost)
        noticed = [seen.detect_s for seen in lost if seen.detect_s is not None]
        within = f", noticed within {human_seconds(statistics.median(noticed))}" if noticed else ""
        stalls_s = [seen.stall_s for seen in lost if seen.stall_s is not None]
        stall = f"median stall {human_seconds(statistics.median(stalls_s))}" if stalls_s else "no step followed"
        lines.append(f"Survived {counted(len(lost), 'failure')} of {counted(workers, 'worker')}: {stall}{within}")
    lines += [f"Went back from step {back.from_step} to {back.to_step}" for back in value.rolled_back]
    lines.append(f"{value.samples_lost} samples lost, {value.samples_repeated} repeated, {value.samples_seen:,} counted")
    if value.steps:
        lines.append(f"Goodput {value.goodput:,.0f} samples/s; a step took {human_seconds(value.step_s_p50)} (median)")
    lines.append(f"All about it is in {directory}: everstep explain, everstep audit")
    return "\n".join(lines)


def counted(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _who(nodes: str, places: Mapping[NodeId, int]) -> str:
    names = [NodeId(name.strip()) for name in nodes.split(",")]
    workers = [str(places[name]) for name in names if name in places]
    if len(workers) != len(names):
        return " and ".join(names)
    return f"worker{'s' if len(workers) > 1 else ''} {' and '.join(workers)}"
