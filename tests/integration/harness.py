"""Runs with real processes: an agent in this one, workers forked from one server that all tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from everstep.engine.samples import Samples
from everstep.engine.shards import from_bytes
from everstep.records import EventSeen, PlanCommitted, Record, RolledBack, RunEnded, StepSeen, ViewCommitted
from everstep.runtime import checkpoints
from everstep.runtime.agent import RunOutcome, RunRequest, run
from everstep.runtime.kills import parse_kill
from everstep.telemetry import audit, runs
from tests.engine.models import Tokens, adamw, layers, token_loss
from tests.engine.reference import Reference

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]


class Run:
    """A run that has ended."""

    def __init__(self, outcome: RunOutcome, records: list[Record]) -> None:
        self.outcome, self.records = outcome, records

    def of(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def losses(self) -> list[float]:
        """By step, on the line that survives."""
        found: dict[int, float] = {}
        for record in self.records:
            if isinstance(record, StepSeen):
                found[record.step] = record.loss
            elif isinstance(record, RolledBack):
                found = {step: loss for step, loss in found.items() if step < record.to_step}
        return [found[step] for step in sorted(found)]

    @property
    def events(self) -> list[EventSeen]:
        return self.of(EventSeen)

    @property
    def policies(self) -> list[str]:
        return [plan.policy for plan in self.of(PlanCommitted)]

    @property
    def views(self) -> list[ViewCommitted]:
        return self.of(ViewCommitted)

    def assert_every_sample_once(self) -> None:
        account = audit.audit(runs.read(self.outcome.directory))
        assert account.problems == ()
        assert (account.samples_lost, account.samples_repeated) == (0, 0)

    def assert_replicas_are_equal(self) -> None:
        (end,) = self.of(RunEnded)
        for unit, hashes in end.state_hash.items():
            assert len(set(hashes.values())) == 1, f"{unit}: {hashes}"

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state in the newest checkpoint."""
        checkpoint, _ = checkpoints.newest_usable(self.outcome.directory / "checkpoints")
        assert checkpoint is not None
        found: dict[str, torch.Tensor] = {}
        for unit, shard in checkpoint.manifest.shards.items():
            found |= from_bytes(checkpoints.check_shard(checkpoint, unit), shard.scalars).tensors
        return found


def train(
    directory: Path, script: str = "small.py", *arguments: str, workers: int = 4, spares: int = 0, kills: tuple[str, ...] = (),
    settings: dict[str, Any] | None = None, resume: bool = False, on_record: Callable[[Record], None] = lambda record: None,
) -> Run:
    """Run a script of ``scripts`` to its end, and check that no process of it is left."""
    records: list[Record] = []

    def keep(record: Record) -> None:
        records.append(record)
        on_record(record)

    path = script if os.path.isabs(script) else SCRIPTS / script
    outcome = run(RunRequest(
        script=Path(path), arguments=arguments, workers=workers, spares=spares, directory=directory, resume=resume,
        settings=settings or {}, kills=tuple(map(parse_kill, kills)), on_record=keep,
    ))
    assert processes_of(directory) == []
    return Run(outcome, records)


def processes_of(directory: Path, node: str = "") -> list[int]:
    """Processes, zombies aside, whose output goes into the run's folder: all of them, or that of ``node``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                output = os.readlink(entry / "fd" / "1")
                if output.startswith(str(directory)) and (not node or Path(output).stem == node):
                    found.append(int(entry.name))
            except OSError:
                continue  # gone, or not ours to look at
    return found


def reference_of_small(steps: int, dtype: torch.dtype = torch.float64) -> Reference:
    """What ``scripts/small.py`` gives in one plain process."""
    reference = Reference(
        layers(dtype=dtype, dropout=0.1), token_loss, adamw, Samples(dataset=Tokens(100), batch=16, micro=2, seed=5), 5,
        (("embed.weight", "head.weight"),), 0.05, lambda step: min(1.0, (step + 1) / 3),
    )
    for step in range(steps):
        reference.step(step)
    return reference


def assert_same_state(run: Run, reference: Reference, bound: float = 1e-10) -> None:
    """Parameters and Adam moments, each to ``bound`` of the tensor's largest magnitude; losses likewise."""
    found, wanted = run.tensors(), reference.tensors()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        scale = max(float(tensor.abs().max()), 1e-30)
        assert float((found[name] - tensor).abs().max()) <= bound * scale, name
    assert len(run.losses) == len(reference.losses)
    assert max(abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True)) < 1e-10
