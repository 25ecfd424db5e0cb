"""A unit as the bytes of a safetensors file, and back."""

from __future__ import annotations

import safetensors.torch
import torch
from safetensors import SafetensorError

from everstep.engine.state import Packed
from everstep.errors import TransferError


def to_bytes(packed: Packed) -> bytes:
    """Tensors only; the plain numbers go into the manifest."""
    return safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in packed.tensors.items()})


def from_bytes(data: bytes, scalars: dict[str, float | int | bool]) -> Packed:
    """Raises TransferError when ``data`` is no safetensors file."""
    try:
        return Packed(safetensors.torch.load(data), dict(scalars))
    except (SafetensorError, ValueError, KeyError) as error:
        raise TransferError(f"not the tensors of a unit: {error}") from error


def copied(packed: Packed) -> Packed:
    """A copy that later updates do not reach."""
    return Packed({name: torch.clone(tensor) for name, tensor in packed.tensors.items()}, dict(packed.scalars))
