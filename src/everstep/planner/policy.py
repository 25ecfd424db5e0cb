"""Every recovery policy proposes plans; it chooses nothing. What each would cost is written into its candidates.

====================  =================================================================================================
``reroute``           routes only: living holders of the same layers take over the hops of who is gone
``normalize``         a healthy node changes its role, so that losses sit where they hurt least; else as ``reroute``
``spare``             an idle node takes the place of one that is gone; if there are too few, the rest is rerouted
``shrink``            pipelines that met who is gone are dropped, their micro-batches spread over the whole ones
``heal``              idle nodes and newcomers take the layers whose holders have most to do; losses as ``reroute``
``grow``              whole pipelines stay, idle nodes and newcomers lengthen one or make new ones; losses as ``reroute``
``repartition``       new pipelines over all survivors, state moved first
``restore``           new pipelines over all survivors, all state from the newest checkpoint, or from the initial weights
====================  =================================================================================================

A node that joins stays idle except under ``heal``, ``grow``, ``repartition`` and ``auto``. Every living node is in every
plan.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar, cast

from everstep.cluster import Cluster
from everstep.config import PlannerConfig
from everstep.decision import Candidate, Way
from everstep.errors import InfeasibleError
from everstep.plan import Hop, Order, Plan, Route
from everstep.planner import objective
from everstep.planner.cost import SWITCH_S, is_shared, load_seconds, stall_seconds
from everstep.planner.memory import needed_bytes, overfull
from everstep.planner.moves import moves_for
from everstep.planner.parts import grouped, holders_by_unit, kinds_of
from everstep.planner.reroute import Router
from everstep.planner.schedules import streams
from everstep.planner.search import Priced, assign, best_priced, priced, why_nothing_fits
from everstep.quantities import NodeId, UnitName, node_number
from everstep.transfer import Move
from everstep.workload import Workload

_T = TypeVar("_T")

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
    ways: frozenset[Way] = frozenset({"start", "now", "blocking", "restore"})
    """What whoever asks can carry out. A candidate of another way is proposed as one without an answer, which says so."""

    _memory: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return self.remembered("nodes", lambda: tuple(sorted(self.cluster.nodes, key=node_number)))

    def remembered(self, what: str, work_out: Callable[[], _T]) -> _T:
        """What several policies ask for is worked out once: nothing here changes."""
        if what not in self._memory:
            self._memory[what] = work_out()
        return cast(_T, self._memory[what])

    @property
    def order(self) -> Order:
        """For new layouts: split as before, with as many slots as before where they fit, which fused backward does not need."""
        before = self.plan.order
        return Order(split=before.split, extra_slots=before.extra_slots if before.split else 0)


def available(situation: Situation) -> Mapping[NodeId, frozenset[int]]:
    """The layers each living node can compute at once: placed on it, and all of their units held.

    Layers that nobody has in this sense, as after a change of placement that was broken off, are looked for by units
    alone.
    """
    return situation.remembered("available", lambda: _available(situation))


def _available(situation: Situation) -> dict[NodeId, frozenset[int]]:
    needs = [situation.workload.units_of({layer}) for layer in range(situation.plan.num_layers)]
    usable = {
        held: frozenset(layer for layer, units in enumerate(needs) if units <= held) for held in set(situation.holds.values())
    }
    usable[frozenset()] = usable.get(frozenset()) or frozenset(layer for layer, units in enumerate(needs) if not units)
    can = {node: usable[situation.holds.get(node, frozenset())] for node in situation.nodes}
    placed = {node: can[node].intersection(situation.plan.placement.get(node, ())) for node in situation.nodes}
    covered = frozenset[int]().union(*set(placed.values()))
    if len(covered) == situation.plan.num_layers:
        return placed
    return {node: placed[node] | (can[node] - covered) for node in situation.nodes}


def is_broken(situation: Situation) -> bool:
    """Whether some micro-batch's route meets a node that is gone or has lost its state."""
    can = available(situation)
    return any(not _passes(route, can) for route in _pipelines(situation))


def _pipelines(situation: Situation) -> Mapping[Route, Sequence[int]]:
    """Distinct routes of the plan before, and their micro-batches."""
    return situation.remembered("pipelines", lambda: grouped(situation.plan.routes))


