"""Every way in which one node, or two at once, can go while a step is being committed: eight nodes, 1,296 cases.

Two pipelines of four stages commit a step in a tree of eight. A moment is before or after one of the seven records and
seven unions is sent, or inside one of the eight applications: 36. Who goes at that moment: one of eight, or one of 28
pairs. Whatever the case, the survivors end with the same state and the step is committed once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, combinations

import pytest

from everstep.plan import Hop, Plan
from everstep.protocol.leader import ComputePlan
from everstep.protocol.messages import PlanOrdered
from everstep.quantities import NodeId, UnitName
from everstep.simulator.chooser import RandomChooser
from everstep.simulator.kernel import Died
from everstep.simulator.model import Model
from everstep.simulator.node import Applied
from everstep.simulator.store import Disk
from everstep.simulator.world import Scenario, World
from everstep.transfer import Load

NODES = tuple(NodeId(f"n{number}") for number in range(8))
STEP = 1
MOMENTS = (("record to send", 7), ("record sent", 7), ("union to send", 7), ("union sent", 7), ("applying", 8))
VICTIMS = tuple(chain(combinations(NODES, 1), combinations(NODES, 2)))
MODEL = Model(
    num_layers=4, units={UnitName(f"u{layer}"): (layer,) for layer in range(4)},
    chunks={UnitName(f"u{layer}"): 1 for layer in range(4)}, micro_batches=2, clip_norm=0.1,
)
PIPELINES = tuple(tuple(Hop(NODES[4 * p + stage], stage, stage + 1) for stage in range(4)) for p in range(2))


class TwoPipelinesFirst(RandomChooser):
    """Two pipelines of four stages to begin with, then any plan."""

    def __init__(self, model: Model, disk: Disk, chance: random.Random) -> None:
        super().__init__(model, disk, chance)
        self._started = False

    def __call__(self, request: ComputePlan, token: int) -> tuple[PlanOrdered | None, str]:
        if self._started:
            return super().__call__(request, token)
        self._started = True
        placement = {hop.node: tuple(hop.layers) for route in PIPELINES for hop in route}
        plan = Plan(num_layers=4, placement=placement, routes=PIPELINES)
        loads = tuple(Load(unit, node) for node in NODES for unit in MODEL.units_of(placement[node]))
        return PlanOrdered(
            view=request.view.number, token=token, step=0, attempt=0, plan=plan, union=None, moves=(), loads=loads,
            restore="initial",
        ), "start"


class CommitWorld(World):
    """Ends ``victims`` when ``point`` is passed for the ``nth`` time in step ``STEP``."""

    def __init__(self, point: str, nth: int, victims: tuple[NodeId, ...]) -> None:
        super().__init__(
            Scenario(seed=nth, num_nodes=len(NODES), num_steps=STEP + 2, model=MODEL, faults=(), checkpoint_every=1),
            choose=TwoPipelinesFirst,
        )
        self._target, self._nth, self._victims = point, nth, victims
        self.hit = False

    def point(self, node: NodeId, name: str) -> None:
        if self.hit or name != self._target or self.nodes[node].applied != STEP:
            return
        self._passed[name] += 1
        if self._passed[name] <= self._nth:
            return
        self.hit = True
        for victim in self._victims:
            self._kill(victim, f"at {name!r} of {node}")
        if node in self._victims:
            raise Died


def cases() -> Iterator[tuple[str, int, tuple[NodeId, ...]]]:
    return ((point, nth, victims) for point, times in MOMENTS for nth in range(times) for victims in VICTIMS)


def test_there_are_1296_cases() -> None:
    assert len(list(cases())) == 1296


@pytest.mark.parametrize("point", [point for point, _ in MOMENTS])
def test_survivors_agree_and_the_step_is_committed_once(point: str) -> None:
    for case in cases():
        if case[0] != point:
            continue
        world = CommitWorld(*case)
        assert not world.play(), case
        assert world.hit, case
        survivors = [node for node in NODES if node not in case[2]]
        assert all(world.nodes[node].alive and world.nodes[node].applied == STEP + 2 for node in survivors), case
        restored = any(order.restore is not None for order in world.store.plans[1:])
        assert restored <= (len(case[2]) == 2 and abs(NODES.index(case[2][0]) - NODES.index(case[2][1])) == 4), case
        committed = {
            (fact.union.view, fact.union.attempt)
            for fact in world.facts
            if isinstance(fact, Applied) and fact.union.step == STEP and fact.node in survivors
        }
        assert len(committed) == 1 or restored, (case, committed)
