"""Every recovery policy proposes plans; it chooses nothing. What each would cost is written into its candidates.

====================  =================================================================================================
``reroute``           routes only: living holders of the same layers take over the hops of who is gone
``spare``             an idle node takes the place of one that is gone; if there are too few, the rest is rerouted
``shrink``            pipelines that met who is gone are dropped, their micro-batches spread over the whole ones
``repartition``       new pipelines over all survivors, state moved first
``restore``           new pipelines over all survivors, all state from the newest checkpoint, or from the initial weights
====================  =================================================================================================

A node that joins stays idle except under ``repartition`` and ``spare``. Every living node is in every plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from everstep.cluster import Cluster
from everstep.config import PlannerConfig
from everstep.decision import Candidate, Way
from everstep.errors import InfeasibleError
from everstep.plan import Hop, Order, Plan, Route
from everstep.planner import objective
from everstep.planner.cost import SWITCH_S, is_shared, stall_seconds
from everstep.planner.memory import overfull
from everstep.planner.moves import moves_for
from everstep.planner.reroute import Router
from everstep.planner.search import Priced, assign, best_priced, priced, why_nothing_fits
from everstep.quantities import NodeId, UnitName, node_number
from everstep.workload import Workload

EXTRA_SLOTS = 2
"""Activation slots beyond 1F1B that rerouting tries: two recover about half of what it costs without."""

REPARTITIONS = 3
"""So many new layouts are proposed, the fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """The newest checkpoint that is whole: the number of steps in it, and where it lies."""

    step: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known when a plan has to be found."""

    cluster: Cluster
    """The living nodes, newcomers included, and no others."""
    workload: Workload
    plan: Plan
    """The plan before, with those who are gone."""
    holds: Mapping[NodeId, frozenset[UnitName]]
    """The units each living node holds at ``step``."""
    lost: tuple[NodeId, ...] = ()
    joined: tuple[NodeId, ...] = ()
    step: int = 0
    """The step to run next."""
    checkpoint: CheckpointInfo | None = None
    gap_s: float = 600.0
    config: PlannerConfig = field(default_factory=PlannerConfig)
    redo_steps: float = 0.0
    """Steps that would be trained again if state were lost at the next event."""
    switch_s: float = SWITCH_S

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(sorted(self.cluster.nodes, key=node_number))

    @property
    def order(self) -> Order:
        """For new layouts: split as before, nothing borrowed."""
        return Order(split=self.plan.order.split)


def available(situation: Situation) -> dict[NodeId, frozenset[int]]:
    """The layers each living node can compute at once: placed on it, and all of their units held.

    Layers that nobody has in this sense, as after a change of placement that was broken off, are looked for by units
    alone.
    """
    usable = {
        node: frozenset(
            layer for layer in range(situation.plan.num_layers)
            if situation.workload.units_of({layer}) <= situation.holds.get(node, frozenset())
        )
        for node in situation.nodes
    }
    placed = {node: usable[node].intersection(situation.plan.placement.get(node, ())) for node in situation.nodes}
    covered = frozenset[int]().union(*placed.values())
    return {node: placed[node] | (usable[node] - covered) for node in situation.nodes}


def is_broken(situation: Situation) -> bool:
    """Whether some micro-batch's route meets a node that is gone or has lost its state."""
    can = available(situation)
    return any(not _passes(route, can) for route in situation.plan.routes)


def _passes(route: Route, can: Mapping[NodeId, frozenset[int]]) -> bool:
    return all(can.get(hop.node, frozenset()).issuperset(hop.layers) for hop in route)


def reroute(situation: Situation) -> list[Candidate]:
    """Only routes change. On devices of their own, nodes are also offered more activation slots."""
    plan = _rerouted(situation, situation.plan, available(situation))
    if isinstance(plan, str):
        return [_no_answer("reroute", plan)]
    plain = _candidate(situation, "reroute", plan, "now")
    if plan.routes == situation.plan.routes or is_shared(situation.cluster):
        return [plain]
    roomy = replace(plan, order=replace(plan.order, extra_slots=max(plan.order.extra_slots, EXTRA_SLOTS)))
    found = [plain, _candidate(situation, "reroute", roomy, "now")]
    return [found[objective.choose(found)]] if any(candidate.feasible for candidate in found) else [plain]


