"""Every recovery policy against drawn losses and recorded traces, on pretend time, with the planner itself in the loop.

    python benchmarks/trace_study.py --out benchmarks/results/trace-study.md          # an hour of one core
    python benchmarks/trace_study.py --part losses-staggered --micro-batches 8        # one table, as the results say which
    python benchmarks/trace_study.py --quick --json                                   # a minute: shows that it runs

Grid of 8 pipelines by 4 stages, 32 equal layers (F = 1, B = 2), a fused step without failures of 10 s, M micro-batches a
pipeline. Under no plan does a node hold more state than one of the grid. At every change the planner is asked as a run asks it;
steps take what its cost model says of the schedule, moves take their bytes over links on which the state of one stage takes
τ/2, any change of plan stands still for a second. See docs/simulate.md.

Losses: ten of 32 nodes, exponential gaps, the same victims for every policy; a run begins with the first loss and ends a gap
after the tenth. Numbers are samples of ``auto`` by samples of the other over all seeds, unless they say otherwise. ✗: misses
its target; (✗): misses it for τ, but not for what the other really stands still after a loss.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from everstep.catalog.trace_files import SHIPPED, load_trace
from everstep.simulator.study.compare import Report, by_forms, compare, placed_anew
from everstep.simulator.study.hazards import draw
from everstep.simulator.study.planned import ALL_WAYS, Planned
from everstep.simulator.study.player import Costs, Player
from everstep.simulator.study.roster import SINGLES, Table, equal_table
from everstep.simulator.study.rules import named
from everstep.simulator.study.times import Family, Times, equal_layers
from everstep.simulator.study.world import Truth
from everstep.trace import Trace

GAPS_S = (60.0, 600.0, 3600.0)
MOVES_S = (2.0, 10.0, 30.0, 120.0)
MICRO_BATCHES = (8, 32)
SAME = ("chameleon", "recycle", "oobleck", "plain-reroute", "torchft", "parcae", "bamboo", "varuna")
PUBLISHED = ("oobleck-published", "reroute-published", "chameleon-published")
EQUATION_13 = "equation 13"
HEAD = {
    "chameleon": "Cham.", "recycle": "ReCycle", "oobleck": "Oobleck", "plain-reroute": "reroute",
    "oobleck-published": "F Oobl.", "reroute-published": "F reroute", "chameleon-published": "F Cham.", EQUATION_13: "F Eq. 13",
}
AT_LOSSES = tuple(name for name in SINGLES if name not in ("heal", "rebalance"))
"""Where nobody joins and nobody is slow, the others do what ``reroute`` does."""


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
        return [str(self.micro_batches), words_of(self.gap_s), words_of(self.move_s), f"{self.share:.3f}"]

    def target(self, against: str, share: float | None = None) -> float:
        """The least ratio that is good: what must hold in this setting. ``share``: instead of τ/gap."""
        share = self.share if share is None else share
        is_short = self.share <= 0.5
        two_p = self.micro_batches == 8
        return {
            "chameleon": 1.05 if 0.1 <= share <= 0.5 else 1.0,
            "recycle": (1.05 if two_p else 1.04) if is_short else 1.0,
            "oobleck": 0.96 * math.exp(share) if is_short else 1.0,
            "plain-reroute": 1.08 if is_short else 1.0,
            "oobleck-published": 1.25 if two_p else 1.06,
            EQUATION_13: 1.36, "chameleon-published": 1.25 if two_p else 1.0,
        }.get(against, 1.0)


def settings(micro_batches: Iterable[int], quick: bool) -> list[Setting]:
    return [
        Setting(each, gap_s, move_s)
        for each in micro_batches for gap_s in GAPS_S[: 1 if quick else 3] for move_s in (MOVES_S[1:2] if quick else MOVES_S)
    ]


def costs_of(move_s: float) -> Costs:
    """What had arrived of a move that is broken off stays. A checkpoint a minute of training: what a lost layer costs is then a
    matter of minutes, not of the whole run."""
    return Costs(move_s=move_s, checkpoint_every_s=60.0, keep_progress=True)


def losses_of(gap_s: float, seeds: int) -> list[Trace]:
    drawn = (draw("exponential", num_nodes=32, num_losses=10, gap_s=gap_s, seed=seed) for seed in range(seeds))
    return [each.from_first_change() for each in drawn]


@cache
def grounds(costs: Costs, micro_batches: int, pipelines: int = 8, num_layers: int = 32) -> Table:
    """A grid of another size is the same job on more nodes, with as many micro-batches a pipeline."""
    return equal_table(costs, micro_batches=micro_batches, num_pipelines=pipelines, num_layers=num_layers)


def played(
    setting: Setting, seeds: int, family: Family, names: Sequence[str], *, singles: Sequence[str] = (), sigma: float = 0.0,
    costs: Costs | None = None, others: Sequence[Player[Any]] = (),
) -> Report:
    costs = costs or costs_of(setting.move_s)
    table = grounds(costs, setting.micro_batches)
    return compare(
        losses_of(setting.gap_s, seeds), [*table.seated(names, family), *others], costs, num_nodes=32, gap_s=setting.gap_s,
        singles=table.seated(singles, family), truth_of=_truth(sigma),
    )


def recorded(
    name: str, micro_batches: int, move_s: float, placements: int, names: Sequence[str], singles: Sequence[str],
    sigma: float = 0.0, piece: int | None = None, family: Family = "staggered",
) -> Report:
    """``piece``: only the first so many changes."""
    trace, nodes = on_its_nodes(name)
    if piece is not None and piece < len(trace.changes):
        trace = replace(trace, changes=trace.changes[:piece], end_s=trace.changes[piece].at_s)
    costs = costs_of(move_s)
    table = grounds(costs, micro_batches, nodes // 4)
    return compare(
        [placed_anew(trace, seed) for seed in range(placements)], table.seated(names, family), costs, num_nodes=nodes,
        singles=table.seated(singles, family), truth_of=_truth(sigma),
    )


def on_its_nodes(name: str) -> tuple[Trace, int]:
    """A trace from when four nodes are there, and the whole pipelines of four that it ever fills; never fewer than eight."""
    trace = load_trace(name).beginning_with(4)
    return trace, max(32, trace.most_nodes // 4 * 4)


def _truth(sigma: float) -> Callable[[int], Truth]:
    return lambda seed: Truth(sigma, seed)


def equation_13(setting: Setting) -> list[Player[Any]]:
    """Rerouting by the published closed form, which no schedule of the planner is as slow as."""
    times = Times(equal_layers(micro_batches=setting.micro_batches), "fused")
    return [*by_forms([replace(named("reroute-published"), name=EQUATION_13)], {"fused": times})]


def words_of(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.0f} h"


def _marked(value: float, target: float, other_target: float | None = None) -> str:
    if value >= target - 5e-4:
        return f"{value:.3f}"
    return f"{value:.3f} {'(✗)' if other_target is not None and value >= other_target - 5e-4 else '✗'}"


def _regret(value: float, limit: float) -> str:
    return f"{value * 100:+.2f}" + (" ✗" if value > limit + 5e-5 else "")


def table_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def losses_table(family: Family, where: Sequence[Setting], seeds: int) -> str:
    shown = (*SAME, *PUBLISHED, EQUATION_13)
    rows = []
    for setting in where:
        report = played(
            setting, seeds, family, ("auto", "free", *SAME, *PUBLISHED), singles=AT_LOSSES, others=equation_13(setting),
        )
        row = report.rows["auto"]
        is_short = setting.share <= 0.5
        stalls_s = {name: report.rows[name].stall_s / 10 for name in shown}
        rows.append([
            *setting.cells,
            *(
                _marked(report.ratio("auto", name), setting.target(name), setting.target(name, stalls_s[name] / setting.gap_s))
                for name in shown
            ),
            f"{report.ratio('auto', 'free'):.3f}", f"{row.fse:.3f}", _regret(row.regret, 0.0 if is_short else 1.0),
            _regret(row.worst_regret, 0.02 if is_short else 1.0),
            f"{stalls_s['oobleck']:.1f}, {stalls_s['chameleon']:.1f}", str(seeds),
        ])
        say(rows[-1])
    return table_text(
        ["M", "gap", "τ", "τ/gap", *(HEAD.get(name, name) for name in shown), "free", "FSE", "regret %", "worst %",
         "stall s", "seeds"], rows,
    )


TIGHT = ("chameleon", "recycle", "oobleck", "oobleck-published", "chameleon-published")
"""Whom ``auto`` is nearest to: of many micro-batches only these are played on recorded traces."""


def traces_table(names: Sequence[str], micro_batches: Sequence[int], orders: int, quick: bool) -> str:
    """p3 for every τ, the others for two; whole traces."""
    rows = []
    shown = (*SAME, *PUBLISHED)
    for name in names:
        gap_s = on_its_nodes(name)[0].mean_gap_s
        for each in micro_batches:
            for move_s in (10.0,) if quick else MOVES_S if name == "p3" else (10.0, 120.0):
                others, singles = (shown, SINGLES) if each == 8 else (TIGHT, IN_ERROR)
                count = orders if name == "p3" and each == 8 else 1
                report = recorded(name, each, move_s, count, ("auto", "free", *others), singles, piece=12 if quick else None)
                row, is_short = report.rows["auto"], move_s <= gap_s / 2
                rows.append([
                    name, str(each), words_of(gap_s), words_of(move_s),
                    *(_marked(report.ratio("auto", other), 1.0) if other in others else "" for other in shown),
                    _marked(report.ratio("auto", "free"), 0.98 if name == "p3" and move_s <= 30 else 0.0), f"{row.fse:.3f}",
                    _regret(row.regret, 0.02 if is_short else 1.0), _regret(row.worst_regret, 0.02 if is_short else 1.0),
                    str(count),
                ])
                say(rows[-1])
    head = ["trace", "M", "gap", "τ", *(HEAD.get(name, name) for name in shown)]
    return table_text([*head, "free", "FSE", "regret %", "worst %", "orders"], rows)


PIECE = 40
"""So many changes, the first, of each recorded trace are played in a world that is not as predicted: every node is another
there, so that every schedule has to be worked out anew."""

IN_ERROR = ("reroute", "grow", "repartition", "two-phase", "shrink", "redundant")
"""Whoever of the single policies could be best somewhere; each is played with the same errors."""


def errors_table(where: Sequence[Setting], names: Sequence[str], micro_batches: Sequence[int], seeds: int, quick: bool) -> str:
    """A world that is not as predicted: nodes, kinds of plans and their moves have errors of their own."""
    rows = []

    def add(sigma: float, what: str, setting: Setting, report: Report) -> None:
        row, limit = report.rows["auto"], 0.04 if setting.share <= 0.5 else 1.0
        rows.append([
            f"{sigma:.0%}", what, *setting.cells, _regret(row.regret, limit), _regret(row.worst_regret, limit),
            str(len(report.outcomes["auto"])),
        ])
        say(rows[-1])

    for sigma in (0.1, 0.3):
        for setting in where:
            add(sigma, "ten losses", setting, played(setting, seeds, "staggered", ("auto",), singles=IN_ERROR, sigma=sigma))
        for name in names:
            for each in micro_batches:
                for move_s in (10.0,) if quick else (10.0, 60.0):
                    setting = Setting(each, on_its_nodes(name)[0].mean_gap_s, move_s)
                    report = recorded(name, each, move_s, 1, ("auto",), IN_ERROR, sigma, piece=10 if quick else PIECE)
                    add(sigma, name, setting, report)
    return table_text(["errors", "trace", "M", "gap", "τ", "τ/gap", "regret %", "worst %", "draws"], rows)


def servers_table(windows: int, quick: bool) -> str:
    """The 400 servers of infinitehbd, in pieces of ten days from all over its year."""
    trace, nodes = on_its_nodes("infinitehbd")
    costs, length_s = costs_of(30.0), (2 if quick else 10) * 86400.0
    table = grounds(costs, 8, nodes // 4)
    rows = []
    for index in range(windows):
        piece = cut(trace, (index + 0.5) / windows * (trace.end_s - length_s), length_s)
        for sigma in (0.0, 0.1, 0.3):
            report = compare(
                [piece], table.seated(("auto", "free"), "staggered"), costs, num_nodes=nodes,
                singles=table.seated(IN_ERROR, "staggered"), truth_of=lambda _, sigma=sigma, index=index: Truth(sigma, index),
            )
            row = report.rows["auto"]
            rows.append([
                str(index + 1), str(len(piece.changes)), f"{sigma:.0%}", f"{report.ratio('auto', 'free'):.4f}",
                f"{row.fse:.4f}", _regret(row.regret, 0.04 if sigma else 0.02),
            ])
            say(rows[-1])
    return table_text(["piece", "changes", "errors", "free", "FSE", "regret %"], rows)


def cut(trace: Trace, start_s: float, length_s: float) -> Trace:
    """What happens in ``length_s`` from ``start_s`` on, with those who are there at its start."""
    alive = dict.fromkeys(trace.nodes)
    changes = []
    for change in trace.changes:
        if change.at_s < start_s:
            alive = dict.fromkeys(node for node in (*alive, *change.joined) if node not in change.lost)
        elif change.at_s < start_s + length_s:
            changes.append(replace(change, at_s=change.at_s - start_s))
    return replace(trace, nodes=tuple(alive), changes=tuple(changes), end_s=length_s)


Variant = Callable[[Setting], tuple[Planned, Costs]]


def more_table(where: Sequence[Setting], seeds: int, searched: int) -> str:
    """What would raise it further: samples by those of ``auto``, in percent more; ``searched``: seeds with local search."""
    def auto(setting: Setting, family: Family = "staggered", num_layers: int = 32, **changed: Any) -> tuple[Planned, Costs]:
        costs = costs_of(setting.move_s)
        (found,) = grounds(costs, setting.micro_batches, 8, num_layers).seated(["auto"], family)
        return replace(found, **changed), costs

    def foresighted(setting: Setting) -> tuple[Planned, Costs]:
        found, costs = auto(setting)
        return replace(found, ground=replace(found.ground, config=replace(found.ground.config, look_ahead=True))), costs

    def losing(setting: Setting) -> tuple[Planned, Costs]:
        found, costs = auto(setting)
        return found, replace(costs, keep_progress=False)

    staggered: Variant = auto
    split: Variant = lambda setting: auto(setting, "split")  # noqa: E731
    variants: dict[str, tuple[Variant, Variant, int]] = {
        "losing the progress of interrupted copies": (losing, staggered, seeds),
        "half-layers as units": (lambda s: auto(s, num_layers=64), staggered, seeds),
        "look-ahead over the next loss": (foresighted, staggered, searched),
        "schedules improved by local search (split)": (lambda s: auto(s, "split", improves=True), split, searched),
        "told the true mean gap": (lambda s: auto(s, knows_gap=True), staggered, seeds),
        "blocking moves only": (lambda s: auto(s, ways=ALL_WAYS - {"behind"}), staggered, seeds),
    }

    @cache
    def samples(variant: Variant, setting: Setting, count: int) -> float:
        who, costs = variant(setting)
        return compare(losses_of(setting.gap_s, count), [who], costs, num_nodes=32, gap_s=setting.gap_s).rows["auto"].samples

    rows = []
    for what, (variant, base, count) in variants.items():
        more = [samples(variant, each, count) / samples(base, each, count) - 1 for each in where]
        rows.append([what, *(f"{each * 100:+.1f}" for each in more), str(count)])
        say(rows[-1])
    columns = (f"M={each.micro_batches}, {words_of(each.gap_s)}, τ {words_of(each.move_s)}" for each in where)
    return table_text(["instead of auto", *columns, "seeds"], rows)


def say(row: object) -> None:
    print(row, file=sys.stderr, flush=True)


def parts(quick: bool, seeds: int, micro_batches: Sequence[int]) -> dict[str, tuple[str, Callable[[], str]]]:
    """By name: the title, and what makes the table."""
    everywhere = settings(micro_batches, quick)
    some = [s for s in everywhere if (s.gap_s, s.move_s) in ((60.0, 10.0), (60.0, 30.0), (600.0, 120.0))]
    orders = max(1, seeds // 3)
    names = ("p3",) if quick else tuple(name for name in SHIPPED if name not in ("parcae-p3", "infinitehbd"))
    return {
        "losses-staggered": ("Ten losses of 32, staggered schedules", lambda: losses_table("staggered", everywhere, seeds)),
        "losses-split": ("Ten losses of 32, split schedules", lambda: losses_table("split", everywhere, seeds)),
        "traces": ("Recorded traces, staggered schedules", lambda: traces_table(names, micro_batches, orders, quick)),
        "errors": ("A world that is not as predicted", lambda: errors_table(some, names, micro_batches, seeds, quick)),
        "servers": ("The 400 servers of infinitehbd, M = 8, τ 30 s", lambda: servers_table(1 if quick else 4, quick)),
        "more": ("What would raise it further, percent", lambda: more_table(some, seeds, max(1, seeds // 8))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--part", choices=list(parts(True, 1, MICRO_BATCHES)), action="append", help="only this table")
    parser.add_argument("--micro-batches", type=int, choices=MICRO_BATCHES, action="append", help="only these")
    parser.add_argument("--quick", action="store_true", help="one setting, one seed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="write the tables here too")
    options = parser.parse_args()
    seeds = 1 if options.quick else options.seeds
    micro_batches = tuple(options.micro_batches or MICRO_BATCHES[: 1 if options.quick else 2])
    tables = {}
    for name, (title, part) in parts(options.quick, seeds, micro_batches).items():
        if options.part is None or name in options.part:
            began_s = time.process_time()
            tables[title] = part()
            say(f"{title}: {time.process_time() - began_s:.0f} s of processor time\n{tables[title]}\n")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    command = " ".join(["python benchmarks/trace_study.py", *sys.argv[1:]])
    text = "\n\n".join(f"## {title}\n\n{words}" for title, words in tables.items())
    if options.out:
        head = f"`{command}`, commit {commit}, Python {platform.python_version()}, {seeds} seeds."
        options.out.write_text(f"{head}\n\n{text}\n")
    said: dict[str, Any] = {"seeds": seeds, "commit": commit, "tables": tables}
    print(json.dumps(said, indent=2, ensure_ascii=False) if options.json else text)


if __name__ == "__main__":
    main()
