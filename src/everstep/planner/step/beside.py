"""What nodes do in a step besides computing layers, and what that costs, learnt from what they measure.

A node reports all processor time of its process since its record before (``step``). What is left of it without the times of
layers and updates went into three things that a plan decides how many there are of, so their costs are a straight line
through what all nodes report:

    rest = node_s + message_s · ends of messages + summed_byte_s · bytes summed

Fitted by least squares over nodes and steps, older ones counting less and less, and held near what was measured once on two
cores where a run has not shown otherwise: with one plan alone the three can hardly be told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from everstep.plan import Plan
from everstep.planner.step.parts import grouped
from everstep.planner.step.reductions import reduction_groups
from everstep.quantities import NodeId
from everstep.workload import Beside, Workload

TYPICAL = Beside(node_s=2e-3, message_s=4e-4, summed_byte_s=5e-9)
"""What was measured with small models on two cores."""

KEPT = 0.98
"""What earlier steps still count after one more."""

TRUST = 0.2
"""``TYPICAL`` is believed as much as so many reports of nodes."""

Chores = Mapping[NodeId, tuple[int, float]]
"""By node: ends of messages to and from neighbours, over all micro-batches; and its share of the bytes that groups sum up."""


def chores(plan: Plan, workload: Workload) -> Chores:
    """What each node of ``plan`` has to do besides in a full step. Of a group of n each member handles (n-1)/n of the bytes."""
    ends, summed = dict.fromkeys(plan.placement, 0), dict.fromkeys(plan.placement, 0.0)
    for route, members in grouped(plan.routes).items():
        for index, hop in enumerate(route):
            ends[hop.node] += len(members) * ((index > 0) + (index < len(route) - 1))
    for nodes, num_bytes in reduction_groups(plan, workload).items():
        for node in nodes:
            summed[node] += num_bytes * (len(nodes) - 1) / len(nodes)
    return {node: (ends[node], summed[node]) for node in plan.placement}


@dataclass(frozen=True, slots=True)
class Rest:
    """Sums of a least-squares fit, in units of ``TYPICAL``: products of what was done, and of it with what it took."""

    products: tuple[tuple[float, float, float], ...] = ((0.0, 0.0, 0.0),) * 3
    taken: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def after(self, plan: Plan, workload: Workload, times: Mapping[NodeId, Mapping[str, float]]) -> Rest:
        """With one more full step of ``plan``, as its nodes measured it. Nodes that did not report ``step`` say nothing."""
        todo = chores(plan, workload)
        rows = [
            (1.0 * TYPICAL.node_s, ends * TYPICAL.message_s, summed * TYPICAL.summed_byte_s, rest_s)
            for node, rest_s in _rests(plan, workload, times)
            for ends, summed in (todo[node],)
        ]
        if not rows:
            return self
        table = np.array(rows)
        done, took = table[:, :3], table[:, 3]
        products = KEPT * np.array(self.products) + done.T @ done
        taken = KEPT * np.array(self.taken) + done.T @ took
        return Rest(tuple(map(tuple, products.tolist())), tuple(taken.tolist()))

    def beside(self) -> Beside:
        """The costs that fit best, none of them below zero. Nothing at all where no node has reported what it did."""
        if not self.products[0][0]:
            return Beside()
        typical = np.array([TYPICAL.node_s, 8 * TYPICAL.message_s, 1e6 * TYPICAL.summed_byte_s])
        belief = np.diag(TRUST * typical**2)
        found = np.linalg.solve(np.array(self.products) + belief, np.array(self.taken) + belief @ np.ones(3)).clip(0.0)
        return Beside(
            node_s=float(found[0]) * TYPICAL.node_s, message_s=float(found[1]) * TYPICAL.message_s,
            summed_byte_s=float(found[2]) * TYPICAL.summed_byte_s,
        )


def _rests(
    plan: Plan, workload: Workload, times: Mapping[NodeId, Mapping[str, float]],
) -> Iterable[tuple[NodeId, float]]:
    """For each node that reports it: processor time that went into neither layers nor updates, at least none."""
    layers: dict[NodeId, dict[int, int]] = {node: {} for node in plan.placement}
    for route, members in grouped(plan.routes).items():
        for hop in route:
            for layer in hop.layers:
                layers[hop.node][layer] = layers[hop.node].get(layer, 0) + len(members)
    for node, reported in times.items():
        if "step" not in reported or node not in layers:
            continue
        known_s = sum(seconds for action, seconds in reported.items() if action.startswith("U:"))
        known_s += sum(
            count * reported.get(f"{kind}:{workload.layers[layer].name}", 0.0)
            for layer, count in layers[node].items() for kind in "FBW"
        )
        yield node, max(0.0, reported["step"] - known_s)
