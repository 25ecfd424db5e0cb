"""``everstep audit``: recount a run from outside."""

from __future__ import annotations

from dataclasses import asdict

import typer

from everstep.cli import output
from everstep.telemetry import audit, runs, words

_MOST_LINES = 20


def command(run: output.RunFolder = None, as_json: output.AsJson = False) -> None:
    """Add up what every node counted and read; exit 1 if a sample or a gradient is missing or counted twice."""
    directory = runs.find(run)
    found = audit.audit(runs.read(directory))
    if as_json:
        output.show({"directory": str(directory), **asdict(found)})
    else:
        output.say(f"{directory}\n{text(found)}")
    raise typer.Exit(1 if found.problems else 0)


def text(found: audit.Audit) -> str:
    """The sums in a line, and what is wrong, if anything."""
    lines = [
        f"{words.counted(found.steps, 'step')}, {found.samples_seen:,} samples counted, "
        f"{found.samples_lost} lost, {found.samples_repeated} repeated",
    ]
    lines += [f"- {problem}" for problem in found.problems[:_MOST_LINES]]
    if len(found.problems) > _MOST_LINES:
        lines.append(f"- and {len(found.problems) - _MOST_LINES} more")
    return "\n".join(lines if found.problems else [*lines, "every gradient and every sample counts exactly once"])
