"""``everstep status``: where a run stands."""

from __future__ import annotations

from everstep.cli import output
from everstep.telemetry import runs, status


def command(run: output.RunFolder = None, as_json: output.AsJson = False) -> None:
    """Say where a run stands: step, loss, pace, who holds what, the last events."""
    directory = runs.find(run)
    value = status.status(runs.read(directory))
    if as_json:
        output.show({"directory": str(directory), **status.to_json(value)})
    else:
        output.say(status.text(value, directory))
