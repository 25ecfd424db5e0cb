"""A pretend view store: the two writes that decide something, and a disk with checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.protocol.messages import PlanOrdered
from everstep.quantities import UnitName
from everstep.simulator.model import Model, State
from everstep.view import View


class Store:
    """Views by compare-and-swap, plans written once for the view that is there."""

    def __init__(self, *, write_once: bool = True) -> None:
        self.view: View | None = None
        self.views: list[View] = []
        self.plans: list[PlanOrdered] = []
        self._write_once = write_once

    def swap(self, expected: int, view: View) -> bool:
        """Put ``view`` there if the number is ``expected`` (0: none)."""
        if (self.view.number if self.view else 0) != expected:
            return False
        self.view = view
        self.views.append(view)
        return True

    def plan_of(self, view: int) -> PlanOrdered | None:
        return next((order for order in self.plans if order.view == view), None)

    def write_plan(self, order: PlanOrdered) -> bool:
        """Put ``order`` there if its view is the current one and has none."""
        if self._write_once and (self.view is None or order.view != self.view.number or self.plan_of(order.view)):
            return False
        self.plans.append(order)
        return True


class Disk:
    """Checkpoints, unit by unit; the first one written of a step stays. ``initial`` is always there."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._steps: dict[int, dict[UnitName, State]] = {}

    def write(self, step: int, states: Mapping[UnitName, State]) -> None:
        kept = self._steps.setdefault(step, {})
        for unit, state in states.items():
            kept.setdefault(unit, state)

    def newest(self) -> int | None:
        """The last step of which every unit is there."""
        return max((step for step, states in self._steps.items() if len(states) == len(self._model.units)), default=None)

    def read(self, name: str, unit: UnitName) -> State:
        """``name`` is ``"initial"`` or a step's number."""
        return self._model.initial(unit) if name == "initial" else self._steps[int(name)][unit]
