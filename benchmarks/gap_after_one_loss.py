"""What one loss of 32 nodes costs: ``python benchmarks/gap_after_one_loss.py [--write]``.

Thirty-two equal layers (or 64 half-layers), F = B = W, no messages, eight pipelines of four stages; one node of each stage
is lost in turn, and the fastest of rerouting and new layouts is compared with the grid before. No node holds more after the
loss than the fullest node of the grid before it: that is the cap, printed in layers' states (parameters, optimizer state and
gradients of a layer) with an activation of a layer at a twentieth of that.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from everstep.cluster import Cluster, Link, Node
from everstep.config import PlannerConfig
from everstep.plan import Hop, Order, Plan
from everstep.planner.policies.layouts import repartition
from everstep.planner.policies.routes import reroute
from everstep.planner.policies.situation import Situation
from everstep.planner.search import priced
from everstep.quantities import NodeId, UnitName
from everstep.workload import LayerCost, Unit, Workload

STATE, ACTIVATION = 20_000, 1_000
PIPELINES, STAGES, LAYERS = 8, 4, 32


@dataclass(frozen=True, slots=True)
class Gap:
    """Step times before and after, in layer slots, and what was best."""

    before: float
    after: float
    policy: str
    layout: str
    cap: float

    @property
    def percent(self) -> float:
        return (self.after / self.before - 1) * 100


def workload_of(each: int, pieces: int) -> Workload:
    slot = 1.0 / pieces
    layers = tuple(
        LayerCost(name=f"l{k}", forward_s=slot, backward_input_s=slot, backward_weight_s=slot,
                  activation_bytes=ACTIVATION // pieces)
        for k in range(LAYERS * pieces)
    )
    units = {
        UnitName(f"l{k}"): Unit(name=UnitName(f"l{k}"), layers=(k,), parameter_bytes=0, state_bytes=STATE // pieces)
        for k in range(LAYERS * pieces)
    }
    return Workload(layers=layers, units=units, num_micro_batches=PIPELINES * each)


def grid(workload: Workload, order: Order) -> Plan:
    size = workload.num_layers // STAGES
    routes = [
        tuple(Hop(NodeId(f"n{d * STAGES + s}"), s * size, (s + 1) * size) for s in range(STAGES)) for d in range(PIPELINES)
    ]
    placement = {hop.node: tuple(hop.layers) for route in routes for hop in route}
    chosen = tuple(routes[m % PIPELINES] for m in range(workload.num_micro_batches))
    return Plan(num_layers=workload.num_layers, placement=placement, routes=chosen, order=order)


def worst_gap(each: int, pieces: int, order: Order, reference: Order | None = None) -> Gap:
    """Over the stage that loses a node. ``reference``: the order that the grid before is compared in, if another."""
    workload = workload_of(each, pieces)
    link = Link(alpha_s=0.0, bytes_per_s=1e30)
    nodes = {NodeId(f"n{k}"): Node(node_id=NodeId(f"n{k}")) for k in range(PIPELINES * STAGES)}
    free = Cluster(nodes=nodes, link=link)
    plan = grid(workload, order)
    now = priced(plan, workload, free)
    before = priced(grid(workload, reference), workload, free) if reference else now
    capped = Cluster(
        nodes={name: replace(node, memory_bytes=now.peak_bytes) for name, node in nodes.items()}, link=link,
    )
    gaps = []
    for stage in range(STAGES):
        lost = NodeId(f"n{STAGES + stage}")
        after = capped.without(frozenset({lost}))
        situation = Situation(
            cluster=after, workload=workload, plan=plan, lost=(lost,), config=PlannerConfig(),
            holds={node: workload.units_of(frozenset(plan.placement[node])) for node in after.nodes},
        )
        found = [c for c in (*reroute(situation), *repartition(situation)) if c.plan is not None]
        best = min(found, key=lambda candidate: candidate.step_s)
        gaps.append(Gap(before.step_s, best.step_s, best.policy, best.reason or f"stage {stage}", now.peak_bytes / STATE))
    return max(gaps, key=lambda gap: gap.percent)


CASES: tuple[tuple[str, int, int, Order, Order | None, str], ...] = (
    ("split, 1F1B slots", 8, 1, Order(split=True), None, "≤ 7 %"),
    ("split, 1F1B slots", 32, 1, Order(split=True), None, "≤ 5 %"),
    ("split, 4 more slots", 8, 1, Order(split=True, extra_slots=4), None, "≤ 7 %"),
    ("split, 4 more slots", 32, 1, Order(split=True, extra_slots=4), None, "≤ 5 %"),
    ("split, 4 more slots, half-layers", 8, 2, Order(split=True, extra_slots=4), None, "≤ 6 %"),
    ("split, 4 more slots, half-layers", 32, 2, Order(split=True, extra_slots=4), None, ""),
    ("split, 4 more slots, against fused 1F1B", 8, 1, Order(split=True, extra_slots=4), Order(), "≤ 0 %"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines = ["| family | M | cap, layer states | before | after | gap | target | by |", "|---|---|---|---|---|---|---|---|"]
    for words, each, pieces, order, reference, target in CASES:
        gap = worst_gap(each, pieces, order, reference)
        lines.append(
            f"| {words} | {each} | {gap.cap:.2f} | {gap.before:.1f} | {gap.after:.1f} | {gap.percent:.1f} % | {target} "
            f"| {gap.policy} {gap.layout} |"
        )
    print("\n".join(lines))
    if options.write:
        head = "# Gap after one loss of 32\n\n`python benchmarks/gap_after_one_loss.py --write`; computed; worst lost stage.\n"
        folder = Path(__file__).parent / "results"
        (folder / "gap_after_one_loss.md").write_text(f"{head}\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
