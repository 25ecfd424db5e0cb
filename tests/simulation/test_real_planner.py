"""The pretend world under plans of the real planner, with each recovery policy."""

from __future__ import annotations

import random
from typing import get_args

import pytest

from everstep.config import PlannerConfig, Policy, RunConfig
from everstep.controller import ClusterFacts, Controller
from everstep.planner.policies.situation import CheckpointInfo
from everstep.protocol.leader import ComputePlan
from everstep.protocol.messages import PlanOrdered
from everstep.simulator.model import Model, use_name
from everstep.simulator.store import Disk
from everstep.simulator.world import World, random_scenario
from everstep.workload import LayerCost, Unit, Workload


def workload_of(model: Model) -> Workload:
    layers = tuple(
        LayerCost(name=use_name(layer), forward_s=0.001 * (1 + layer % 3), backward_input_s=0.001, backward_weight_s=0.001)
        for layer in range(model.num_layers)
    )
    units = {
        name: Unit(name=name, layers=users, parameter_bytes=1000, state_bytes=3000, gradient_bytes=1000)
        for name, users in model.units.items()
    }
    return Workload(layers=layers, units=units, num_micro_batches=model.micro_batches)


class PlannedFor:
    """Answers the leader with the real controller."""

    def __init__(self, policy: Policy, model: Model, disk: Disk) -> None:
        config = RunConfig(planner=PlannerConfig(policy=policy))
        self._controller = Controller(config, ClusterFacts())
        self._workload, self._disk = workload_of(model), disk

    def __call__(self, request: ComputePlan, token: int) -> tuple[PlanOrdered | None, str]:
        if self._controller.plan is None:
            order, _ = self._controller.start(request.view, self._workload, None, token=token)
            return order, "start"
        newest = self._disk.newest()
        checkpoint = None if newest is None else CheckpointInfo(step=newest, path=str(newest))
        order, _, reason = self._controller.answer(
            request.view, request.resolution, request.lost, request.joined, request.cause, 1.0, token, checkpoint,
            request.rollbacks,
        )
        return order, reason


@pytest.mark.parametrize("policy", get_args(Policy))
def test_with_real_plans_too_training_goes_on_as_if_nothing_had(policy: Policy) -> None:
    def choose(model: Model, disk: Disk, chance: random.Random) -> PlannedFor:
        return PlannedFor(policy, model, disk)

    for seed in range(40):
        world = World(random_scenario(seed), choose=choose)
        assert not world.play(), f"seed {seed}"
