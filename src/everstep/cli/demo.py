"""``everstep demo``: the main job, once with workers killed on the way and once without, and the two compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from everstep.catalog import scripts, texts
from everstep.cli import audit as audit_command
from everstep.cli import output
from everstep.errors import ConfigError
from everstep.telemetry import audit, picture, runs, words
from everstep.telemetry.summary import Summary, to_json

LOSS_BOUND = 1e-5
"""The largest difference of a step's loss. One micro-batch that one layer counts twice gives ten times as much."""

LEARNED_BELOW = 0.3
"""Nats a byte by which the last losses must lie below the unigram entropy, after a full run."""

EVENTS_EVERY_S = 15.0
"""What the planner is told to expect: about how often the demonstration kills. Told to expect an event every ten minutes, it
would rightly prefer plans that are a little faster and lose state at the next one."""

_FULL_RUN_STEPS = 200
_LEAST_STEPS = 10
_LEAST_WORKERS = 6
"""Four die; two that are left can still hold the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The two runs side by side; without problems the disturbed one is as good as the other."""

    max_difference: float
    entropy: float
    last_loss: float
    """The mean of the last ten steps of the disturbed run."""
    problems: tuple[str, ...]


def kills_for(steps: int) -> list[str]:
    """One worker alone, one in the middle of a reduction, and a pair at once, spread over ``steps``."""
    alone, reducing, pair = (round(steps * share) for share in (0.2, 0.45, 0.7))
    return [
        f"worker=survivable,step={alone},phase=backward", f"worker=survivable,step={reducing},phase=reduce",
        *[f"worker=survivable,step={pair},phase=forward"] * 2,
    ]


def compare(disturbed: Summary, undisturbed: Summary, entropy: float, steps: int, num_kills: int) -> Comparison:
    """Everything that a disturbed run must have in common with an undisturbed one. ``entropy`` in nats a byte."""
    gaps = picture.differences(disturbed.loss, undisturbed.loss)
    # A NaN is a difference too, and max() would pass over it.
    largest = max((gap if gap == gap else float("inf") for gap in gaps), default=float("inf"))
    last = disturbed.loss[-10:]
    last_loss = sum(last) / len(last) if last else float("inf")
    died = sum(len(event.node.split(",")) for event in disturbed.events if event.kind in ("lost", "silent"))
    problems = [
        f"the {name} run has {len(value.loss)} of {steps} steps"
        for name, value in (("disturbed", disturbed), ("undisturbed", undisturbed)) if len(value.loss) != steps
    ]
    if largest > LOSS_BOUND:
        problems.append(f"losses differ by up to {largest:.1e}, allowed are {LOSS_BOUND:.0e}")
    if died != num_kills:
        problems.append(f"{words.counted(died, 'worker')} died, {num_kills} should have")
    if steps >= _FULL_RUN_STEPS and last_loss > entropy - LEARNED_BELOW:
        problems.append(f"the last losses ({last_loss:.3f}) are not clearly below the unigram entropy ({entropy:.3f})")
    return Comparison(max_difference=largest, entropy=entropy, last_loss=last_loss, problems=tuple(problems))


def command(
    steps: Annotated[int, typer.Option(min=_LEAST_STEPS, help="Steps of each run; the kills are spread over them.")] = 200,
    workers: Annotated[int, typer.Option(min=_LEAST_WORKERS, help="Processes that compute; four are killed.")] = 8,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to put it all. [default: runs/demo-<time>]", show_default=False),
    ] = None,
    as_json: output.AsJson = False,
) -> None:
    """Train a small GPT twice, once with four of its workers killed on the way, and show that nothing is lost."""
    from everstep.cli import launch

    folder = directory or launch.folder_for("demo")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; name another folder")
    console = None if as_json else Console()
    kills = kills_for(steps)
    values: dict[str, Summary] = {}
    for title, name, texts_of_kills in (("1 of 2: workers are killed", "disturbed", kills),
                                        ("2 of 2: nobody is killed", "undisturbed", [])):
        if console is not None:
            console.rule(title)
        values[name] = _train(folder / name, steps, workers, texts_of_kills, console, title)
    entropy = texts.unigram_entropy(texts.path("kjv").read_bytes())
    found = compare(values["disturbed"], values["undisturbed"], entropy, steps, len(kills))
    accounts = {name: audit.audit(runs.read(folder / name)) for name in values}
    picture.draw(values["disturbed"], values["undisturbed"], entropy, folder / "losses.png")
    problems = [*found.problems, *(f"audit of the {name} run: {problem}"
                                   for name, account in accounts.items() for problem in account.problems)]
    if as_json:
        output.show(_to_json(folder, values, found, problems))
    else:
        _tell(folder, found, accounts)
    for problem in problems:
        output.complain(problem)
    raise typer.Exit(1 if problems else 0)


def _train(
    folder: Path, steps: int, workers: int, kills: list[str], console: Console | None, title: str,
) -> Summary:
    from everstep.cli import launch
    from everstep.runtime.agent import RunRequest

    done = launch.launch(RunRequest(
        script=scripts.path("tiny_gpt"), arguments=("--steps", str(steps)), workers=workers, directory=folder,
        kills=launch.kills_of(kills, workers), settings={"planner": {"gap_s": EVENTS_EVERY_S}},
    ), console, title)
    if done.summary is None or done.outcome.exit_code:
        output.complain(f"the run in {folder} ended early ({done.outcome.outcome}): {done.outcome.message}")
        raise typer.Exit(done.outcome.exit_code or 1)
    return done.summary


def _tell(folder: Path, found: Comparison, accounts: dict[str, audit.Audit]) -> None:
    for name, account in accounts.items():
        output.say(f"audit of the {name} run: {audit_command.text(account)}")
    output.say(f"largest difference of the losses: {found.max_difference:.1e} (allowed: {LOSS_BOUND:.0e})")
    output.say(f"last losses: {found.last_loss:.3f} nats a byte; unigram entropy of the text: {found.entropy:.3f}")
    output.say(f"both curves: {folder / 'losses.png'}")


def _to_json(folder: Path, values: dict[str, Summary], found: Comparison, problems: list[str]) -> dict[str, Any]:
    return {
        "directory": str(folder), "picture": str(folder / "losses.png"), "max_difference": found.max_difference,
        "unigram_entropy": found.entropy, "last_loss": found.last_loss, "problems": problems,
        **{name: to_json(value) for name, value in values.items()},
    }
