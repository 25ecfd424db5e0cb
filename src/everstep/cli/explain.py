"""``everstep explain``: why a run chose the recoveries that it chose."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli import output
from everstep.records import to_builtins
from everstep.telemetry import explain, runs


def command(
    run: output.RunFolder = None,
    number: Annotated[int | None, typer.Option("--number", "-n", help="Only this decision; they count from 1.")] = None,
    as_json: output.AsJson = False,
) -> None:
    """Show each decision of a run: what was considered, what it would have cost, what was chosen, and what it then took."""
    explanations = explain.explain(runs.read(runs.find(run)), number)
    if as_json:
        output.show([to_builtins(explanation) for explanation in explanations])
    else:
        output.say("\n\n".join(map(explain.text, explanations)) or "no decision yet")