def intact(situation: Situation) -> tuple[Route, ...]:
    """Pipelines that are whole and that no rerouted micro-batch visits: they may stay as they are."""
    can = available(situation)
    visits = Counter(hop.node for route in _pipelines(situation) for hop in route)
    return tuple(
        route for route in _pipelines(situation)
        if _passes(route, can) and all(visits[hop.node] == 1 for hop in route)
    )


def _passes(route: Route, can: Mapping[NodeId, frozenset[int]]) -> bool:
    return all(can.get(hop.node, frozenset()).issuperset(hop.layers) for hop in route)


def reroute(situation: Situation) -> list[Candidate]:
    """Only routes change. On devices of their own, nodes get more activation slots where their memory allows it."""
    plan = _over_the_living(situation)
    if isinstance(plan, str):
        return [_no_answer("reroute", plan)]
    return [_candidate(situation, "reroute", _with_slots(situation, plan), "now")]


def _over_the_living(situation: Situation) -> Plan | str:
    """The plan before with routes over who is left, or why there is no way."""
    return situation.remembered("rerouted", lambda: _rerouted(situation, situation.plan, available(situation)))


def _with_slots(situation: Situation, plan: Plan) -> Plan:
    """``plan`` with more activation slots where its routes are new, nodes have devices of their own, and memory allows it."""
    extra_slots = max(plan.order.extra_slots, EXTRA_SLOTS)
    if plan.routes == situation.plan.routes or is_shared(situation.cluster) or not _has_room(situation, plan, extra_slots):
        return plan
    return replace(plan, order=replace(plan.order, extra_slots=extra_slots))


def _has_room(situation: Situation, plan: Plan, extra_slots: int) -> bool:
    """Whether every node can hold as many activations as so many slots allow, whether it would use them or not."""
    active = list(accumulate((layer.activation_bytes for layer in situation.workload.layers), initial=0))
    slots: dict[NodeId, int] = {}
    largest: dict[NodeId, int] = {}
    for route in grouped(plan.routes):
        for index, hop in enumerate(route):
            slots[hop.node] = max(slots.get(hop.node, 0), len(route) - index)
            largest[hop.node] = max(largest.get(hop.node, 0), active[hop.end] - active[hop.first])
    held = {node: (count + extra_slots) * largest[node] for node, count in slots.items()}
    return not overfull(
        needed_bytes(plan, situation.workload, held), situation.cluster, situation.config.worker_memory_bytes,
    )


def _rerouted(situation: Situation, plan: Plan, can: Mapping[NodeId, frozenset[int]]) -> Plan | str:
    """``plan`` on the living nodes that ``can`` compute; or why there is no way."""
    missing = sorted(set(range(plan.num_layers)) - frozenset[int]().union(*set(can.values())))
    if missing:
        return f"{_layers(missing, situation.workload)} no living holder"
    speeds = {node: situation.cluster.nodes[node].speed for node in can}
    routes = Router(can, situation.workload, speeds).routes(plan.routes)
    if routes is None:
        return "every way over the living holders would visit a node twice"
    return replace(plan, routes=routes, placement=_placement(can, situation.nodes))


def _placement(can: Mapping[NodeId, frozenset[int]], nodes: Sequence[NodeId]) -> dict[NodeId, tuple[int, ...]]:
    layers = {held: tuple(sorted(held)) for held in set(can.values())}
    return {node: layers[can[node]] for node in nodes}


def spare(situation: Situation) -> list[Candidate]:
    """Idle nodes take the places of those who are gone, the busiest places first."""
    plan = situation.plan
    busy: Counter[NodeId] = Counter()
    for route, members in _pipelines(situation).items():
        busy.update({hop.node: len(members) for hop in route})
    gone = [node for node in busy if node not in situation.cluster.nodes]
    empty = sorted(gone, key=lambda node: (-busy[node], node_number(node)))
    idle = [node for node in situation.nodes if node not in busy]
    if not empty:
        return [_no_answer("spare", "nobody's place is empty")]
    if not idle:
        return [_no_answer("spare", "no node is idle")]
    places = empty[:len(idle)]
    wanted = [situation.workload.units_of(frozenset(plan.placement[node])) for node in places]
    chosen = dict(zip(places, assign(wanted, idle, situation.workload, situation.holds), strict=True))
    can = dict(available(situation))
    for place, node in chosen.items():
        can[node] = frozenset(plan.placement[place])
    moved = {route: tuple(_moved(hop, chosen) for hop in route) for route in _pipelines(situation)}
    routes = tuple(moved[route] for route in plan.routes)
    filled = _rerouted(situation, replace(plan, routes=routes), can)
    if isinstance(filled, str):
        return [_no_answer("spare", filled)]
    return [_candidate(situation, "spare", filled, "blocking")]


