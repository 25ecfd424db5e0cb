"""Checkpoints on disk: what is there, whether it is whole, and which one is the newest. No torch.

A checkpoint is a folder ``step-00000050.view-3`` with one safetensors file a unit, written by whichever node holds the unit
first, and a ``manifest.json`` that comes last, by rename: without it the folder does not count. It is independent of the
number of workers. The newest is the one of the highest view, then step: a late writer of an older view never wins.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.errors import CheckpointError
from everstep.quantities import UnitName

MANIFEST = "manifest.json"
VERSION = 1


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One unit's file."""

    file: str
    sha256: str
    num_bytes: int
    finite: bool
    scalars: dict[str, float | int | bool] = {}


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a folder a checkpoint."""

    version: int
    step: int
    view: int
    digest: str
    """Of the job that wrote it: layers, units, shapes."""
    shards: dict[str, Shard]

    @property
    def finite(self) -> bool:
        return all(shard.finite for shard in self.shards.values())


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


def folder_of(root: Path, step: int, view: int) -> Path:
    return root / f"step-{step:08d}.view-{view}"


def shard_file(unit: UnitName) -> str:
    """A file name for a unit, whatever its name has in it."""
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in unit)
    return f"{safe}-{hashlib.sha256(unit.encode()).hexdigest()[:8]}.safetensors"


def write_atomically(path: Path, data: bytes) -> None:
    """``data`` is at ``path`` whole, or not at all, whenever the machine stops."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_atomically(folder / MANIFEST, msgspec.json.encode(manifest))
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read(folder: Path) -> Checkpoint:
    """The checkpoint in ``folder``, its manifest read but its shards not yet checked.

    Raises:
        CheckpointError: no manifest, a damaged one, or one of another version.
    """
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise CheckpointError(f"{folder}: not a complete checkpoint: {MANIFEST} {error.strerror}", str(folder)) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: damaged: {error}", str(path)) from error
    if manifest.version != VERSION:
        raise CheckpointError(f"{path}: written as version {manifest.version}, this program reads {VERSION}", str(path))
    return Checkpoint(folder, manifest)


def check_shard(checkpoint: Checkpoint, unit: str) -> bytes:
    """The bytes of a unit's file.

    Raises:
        CheckpointError: it is missing, truncated or changed; names the file.
    """
    shard = checkpoint.manifest.shards.get(unit)
    if shard is None:
        raise CheckpointError(f"{checkpoint.path}: has no unit {unit}", str(checkpoint.path))
    path = checkpoint.path / shard.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}", str(path)) from error
    if len(data) != shard.num_bytes:
        raise CheckpointError(f"{path}: should have {shard.num_bytes} bytes, has {len(data)}: truncated", str(path))
    if hashlib.sha256(data).hexdigest() != shard.sha256:
        raise CheckpointError(f"{path}: its checksum is not the one in the manifest: the file was damaged", str(path))
    return data


def verify(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError when any shard is not as the manifest says."""
    for unit in checkpoint.manifest.shards:
        check_shard(checkpoint, unit)


def complete(root: Path) -> list[Checkpoint]:
    """Complete checkpoints under ``root``, newest first. Folders that are not whole are passed over."""
    found = []
    for folder in root.glob("step-*.view-*"):
        try:
            found.append(read(folder))
        except CheckpointError:
            continue  # torn, or still being written
    return sorted(found, key=lambda c: (c.manifest.view, c.manifest.step), reverse=True)


def newest_usable(root: Path) -> tuple[Checkpoint | None, list[CheckpointError]]:
    """The newest checkpoint whose every byte is right, and what is wrong with the newer ones that were passed over."""
    damaged = []
    for checkpoint in complete(root):
        try:
            verify(checkpoint)
        except CheckpointError as error:
            damaged.append(error)
            continue
        return checkpoint, damaged
    return None, damaged


def prune(root: Path, keep: int) -> None:
    """Keep the newest ``keep``, and the newest finite one whichever it is. Torn folders older than those go too."""
    found = complete(root)
    kept = {checkpoint.path for checkpoint in found[:keep]}
    kept.update(checkpoint.path for checkpoint in [c for c in found if c.manifest.finite][:1])
    if not kept:
        return
    oldest = min((c.manifest.view, c.manifest.step) for c in found if c.path in kept)
    for folder in root.glob("step-*.view-*"):
        if folder not in kept and (_numbers(folder) < oldest or (folder / MANIFEST).exists()):
            shutil.rmtree(folder, ignore_errors=True)


def _numbers(folder: Path) -> tuple[int, int]:
    step, _, view = folder.name.removeprefix("step-").partition(".view-")
    return (int(view), int(step)) if step.isdigit() and view.isdigit() else (0, 0)


def manifest_of(step: int, view: int, digest: str, shards: Mapping[str, Shard]) -> Manifest:
    return Manifest(version=VERSION, step=step, view=view, digest=digest, shards=dict(shards))
