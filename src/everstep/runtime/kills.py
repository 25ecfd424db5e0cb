"""Kills to inject for demonstrations and tests, as they are written on a command line.

``worker=3,step=20,phase=backward`` kills one worker, by its place of start. ``worker=survivable`` leaves the choice to
the moment: a victim whose loss, together with the others of that moment, leaves a holder of each layer.
``random:SEED`` is one to three kills of any workers at random instants.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from everstep.errors import ConfigError

PHASES = ("forward", "backward", "reduce", "vote", "apply", "switch", "recover")
"""Where in a step; the last two mean the first switch or recovery at or after that step."""

_KEYS = ("worker", "step", "phase")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One SIGKILL. ``worker`` is the place where the victim started; None draws a survivable one at that moment."""

    worker: int | None
    step: int
    phase: str

    def __str__(self) -> str:
        return f"worker={'survivable' if self.worker is None else self.worker},step={self.step},phase={self.phase}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomKills:
    """One to three kills of any workers at instants that follow from ``seed``."""

    seed: int

    def __str__(self) -> str:
        return f"random:{self.seed}"


def parse_kill(text: str) -> Kill | RandomKills:
    """Read one ``--kill``. ``phase`` is backward if it is left out.

    Raises:
        ConfigError: says which part is wrong, and what is wanted instead.
    """
    if text.startswith("random:"):
        return RandomKills(seed=_number(text, "seed", text.removeprefix("random:")))
    parts: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ConfigError(f"--kill {text}: {part!r} is not key=value; want for example worker=3,step=20,phase=backward")
        if key not in _KEYS:
            raise ConfigError(f"--kill {text}: unknown key {key!r}{_nearest(key, _KEYS)}; known: {', '.join(_KEYS)}")
        if key in parts:
            raise ConfigError(f"--kill {text}: {key} is given twice")
        parts[key] = value
    for key in ("worker", "step"):
        if key not in parts:
            raise ConfigError(f"--kill {text}: {key} is missing; want for example worker=3,step=20,phase=backward")
    phase = parts.get("phase", "backward")
    if phase not in PHASES:
        raise ConfigError(f"--kill {text}: unknown phase {phase!r}{_nearest(phase, PHASES)}; known: {', '.join(PHASES)}")
    worker = None if parts["worker"] == "survivable" else _number(text, "worker", parts["worker"], " or survivable")
    return Kill(worker=worker, step=_number(text, "step", parts["step"]), phase=phase)


def _number(text: str, name: str, value: str, otherwise: str = "") -> int:
    if not re.fullmatch(r"\d+", value):
        raise ConfigError(f"--kill {text}: {name} must be a number from 0{otherwise}, got {value!r}")
    return int(value)


def _nearest(word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