def _moved(hop: Hop, places: Mapping[NodeId, NodeId]) -> Hop:
    return replace(hop, node=places.get(hop.node, hop.node))


def shrink(situation: Situation) -> list[Candidate]:
    """Whole pipelines take the micro-batches of the broken ones, each next one where the busiest node has least to do."""
    can = available(situation)
    pipelines = _pipelines(situation)
    whole = [route for route in pipelines if _passes(route, can)]
    if not whole:
        return [_no_answer("shrink", "no pipeline is whole")]
    work_s = [[_work_s(situation, hop) for hop in route] for route in whole]
    load_s = dict.fromkeys((hop.node for route in whole for hop in route), 0.0)

    def busiest_s(index: int) -> float:
        return max(load_s[hop.node] + seconds for hop, seconds in zip(whole[index], work_s[index], strict=True))

    for route, seconds in zip(whole, work_s, strict=True):
        for hop, hop_s in zip(route, seconds, strict=True):
            load_s[hop.node] += len(pipelines[route]) * hop_s
    heap = [(busiest_s(index), index) for index in range(len(whole))]
    heapq.heapify(heap)
    routes = list(situation.plan.routes)
    broken = sorted(m for route in pipelines.keys() - set(whole) for m in pipelines[route])
    for micro_batch in broken:
        while (now_s := busiest_s(heap[0][1])) > heap[0][0]:  # another route visits one of its nodes
            heapq.heapreplace(heap, (now_s, heap[0][1]))
        index = heap[0][1]
        routes[micro_batch] = whole[index]
        for hop, hop_s in zip(whole[index], work_s[index], strict=True):
            load_s[hop.node] += hop_s
    members = {hop.node for route in whole for hop in route}
    kept = members if broken else set(situation.nodes)
    placement = {node: can[node] if node in kept else frozenset[int]() for node in situation.nodes}
    plan = replace(situation.plan, routes=tuple(routes), placement=_placement(placement, situation.nodes))
    return [_candidate(situation, "shrink", plan, "now")]


def _work_s(situation: Situation, hop: Hop) -> float:
    until = situation.remembered("work", lambda: list(accumulate((x.total_s for x in situation.workload.layers), initial=0.0)))
    return (until[hop.end] - until[hop.first]) / situation.cluster.nodes[hop.node].speed


def repartition(situation: Situation) -> list[Candidate]:
    """New layouts over all living nodes, from those that leave most pipelines as they are to the fastest."""
    found = _layouts(situation)
    if not found:
        return [_no_answer("repartition", _why_nothing_fits(situation))]
    candidates = [_candidate(situation, "repartition", answer, "blocking") for answer in found[:REPARTITIONS]]
    return [candidate for candidate in candidates if candidate.feasible] or candidates[:1]


def restore(situation: Situation) -> list[Candidate]:
    """The fastest layout over all living nodes, and the steps since the checkpoint once more."""
    found = _layouts(situation)
    if not found:
        return [_no_answer("restore", _why_nothing_fits(situation))]
    return [_candidate(situation, "restore", found[0], "restore")]


def normalize(situation: Situation) -> list[Candidate]:
    """One healthy node changes its role, from where losses hurt least to where they hurt most.

    Proposed only where its new peers would then still have at least as much to do as those it leaves.
    """
    found = _loads(situation)
    if isinstance(found, str):
        return [_no_answer("normalize", found)]
    plan, load_s = found
    groups = _by_layers(plan, load_s)
    if len(groups) < 2:
        return [_no_answer("normalize", "all nodes have the same role")]
    busiest = max(groups, key=lambda layers: _mean(groups[layers], load_s))
    others = [layers for layers, nodes in groups.items() if layers != busiest and len(nodes) > 1]
    if not others:
        return [_no_answer("normalize", "no role could spare a node")]
    calmest = min(others, key=lambda layers: _mean(groups[layers], load_s) / (1 - 1 / len(groups[layers])))
    here, there = groups[busiest], groups[calmest]
    relieved_s = _mean(here, load_s) * len(here) / (len(here) + 1)
    burdened_s = _mean(there, load_s) * len(there) / (len(there) - 1)
    if relieved_s < burdened_s * (1 - objective.NOISE):
        return [_no_answer("normalize", "losses sit where they hurt least")]
    node = min(there, key=lambda node: (load_s[node], node_number(node)))
    return [_with_roles(situation, "normalize", {node: busiest})]


