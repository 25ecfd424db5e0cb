"""The best layouts of n nodes: a few are found, given to nodes, and priced with the whole cost model.

After a change the search goes along the front from keeping every pipeline that is whole to the least step time of all: ties
in step time hide huge moves. A handful of layouts (``layouts``) is then put on nodes (``places``) and priced with the whole
cost model, which also knows messages in list schedules, the number of replicas in a reduction, unequal speeds and cores that
nodes share; the search does not.

A layout in which each layer has two holders comes before any that would not survive every single loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import NamedTuple

from everstep.cluster import Cluster
from everstep.config import PlannerConfig
from everstep.errors import InfeasibleError
from everstep.plan import Order, Plan, Route
from everstep.planner.layouts.catalogue import Catalogue, Layout, rounded, smallest_cap
from everstep.planner.layouts.places import Holds, assigned, plan_of
from everstep.planner.layouts.splits import Splits
from everstep.planner.remembered import remembered
from everstep.planner.step.cost import is_shared, seconds_after, staggered_seconds
from everstep.planner.step.memory import cap_bytes, caps_of, have_one_cap, needed_bytes, overfull, rooms
from everstep.planner.step.pace import one_speed, pace
from everstep.planner.step.parts import alike, holders
from everstep.planner.step.shadows import shadowed
from everstep.quantities import NodeId, human_bytes, node_number
from everstep.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A plan with its predicted step time and the bytes of its fullest node."""

    plan: Plan
    step_s: float
    needed_bytes: Mapping[NodeId, int] = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        return max(self.needed_bytes.values(), default=0)


ROOMY_NODES = 1024
"""With more nodes ``Order.extra_slots`` alone counts: what each could hold besides takes too long to say."""


def with_room(plan: Plan, workload: Workload, cluster: Cluster, worker_memory_bytes: int | None = None) -> Plan:
    """``plan`` with leave for each node to fill its memory with activations, if that is limited and it has its device alone."""
    room: dict[NodeId, int] = {}
    if len(plan.placement) <= ROOMY_NODES and not is_shared(cluster):
        caps = caps_of(plan.placement, cluster, worker_memory_bytes)
        room = rooms(plan, workload, caps) if any(caps.values()) else room
    return plan if plan.room == room else replace(plan, room=room)


def priced(plan: Plan, workload: Workload, cluster: Cluster, worker_memory_bytes: int | None = None) -> Priced:
    """One schedule serves both figures. Nodes whose memory is limited get ``with_room``.

    What plain pipelines cost on nodes that are all alike does not depend on their names, and is remembered.
    """
    shape = _shape_of(plan, cluster, worker_memory_bytes)
    if shape is None:
        return priced_anew(plan, workload, cluster, worker_memory_bytes)
    known = _prices(workload)
    if shape not in known:
        if len(known) >= REMEMBERED:
            known.clear()
        known[shape] = _price_of(priced_anew(plan, workload, cluster, worker_memory_bytes))
    return _named(plan, known[shape])


def priced_anew(plan: Plan, workload: Workload, cluster: Cluster, worker_memory_bytes: int | None = None) -> Priced:
    """``priced`` without what is remembered."""
    plan = with_room(plan, workload, cluster, worker_memory_bytes)
    found = pace(plan, workload, cluster)
    if plan.order.staggered:
        step_s = staggered_seconds(plan, workload, cluster)
    else:
        step_s = seconds_after(plan, workload, cluster, found.ends_s)
    return Priced(plan=plan, step_s=step_s, needed_bytes=needed_bytes(plan, workload, found.active_bytes))


REMEMBERED = 4096
"""Prices that are kept for one workload."""


class _Price(NamedTuple):
    """A price without names: the step, and by kind of pipeline and stage the room and the bytes of a node."""

    step_s: float
    rooms: tuple[tuple[int | None, ...], ...]
    needed_bytes: tuple[tuple[int, ...], ...]


