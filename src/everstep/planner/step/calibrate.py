"""How far the cost model is off, learnt from steps as they are measured.

A model that leaves something out is wrong by a factor. Most of that factor is common to all plans: it follows the machine,
whose load changes, and is kept as one moving ratio by which all times of the workload are multiplied. The rest goes with the
kind of plan, since what the model leaves out weighs more in one kind than in another, and is kept as a *residual* by plan
family. A step that is off moves the residual of its family first, by less the more steps of that family were seen, and what
then remains moves the common ratio. So a family that was never seen is predicted by the common ratio alone, one that was not
seen for long still follows the machine, and a family's first step does not disturb what is known of the others.

Everything is a value; averages are of logarithms, because errors are factors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from everstep.plan import Plan
from everstep.planner.step.parts import grouped
from everstep.workload import Workload

Shape = Literal["one length", "several lengths", "rerouted"]
"""Whole pipelines, all as long as one another or not; or routes that share nodes."""

Backward = Literal["fused", "split", "staggered"]


@dataclass(frozen=True, slots=True)
class Family:
    """Plans for which the model is taken to be wrong by the same factor. Coarse: a run sees only a handful of plans."""

    shape: Shape
    backward: Backward

    def __str__(self) -> str:
        return f"{self.shape}, {self.backward}"


Residuals = Mapping[Family, float]
"""What predictions for plans of a family are to be multiplied by; absent: 1."""


def family_of(plan: Plan) -> Family:
    """The family that ``plan`` belongs to."""
    order = plan.order
    return Family(_shape(plan), "staggered" if order.staggered else "split" if order.split else "fused")


def residual_of(plan: Plan, residuals: Residuals) -> float:
    """What a prediction for ``plan`` is to be multiplied by."""
    return residuals.get(family_of(plan), 1.0) if residuals else 1.0


def changed(before: Residuals, now: Residuals) -> float:
    """The largest relative change of a family's residual."""
    return max((abs(now.get(f, 1.0) / before.get(f, 1.0) - 1) for f in before.keys() | now.keys()), default=0.0)


def _shape(plan: Plan) -> Shape:
    routes = grouped(plan.routes)
    visits = sum(map(len, routes))
    if visits > len({hop.node for route in routes for hop in route}):
        return "rerouted"
    return "one length" if len(set(map(len, routes))) == 1 else "several lengths"


@dataclass(frozen=True, slots=True)
class Seen:
    """The residual of a family, and from how many steps it was learnt."""

    residual: float = 1.0
    count: int = 0


RATIO_WEIGHT = 0.2
"""Of one step in the common ratio, once there were some."""

RESIDUAL_WEIGHT = 0.02
"""The least of one step in a residual: low, so that a change of the machine's load is not taken for one of the family's."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """measured = predicted · ``ratio`` · residual of the plan's family, where ``predicted`` is what the bare model says."""

    ratio: float = 1.0
    count: int = 0
    families: Mapping[Family, Seen] = field(default_factory=dict)

    def after(self, measured_s: float, predicted_s: float, family: Family) -> Calibration:
        """With one more step of a plan of ``family``. While there is one family only, all is taken to be common."""
        if not (measured_s > 0 and predicted_s > 0):
            return self
        seen = self.families.get(family, Seen())
        error = math.log(measured_s / self.seconds(predicted_s, family))
        others = self.families.keys() - {family}
        here = max(RESIDUAL_WEIGHT, 1 / (seen.count + 1)) if others else 0.0
        common = max(RATIO_WEIGHT, 1 / (self.count + 1)) * (1 - here)
        moved = Seen(seen.residual * math.exp(here * error), seen.count + 1)
        return Calibration(self.ratio * math.exp(common * error), self.count + 1, {**self.families, family: moved})

    def seconds(self, predicted_s: float, family: Family) -> float:
        """What a step of a plan of ``family`` is expected to take where the bare model says ``predicted_s``."""
        return predicted_s * self.ratio * self.families.get(family, Seen()).residual

    @property
    def residuals(self) -> Residuals:
        """By family, those that were seen."""
        return {family: seen.residual for family, seen in self.families.items()}


def calibrated(workload: Workload, calibration: Calibration) -> Workload:
    """``workload`` with all times multiplied by the common ratio, so that predictions follow what was measured."""
    ratio = calibration.ratio
    layers = tuple(
        replace(
            layer, forward_s=layer.forward_s * ratio, backward_input_s=layer.backward_input_s * ratio,
            backward_weight_s=layer.backward_weight_s * ratio, optimizer_s=layer.optimizer_s * ratio,
        )
        for layer in workload.layers
    )
    return replace(workload, layers=layers, fixed_s=workload.fixed_s * ratio, beside=workload.beside.times(ratio))
