"""What each mechanism adds, one after the other: from plain rerouting to all of it.

    python benchmarks/ablation_ladder.py --out benchmarks/results/ablation-ladder    # writes .md and .png, about two minutes
    python benchmarks/ablation_ladder.py --quick --json

Ten losses of 32 nodes as in ``trace_study.py``. A rung has everything below it:

R0   rerouting as published: fused schedules, lost work added up stage by stage (equation 13)
R1   two more activation slots: the planner's schedules, found by pretending to run them
R2   backward in two pieces, enough slots
R3   an optimizer that waits for nobody
+N   normalization: healthy nodes change roles, always when a step gets shorter
+Dy  re-partition, always, blocking
Eq. 8      one of reroute, normalize and re-partition by Chameleon's rule, told the true mean gap
hazard     by the expected steps with exponential gaps, the rate from the run's own history
two-phase  moves may go on behind training
asymmetric rerouting on any layout, layer by layer
look-ahead over the next loss, among layouts that are equally fast

Numbers are samples by those of R0, over all seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trace_study import Setting, table

from everstep.cluster import Cluster, Link, Node
from everstep.plan import Hop, Order, Plan
from everstep.planner.cost import step_seconds
from everstep.planner.reroute import Router
from everstep.quantities import NodeId, UnitName
from everstep.simulator.study import picture
from everstep.simulator.study.compare import by_forms, compare
from everstep.simulator.study.hazards import draw
from everstep.simulator.study.layout import Bounds
from everstep.simulator.study.player import Costs
from everstep.simulator.study.rules import Rules, named
from everstep.simulator.study.times import FAMILIES, Family, Job, Times, equal_layers
from everstep.trace import Trace
from everstep.workload import LayerCost, Unit, Workload

SETTINGS = (
    Setting(8, 60.0, 10.0), Setting(8, 600.0, 120.0), Setting(32, 60.0, 10.0), Setting(32, 600.0, 120.0),
)
EXTRA_SLOTS = 2


class SlotTimes(Times):
    """Fused, with more activation slots: rerouted grids by the planner's own schedules, where these are faster."""

    def _grid_s(self, bounds: Bounds, num_pipelines: int, holes: Sequence[int]) -> float:
        plain_s = super()._grid_s(bounds, num_pipelines, holes)
        return min(plain_s, scheduled_s(self.job, bounds, num_pipelines, holes)) if any(holes) else plain_s


def scheduled_s(job: Job, bounds: Bounds, num_pipelines: int, holes: Sequence[int]) -> float:
    """A step of the planner's fused schedule on a grid whose holes are each in another pipeline, as far as they go."""
    lines = [
        tuple(Hop(NodeId(f"n{line * len(bounds) + stage}"), first, end) for stage, (first, end) in enumerate(bounds))
        for line in range(num_pipelines)
    ]
    gone: set[NodeId] = set()
    line = 0
    for stage, missing in enumerate(holes):
        for _ in range(missing):
            gone.add(lines[line % num_pipelines][stage].node)
            line += 1
    alive = {hop.node: tuple(hop.layers) for hops in lines for hop in hops if hop.node not in gone}
    names = [f"layer{index}" for index in range(job.num_layers)]
    workload = Workload(
        layers=tuple(
            LayerCost(name=name, forward_s=ahead, backward_input_s=(work - ahead) / 2, backward_weight_s=(work - ahead) / 2)
            for name, ahead, work in zip(names, job.forward_s, job.work_s, strict=True)
        ),
        units={
            UnitName(name): Unit(name=UnitName(name), layers=(index,), parameter_bytes=0, state_bytes=0)
            for index, name in enumerate(names)
        },
        num_micro_batches=job.num_micro_batches, measured=True,
    )
    router = Router({node: frozenset(layers) for node, layers in alive.items()}, workload, dict.fromkeys(alive, 1.0))
    routes = router.routes([lines[number % num_pipelines] for number in range(job.num_micro_batches)])
    if routes is None:
        return float("inf")
    plan = Plan(num_layers=job.num_layers, placement=alive, routes=routes, order=Order(extra_slots=EXTRA_SLOTS))
    cluster = Cluster(nodes={node: Node(node_id=node) for node in alive}, link=Link(alpha_s=0.0, bytes_per_s=1e15))
    return step_seconds(plan, workload, cluster)


def rungs() -> list[tuple[str, Rules, bool]]:
    """Name, rules, and whether extra slots are what it is about."""
    reroute, auto = named("reroute"), named("auto")
    rule = Rules(
        name="Eq. 8", family="staggered", reroute="grid", moves=("normalize", "repartition"), score="equation 8",
        knows_gap=True,
    )
    hazard = replace(rule, score="value", knows_gap=False)
    two_phase = replace(hazard, ways=("blocking", "behind"))
    asymmetric = replace(auto, moves=tuple(move for move in auto.moves if move != "sturdy"), look_ahead=False)
    return [
        ("R0", replace(reroute, family="fused"), False), ("R1", replace(reroute, family="fused"), True),
        ("R2", replace(reroute, family="split"), False), ("R3", reroute, False), ("+N", named("normalize"), False),
        ("+Dy", named("repartition"), False), ("Eq. 8", rule, False), ("hazard", hazard, False),
        ("two-phase", two_phase, False), ("asymmetric", asymmetric, False), ("look-ahead", auto, False),
    ]


def ladder(setting: Setting, seeds: int) -> dict[str, float]:
    """Samples by rung, by those of R0."""
    traces: list[Trace] = [
        draw("exponential", num_nodes=32, num_losses=10, gap_s=setting.gap_s, seed=seed).from_first_change()
        for seed in range(seeds)
    ]
    job = equal_layers(micro_batches=setting.micro_batches)
    times: Mapping[Family, Times] = {family: Times(job, family) for family in FAMILIES}
    with_slots = {**times, "fused": SlotTimes(job, "fused")}
    found = {}
    for name, rules, has_slots in rungs():
        report = compare(
            traces, by_forms([replace(rules, name=name)], with_slots if has_slots else times), Costs(move_s=setting.move_s),
            gap_s=setting.gap_s, num_nodes=32,
        )
        found[name] = report.rows[name].samples
    return {name: samples / found["R0"] for name, samples in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="one setting, two seeds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="write a table and a picture here, with .md and .png added")
    options = parser.parse_args()
    seeds, chosen = (2, SETTINGS[:1]) if options.quick else (options.seeds, SETTINGS)
    columns = {
        f"M={s.micro_batches}, gap {s.gap_s / 60:.0f} min, τ {s.move_s:.0f} s": ladder(s, seeds) for s in chosen
    }
    names = list(next(iter(columns.values())))
    rows = [[name, *(f"{column[name]:.3f}" for column in columns.values())] for name in names]
    text = table(["rung", *columns], rows)
    if options.out:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
        options.out.with_suffix(".md").write_text(
            f"# What each mechanism adds\n\n- Command: `python benchmarks/ablation_ladder.py --seeds {seeds}`\n"
            f"- Commit: {commit.strip()}\n- Pretend time: no figure depends on the machine. {seeds} seeds.\n"
            "  Samples by those of R0; what the rungs are stands at the top of the script.\n\n"
            f"{text}\n\n![as bars]({options.out.stem}.png)\n"
        )
        picture.ladder(columns, "samples by those of R0", options.out.with_suffix(".png"))
    print(json.dumps(columns, indent=2, ensure_ascii=False) if options.json else text)


if __name__ == "__main__":
    main()