def heal(situation: Situation) -> list[Candidate]:
    """Idle nodes, newcomers among them, take the layers whose holders have most to do."""
    found = _loads(situation)
    if isinstance(found, str):
        return [_no_answer("heal", found)]
    plan, load_s = found
    idle = [node for node in situation.nodes if not load_s[node]]
    if not idle:
        return [_no_answer("heal", "no node is idle")]
    groups = {layers: list(nodes) for layers, nodes in _by_layers(plan, load_s).items()}
    total_s = {layers: sum(load_s[node] for node in nodes) for layers, nodes in groups.items()}
    even = {layers: len(nodes) for layers, nodes in groups.items()}
    roles: dict[NodeId, tuple[int, ...]] = {}
    for node in idle:
        busiest = max(even, key=lambda layers: total_s[layers] / even[layers])
        if total_s[busiest] / even[busiest] <= min(total_s[layers] / even[layers] for layers in even) * (1 + objective.NOISE):
            break  # there is no hole to fill
        even[busiest] += 1
        roles[node] = busiest
    if not roles:
        return [_no_answer("heal", "there is no hole to fill")]
    return [_with_roles(situation, "heal", roles)]


def grow(situation: Situation) -> list[Candidate]:
    """Pipelines that are whole stay; the other nodes, newcomers among them, lengthen one or make new ones."""
    candidates = [_candidate(situation, "grow", answer, "blocking") for answer in _layouts(situation)[:REPARTITIONS]]
    feasible = [candidate for candidate in candidates if candidate.feasible]
    if not feasible:
        return [_no_answer("grow", _why_nothing_fits(situation))]
    return [min(feasible, key=lambda candidate: (candidate.moved_bytes, candidate.step_s))]


def _loads(situation: Situation) -> tuple[Plan, dict[NodeId, float]] | str:
    """The plan with routes over the living, and the seconds of work that each node has in it."""
    return situation.remembered("loads", lambda: _loads_of(situation))


def _loads_of(situation: Situation) -> tuple[Plan, dict[NodeId, float]] | str:
    plan = _over_the_living(situation)
    if isinstance(plan, str):
        return plan
    load_s = dict.fromkeys(situation.nodes, 0.0)
    for route, members in grouped(plan.routes).items():
        for hop in route:
            load_s[hop.node] += len(members) * _work_s(situation, hop)
    return plan, load_s


def _by_layers(plan: Plan, load_s: Mapping[NodeId, float]) -> dict[tuple[int, ...], list[NodeId]]:
    found: dict[tuple[int, ...], list[NodeId]] = {}
    for node, layers in plan.placement.items():
        if load_s[node]:
            found.setdefault(layers, []).append(node)
    return found


def _mean(nodes: Sequence[NodeId], load_s: Mapping[NodeId, float]) -> float:
    return sum(load_s[node] for node in nodes) / len(nodes)


def _with_roles(situation: Situation, policy: str, roles: Mapping[NodeId, tuple[int, ...]]) -> Candidate:
    """Nodes hold other layers than before, and what peers do for others is shared out anew."""
    can = dict(available(situation)) | {node: frozenset(layers) for node, layers in roles.items()}
    routes = situation.plan.routes
    names = streams(routes)
    visits = Counter((hop.node, name) for route, name in zip(routes, names, strict=True) for hop in route)
    home: dict[NodeId, NodeId] = {}
    for (node, name), _ in visits.most_common():
        home.setdefault(node, name)
    at_home = tuple(
        tuple([hop for hop in route if home[hop.node] == name]) for route, name in zip(routes, names, strict=True)
    )
    plan = _rerouted(situation, replace(situation.plan, routes=at_home), can)
    if isinstance(plan, str):
        return _no_answer(policy, plan)
    return _candidate(situation, policy, _with_slots(situation, plan), "blocking")


