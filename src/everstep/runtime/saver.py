"""Writes this node's part of a checkpoint behind training, and completes the manifest where this node is the reporter.

The copy is taken at a step boundary, so it blocks for as long as memory takes to copy; disk is a thread's business. No
message is needed: the parts of the other nodes are waited for in the folder itself, so a checkpoint is also completed when
the agent is gone.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.engine.shards import copied, to_bytes
from everstep.engine.state import HeldState, Packed
from everstep.plan import Plan
from everstep.quantities import NodeId, UnitName
from everstep.runtime.checkpoints import Shard, folder_of, manifest_of, prune, shard_file, write_atomically, write_manifest

MOST_WAITING = 1
"""Copies that wait while another is written: each is as large as this node's state."""

PARTS_WITHIN_S = 60.0
"""How long the reporter waits for other nodes' parts: one that died never writes its own, and the folder stays torn."""


@dataclass(frozen=True)
class _Job:
    step: int
    view: int
    units: dict[UnitName, Packed]
    writers: frozenset[NodeId]
    """Whose parts make it complete; empty where this node does not write the manifest."""


class Saver:
    """One writer thread, started with the first checkpoint."""

    def __init__(
        self, *, node: NodeId, root: Path, digest: str, keep: int, on_saved: Callable[[int, int, Path], None],
        on_failed: Callable[[int, str], None],
    ) -> None:
        self._node, self._root, self._digest, self._keep, self._on_saved = node, root, digest, keep, on_saved
        self._on_failed = on_failed
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._current_view = 0

    def adopt(self, view: int) -> None:
        """Parts of older views' nodes are not waited for any more."""
        self._current_view = max(self._current_view, view)

    def save(self, step: int, view: int, plan: Plan, held: HeldState, is_reporter: bool) -> None:
        """Copy what this node has to write and hand it to the thread. While two are being written already, there is none."""
        if self._jobs.qsize() >= MOST_WAITING:
            self._on_failed(step, f"no checkpoint of step {step}: the disk has not yet taken the ones before")
            return
        owners = {name: _first_holder(plan, held, name) for name in held.facts.units}
        mine = {name: copied(held.units[name].pack()) for name, owner in owners.items() if owner == self._node}
        writers = frozenset(owners.values()) if is_reporter else frozenset()
        if not mine and not writers:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="saver")
            self._thread.start()
        self._jobs.put(_Job(step, view, mine, writers))

    def finish(self, within_s: float) -> None:
        """Wait until everything handed over is on disk, but not longer than ``within_s``."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(within_s)
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._write(job)
            except Exception as error:  # a full disk must not end training, nor this thread: the agent is told
                self._on_failed(job.step, f"the checkpoint of step {job.step} could not be written: {error}")

    def _write(self, job: _Job) -> None:
        folder = folder_of(self._root, job.step, job.view)
        folder.mkdir(parents=True, exist_ok=True)
        shards: dict[str, Shard] = {}
        for name, packed in job.units.items():
            data = to_bytes(packed)
            shards[name] = Shard(
                file=shard_file(name), sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data),
                finite=packed.is_finite(), scalars=packed.scalars,
            )
            write_atomically(folder / shards[name].file, data)
        write_atomically(folder / f"part-{self._node}.json", msgspec.json.encode(shards))
        if job.writers and self._gathered(folder, job):
            prune(self._root, self._keep)
            self._on_saved(job.step, job.view, folder)

    def _gathered(self, folder: Path, job: _Job) -> bool:
        deadline_s = time.monotonic() + PARTS_WITHIN_S
        parts = {node: folder / f"part-{node}.json" for node in job.writers}
        while not all(path.exists() for path in parts.values()):
            if time.monotonic() > deadline_s or self._current_view > job.view:
                return False
            time.sleep(0.01)
        shards: dict[str, Shard] = {}
        for path in parts.values():
            shards |= msgspec.json.decode(path.read_bytes(), type=dict[str, Shard])
        write_manifest(folder, manifest_of(job.step, job.view, self._digest, shards))
        return True


def _first_holder(plan: Plan, held: HeldState, unit: UnitName) -> NodeId:
    layers = set(held.facts.units[unit].layers)
    return next(node for node in plan.nodes if layers.intersection(plan.placement[node]))