def _rerouted(situation: Situation, plan: Plan, can: Mapping[NodeId, frozenset[int]]) -> Plan | str:
    """``plan`` on the living nodes that ``can`` compute; or why there is no way."""
    missing = sorted(set(range(plan.num_layers)) - frozenset[int]().union(*can.values()))
    if missing:
        return f"{_layers(missing, situation.workload)} no living holder"
    speeds = {node: situation.cluster.nodes[node].speed for node in can}
    routes = Router(can, situation.workload, speeds).routes(plan.routes)
    if routes is None:
        return "every way over the living holders would visit a node twice"
    return replace(plan, routes=routes, placement={node: tuple(sorted(can[node])) for node in situation.nodes})


def spare(situation: Situation) -> list[Candidate]:
    """Idle nodes take the places of those who are gone, the busiest places first."""
    plan = situation.plan
    busy = {hop.node for route in plan.routes for hop in route}
    hops = [hop.node for route in plan.routes for hop in route]
    gone = [node for node in busy if node not in situation.cluster.nodes]
    empty = sorted(gone, key=lambda node: (-hops.count(node), node_number(node)))
    idle = [node for node in situation.nodes if node not in busy]
    if not empty:
        return [_no_answer("spare", "nobody's place is empty")]
    if not idle:
        return [_no_answer("spare", "no node is idle")]
    places = empty[:len(idle)]
    wanted = [situation.workload.units_of(frozenset(plan.placement[node])) for node in places]
    chosen = dict(zip(places, assign(wanted, idle, situation.workload, situation.holds), strict=True))
    can = available(situation)
    for place, node in chosen.items():
        can[node] = frozenset(plan.placement[place])
    routes = tuple(tuple(_moved(hop, chosen) for hop in route) for route in plan.routes)
    filled = _rerouted(situation, replace(plan, routes=routes), can)
    if isinstance(filled, str):
        return [_no_answer("spare", filled)]
    return [_candidate(situation, "spare", filled, "blocking")]


def _moved(hop: Hop, places: Mapping[NodeId, NodeId]) -> Hop:
    return replace(hop, node=places.get(hop.node, hop.node))


def shrink(situation: Situation) -> list[Candidate]:
    """Whole pipelines take the micro-batches of the broken ones, each next one where the busiest node has least to do."""
    can = available(situation)
    whole = [route for route in situation.plan.pipelines() if _passes(route, can)]
    if not whole:
        return [_no_answer("shrink", "no pipeline is whole")]
    work_s = {route: [_work_s(situation, hop) for hop in route] for route in whole}
    load_s = dict.fromkeys(situation.nodes, 0.0)

    def busiest_s(route: Route) -> float:
        return max(load_s[hop.node] + seconds for hop, seconds in zip(route, work_s[route], strict=True))

    def count(route: Route) -> None:
        for hop, seconds in zip(route, work_s[route], strict=True):
            load_s[hop.node] += seconds

    for route in situation.plan.routes:
        if route in work_s:
            count(route)
    routes = []
    for route in situation.plan.routes:
        taken = route if route in work_s else min(whole, key=busiest_s)
        if route not in work_s:
            count(taken)
        routes.append(taken)
    members = {hop.node for route in whole for hop in route}
    kept = members if len(whole) < len(situation.plan.pipelines()) else set(situation.nodes)
    placement = {node: tuple(sorted(can[node])) if node in kept else () for node in situation.nodes}
    return [_candidate(situation, "shrink", replace(situation.plan, routes=tuple(routes), placement=placement), "now")]


def _work_s(situation: Situation, hop: Hop) -> float:
    return sum(situation.workload.layers[layer].total_s for layer in hop.layers) / situation.cluster.nodes[hop.node].speed


def repartition(situation: Situation) -> list[Candidate]:
    """The fastest layouts over all living nodes, each node in the place that it lacks least for."""
    found = _layouts(situation, situation.holds)
    if not found:
        return [_no_answer("repartition", _why_nothing_fits(situation))]
    candidates = [_candidate(situation, "repartition", answer, "blocking") for answer in found[:REPARTITIONS]]
    return [candidate for candidate in candidates if candidate.feasible] or candidates[:1]


def restore(situation: Situation) -> list[Candidate]:
    """The fastest layout over all living nodes, and the steps since the checkpoint once more."""
    found = _layouts(situation, {})
    if not found:
        return [_no_answer("restore", _why_nothing_fits(situation))]
    return [_candidate(situation, "restore", found[0], "restore")]


