"""In which order a worker acts: as it is told, else as follows from the plan."""

from __future__ import annotations

from dataclasses import replace

from everstep import schedule as schedules
from everstep.plan import Order
from everstep.planner.step.schedules import order_of
from everstep.protocol.codec import decode_to_member, encode
from everstep.protocol.messages import PlanOrdered
from everstep.runtime.session import schedule_of
from tests.unit.planner.worlds import grid_plan

PLAN = grid_plan(1, 3, 6)
ORDER = PlanOrdered(view=1, token=1, step=0, attempt=0, plan=PLAN, union=None, moves=())


def test_without_a_schedule_everybody_works_it_out_from_the_plan() -> None:
    assert schedule_of(ORDER) == order_of(PLAN)


def test_a_schedule_that_comes_with_the_order_is_followed() -> None:
    roomy = order_of(replace(PLAN, order=Order(extra_slots=2)))
    assert roomy != order_of(PLAN) and schedules.problems(roomy, PLAN) == []
    told = {node: " ".join(map(str, actions)) for node, actions in roomy.items()}
    arrived = decode_to_member(encode(PlanOrdered(
        view=1, token=1, step=0, attempt=0, plan=PLAN, union=None, moves=(), schedule=told,
    )))
    assert isinstance(arrived, PlanOrdered) and schedule_of(arrived) == roomy