@remembered(16)
def _prices(workload: Workload) -> dict[object, _Price]:
    return {}


def _shape_of(plan: Plan, cluster: Cluster, worker_memory_bytes: int | None) -> object | None:
    """What the price of ``plan`` depends on besides the workload; None: on which node is where, too."""
    speed, caps = one_speed(cluster), caps_of(tuple(cluster.nodes)[:1], cluster, worker_memory_bytes)
    if speed is None or cluster.one_link is None or not have_one_cap(cluster) or any(cluster.host_cores.values()):
        return None
    plain, others = alike(plan.routes)
    if others or shadowed(plan.routes):
        return None
    pipelines, busy = [], 0
    for shape in plain:
        hops = tuple([(hop.first, hop.end) for hop in shape.routes[0]])
        placed = [plan.placement[node] for node in shape.nodes]
        own = placed[:len(hops)]
        if placed != own * len(shape.routes) or [(layers[0], len(layers)) for layers in own] != [
            (first, end - first) for first, end in hops
        ]:
            return None
        pipelines.append((hops, shape.num_micro_batches, len(shape.routes)))
        busy += len(placed)
    idle = len(plan.placement) - busy
    if len(holders(plan.placement).get((), ())) != idle:
        return None
    return tuple(pipelines), idle, plan.num_layers, plan.order, cluster.link, speed, *caps.values()


def _price_of(answer: Priced) -> _Price:
    plain, _ = alike(answer.plan.routes)
    first = [shape.nodes[:len(shape.routes[0])] for shape in plain]
    return _Price(
        answer.step_s, tuple([tuple(map(answer.plan.room.get, nodes)) for nodes in first]),
        tuple([tuple([answer.needed_bytes[node] for node in nodes]) for nodes in first]),
    )


def _named(plan: Plan, price: _Price) -> Priced:
    """``price`` for the nodes of ``plan``."""
    plain, _ = alike(plan.routes)
    room: dict[NodeId, int] = {}
    needed: dict[NodeId, int] = {}
    for shape, rooms_of, bytes_of in zip(plain, price.rooms, price.needed_bytes, strict=True):
        room.update((node, most) for node, most in zip(shape.nodes, cycle(rooms_of), strict=False) if most is not None)
        needed.update(zip(shape.nodes, cycle(bytes_of), strict=False))
    return Priced(
        plan=plan if plan.room == room else replace(plan, room=room), step_s=price.step_s,
        needed_bytes={node: needed.get(node, 0) for node in plan.placement},
    )


def best_priced(
    nodes: Sequence[NodeId], workload: Workload, cluster: Cluster, config: PlannerConfig, *, holds: Holds | None = None,
    order: Order | None = None, idle: int = 0, keep: Sequence[Route] = (),
) -> list[Priced]:
    """A few distinct layouts of ``nodes`` by predicted step time, every node in each. Empty: nothing fits.

    Nodes beyond ``idle`` stay idle only where no faster layout uses them. ``holds``: what each node holds, so that it gets a
    place near it. ``keep``: pipelines of living nodes that run already and may stay as they are.
    """
    order = Order() if order is None else order
    catalogue = Catalogue(workload, cluster, config, nodes, order)
    numbered = sorted(nodes, key=node_number)
    ranked = sorted(numbered, key=lambda node: cluster.nodes[node].host)
    found: list[Layout] = []
    for least in sorted({config.tolerate + 1, 2, 1}, reverse=True):
        found = found or catalogue.layouts(keep, least, idle)
    if not found and cluster.site_links:
        found = catalogue.straddling(idle)
    answers = []
    for layout in found:
        chosen = assigned(layout, ranked, workload, cluster, holds or {})
        plan = plan_of(layout, chosen, numbered, workload.num_layers, order)
        for extra_slots in _slots_to_try(order, layout):
            slotted = replace(plan, order=replace(order, extra_slots=extra_slots))
            answer = priced(slotted, workload, cluster, config.worker_memory_bytes)
            if not overfull(answer.needed_bytes, cluster, config.worker_memory_bytes):
                answers.append(answer)
                break
    return sorted(answers, key=lambda answer: rounded(answer.step_s))


