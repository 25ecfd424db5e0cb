"""Starting a run from the command line and watching it: what ``run`` and ``demo`` share."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from everstep import config as configuration
from everstep.config import RunConfig
from everstep.errors import ConfigError
from everstep.records import Record
from everstep.runtime.agent import RunOutcome, RunRequest
from everstep.runtime.agent import run as run_agent
from everstep.runtime.kills import Kill, RandomKills, parse_kill
from everstep.telemetry import runs, words
from everstep.telemetry.display import Display, last_words
from everstep.telemetry.summary import Summary, summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A run that has ended, and what its records say; ``summary`` is None when it never began."""

    outcome: RunOutcome
    summary: Summary | None
    wall_s: float


def launch(request: RunRequest, console: Console | None, title: str = "") -> Launched:
    """Carry out ``request``; ``console`` shows it live and says how it ended, None keeps silent."""
    if console is None:
        outcome = run_agent(request)
    else:
        with Display(console, request.directory / "logs", title) as display:
            outcome = run_agent(_watched(request, display))
    if not (outcome.directory / runs.AGENT_FILE).is_file():
        return Launched(outcome=outcome, summary=None, wall_s=0.0)
    run = runs.read(outcome.directory)
    value, wall_s = summary(run), max(_time_s(record) for record in run.sessions[-1])
    if console is not None:
        console.print(last_words(words.summary(value, wall_s, outcome.directory), well=outcome.exit_code == 0))
    return Launched(outcome=outcome, summary=value, wall_s=wall_s)


def folder_for(name: str, root: Path = Path("runs")) -> Path:
    """A folder for a new run that is not there yet: ``runs/<name>-<time>``."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    tries = (root / (stem if number == 1 else f"{stem}-{number}") for number in range(1, 1000))
    return next(folder for folder in tries if not folder.exists())


def settings_of(file: Path | None, settings: list[str], policy: str | None, respawn: bool) -> dict[str, Any]:
    """What wins over the script's own configuration: ``--policy`` and ``--respawn``, then ``--set``, then the file.

    Raises:
        ConfigError: an unknown key or a wrong value; says where it stands.
    """
    sources: list[tuple[str, dict[str, Any]]] = [
        (str(file), {} if file is None else configuration.values_of_file(file)),
        ("--set", configuration.values_of_settings(settings)),
        ("--policy", {} if policy is None else {"planner.policy": policy}),
        ("--respawn", {"respawn": True} if respawn else {}),
    ]
    values: dict[str, Any] = {}
    config = RunConfig()
    for source, more in sources:
        config = configuration.from_mapping(more, config, source)
        values |= more
    return values


def kills_of(texts: list[str], num_places: int) -> tuple[Kill | RandomKills, ...]:
    """The kills written in ``texts``; a worker must be one of the ``num_places`` that are started.

    Raises:
        ConfigError: says which one is wrong and why.
    """
    kills = tuple(map(parse_kill, texts))
    for kill in kills:
        if isinstance(kill, Kill) and kill.worker is not None and kill.worker >= num_places:
            raise ConfigError(f"--kill {kill}: workers are 0 to {num_places - 1}")
    return kills


def _watched(request: RunRequest, display: Display) -> RunRequest:
    return replace(request, on_record=display.on)


def _time_s(record: Record) -> float:
    return getattr(record, "time_s", 0.0)