def keep(situation: Situation) -> list[Candidate]:
    """Nothing changes but who is in: newcomers are spares."""
    plan = _over_the_living(situation)
    assert isinstance(plan, Plan), "only asked where no route is broken"
    return [_candidate(situation, "spare" if situation.joined else "reroute", plan, "now")]


POLICIES: Mapping[str, Callable[[Situation], list[Candidate]]] = {
    "reroute": reroute, "normalize": normalize, "spare": spare, "heal": heal, "shrink": shrink, "grow": grow,
    "repartition": repartition, "restore": restore,
}

BESIDE_REROUTE = ("normalize", "heal", "grow")
"""Policies that are about more than a loss: chosen alone, they are asked beside ``reroute`` and the better one is taken."""


def propose(situation: Situation) -> list[Candidate]:
    """The candidates of the configured policy, or of all.

    Where a forced policy has no answer, ``restore`` is proposed too, and the table says so.
    """
    forced = situation.config.policy
    if not is_broken(situation):
        asked = {"auto": ("heal", "repartition"), "repartition": ("repartition",), "heal": ("heal",), "grow": ("grow",)}
        found = [] if forced == "repartition" else keep(situation)
        return found + [candidate for policy in asked.get(forced, ()) for candidate in POLICIES[policy](situation)]
    if forced == "auto":  # what grow would do is among the layouts of repartition
        return [c for name, policy in POLICIES.items() if name != "grow" for c in policy(situation)]
    found = POLICIES[forced](situation)
    if forced in BESIDE_REROUTE:
        found = [*reroute(situation), *found]
    if forced == "restore" or any(candidate.feasible for candidate in found):
        return found
    return [*found, *restore(situation)]


def _layouts(situation: Situation) -> list[Priced]:
    """By step time. A restore takes the same layouts: what nodes hold decides only who gets which place."""
    return situation.remembered("layouts", lambda: best_priced(
        situation.nodes, situation.workload, situation.cluster, situation.config, holds=situation.holds,
        order=situation.order, keep=intact(situation),
    ))


def _why_nothing_fits(situation: Situation) -> str:
    error = why_nothing_fits(situation.nodes, situation.workload, situation.cluster, situation.config)
    return "; ".join(error.rejected.values()) or "no layout of these nodes fits"


def _candidate(situation: Situation, policy: str, plan: Plan | Priced, way: Way) -> Candidate:
    """``plan`` with everything that it is predicted to cost, or why it cannot be had."""
    answer = plan if isinstance(plan, Priced) else priced(plan, situation.workload, situation.cluster)
    too_much = overfull(answer.needed_bytes, situation.cluster, situation.config.worker_memory_bytes)
    if too_much:
        return _no_answer(policy, too_much)
    moves: tuple[Move, ...] = ()
    restore_step = None
    if way == "restore":
        restore_step = situation.checkpoint.step if situation.checkpoint else 0
        stall_s = situation.switch_s + load_seconds(answer.plan, situation.workload)
        stall_s += max(0, situation.step - restore_step) * answer.step_s
    else:
        try:
            moves, _ = moves_for(answer.plan, situation.holds, situation.workload)
        except InfeasibleError as error:
            return _no_answer(policy, str(error))
        stall_s = stall_seconds(moves, situation.cluster, switch_s=situation.switch_s)
    return Candidate(
        policy=policy, plan=answer.plan, way="now" if way == "blocking" and not moves else way, step_s=answer.step_s,
        stall_s=stall_s, moved_bytes=sum(move.num_bytes for move in moves), peak_bytes=answer.peak_bytes,
        restore_step=restore_step, reason=layout_words(answer.plan) if policy in ("repartition", "grow", "start") else "",
        value=objective.value(
            batch=situation.workload.batch, step_s=answer.step_s, stall_s=stall_s, gap_s=situation.gap_s,
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


def _no_answer(policy: str, reason: str) -> Candidate:
    return Candidate(policy=policy, plan=None, reason=reason)


def _layers(indices: list[int], workload: Workload) -> str:
    names = ", ".join(workload.layers[index].name for index in indices)
    return f"layer {names} has" if len(indices) == 1 else f"layers {names} have"
