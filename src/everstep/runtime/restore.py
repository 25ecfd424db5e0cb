"""State from a checkpoint, or as the seed makes it, into the units of a node."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from everstep.engine.shards import from_bytes
from everstep.engine.state import HeldState
from everstep.errors import CheckpointError, TransferError
from everstep.quantities import UnitName
from everstep.runtime.checkpoints import Checkpoint, check_shard, read

INITIAL = "initial"
"""In place of a path: the weights that the seed makes."""


def load(held: HeldState, units: Iterable[UnitName], source: str, digest: str) -> None:
    """Fill ``units``, which are held with their initial weights already.

    Raises:
        CheckpointError: damaged, or written by another model; names the file and the first difference.
    """
    if source == INITIAL:
        return
    checkpoint = read(Path(source))
    if checkpoint.manifest.digest != digest:
        raise CheckpointError(f"{source}: is of another model: {_difference(checkpoint, held)}", source)
    for unit in units:
        try:
            packed = from_bytes(check_shard(checkpoint, unit), checkpoint.manifest.shards[unit].scalars)
            held.units[unit].unpack(packed)
        except TransferError as error:
            raise CheckpointError(f"{source}: {error}", source) from error


def _difference(checkpoint: Checkpoint, held: HeldState) -> str:
    there, here = set(checkpoint.manifest.shards), set(held.facts.units)
    if there != here:
        only_there, only_here = sorted(there - here), sorted(here - there)
        said = [f"it has {only_there[0]}, this model has not"] if only_there else []
        said += [f"this model has {only_here[0]}, it has not"] if only_here else []
        return "; ".join(said)
    for name, unit in held.units.items():
        try:
            tensors = from_bytes(check_shard(checkpoint, name), {}).tensors
        except (CheckpointError, TransferError) as error:
            return str(error)
        for full, parameter in unit.parameters.items():
            saved = tensors.get(f"parameter:{full}")
            if saved is None:
                return f"it has no {full}, this model has"
            if (saved.shape, saved.dtype) != (parameter.shape, parameter.dtype):
                return (f"its {full} is {saved.dtype} {tuple(saved.shape)}, "
                        f"this model's {parameter.dtype} {tuple(parameter.shape)}")
    return "layers have other names, or units that are held elsewhere have other shapes"