def keep(situation: Situation) -> list[Candidate]:
    """Nothing changes but who is in: newcomers are spares."""
    plan = _rerouted(situation, situation.plan, available(situation))
    assert isinstance(plan, Plan), "only asked where no route is broken"
    return [_candidate(situation, "spare" if situation.joined else "reroute", plan, "now")]


POLICIES: Mapping[str, Callable[[Situation], list[Candidate]]] = {
    "reroute": reroute, "spare": spare, "shrink": shrink, "repartition": repartition, "restore": restore,
}


def propose(situation: Situation) -> list[Candidate]:
    """The candidates of the configured policy, or of all.

    Where a forced policy has no answer, ``restore`` is proposed too, and the table says so.
    """
    forced = situation.config.policy
    if not is_broken(situation):
        if forced == "repartition":
            return repartition(situation)
        return keep(situation) + (repartition(situation) if forced == "auto" else [])
    if forced == "auto":
        return [candidate for policy in POLICIES.values() for candidate in policy(situation)]
    found = POLICIES[forced](situation)
    if forced == "restore" or any(candidate.feasible for candidate in found):
        return found
    return [*found, *restore(situation)]


def _layouts(situation: Situation, holds: Mapping[NodeId, frozenset[UnitName]]) -> list[Priced]:
    return best_priced(
        situation.nodes, situation.workload, situation.cluster, situation.config, holds=holds, order=situation.order,
    )


def _why_nothing_fits(situation: Situation) -> str:
    error = why_nothing_fits(situation.nodes, situation.workload, situation.cluster, situation.config)
    return "; ".join(error.rejected.values()) or "no layout of these nodes fits"


def _candidate(situation: Situation, policy: str, plan: Plan | Priced, way: Way) -> Candidate:
    """``plan`` with everything that it is predicted to cost, or why it cannot be had."""
    answer = plan if isinstance(plan, Priced) else priced(plan, situation.workload, situation.cluster)
    too_much = overfull(answer.needed_bytes, situation.cluster, situation.config.worker_memory_bytes)
    if too_much:
        return _no_answer(policy, too_much)
    try:
        moves, loads = moves_for(answer.plan, situation.holds, situation.workload, restore=way == "restore")
    except InfeasibleError as error:
        return _no_answer(policy, str(error))
    stall_s = stall_seconds(
        moves, situation.cluster, loads=loads, workload=situation.workload, switch_s=situation.switch_s,
    )
    restore_step = None
    if way == "restore":
        restore_step = situation.checkpoint.step if situation.checkpoint else 0
        stall_s += max(0, situation.step - restore_step) * answer.step_s
    return Candidate(
        policy=policy, plan=answer.plan, way="now" if way == "blocking" and not moves else way, step_s=answer.step_s,
        stall_s=stall_s, moved_bytes=sum(move.num_bytes for move in moves), peak_bytes=answer.peak_bytes,
        restore_step=restore_step, reason=layout_words(answer.plan) if policy in ("repartition", "start") else "",
        value=objective.value(
            batch=situation.workload.batch, step_s=answer.step_s, stall_s=stall_s, gap_s=situation.gap_s,
            at_risk=at_risk(answer.plan, situation.workload), redo_steps=situation.redo_steps,
        ),
    )


def at_risk(plan: Plan, workload: Workload) -> float:
    """The share of nodes that hold the only copy of some unit."""
    holders: dict[UnitName, list[NodeId]] = {}
    for node in plan.nodes:
        for unit in workload.units_of(frozenset(plan.placement[node])):
            holders.setdefault(unit, []).append(node)
    return len({nodes[0] for nodes in holders.values() if len(nodes) == 1}) / len(plan.nodes)


def layout_words(plan: Plan) -> str:
    """``4+3``, or ``2×3+12×2`` where there are many: how long the pipelines are, longest first."""
    lengths = Counter(len(route) for route in plan.pipelines())
    words = [f"{count}×{length}" if count > 2 else "+".join([str(length)] * count) for length, count in lengths.items()]
    return "+".join(word for _, word in sorted(zip(lengths, words, strict=True), reverse=True))


def _no_answer(policy: str, reason: str) -> Candidate:
    return Candidate(policy=policy, plan=None, reason=reason)


def _layers(indices: list[int], workload: Workload) -> str:
    names = ", ".join(workload.layers[index].name for index in indices)
    return f"layer {names} has" if len(indices) == 1 else f"layers {names} have"
