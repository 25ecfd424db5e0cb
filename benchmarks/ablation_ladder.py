"""What each mechanism adds, one after the other: from plain rerouting to all of it, with the planner itself in the loop.

    python benchmarks/ablation_ladder.py --out benchmarks/results/ablation-ladder    # writes .md and .png, half an hour
    python benchmarks/ablation_ladder.py --quick --json

Ten losses of 32 nodes as in ``trace_study.py``. A rung has everything below it, up to the line:

R0   rerouting in turn to the peers of a stage, fused 1F1B
R1   two more activation slots
R2   backward in two pieces, enough slots
R3   an optimizer that waits for nobody
+N   normalization: healthy nodes change roles where that is worth more
+Dy  re-partition, always, blocking
Eq. 8       rerouting or Algorithm 1 by Chameleon's rule, told the true mean gap
hazard      all policies by the expected samples with exponential gaps, the rate from the run's own history; rerouting of grids
two-phase   moves may go on behind training
asymmetric  rerouting on any layout
finer       rerouted work is cut finer than the stages that are there
keep progress  what had arrived of a move that is broken off stays
--
look-ahead over the next loss, half-layers as units: each added to all that is above the line

Numbers are samples by those of R0, over all seeds.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trace_study import Setting, costs_of, losses_of, say, table_text, words_of

from everstep.decision import Candidate
from everstep.plan import Order
from everstep.planner.baselines.grids import cuts_of
from everstep.planner.policies.situation import Situation
from everstep.planner.step.calibrate import family_of
from everstep.simulator.study import picture
from everstep.simulator.study.compare import compare
from everstep.simulator.study.planned import ALL_WAYS, Planned
from everstep.simulator.study.player import Costs
from everstep.simulator.study.roster import equal_table

SETTINGS = (
    Setting(8, 60.0, 10.0), Setting(8, 600.0, 120.0), Setting(32, 60.0, 10.0), Setting(32, 600.0, 120.0),
)


def grids_alone(asked: Situation, candidate: Candidate) -> bool:
    """Whether only pipelines that are cut alike are rerouted."""
    is_rerouted = candidate.plan is not None and family_of(candidate.plan).shape == "rerouted"
    return not is_rerouted or cuts_of(asked.plan) is not None


def rungs(setting: Setting) -> list[tuple[str, Planned, Costs]]:
    costs = replace(costs_of(setting.move_s), keep_progress=False)
    table = equal_table(costs, micro_batches=setting.micro_batches)
    finer_units = equal_table(costs, micro_batches=setting.micro_batches, num_layers=64)
    (fused,), (split,) = table.seated(["reroute-published"], "fused"), table.seated(["plain-reroute"], "split")
    plain, normalized, repartition, rule, auto = table.seated(
        ["plain-reroute", "recycle", "repartition", "chameleon", "auto"], "staggered",
    )
    (halves,) = finer_units.seated(["auto"], "staggered")
    hazard = replace(auto, passes_on=False, allows=grids_alone, ways=ALL_WAYS - {"behind"})
    two_phase = replace(hazard, ways=ALL_WAYS)
    foresight = replace(auto, ground=replace(auto.ground, config=replace(auto.ground.config, look_ahead=True)))
    return [
        ("R0", fused, costs), ("R1", replace(fused, ground=replace(fused.ground, order=Order(extra_slots=2))), costs),
        ("R2", split, costs), ("R3", plain, costs), ("+N", normalized, costs), ("+Dy", repartition, costs),
        ("Eq. 8", rule, costs), ("hazard", hazard, costs), ("two-phase", two_phase, costs),
        ("asymmetric", replace(auto, passes_on=False), costs), ("finer", auto, costs),
        ("keep progress", auto, costs_of(setting.move_s)), ("look-ahead", foresight, costs_of(setting.move_s)),
        ("half-layers", halves, costs_of(setting.move_s)),
    ]


def ladder(setting: Setting, seeds: int) -> dict[str, float]:
    """Samples by rung, by those of R0."""
    found = {}
    for name, player, costs in rungs(setting):
        report = compare(
            losses_of(setting.gap_s, seeds), [replace(player, name=name)], costs, gap_s=setting.gap_s, num_nodes=32,
        )
        found[name] = report.rows[name].samples
        say((setting, name, found[name] / found["R0"]))
    return {name: samples / found["R0"] for name, samples in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="one setting, one seed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="write a table and a picture here, with .md and .png added")
    options = parser.parse_args(arguments)
    seeds, chosen = (1, SETTINGS[:1]) if options.quick else (options.seeds, SETTINGS)
    columns = {
        f"M={each.micro_batches}, gap {words_of(each.gap_s)}, τ {words_of(each.move_s)}": ladder(each, seeds) for each in chosen
    }
    names = list(next(iter(columns.values())))
    rows = [[name, *(f"{column[name]:.3f}" for column in columns.values())] for name in names]
    text = table_text(["rung", *columns], rows)
    if options.out:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
        options.out.with_suffix(".md").write_text(
            f"# What each mechanism adds\n\n- Command: `python benchmarks/ablation_ladder.py --seeds {seeds}`\n"
            f"- Commit: {commit.strip()}, Python {platform.python_version()}\n"
            f"- Pretend time: no figure depends on the machine. {seeds} seeds.\n"
            "  Samples by those of R0; what the rungs are stands at the top of the script.\n\n"
            f"{text}\n\n![as bars]({options.out.stem}.png)\n"
        )
        picture.ladder(columns, "samples by those of R0", options.out.with_suffix(".png"))
    print(json.dumps(columns, indent=2, ensure_ascii=False) if options.json else text)


if __name__ == "__main__":
    main()
