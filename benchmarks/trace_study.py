"""Every recovery policy against drawn losses and recorded traces, on pretend time.

    python benchmarks/trace_study.py --out benchmarks/results/trace-study.md         # about ten minutes of one core
    python benchmarks/trace_study.py --quick --json                                  # seconds: shows that it runs

Grid of 8 pipelines by 4 stages, 32 equal layers (F = 1, B = 2), a fused step without failures of 10 s, M micro-batches a
pipeline. What the model counts and what it leaves out: docs/simulate.md. Losses: ten of 32 nodes, exponential gaps, the same
victims for every policy; a run begins with the first loss and ends a gap after the tenth. Numbers are samples of ``auto`` by
samples of the other over all seeds, unless they say otherwise. A figure that misses its target has a ✗.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from everstep.catalog.trace_files import SHIPPED, load_trace
from everstep.simulator.study.compare import Report, by_forms, compare, placed_anew, singles_of
from everstep.simulator.study.hazards import draw
from everstep.simulator.study.player import Costs
from everstep.simulator.study.rules import Rules, named
from everstep.simulator.study.times import FAMILIES, Family, Times, equal_layers
from everstep.simulator.study.world import Truth

GAPS_S = (60.0, 600.0, 3600.0)
MOVES_S = (2.0, 10.0, 30.0, 120.0)
MICRO_BATCHES = (8, 32)
SAME = ("chameleon", "recycle", "oobleck", "plain-reroute", "torchft", "parcae", "bamboo", "varuna")
PUBLISHED = ("oobleck-published", "reroute-published", "chameleon-published")
HEAD = {
    "chameleon": "Cham.", "recycle": "ReCycle", "oobleck": "Oobleck", "plain-reroute": "reroute",
    "oobleck-published": "F Oobl.", "reroute-published": "F Eq. 13", "chameleon-published": "F Cham.",
}


@dataclass(frozen=True)
class Setting:
    micro_batches: int
    gap_s: float
    move_s: float

    @property
    def share(self) -> float:
        return self.move_s / self.gap_s

    @property
    def cells(self) -> list[str]:
        return [str(self.micro_batches), _time(self.gap_s), _time(self.move_s), f"{self.share:.3f}"]

    def target(self, against: str) -> float:
        """The least ratio that is good: what must hold in this setting."""
        is_short = self.share <= 0.5
        two_p = self.micro_batches == 8
        return {
            "chameleon": 1.05 if 0.1 <= self.share <= 0.5 else 1.0,
            "recycle": (1.05 if two_p else 1.04) if is_short else 1.0,
            "oobleck": 0.96 * math.exp(self.share) if is_short else 1.0,
            "plain-reroute": 1.08 if is_short else 1.0,
            "oobleck-published": 1.25 if two_p else 1.06,
            "reroute-published": 1.36, "chameleon-published": 1.25 if two_p else 1.0,
        }.get(against, 1.0)


def settings(quick: bool) -> list[Setting]:
    return [
        Setting(micro_batches, gap_s, move_s)
        for micro_batches in MICRO_BATCHES[: 1 if quick else 2] for gap_s in GAPS_S[: 1 if quick else 3]
        for move_s in (MOVES_S[1:2] if quick else MOVES_S)
    ]


class Study:
    """Tables for one family of schedules; step times are worked out once for all of them."""

    def __init__(self, family: Family, seeds: int, slack: float = 0.0, num_layers: int = 32) -> None:
        self.family, self.seeds = family, seeds
        self.slack, self.num_layers = slack, num_layers
        self._times: dict[tuple[int, int], dict[Family, Times]] = {}

    def times(self, micro_batches: int, pipelines: int = 8) -> dict[Family, Times]:
        key = (micro_batches, pipelines)
        if key not in self._times:
            # Of few pipelines the step is the same, so that a grid of another size is the same job on other nodes.
            job = equal_layers(num_layers=self.num_layers, micro_batches=micro_batches, num_pipelines=pipelines)
            self._times[key] = {family: Times(job, family, slack=self.slack) for family in FAMILIES}
        return self._times[key]

    def rules(self, names: Sequence[str]) -> list[Rules]:
        return [named(name, self.family) for name in names]

    def losses(
        self, setting: Setting, rules: Sequence[Rules], sigma: float = 0.0, costs: Costs | None = None, singles: bool = True,
    ) -> Report:
        traces = [
            draw("exponential", num_nodes=32, num_losses=10, gap_s=setting.gap_s, seed=seed).from_first_change()
            for seed in range(self.seeds)
        ]
        times = self.times(setting.micro_batches)
        return compare(
            traces, by_forms(rules, times), costs or Costs(move_s=setting.move_s), num_nodes=32, gap_s=setting.gap_s,
            singles=by_forms(singles_of(self.family), times) if singles else (), truth_of=_truth(sigma),
        )

    def recorded(self, name: str, micro_batches: int, move_s: float, placements: int, sigma: float = 0.0) -> Report:
        trace = load_trace(name).beginning_with(4)
        nodes = max(32, trace.most_nodes // 4 * 4)
        times = self.times(micro_batches, nodes // 4)
        return compare(
            [placed_anew(trace, seed) for seed in range(placements)],
            by_forms(self.rules(("auto", "free", *SAME, *PUBLISHED)), times), Costs(move_s=move_s),
            singles=by_forms(singles_of(self.family), times), num_nodes=nodes, truth_of=_truth(sigma),
        )


def _truth(sigma: float) -> Callable[[int], Truth]:
    return lambda seed: Truth(sigma, seed)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.0f} h"


def _marked(value: float, target: float) -> str:
    return f"{value:.3f}" + (" ✗" if value < target - 5e-4 else "")


def _regret(value: float, limit: float) -> str:
    return f"{value * 100:+.2f}" + (" ✗" if value > limit + 5e-5 else "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def losses_table(study: Study, where: Sequence[Setting]) -> str:
    shown = (*SAME, *PUBLISHED)
    rows = []
    for setting in where:
        report = study.losses(setting, study.rules(("auto", "free", *shown)))
        row = report.rows["auto"]
        is_short = setting.share <= 0.5
        rows.append([
            *setting.cells, *(_marked(report.ratio("auto", name), setting.target(name)) for name in shown),
            f"{report.ratio('auto', 'free'):.3f}", f"{row.fse:.3f}", _regret(row.regret, 0.0 if is_short else 1.0),
            _regret(row.worst_regret, 0.02 if is_short else 1.0),
        ])
    return table(
        ["M", "gap", "τ", "τ/gap", *(HEAD.get(name, name) for name in shown), "free", "FSE", "regret %", "worst %"], rows,
    )


def traces_table(study: Study, names: Sequence[str], quick: bool) -> str:
    rows = []
    for name in names:
        for micro_batches in (8,) if quick else MICRO_BATCHES:
            for move_s in MOVES_S[1:2] if quick else MOVES_S:
                placements = 10 if name == "p3" and not quick else 1
                report = study.recorded(name, micro_batches, move_s, placements)
                gap_s = load_trace(name).beginning_with(4).mean_gap_s
                row, is_short = report.rows["auto"], move_s <= gap_s / 2
                free = report.ratio("auto", "free")
                rows.append([
                    name, str(micro_batches), _time(gap_s), _time(move_s),
                    *(_marked(report.ratio("auto", other), 1.0) for other in (*SAME[:6], *PUBLISHED)),
                    _marked(free, 0.98 if name == "p3" and move_s <= 30 else 0.0), f"{row.fse:.3f}",
                    _regret(row.regret, 0.02 if is_short else 1.0), _regret(row.worst_regret, 0.02 if is_short else 1.0),
                ])
    head = ["trace", "M", "gap", "τ", *(HEAD.get(name, name) for name in (*SAME[:6], *PUBLISHED))]
    return table([*head, "free", "FSE", "regret %", "worst %"], rows)


def noise_table(study: Study, where: Sequence[Setting], names: Sequence[str], quick: bool) -> str:
    rows = []
    for sigma in (0.1, 0.3):
        for setting in where:
            row = study.losses(setting, study.rules(("auto",)), sigma).rows["auto"]
            limit = 0.04 if setting.share <= 0.5 else 1.0
            regrets = [_regret(row.regret, limit), _regret(row.worst_regret, limit)]
            rows.append([f"{sigma:.0%}", "ten losses", *setting.cells, *regrets])
        for name in names:
            for move_s in MOVES_S[1:2] if quick else (10.0, 30.0, 120.0):
                row = study.recorded(name, 8, move_s, 1 if quick else 5, sigma).rows["auto"]
                gap_s = load_trace(name).beginning_with(4).mean_gap_s
                limit = 0.04 if move_s <= gap_s / 2 else 1.0
                rows.append([
                    f"{sigma:.0%}", name, "8", _time(gap_s), _time(move_s), f"{move_s / gap_s:.3f}",
                    _regret(row.regret, limit), _regret(row.worst_regret, limit),
                ])
    return table(["errors", "trace", "M", "gap", "τ", "τ/gap", "regret %", "worst %"], rows)


def slack_table(study: Study, where: Sequence[Setting]) -> str:
    """Whether targets still hold where schedules of layer-by-layer rerouting miss their bound."""
    rows = []
    for slack in (0.06, 0.15):
        charged = Study(study.family, study.seeds, slack)
        for setting in where:
            shown = ("chameleon", "recycle", "oobleck", "plain-reroute", "torchft")
            report = charged.losses(setting, charged.rules(("auto", "free", *shown)))
            row = report.rows["auto"]
            is_short = setting.share <= 0.5
            rows.append([
                f"{slack:.0%}", *setting.cells, *(_marked(report.ratio("auto", name), setting.target(name)) for name in shown),
                f"{report.ratio('auto', 'free'):.3f}", _regret(row.regret, 0.0 if is_short else 1.0),
                _regret(row.worst_regret, 0.02 if is_short else 1.0),
            ])
    head = ["charged", "M", "gap", "τ", "τ/gap", "Cham.", "ReCycle", "Oobleck", "reroute", "torchft", "free"]
    return table([*head, "regret %", "worst %"], rows)


def more_table(study: Study, where: Sequence[Setting]) -> str:
    """What would raise it further: samples by those of ``auto``, in percent more."""
    auto = named("auto", study.family)
    plain = replace(auto, moves=tuple(move for move in auto.moves if move != "sturdy"), look_ahead=False)
    finer = Study(study.family, study.seeds, num_layers=64)
    variants: dict[str, Callable[[Setting], Report]] = {
        "without look-ahead over the next loss": lambda setting: study.losses(
            setting, [replace(plain, name="it")], singles=False),
        "starting on the layout that is best after a loss": lambda setting: study.losses(
            setting, [replace(auto, name="it", sturdy_start=True)], singles=False),
        "told the true mean gap": lambda setting: study.losses(
            setting, [replace(auto, name="it", knows_gap=True)], singles=False),
        "keeping the progress of interrupted copies": lambda setting: study.losses(
            setting, [replace(auto, name="it")], singles=False, costs=Costs(move_s=setting.move_s, keep_progress=True)),
        "half-layers as units": lambda setting: finer.losses(setting, [replace(auto, name="it")], singles=False),
        "blocking moves only": lambda setting: study.losses(
            setting, [replace(auto, name="it", ways=("blocking",))], singles=False),
        "dropping broken pipelines instead of rerouting": lambda setting: study.losses(
            setting, [replace(auto, name="it", reroute="drop")], singles=False),
    }
    base = [sum(each.samples for each in study.losses(s, [auto], singles=False).outcomes["auto"]) for s in where]
    rows = [
        [what, *(
            f"{(sum(each.samples for each in played(setting).outcomes['it']) / samples - 1) * 100:+.1f}"
            for setting, samples in zip(where, base, strict=True)
        )]
        for what, played in variants.items()
    ]
    return table(["instead of auto", *(f"M={s.micro_batches}, {_time(s.gap_s)}, τ {_time(s.move_s)}" for s in where)], rows)


def study_text(quick: bool, seeds: int, say: Callable[[str], None]) -> dict[str, str]:
    """All tables by title."""
    everywhere = settings(quick)
    some = [s for s in everywhere if (s.gap_s, s.move_s) in ((60.0, 2.0), (60.0, 10.0), (60.0, 30.0), (600.0, 120.0))]
    # The 400 servers of infinitehbd take eight minutes a setting; the same trace twice says nothing new.
    names = ("p3",) if quick else tuple(name for name in SHIPPED if name not in ("parcae-p3", "infinitehbd"))
    staggered, split = Study("staggered", seeds), Study("split", seeds)
    parts: dict[str, Callable[[], str]] = {
        "Ten losses of 32, staggered schedules": lambda: losses_table(staggered, everywhere),
        "Ten losses of 32, split schedules": lambda: losses_table(split, everywhere),
        "Recorded traces, staggered schedules": lambda: traces_table(staggered, names, quick),
        "A world that is not as predicted": lambda: noise_table(staggered, some, names[:2], quick),
        "Rerouting of other layouts than grids charged with more than its bound": lambda: slack_table(staggered, some),
        "What would raise it further, percent": lambda: more_table(staggered, some),
    }
    found = {}
    for title, part in parts.items():
        began_s = time.monotonic()
        found[title] = part()
        say(f"{title}: {time.monotonic() - began_s:.0f} s\n{found[title]}\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="one setting, two seeds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="write the tables here too")
    options = parser.parse_args()
    seeds = 2 if options.quick else options.seeds
    tables = study_text(options.quick, seeds, lambda words: print(words, file=sys.stderr, flush=True))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    said: dict[str, Any] = {"seeds": seeds, "commit": commit, "tables": tables}
    text = "\n\n".join(f"## {title}\n\n{words}" for title, words in tables.items())
    if options.out:
        options.out.write_text(f"Commit {commit}, {seeds} seeds.\n\n{text}\n")
    print(json.dumps(said, indent=2, ensure_ascii=False) if options.json else text)


if __name__ == "__main__":
    main()
