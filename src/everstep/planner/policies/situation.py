"""What is known when a plan has to be found, and what follows from it for every policy alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar, cast

from everstep.cluster import Cluster
from everstep.config import PlannerConfig
from everstep.decision import Way
from everstep.plan import Hop, Order, Plan, Route
from everstep.planner.objective import Curve, Exponential, Gap
from everstep.planner.step.calibrate import Residuals
from everstep.planner.step.cost import SWITCH_S
from everstep.planner.step.parts import Grouped, Held, alike, grouped
from everstep.quantities import NodeId, UnitName, node_number
from everstep.workload import Workload

_T = TypeVar("_T")


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
    residuals: Residuals = field(default_factory=dict)
    """What step times are to be multiplied by, by plan family: what the cost model leaves out of each."""
    move_ratio: float = 1.0
    """What times of moving state are to be multiplied by: how much longer moves have taken than predicted."""
    ways: frozenset[Way] = frozenset({"start", "now", "blocking", "restore"})
    """What whoever asks can carry out. A candidate of another way is proposed as one without an answer, which says so."""

    expected: Mapping[NodeId, float] = field(default_factory=dict)
    """Who is away, or cannot be heard, and is known to be back: in how many seconds. Who keeps its state is in ``holds``."""
    ends: Mapping[NodeId, float] = field(default_factory=dict)
    """Living nodes that are known to go, and in how many seconds, as after a notice or when they are drained."""
    avoided: frozenset[NodeId] = frozenset()
    """Living nodes that give away what they hold and get nothing to do."""
    survival: Callable[[float], float] | None = None
    """The chance that the next event is more than so many seconds away. None: exponential with mean ``gap_s``."""
    weights: Mapping[NodeId, float] = field(default_factory=dict)
    """How likely each node is to be lost next, by its own history; absent: 1."""
    passes_on: bool = True
    """Whether rerouting may cut work finer than the stages that are there, so that nodes share it more evenly."""
    shadows: bool = False
    """Whether who shadows a hop also computes it. If not, redundancy is a matter of who holds what, and costs no time."""
    thorough: bool = False
    """Whether there is time to look further, as ahead of a loss: at moved windows, and at more layouts."""

    _memory: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return self.remembered("nodes", lambda: tuple(sorted(self.cluster.nodes, key=node_number)))

    @property
    def usable(self) -> tuple[NodeId, ...]:
        """Those that may get something to do."""
        return self.remembered("usable", lambda: tuple([node for node in self.nodes if node not in self.avoided]))

    @property
    def gap(self) -> Gap:
        """What is known of the time to the next event. A curve is followed as far as eight mean gaps."""
        survival = self.survival
        return self.remembered("gap", lambda: Curve(survival, 8 * self.gap_s) if survival else Exponential(self.gap_s))

    def remembered(self, what: object, work_out: Callable[[], _T]) -> _T:
        """What several policies ask for is worked out once: nothing here changes."""
        if what not in self._memory:
            self._memory[what] = work_out()
        return cast(_T, self._memory[what])

    @property
    def order(self) -> Order:
        """For new layouts: as before, with as many slots as before where they fit, which fused backward does not need."""
        before = self.plan.order
        return Order(split=before.split, extra_slots=before.extra_slots if before.split else 0, staggered=before.staggered)


def available(situation: Situation) -> Mapping[NodeId, frozenset[int]]:
    """The layers each living node can compute at once: placed on it, and all of their units held.

    Layers that nobody has in this sense, as after a change of placement that was broken off, are looked for by units
    alone.
    """
    return situation.remembered("available", lambda: _available(situation))


def _available(situation: Situation) -> dict[NodeId, frozenset[int]]:
    units = Held.of(situation.workload)
    needs = [units.units((layer,)) for layer in range(situation.plan.num_layers)]
    usable = {
        held: frozenset(layer for layer, units in enumerate(needs) if units <= held) for held in set(situation.holds.values())
    }
    usable[frozenset()] = usable.get(frozenset()) or frozenset(layer for layer, units in enumerate(needs) if not units)
    usable_nodes = set(situation.usable)
    can = {
        node: usable[situation.holds.get(node, frozenset())] if node in usable_nodes else frozenset[int]()
        for node in situation.nodes
    }
    common: dict[tuple[frozenset[int], tuple[int, ...]], frozenset[int]] = {}
    """Few different things are held by many nodes."""
    placed: dict[NodeId, frozenset[int]] = {}
    for node in situation.nodes:
        pair = (can[node], situation.plan.placement.get(node, ()))
        if pair not in common:
            common[pair] = pair[0].intersection(pair[1])
        placed[node] = common[pair]
    covered = frozenset[int]().union(*set(placed.values()))
    if len(covered) == situation.plan.num_layers:
        return placed
    return {node: placed[node] | (can[node] - covered) for node in situation.nodes}


def is_broken(situation: Situation) -> bool:
    """Whether some micro-batch's route meets a node that is gone or has lost its state."""
    return len(whole_routes(situation)) < len(pipelines_of(situation).routes)


def pipelines_of(situation: Situation) -> Grouped:
    """Distinct routes of the plan before, and their micro-batches."""
    return grouped(situation.plan.routes)


def whole_routes(situation: Situation) -> tuple[int, ...]:
    """Those of ``pipelines_of`` that meet nobody who is gone or has lost state, as indices."""
    return situation.remembered("whole", lambda: _whole_routes(situation))


def _whole_routes(situation: Situation) -> tuple[int, ...]:
    can = available(situation)
    nothing = frozenset[int]()
    known: dict[tuple[frozenset[int], int, int], bool] = {}

    def passes(hop: Hop) -> bool:
        key = (can.get(hop.node, nothing), hop.first, hop.end)
        if key not in known:
            known[key] = key[0].issuperset(hop.layers)
        return known[key]

    return tuple([index for index, route in enumerate(pipelines_of(situation).routes) if all(map(passes, route))])


def intact(situation: Situation) -> tuple[Route, ...]:
    """Pipelines that are whole and that no rerouted micro-batch visits: they may stay as they are, without shadows."""
    whole = {id(pipelines_of(situation).routes[index]) for index in whole_routes(situation)}
    plain, _ = alike(situation.plan.routes)
    order = pipelines_of(situation).number
    found = [route for shape in plain for route in shape.routes if id(route) in whole]
    return tuple([_unshadowed(route) for route in sorted(found, key=lambda route: order[id(route)])])


def _unshadowed(route: Route) -> Route:
    if all(hop.shadow is None for hop in route):
        return route
    return tuple([replace(hop, shadow=None) for hop in route])


def route_work_s(situation: Situation, route: Route) -> list[float]:
    """By hop, the seconds that one micro-batch takes there, forward and back."""
    until = situation.remembered("work", lambda: list(accumulate((x.total_s for x in situation.workload.layers), initial=0.0)))
    nodes = situation.cluster.nodes
    return [(until[hop.end] - until[hop.first]) / nodes[hop.node].speed for hop in route]
