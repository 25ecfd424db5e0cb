"""The planner itself in the loop: at each change it is asked as a run asks it, and what it decides is played.

1. The player holds a real plan and what each node holds. A change makes a situation of these, of the gap that the run's own
   history tells (or of the true one, for systems that are told), and of what records have taught: the speed of nodes that
   have run, the residual of kinds of plans, the rate of links. ``decide`` of the planner does the rest.
2. Steps take what the planner's cost model says of the plan's own schedule, memory counted; moves take their bytes over the
   links. Where the world is not as predicted, nodes are slower or faster, and kinds of plans and moves take longer or shorter.
3. A restore loads what every node needs and loses what was trained since the last checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, product
from statistics import fmean
from typing import get_args

from everstep.cluster import Cluster, Node
from everstep.config import PlannerConfig
from everstep.config import Policy as PolicyName
from everstep.decision import Candidate
from everstep.decision import Way as PlannedWay
from everstep.errors import InfeasibleError
from everstep.plan import Hop, Order, Plan
from everstep.planner.idle.refine import refined
from everstep.planner.layouts.places import interleaved
from everstep.planner.layouts.search import best_priced, priced
from everstep.planner.policies.layouts import restore
from everstep.planner.policies.situation import CheckpointInfo
from everstep.planner.policies.situation import Situation as Asked
from everstep.planner.policies.standing import with_redundancy
from everstep.planner.policies.table import choose, decide, propose
from everstep.planner.step.calibrate import Backward, Calibration, Family, Residuals, Shape, family_of
from everstep.planner.step.moves import moves_for
from everstep.planner.step.parts import units_by_layers
from everstep.quantities import NodeId, UnitName
from everstep.simulator.study.player import Option, Situation, Way
from everstep.simulator.study.times import even_bounds
from everstep.transfer import Move
from everstep.workload import Workload

_FAMILIES = {str(each): each for each in map(Family, *zip(*product(get_args(Shape), get_args(Backward)), strict=True))}

ALL_WAYS: frozenset[PlannedWay] = frozenset({"start", "now", "blocking", "behind", "wait", "restore"})

_GONE = 1_000_000
"""Numbers from here on are of nodes that never were."""

_REMEMBERED = 16

LOADED_FROM = CheckpointInfo(step=0, path="the last one")


@dataclass(frozen=True, slots=True)
class Running:
    """A plan, which may still name nodes that are gone, and the units that each living node holds."""

    plan: Plan
    holds: Mapping[str, frozenset[UnitName]]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self.holds)

    @property
    def busy(self) -> tuple[str, ...]:
        at_work = {hop.node for route in self.plan.pipelines() for hop in route}
        return tuple(node for node in self.holds if node in at_work)

    @property
    def kind(self) -> str:
        return str(family_of(self.plan))

    def without(self, lost: Iterable[str]) -> Running:
        gone = frozenset(lost)
        return Running(self.plan, {node: units for node, units in self.holds.items() if node not in gone})

    def joined_by(self, nodes: Sequence[str]) -> Running:
        return Running(self.plan, {**self.holds, **dict.fromkeys(nodes, frozenset[UnitName]())})

    def bare(self) -> Running:
        return Running(self.plan, dict.fromkeys(self.holds, frozenset[UnitName]()))


@dataclass(frozen=True)
class Ground:
    """What is trained on what: ``num_stages`` are those of the grid, ``order`` that of its schedules.

    Nodes beyond those of ``cluster`` are like its last.
    """

    workload: Workload
    cluster: Cluster
    num_stages: int
    order: Order
    config: PlannerConfig = field(default_factory=PlannerConfig)
    move_ratio: float = 1.0
    """How much longer state takes over the links than its bytes say. Messages and sums take what theirs say."""

    def cluster_of(self, nodes: Iterable[str], seen: Mapping[str, float] | None = None) -> Cluster:
        """The nodes of that name, as slow as was ``seen``."""
        seen = seen or {}
        found: dict[NodeId, Node] = {}
        for name in map(NodeId, nodes):
            node = self.cluster.nodes.get(name) or replace(self._last, node_id=name)
            ratio = seen.get(f"node {name}", 1.0)
            found[name] = node if ratio == 1.0 else replace(node, speed=node.speed / ratio)
        return replace(self.cluster, nodes=found)

    @cached_property
    def _last(self) -> Node:
        return list(self.cluster.nodes.values())[-1]

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Of the stages of the grid."""
        return even_bounds([layer.total_s for layer in self.workload.layers], self.num_stages)

    def running(self, plan: Plan, holds: Mapping[str, frozenset[UnitName]] | None = None) -> Running:
        """``plan`` with every node holding what it needs, or what of it stands in ``holds``."""
        units = units_by_layers(plan.placement.values(), self.workload)
        return Running(plan, {
            node: units[layers] if holds is None else holds.get(node, frozenset()) & units[layers]
            for node, layers in plan.placement.items()
        })

    def grid(self, nodes: Sequence[str]) -> Plan | None:
        """As many whole pipelines as there are nodes and micro-batches for, the rest idle; None: there is not one."""
        count = min(len(nodes) // self.num_stages, self.workload.num_micro_batches)
        if count == 0:
            return None
        routes = [
            tuple(Hop(NodeId(nodes[line * self.num_stages + stage]), *self.bounds[stage]) for stage in range(self.num_stages))
            for line in range(count)
        ]
        placement = {NodeId(node): tuple[int, ...]() for node in nodes}
        placement.update({hop.node: tuple(hop.layers) for route in routes for hop in route})
        shares = [self.workload.num_micro_batches // count + (line < self.workload.num_micro_batches % count)
                  for line in range(count)]
        return Plan(
            num_layers=self.workload.num_layers, placement=placement, order=self.order,
            routes=tuple(routes[line] for line in interleaved(shares)),
        )

    def fastest(self, nodes: Sequence[str]) -> Plan | None:
        """The fastest layout that the planner finds, or the grid if that is no slower; None: nothing fits."""
        cluster = self.cluster_of(nodes)
        found = best_priced(tuple(cluster.nodes), self.workload, cluster, self.config, order=self.order)
        grid = self.grid(nodes)
        if grid is None or not found:
            return found[0].plan if found else grid
        is_slower = found[0].step_s < self.step_s(grid) * (1 - 1e-9)
        return found[0].plan if is_slower else grid

    def step_s(self, plan: Plan, factor: Callable[[str], float] = lambda node: 1.0) -> float:
        """By the planner's cost model, if each node takes ``factor(node)`` times as long."""
        seen = {f"node {node}": factor(node) for node in plan.placement}
        return priced(plan, self.workload, self.cluster_of(plan.placement, seen)).step_s


@dataclass(frozen=True)
class Planned:
    """``policy`` of the planner plays."""

    name: str
    policy: PolicyName
    ground: Ground
    starts_on_grid: bool = False
    reserve: int = 0
    """Nodes kept idle at the start."""
    knows_gap: bool = False
    """Told the true mean gap; otherwise it estimates it from its own history."""
    is_free: bool = False
    is_redundant: bool = False
    """Begins with everything held twice. Who shadows somebody computes."""
    improves: bool = False
    """Whether a better schedule is looked for as soon as a plan runs, and found at once."""
    rethinks: bool = False
    loses_work: bool = False
    ways: frozenset[PlannedWay] = ALL_WAYS
    passes_on: bool = True
    """Whether rerouting may cut work finer than the stages that are there."""
    allows: Callable[[Asked, Candidate], bool] | None = None
    """What it may do of what is proposed, for studies of what a mechanism is worth; None: everything."""
    _steps: dict[object, tuple[Plan, float]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def batch(self) -> int:
        return self.ground.workload.batch

    def start(self, nodes: tuple[str, ...]) -> Running | None:
        reserve = self.reserve if len(nodes) - self.reserve >= self.ground.num_stages else 0
        used, idle = nodes[:len(nodes) - reserve], nodes[len(nodes) - reserve:]
        plan = self.ground.grid(used) if self.starts_on_grid else self.ground.fastest(used)
        if plan is None:
            return None
        if self.is_redundant:
            plan = with_redundancy(plan, shadows=True)
        placement = {**plan.placement, **{NodeId(node): () for node in idle}}
        return self.ground.running(replace(plan, placement=placement))

    def bare(self, nodes: tuple[str, ...]) -> Running:
        """As if a grid of others had run before."""
        gone = self.ground.grid([f"n{_GONE + number}" for number in range(self.ground.num_stages)])
        assert gone is not None, "one pipeline is a grid"
        return Running(gone, dict.fromkeys(nodes, frozenset[UnitName]()))

    def step_s(self, layout: Running) -> float:
        return self.true_step_s(layout, lambda node: 1.0)

    def true_step_s(self, layout: Running, factor: Callable[[str], float]) -> float:
        is_broken = any(node not in layout.holds for node in layout.plan.placement)
        return math.inf if is_broken else self._plan_s(layout.plan, factor)

    def _plan_s(self, plan: Plan, factor: Callable[[str], float]) -> float:
        """The last few are remembered: the world asks for the same again and again."""
        key = (id(plan), tuple(map(factor, plan.placement)))
        if key not in self._steps:
            if len(self._steps) == _REMEMBERED:
                del self._steps[next(iter(self._steps))]
            self._steps[key] = (plan, self._improved_s(plan) if self.improves else self.ground.step_s(plan, factor))
        return self._steps[key][1]

    def _improved_s(self, plan: Plan) -> float:
        ground = self.ground
        found = refined(plan, ground.workload, ground.cluster_of(plan.placement), ground.config.worker_memory_bytes)
        better = [each.answer.step_s for each in found if each is not None]
        return better[-1] if better else ground.step_s(plan)

    def pace_of_a_node(self, num_nodes: int) -> float:
        plan = self.ground.grid([f"n{number}" for number in range(num_nodes)])
        assert plan is not None, "a study begins with at least one pipeline"
        return self.batch / self.ground.step_s(plan) / (len(plan.nodes) - len(plan.spares))

    def react(self, situation: Situation[Running]) -> Option[Running]:
        if not situation.layout.nodes:
            return Option(policy="wait", way="wait", target=situation.layout, step_s=math.inf)
        asked = self._asked(situation)
        try:
            candidates, chosen = decide(asked) if self.allows is None else self._decide(asked, self.allows)
        except InfeasibleError:
            return Option(policy="wait", way="wait", target=situation.layout, step_s=math.inf)
        return self._option(candidates[chosen], asked, situation)

    def _decide(self, asked: Asked, allows: Callable[[Asked, Candidate], bool]) -> tuple[list[Candidate], int]:
        found = propose(asked)
        if not any(each.feasible and allows(asked, each) for each in found):
            found += restore(asked)
        left = [each if each.feasible and allows(asked, each) else replace(each, plan=None) for each in found]
        return left, choose(asked, left)

    def _asked(self, situation: Situation[Running]) -> Asked:
        layout, seen = situation.layout, situation.seen
        move_ratio = 0.0 if self.is_free else self.ground.move_ratio * _mean_ratio(seen)
        step_s = self._plan_s(layout.plan, lambda node: 1.0)
        return Asked(
            cluster=self.ground.cluster_of(layout.nodes, seen), workload=self.ground.workload, plan=layout.plan,
            holds={NodeId(node): units for node, units in layout.holds.items()},
            lost=tuple(node for node in layout.plan.placement if node not in layout.holds),
            joined=tuple(NodeId(node) for node in layout.holds if node not in layout.plan.placement),
            step=math.ceil(situation.unsaved_steps), checkpoint=LOADED_FROM,
            gap_s=situation.gap_s if self.knows_gap else situation.seen_gap_s,
            config=replace(self.ground.config, policy=self.policy), residuals=_residuals(seen), move_ratio=move_ratio,
            redo_steps=(situation.costs.checkpoint_every_s / 2 + situation.costs.restore_s) / step_s,
            switch_s=situation.costs.exposed_s, ways=self.ways,
            shadows=True, passes_on=self.passes_on,
        )

    def _option(self, taken: Candidate, asked: Asked, situation: Situation[Running]) -> Option[Running]:
        """What was decided, with times as the bare model has them: what is true of them is the world's."""
        plan, way = taken.plan, _WAYS[taken.way]
        assert plan is not None, "only a feasible candidate can be chosen"
        ratio = 1.0 if self.is_free else _mean_ratio(situation.seen)
        pause_s = min(asked.switch_s, taken.stall_s)
        target = self.ground.running(plan if taken.later is None else taken.later)
        option = Option(policy=taken.policy, way=way, target=target, step_s=taken.step_s, pause_s=pause_s)
        if way == "now":
            return replace(option, meanwhile=target, pause_s=taken.stall_s)
        if way == "restore":
            redone_s = max(0, asked.step - (taken.restore_step or 0)) * taken.step_s
            return replace(option, stall_s=taken.stall_s - redone_s - pause_s)
        moves, _ = moves_for(target.plan, asked.holds, asked.workload, cluster=asked.cluster)
        option = replace(option, moves=target.kind if moves else "")
        if way == "blocking":
            stall_s = (taken.stall_s - pause_s) / ratio
            return replace(option, stall_s=stall_s, arrivals=_arrivals(moves, asked.cluster, stall_s * ratio, ratio))
        now = self._beside(plan, target, asked)
        return replace(
            option, meanwhile=now, pause_s=taken.stall_s, copy_s=taken.copy_s / ratio, stall_s=taken.later_stall_s,
            step_s=taken.later_step_s, now_s=taken.step_s, arrivals=_arrivals(moves, asked.cluster, taken.copy_s, ratio),
        )

    def _beside(self, plan: Plan, later: Running, asked: Asked) -> Running:
        """``plan`` at work, with what nodes hold already of what they will need."""
        now = self.ground.running(plan)
        return Running(plan, {
            node: units | (asked.holds.get(NodeId(node), frozenset()) & later.holds.get(node, frozenset()))
            for node, units in now.holds.items()
        })

    def kept(self, option: Option[Running], copied_s: float, layout: Running) -> Running:
        holds = dict(layout.holds)
        for at_s, node, unit in option.arrivals:
            if at_s <= copied_s and node in holds:
                holds[node] = holds[node] | {UnitName(unit)}
        return Running(layout.plan, holds)


_WAYS: Mapping[PlannedWay, Way] = {
    "start": "now", "now": "now", "blocking": "blocking", "behind": "behind", "wait": "now", "restore": "restore",
}


def _mean_ratio(seen: Mapping[str, float]) -> float:
    """Measured by predicted of moves so far: a factor, so the mean is that of logarithms."""
    found = [math.log(ratio) for name, ratio in seen.items() if name.startswith("move ")]
    return math.exp(fmean(found)) if found else 1.0


def _residuals(seen: Mapping[str, float]) -> Residuals:
    """What a run's calibration makes of the same records: kinds of plans never run take the ratio common to all."""
    calibration = Calibration()
    for name, ratio in seen.items():
        if name.startswith("step ") and ratio != 1.0:
            calibration = calibration.after(ratio, 1.0, _FAMILIES[name.removeprefix("step ")])
    if not calibration.count:
        return {}
    return {family: calibration.seconds(1.0, family) for family in _FAMILIES.values()}


def _arrivals(moves: Sequence[Move], cluster: Cluster, copy_s: float, ratio: float) -> tuple[tuple[float, str, str], ...]:
    """When each unit is there, as the bare model has it: a node receives one after the other, the busiest until ``copy_s``."""
    by_target: dict[NodeId, list[Move]] = {}
    for move in moves:
        by_target.setdefault(move.target, []).append(move)
    ends = {
        target: list(accumulate(cluster.link_between(move.source, target).seconds(move.num_bytes) for move in received))
        for target, received in by_target.items()
    }
    busiest_s = max((each[-1] for each in ends.values()), default=0.0)
    stretch = copy_s / busiest_s / ratio if busiest_s else 0.0
    return tuple(
        (end_s * stretch, target, move.unit)
        for target, received in by_target.items() for end_s, move in zip(ends[target], received, strict=True)
    )
