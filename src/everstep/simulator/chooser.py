"""A stand-in for the planner: any valid plan, by chance. What is safe under it does not lean on good choices."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Protocol

from everstep.plan import Hop, Plan, Route, problems
from everstep.protocol.leader import ComputePlan
from everstep.protocol.messages import PlanOrdered
from everstep.quantities import NodeId, UnitName, node_number
from everstep.simulator.model import Model
from everstep.simulator.store import Disk
from everstep.transfer import Load, Move

Holds = Mapping[NodeId, frozenset[UnitName]]


class Chooser(Protocol):
    """What answers the leader's ``ComputePlan``."""

    def __call__(self, request: ComputePlan, token: int) -> tuple[PlanOrdered | None, str]:
        """An order and why; or None and why there is none."""


class RandomChooser:
    """Reroutes over what is held, or cuts anew and moves; restores when a unit has no holder."""

    def __init__(self, model: Model, disk: Disk, chance: random.Random) -> None:
        self._model, self._disk, self._random = model, disk, chance

    def __call__(self, request: ComputePlan, token: int) -> tuple[PlanOrdered | None, str]:
        resolution = request.resolution
        held: frozenset[UnitName] = frozenset().union(*resolution.holds.values())
        if resolution.step is None or len(held) < len(self._model.units):
            return self._restored(request, token), "restore"
        plan = self._rerouted(resolution.holds) if self._random.random() < 0.6 else None
        reason = "reroute" if plan else "repartition"
        plan = plan or self._cut_anew(resolution.holds)
        _check(plan, request, self._model)
        return PlanOrdered(
            view=request.view.number, token=token, step=resolution.step, attempt=resolution.attempt, plan=plan,
            union=resolution.union, moves=self._moves(plan, resolution.holds), rollbacks=request.rollbacks,
        ), reason

    def _restored(self, request: ComputePlan, token: int) -> PlanOrdered:
        plan = self._cut_anew(request.resolution.holds)
        _check(plan, request, self._model)
        newest = self._disk.newest()
        loads = tuple(Load(unit, node) for node in plan.nodes for unit in self._model.units_of(plan.placement[node]))
        return PlanOrdered(
            view=request.view.number, token=token, step=newest or 0, attempt=request.resolution.attempt, plan=plan, union=None,
            moves=(), loads=loads, restore="initial" if newest is None else str(newest), rollbacks=request.rollbacks,
        )

    def _rerouted(self, holds: Holds) -> Plan | None:
        """Everybody keeps what they hold; each micro-batch finds a way of its own. None: some layer is in pieces."""
        placement = {
            node: tuple(
                layer for layer in range(self._model.num_layers) if units.issuperset(self._model.units_of([layer]))
            )
            for node, units in holds.items()
        }
        routes = tuple(self._way(placement) for _ in range(self._model.micro_batches))
        if not all(routes):
            return None
        return Plan(num_layers=self._model.num_layers, placement=placement, routes=routes)

    def _way(self, placement: Mapping[NodeId, tuple[int, ...]]) -> Route:
        for _ in range(5):
            route: list[Hop] = []
            layer = 0
            while layer < self._model.num_layers:
                visited = {hop.node for hop in route}
                able = [node for node in sorted(placement) if layer in placement[node] and node not in visited]
                if not able:
                    break
                node = self._random.choice(able)
                run = next(end for end in range(layer + 1, self._model.num_layers + 1) if end not in placement[node])
                end = run if self._random.random() < 0.8 else self._random.randint(layer + 1, run)
                route.append(Hop(node, layer, end))
                layer = end
            else:
                return tuple(route)
        return ()

    def _cut_anew(self, holds: Holds) -> Plan:
        """Pipelines of random lengths over the nodes in random order; who is left over is a spare."""
        nodes = sorted(holds, key=node_number)
        self._random.shuffle(nodes)
        pipelines: list[Route] = []
        while nodes and (not pipelines or self._random.random() < 0.85):
            length = self._random.randint(1, min(len(nodes), self._model.num_layers, 4))
            stages, nodes = nodes[:length], nodes[length:]
            inner = sorted(self._random.sample(range(1, self._model.num_layers), length - 1))
            bounds = [0, *inner, self._model.num_layers]
            pipelines.append(tuple(Hop(n, bounds[k], bounds[k + 1]) for k, n in enumerate(stages)))
        placement: dict[NodeId, tuple[int, ...]] = dict.fromkeys(sorted(holds, key=node_number), ())
        placement |= {hop.node: tuple(hop.layers) for route in pipelines for hop in route}
        routes = tuple(self._random.choice(pipelines) for _ in range(self._model.micro_batches))
        return Plan(num_layers=self._model.num_layers, placement=placement, routes=routes)

    def _moves(self, plan: Plan, holds: Holds) -> tuple[Move, ...]:
        return tuple(
            Move(unit, self._random.choice([source for source in sorted(holds) if unit in holds[source]]), node)
            for node in plan.nodes
            for unit in self._model.units_of(plan.placement[node])
            if unit not in holds[node]
        )


def _check(plan: Plan, request: ComputePlan, model: Model) -> None:
    found = problems(plan, request.view, model.num_layers)
    assert not found, f"not a plan for view {request.view.number}: {'; '.join(found)}"
