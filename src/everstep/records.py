"""What a run writes down, one JSON object a line, appended before the thing that it vouches for is announced.

Nodes write ``Counted`` before they send their prepared record and ``Committed`` when they hold the union, so a node that
is killed later does not take its account along. The agent writes the rest. ``everstep audit`` adds these up from outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from everstep.decision import Decision
from everstep.errors import ConfigError
from everstep.plan import Plan
from everstep.quantities import NodeId
from everstep.view import View


class RunStarted(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """The head of a run, or of its continuation."""

    time_s: float
    script: str
    arguments: tuple[str, ...]
    workers: int
    spares: int
    seed: int
    numerics: str
    until: int | None
    dataset_samples: int
    batch: int
    micro: int
    layers: tuple[str, ...]
    uses: dict[str, tuple[str, ...]]
    """Units by name, and the names of the layers that use each: the pairs to count are (unit, layer) × micro-batch."""
    first_step: int = 0


class Counted(msgspec.Struct, frozen=True, kw_only=True, tag="counted"):
    """What one node added to its sums in one attempt of a step, and which samples it read for it."""

    node: NodeId
    view: int
    step: int
    attempt: int
    pairs: dict[str, tuple[int, ...]]
    """``unit/layer`` → the micro-batches counted."""
    samples: dict[int, tuple[int, ...]]
    """Micro-batch → sample ids read."""


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag="committed"):
    """A node holds the union of this attempt. ``view`` is the view whose nodes made it."""

    node: NodeId
    view: int
    step: int
    attempt: int
    loss: float


class ViewCommitted(msgspec.Struct, frozen=True, kw_only=True, tag="view"):
    time_s: float
    view: View
    cause: str


class PlanCommitted(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """The plan of a view, from ``step`` on, and the decision that chose it."""

    time_s: float
    view: int
    step: int
    attempt: int
    policy: str
    plan: Plan
    decision: Decision


class RolledBack(msgspec.Struct, frozen=True, kw_only=True, tag="rolled-back"):
    """State was lost: the steps from ``to_step`` up to ``from_step`` are trained again."""

    time_s: float
    view: int
    from_step: int
    to_step: int


class EventSeen(msgspec.Struct, frozen=True, kw_only=True, tag="event"):
    """One event and the recovery from it, complete once training went on. Times in seconds."""

    time_s: float
    """Since the start of the run."""
    step: int
    phase: str
    """Where in the step the job was, as far as the agent knows: forward, backward, reduce, vote, apply, switch, recover."""
    node: str
    """Who: one node, or several with commas."""
    policy: str
    decision: str
    """The decision in one line."""
    detect_s: float | None
    """From the moment it happened to the moment it was known; None where nobody knows when it happened."""
    decide_s: float
    stall_s: float | None
    """None where no step followed any more."""
    step_s_before: float
    step_s_after: float
    step_s_predicted: float
    kind: str = "lost"
    """lost, joined, silent, stopped."""


class StepSeen(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """The agent heard that a step is committed."""

    time_s: float
    step: int
    attempt: int
    loss: float
    step_s: float


class CheckpointWritten(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint"):
    time_s: float
    step: int
    view: int
    path: str


class CheckpointPassedOver(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint-passed-over"):
    """A checkpoint that cannot be used; ``why`` names the file and what is wrong with it. An older one is taken."""

    time_s: float
    path: str
    why: str


class RunEnded(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """How the run ended: done, stopped, failed; with the hash of each unit on each node."""

    time_s: float
    outcome: str
    steps: int
    message: str = ""
    state_hash: dict[str, dict[str, str]] = {}


Record = (
    RunStarted | Counted | Committed | ViewCommitted | PlanCommitted | RolledBack | EventSeen | StepSeen
    | CheckpointWritten | CheckpointPassedOver | RunEnded
)

_NULLABLE = ("until", "detect_s")
"""Fields of records that may be None; null in any other stands for a number that is not finite."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def line(record: Record) -> bytes:
    """One record as a line of JSON, newline included: written in one call, so never half a line by another's hand."""
    return _encoder.encode(record) + b"\n"


def read(path: Path) -> Iterator[Record]:
    """The records of a file, in order. A torn last line (its writer was killed) ends the file.

    Raises:
        ConfigError: the file cannot be read, or a line before the last is not a record.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    for number, text in enumerate(lines, start=1):
        if not text:
            continue
        try:
            yield _decoded(text)
        except msgspec.MsgspecError as error:
            if number == len(lines):
                return
            raise ConfigError(f"{path}, line {number}: not a record of a run: {error}") from error


def _decoded(text: bytes) -> Record:
    """JSON has no word for what is not finite, so msgspec writes null: a loss was NaN, a candidate's default infinite."""
    try:
        return _decoder.decode(text)
    except msgspec.ValidationError:
        raw: Any = msgspec.json.decode(text)
        if not isinstance(raw, dict):
            raise
        raw = {key: float("nan") if value is None and key not in _NULLABLE else value for key, value in raw.items()}
        with suppress(KeyError, TypeError):  # no decision at all: then it is no record, as is said below
            for candidate in raw["decision"]["candidates"] if raw.get("type") == "plan" else ():
                for field in ("step_s", "value", "later_step_s"):
                    if field in candidate and candidate[field] is None:
                        del candidate[field]
        found: Record = msgspec.convert(raw, Record, str_keys=True)
        return found


def to_builtins(value: Any) -> Any:
    """A record or noun as plain JSON values, for ``--json``."""
    return msgspec.to_builtins(value, str_keys=True)
