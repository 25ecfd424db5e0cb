"""Time per step without failures, against plain torch on the same machine, as ratios.

    python benchmarks/steady_state.py [--quick] [--json] [--case one-process --case replicas-2 ...] [--pairs 40]

Each case is one run in which the same processes train with Everstep and with plain torch in turn (``steady_state_job.py``). A
ratio is that of one pair of neighbouring steps; the table has the median of the pairs, an interval that holds the true median
in 95 of 100 runs, and the pairs' quartiles.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everstep.runtime.agent import RunRequest, run

JOB = Path(__file__).with_name("steady_state_job.py")
QUICK = ("--pairs", "2", "--width", "32", "--blocks", "8", "--context", "16", "--batch", "8", "--micro", "2")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table: what Everstep is compared with, and the largest ratio that is good."""

    name: str
    kind: str
    workers: int
    against: str
    target: float
    options: tuple[str, ...] = ()


CASES = (
    Case(name="one-process", kind="one-process", workers=1, against="gradient accumulation in one process", target=1.05),
    Case(name="replicas-2", kind="replicas", workers=2, against="DistributedDataParallel, gloo, 2 processes", target=1.05),
    Case(name="replicas-4", kind="replicas", workers=4, against="DistributedDataParallel, gloo, 4 processes", target=1.05),
    Case(name="pipeline-2", kind="pipeline", workers=2, against="distributed.pipelining, 1F1B, gloo, 2 stages", target=1.10),
    Case(
        name="pipeline-2-fused", kind="pipeline", workers=2, against="the same; backward not split, as there", target=1.10,
        options=("--split", "off"),
    ),
    Case(name="pipeline-4", kind="pipeline", workers=4, against="distributed.pipelining, 1F1B, gloo, 4 stages", target=1.10),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one case. Seconds are medians of a step; ``processor`` is the sum over processes."""

    case: str
    against: str
    pairs: int
    ratio: float
    ratio_p25: float
    ratio_p75: float
    ratio_low: float
    ratio_high: float
    processor_ratio: float
    everstep_step_s: float
    torch_step_s: float
    everstep_processor_s: float
    torch_processor_s: float
    loss_difference: float
    load_average: float
    target: float
    plan: str


def measure(case: Case, options: Sequence[str]) -> Result:
    """Run one case.

    Raises:
        RuntimeError: it did not end well; says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        arguments = (case.kind, str(path), "--workers", str(case.workers), *case.options, *options)
        if case.workers == 1:
            environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
            done = subprocess.run([sys.executable, str(JOB), *arguments], env=environment, check=False)
            message = f"exit code {done.returncode}" if done.returncode else ""
        else:
            message = _run_workers(case, arguments, Path(folder) / "run")
        if message:
            raise RuntimeError(f"{case.name}: {message}")
        found = json.loads(path.read_text())
    return _result(case, found["plan"], found["rows"])


def _run_workers(case: Case, arguments: tuple[str, ...], folder: Path) -> str:
    """What went wrong; empty when nothing did."""
    outcome = run(RunRequest(script=JOB, arguments=arguments, workers=case.workers, directory=folder))
    if outcome.exit_code == 0:
        return ""
    logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted((folder / "logs").iterdir()))
    return f"{outcome.message}\n{logs}"


def _result(case: Case, plan: str, rows: list[dict[str, Any]]) -> Result:
    ratios = sorted(row["everstep"]["wall_s"] / row["torch"]["wall_s"] for row in rows)
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive")
    low, high = _interval(len(ratios))

    def median(side: str, key: str) -> float:
        return statistics.median(row[side][key] for row in rows)

    return Result(
        case=case.name, against=case.against, pairs=len(rows), ratio=statistics.median(ratios),
        ratio_p25=quartiles[0], ratio_p75=quartiles[2], ratio_low=ratios[low], ratio_high=ratios[high],
        processor_ratio=statistics.median(row["everstep"]["processor_s"] / row["torch"]["processor_s"] for row in rows),
        everstep_step_s=median("everstep", "wall_s"), torch_step_s=median("torch", "wall_s"),
        everstep_processor_s=median("everstep", "processor_s"), torch_processor_s=median("torch", "processor_s"),
        loss_difference=max(abs(row["everstep"]["loss"] - row["torch"]["loss"]) for row in rows),
        load_average=os.getloadavg()[0], target=case.target, plan=plan,
    )


def _interval(count: int) -> tuple[int, int]:
    """Which of ``count`` sorted values bound the true median in 95 of 100 cases: the binomial's, by its normal form."""
    reach = 0.98 * count**0.5
    return max(0, int(count / 2 - reach)), min(count - 1, int(count / 2 + reach))


def table(results: Sequence[Result]) -> str:
    """Markdown."""
    lines = [
        "| case | against | ratio | 95 % interval | quartiles | target | processor time | step: Everstep, torch | largest loss "
        "difference | pairs | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r.case} | {r.against} | **{r.ratio:.3f}** | {r.ratio_low:.3f}–{r.ratio_high:.3f} | "
            f"{r.ratio_p25:.3f}–{r.ratio_p75:.3f} | {r.target:.2f} {'met' if r.ratio <= r.target else 'missed'} | "
            f"{r.processor_ratio:.3f} | {r.everstep_step_s:.3f} s, {r.torch_step_s:.3f} s | {r.loss_difference:.0e} | "
            f"{r.pairs} | {r.load_average:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model and two pairs: shows that it runs, no more")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="only this; may be repeated")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of rounds a case")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.case or case.name in options.case]
    extra = QUICK if options.quick else ("--pairs", str(options.pairs))
    results = []
    for case in cases:
        results.append(measure(case, extra))
        print(f"{case.name}: {results[-1].ratio:.3f}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print(f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}\n\n{table(results)}")


if __name__ == "__main__":
    main()
