"""Everything that can be set. Frozen, keyword-only, checked when made; an unknown key is an error with the nearest name.

Explicit arguments win over the file, the file over defaults. The environment is read in one place only, by the runtime.
"""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from everstep.errors import ConfigError
from everstep.quantities import parse_bytes, parse_seconds

Policy = Literal[
    "auto", "reroute", "normalize", "spare", "heal", "shrink", "grow", "rebalance", "repartition", "two-phase", "redundant",
    "wait", "restore",
    "oobleck", "recycle", "plain-reroute", "bamboo", "varuna", "torchft", "parcae", "chameleon",
]
"""How to recover: by whatever is worth most, by one policy of ours alone, or as a published system would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorConfig:
    """When a silent worker is given up. A worker's death is seen through its process handle, not through this."""

    heartbeat_interval_s: float = 0.2
    """How often a healthy worker speaks."""

    suspect_after_s: float = 5.0
    """Silence, in seconds, after which a worker is removed and its process ended."""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_interval_s < self.suspect_after_s:
            raise ConfigError(
                "need 0 < heartbeat_interval_s < suspect_after_s, "
                f"got {self.heartbeat_interval_s} and {self.suspect_after_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """What goes to disk, and how often."""

    every_steps: int = 50
    """A checkpoint after every so many steps; 0: only when asked, or when the run is stopped."""

    keep: int = 2
    """How many are kept. The last one that was verified to be finite is never dropped."""

    def __post_init__(self) -> None:
        if self.every_steps < 0 or self.keep < 1:
            raise ConfigError(f"need every_steps >= 0 and keep >= 1, got {self.every_steps} and {self.keep}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """How recoveries are chosen."""

    policy: Policy = "auto"
    """The recovery to use at every event; ``auto`` chooses among all by expected samples."""

    gap_s: float = 600.0
    """Expected time between events before the run has seen any."""

    worker_memory_bytes: int | None = None
    """What state and activations may take on one worker. None: not limited."""

    max_stages: int = 16
    """The longest pipeline that is considered."""

    tolerate: int = 0
    """Any so many losses at once must leave a living holder of every layer. Where no plan can, the run says so."""

    look_ahead: bool = False
    """Choose among the best few by what the next loss would leave of them, too."""

    def __post_init__(self) -> None:
        if self.gap_s <= 0:
            raise ConfigError(f"gap_s must be positive, got {self.gap_s}")
        if self.worker_memory_bytes is not None and self.worker_memory_bytes <= 0:
            raise ConfigError(f"worker_memory_bytes must be positive, got {self.worker_memory_bytes}")
        if self.max_stages < 1:
            raise ConfigError(f"max_stages must be at least 1, got {self.max_stages}")
        if self.tolerate < 0:
            raise ConfigError(f"tolerate must be at least 0, got {self.tolerate}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a step is computed."""

    numerics: Literal["fp32", "fp64-sum"] = "fp32"
    """How gradients are summed: in the parameters' own precision, or in float64."""

    split_backward: Literal["auto", "on", "off"] = "auto"
    """Compute weight gradients apart from input gradients, so that they can fill bubbles."""

    threads: int = 1
    """Intra-op threads of every worker. Part of the job's identity: some kernels' bits depend on it."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"threads must be at least 1, got {self.threads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A whole run."""

    detector: DetectorConfig = field(default_factory=DetectorConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    orphan_after_s: float = 5.0
    """How long workers go on without their agent before they write a checkpoint and exit."""

    respawn: bool = False
    """Replace a lost worker by a fresh process, which joins at a step boundary."""

    def __post_init__(self) -> None:
        if self.orphan_after_s <= 0:
            raise ConfigError(f"orphan_after_s must be positive, got {self.orphan_after_s}")


def from_mapping(values: Mapping[str, Any], base: RunConfig | None = None, source: str = "configuration") -> RunConfig:
    """``base`` with ``values`` (nested tables or dotted keys) set.

    Raises:
        ConfigError: an unknown key (the nearest valid name is given), or a value of the wrong type or range.
    """
    return typing.cast(RunConfig, _filled(base or RunConfig(), _nested(values), source, ""))


def from_file(path: Path, base: RunConfig | None = None) -> RunConfig:
    """Read a TOML file.

    Raises:
        ConfigError: the file cannot be read or parsed, or a key or value is wrong; names the file.
    """
    return from_mapping(values_of_file(path), base, str(path))


def from_settings(settings: list[str], base: RunConfig | None = None) -> RunConfig:
    """Apply ``key=value`` strings as given to ``--set``, for example ``planner.policy=reroute``."""
    return from_mapping(values_of_settings(settings), base, "--set")


def values_of_file(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, by dotted key, not checked yet.

    Raises:
        ConfigError: the file cannot be read or parsed.
    """
    try:
        return _dotted(tomllib.loads(path.read_text()))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def values_of_settings(settings: list[str]) -> dict[str, Any]:
    """The settings in ``key=value`` strings, by dotted key, not checked yet.

    Raises:
        ConfigError: a string is not of this form.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {setting}: want key=value, for example --set planner.policy=reroute")
        values |= _dotted({key.strip(): _literal(value.strip())})
    return values


def _dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _dotted(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys with values as ``--set`` takes them: ``{"planner.policy": "reroute"}``."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value).lower() if isinstance(value, bool) else value
    return found


def _literal(value: str) -> Any:
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        table, *rest = key.split(".", 1)
        inner = _nested(value) if isinstance(value, Mapping) else value
        if rest:
            inner = _nested({rest[0]: inner})
        if not isinstance(inner, dict):
            nested[table] = inner
        elif isinstance(nested.setdefault(table, {}), dict):  # else it was set to no table, which is an error below
            nested[table].update(inner)
    return nested


def _filled(base: Any, values: Mapping[str, Any], source: str, prefix: str) -> Any:
    hints = get_type_hints(type(base))
    known = {f.name: hints[f.name] for f in fields(base)}
    changes: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in known:
            raise ConfigError(f"{source}: unknown key {name!r}{_suggestion(key, prefix, list(known))}")
        current = getattr(base, key)
        if is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{source}: {name} is a table of settings, got {value!r}")
            changes[key] = _filled(current, value, source, f"{name}.")
        else:
            changes[key] = _checked(value, known[key], source, name)
    try:
        return replace(base, **changes)
    except ConfigError as error:
        raise ConfigError(f"{source}: {prefix.rstrip('.') or 'run'}: {error}") from error


def _suggestion(key: str, prefix: str, known: list[str]) -> str:
    here = [(_likeness(key, name), f"{prefix}{name}") for name in known]
    elsewhere = [(_likeness(key, f.name), f"{g.name}.{f.name}") for g in fields(RunConfig) for f in _inner_fields(g.name)]
    likeness, name = max([*here, *elsewhere], key=lambda found: found[0])
    return f"; did you mean {name}?" if likeness >= 0.6 else f"; known here: {', '.join(known)}"


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _inner_fields(table: str) -> tuple[Any, ...]:
    value = getattr(RunConfig(), table)
    return fields(value) if is_dataclass(value) else ()


def _checked(value: Any, expected: Any, source: str, name: str) -> Any:
    if get_origin(expected) in (types.UnionType, typing.Union):
        if value is None:
            return None
        expected = next(option for option in get_args(expected) if option is not type(None))
    if get_origin(expected) is Literal:
        options = get_args(expected)
        if value not in options:
            near = difflib.get_close_matches(str(value), options, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{source}: {name} must be one of {', '.join(options)}, got {value!r}{hint}")
        return value
    try:
        if expected is int and name.endswith("_bytes"):
            return parse_bytes(value)
        if expected is float and name.endswith("_s"):
            return parse_seconds(value)
    except ValueError as error:
        raise ConfigError(f"{source}: {name}: {error}") from error
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise ConfigError(f"{source}: {name} must be {_words(expected)}, got {value!r}")
    return value


def _words(expected: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return words.get(expected, str(expected))
