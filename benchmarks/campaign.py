"""Random kills, run after run: does every run end right, and what did each recovery cost?

    python benchmarks/campaign.py --runs 50 --table benchmarks/results/campaign.md

Each run is a short job over eight worker processes on this machine (real CPU), with one to three SIGKILLs of any workers at
random instants drawn from the run's seed; every other run starts fresh processes for the lost ones. A run is right if it
ends, if the audit of its records finds each gradient and each sample counted exactly once, and if its losses are those of
the undisturbed run within 1e-5. Runs that had to restore a checkpoint, or the initial weights, are counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "tiny_gpt.py"
STEPS = 30
WORKERS = 8
LOSS_BOUND = 1e-5


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run. Times in seconds; a recovery is (detect, decide, stall, step before, policy)."""

    seed: int
    respawn: bool
    killed: int
    policies: tuple[str, ...]
    restored: bool
    max_difference: float
    problems: tuple[str, ...]
    recoveries: tuple[tuple[float | None, float, float | None, float, str], ...]
    wall_s: float

    @property
    def is_right(self) -> bool:
        return not self.problems


def one_run(seed: int | None, folder: Path, steps: int = STEPS) -> tuple[Row, list[float]]:
    """A run with the kills of ``seed`` (None: undisturbed), and its losses."""
    from everstep.runtime.agent import RunRequest, run
    from everstep.runtime.kills import RandomKills
    from everstep.telemetry import audit, runs
    from everstep.telemetry.summary import summary

    began_s = time.monotonic()
    respawn = seed is not None and seed % 2 == 1
    outcome = run(RunRequest(
        script=SCRIPT, arguments=("--steps", str(steps)), workers=WORKERS, directory=folder,
        settings={"respawn": respawn, "planner": {"gap_s": 15.0}, "checkpoint": {"every_steps": 10}},
        kills=() if seed is None else (RandomKills(seed=seed),),
    ))
    problems = [] if outcome.exit_code == 0 else [f"ended {outcome.outcome}: {outcome.message}"]
    told = runs.read(folder)
    problems += audit.audit(told).problems
    value = summary(told)
    lost = [event for event in value.events if event.kind != "joined"]
    row = Row(
        seed=-1 if seed is None else seed, respawn=respawn,
        killed=sum(len(event.node.split(",")) for event in lost), policies=tuple(event.policy for event in lost),
        restored=bool(value.rolled_back), max_difference=0.0, problems=tuple(problems),
        recoveries=tuple((e.detect_s, e.decide_s, e.stall_s, e.step_s_before, e.policy) for e in lost),
        wall_s=time.monotonic() - began_s,
    )
    return row, list(value.loss)


def compared(row: Row, losses: list[float], wanted: list[float]) -> Row:
    """``row`` with the largest difference to the undisturbed run."""
    problems = list(row.problems)
    if len(losses) != len(wanted):
        problems.append(f"{len(losses)} of {len(wanted)} steps")
    largest = max((abs(a - b) for a, b in zip(losses, wanted, strict=False)), default=float("inf"))
    if not largest <= LOSS_BOUND:
        problems.append(f"losses differ by up to {largest:.1e}")
    return Row(**{**asdict(row), "max_difference": largest, "problems": tuple(problems)})


def campaign(seeds: range, steps: int = STEPS, tell: bool = True) -> list[Row]:
    """All runs, one after another."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        _, wanted = one_run(None, Path(scratch) / "undisturbed", steps)
        for seed in seeds:
            row, losses = one_run(seed, Path(scratch) / str(seed), steps)
            rows.append(compared(row, losses, wanted))
            if tell:
                print(_line(rows[-1]), flush=True)
    return rows


def figures(rows: list[Row]) -> dict[str, float]:
    """Medians over all recoveries, those with a restore apart."""
    detect_s = [r[0] for row in rows for r in row.recoveries if r[0] is not None]
    ended = [r for row in rows for r in row.recoveries if r[2] is not None]  # the others had no step to follow
    plain = [r for r in ended if r[4] != "restore"]
    restores = [r for r in ended if r[4] == "restore"]
    found = {
        "runs": len(rows), "right": sum(row.is_right for row in rows), "restored": sum(row.restored for row in rows),
        "kills": sum(row.killed for row in rows), "max_difference": max(row.max_difference for row in rows),
        "recoveries": len(plain), "restores": len(restores),
    }
    if detect_s:
        found |= {"detect_s_p50": median(detect_s), "detect_s_max": max(detect_s)}
    if plain:
        found |= {
            "decide_s_p50": median(r[1] for r in plain), "stall_s_p50": median(r[2] for r in plain),
            "stall_s_max": max(r[2] for r in plain), "step_s_p50": median(r[3] for r in plain),
            "stall_less_a_step_s_p50": median(r[2] - r[3] for r in plain),
        }
    if restores:
        found["restore_stall_s_p50"] = median(r[2] for r in restores)
    return found


def _line(row: Row) -> str:
    stalls = " ".join("-" if r[2] is None else f"{r[2]:.2f}" for r in row.recoveries)
    verdict = "right" if row.is_right else "; ".join(row.problems)
    return (f"| {row.seed} | {'yes' if row.respawn else ''} | {row.killed} | {' '.join(row.policies)} | {stalls} | "
            f"{row.max_difference:.1e} | {row.wall_s:.1f} | {verdict} |")


def table(rows: list[Row], command: str) -> str:
    """Everything as Markdown, with the command and the machine."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    head = [
        f"# Random kills, {len(rows)} runs", "",
        f"`{command}` on {os.cpu_count()} cores ({platform.machine()}), real CPU, commit {commit}; load at the end "
        f"{os.getloadavg()[0]:.1f}. {STEPS} steps of `examples/tiny_gpt.py` over {WORKERS} workers.", "",
        "| figure | value |", "|---|---|",
        *(f"| {name} | {value:.3g} |" for name, value in figures(rows).items()), "",
        "Stall is the last good step's end to the next step's end, less a median step; a loss during a recovery belongs to it.",
        "Medians are over recoveries without a restore.", "",
        "| seed | respawn | killed | policies | stalls, s | largest loss difference | wall, s | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *map(_line, rows), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--table", type=Path, help="write a Markdown table here")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = campaign(range(options.first_seed, options.first_seed + options.runs), tell=not options.json)
    if options.table:
        options.table.parent.mkdir(parents=True, exist_ok=True)
        options.table.write_text(table(rows, " ".join(["python", "benchmarks/campaign.py", *sys.argv[1:]])))
    print(json.dumps({"figures": figures(rows), "rows": [asdict(row) for row in rows]}, indent=2) if options.json
          else "\n".join(f"{name}: {value:.4g}" for name, value in figures(rows).items()))
    sys.exit(0 if all(row.is_right for row in rows) else 1)


if __name__ == "__main__":
    main()