def _slots_to_try(order: Order, layout: Layout) -> list[int]:
    """The most first. Where some are given, a long pipeline of small stages may use as many as it has stages.

    With staggered updates twice as many: it takes these until no stage waits for another.
    """
    if not order.extra_slots:
        return [0]
    longest = max(len(bounds) for bounds, _ in layout.shapes) * (2 if order.staggered else 1)
    return sorted({longest, order.extra_slots, order.extra_slots // 2, 0}, reverse=True)


def best_plans(
    nodes: Sequence[NodeId], workload: Workload, cluster: Cluster, config: PlannerConfig, *, holds: Holds | None = None,
    order: Order | None = None,
) -> list[Plan]:
    """The plans of ``best_priced``, fastest first."""
    return [answer.plan for answer in best_priced(nodes, workload, cluster, config, holds=holds, order=order)]


SPLIT_MUST_SAVE = 0.12
"""The part of a step that splitting backward must save. On CPU, with small layers, it takes that much more processor time
(``benchmarks/results/steady-state-cpu-2-cores-2026-11-30.md``)."""


def with_best_order(found: Priced, workload: Workload, cluster: Cluster, config: PlannerConfig) -> Priced:
    """``found`` with split backward, if that is predicted to be clearly faster and fits; else as it is.

    Clearly, since the prediction leaves out what splitting itself costs: more calls for each linear layer.
    """
    split = replace(found.plan, order=replace(found.plan.order, split=True))
    other = priced(split, workload, cluster, config.worker_memory_bytes)
    fits = not overfull(other.needed_bytes, cluster, config.worker_memory_bytes)
    return other if fits and other.step_s < (1 - SPLIT_MUST_SAVE) * found.step_s else found


def why_nothing_fits(
    nodes: Sequence[NodeId], workload: Workload, cluster: Cluster, config: PlannerConfig,
) -> InfeasibleError:
    """For each number of stages that was tried, what was in the way, and what memory would do."""
    cap = smallest_cap(nodes, cluster, config)
    splits = Splits(workload, None, columns=1, longest=min(config.max_stages, len(nodes)))
    tightest = min(nodes, key=lambda node: (_cap_or_more(node, cluster, config), node_number(node)))
    rejected: dict[str, str] = {}
    enough: list[tuple[int, int]] = []
    for num_stages in range(1, min(len(nodes), config.max_stages) + 1):
        if num_stages > workload.num_layers:
            rejected[_stages(num_stages)] = f"{_stages(num_stages)} but only {workload.num_layers} layers"
        elif cap is not None:
            num_pipelines = min(len(nodes) // num_stages, workload.num_micro_batches)
            needed = splits.least_bytes(num_stages, -(-workload.num_micro_batches // num_pipelines))
            enough.append((needed, num_stages))
            rejected[_stages(num_stages)] = f"{tightest} needs {human_bytes(needed)} of {human_bytes(cap)}"
    if len(nodes) > config.max_stages:
        rejected[f"more than {_stages(config.max_stages)}"] = f"max_stages is {config.max_stages}"
    words = "; ".join(f"{tried}: {why}" for tried, why in rejected.items())
    if enough:
        needed, num_stages = min(enough)
        words += f". It would fit with {human_bytes(needed, up=True)} on every node, in {_stages(num_stages)}"
    return InfeasibleError(f"no plan for {len(nodes)} nodes and {workload.num_layers} layers fits: {words}", rejected)


def _stages(count: int) -> str:
    return "1 stage" if count == 1 else f"{count} stages"


def _cap_or_more(node: NodeId, cluster: Cluster, config: PlannerConfig) -> float:
    cap = cap_bytes(node, cluster, config.worker_memory_bytes)
    return float("inf") if cap is None else cap
