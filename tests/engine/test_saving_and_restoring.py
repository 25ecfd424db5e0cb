"""State to disk and back: whole checkpoints from several nodes, and only into the model that wrote them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from everstep.engine.model import facts_of
from everstep.engine.state import HeldState
from everstep.errors import CheckpointError
from everstep.plan import Hop, Plan
from everstep.quantities import NodeId
from everstep.runtime import restore, saver
from everstep.runtime.checkpoints import MANIFEST, complete, folder_of, newest_usable, read, shard_file
from everstep.runtime.saver import Saver
from tests.engine.models import adamw, layers

N0, N1 = NodeId("n0"), NodeId("n1")
TIES = (("embed.weight", "head.weight"),)
PLAN = Plan(
    num_layers=6, placement={N0: (0, 1, 2), N1: (2, 3, 4, 5)}, routes=((Hop(N0, 0, 3), Hop(N1, 3, 6)),),
)


def state(node: NodeId, made: Any = None, seed: int = 3, updates: int = 2) -> HeldState:
    made = made or layers()
    held = HeldState(facts_of(made, seed, TIES), made, seed, adamw)
    held.hold(PLAN.placement[node])
    for step in range(updates):
        for unit in held.units.values():
            generator = torch.Generator().manual_seed(step)
            unit.flat.copy_(torch.randn(unit.flat.shape, generator=generator, dtype=unit.flat.dtype))
            unit.apply(1.0, 1.0)
    return held


class Saving:
    def __init__(self, root: Path, keep: int = 2) -> None:
        self.saved: list[tuple[int, int, Path]] = []
        self.failed: list[str] = []
        self.savers = {
            node: Saver(
                node=node, root=root, digest="digest", keep=keep, on_saved=lambda *what: self.saved.append(what),
                on_failed=lambda step, why: self.failed.append(why),
            )
            for node in (N0, N1)
        }

    def save(self, held: dict[NodeId, HeldState], step: int, view: int = 1, nodes: tuple[NodeId, ...] = (N0, N1)) -> None:
        for node in nodes:
            self.savers[node].save(step, view, PLAN, held[node], node == N0)

    def finish(self) -> None:
        for one in self.savers.values():
            one.finish(within_s=30)


@pytest.fixture(scope="module")
def held() -> dict[NodeId, HeldState]:
    return {node: state(node) for node in (N0, N1)}


def test_each_unit_is_written_once_and_restores_to_the_bit(tmp_path: Path, held: dict[NodeId, HeldState]) -> None:
    saving = Saving(tmp_path)
    saving.save(held, 5)
    saving.finish()
    assert saving.saved == [(5, 1, folder_of(tmp_path, 5, 1))]
    newest, damaged = newest_usable(tmp_path)
    assert newest is not None and damaged == [] and newest.manifest.finite
    assert set(newest.manifest.shards) == set(held[N0].facts.units)
    parts = {node: msgspec.json.decode((newest.path / f"part-{node}.json").read_bytes()) for node in (N0, N1)}
    assert set(parts[N0]) == {"tie:embed.weight", "block.0", "block.1"}  # of what both hold, the first writes it
    assert set(parts[N1]) == {"block.2", "block.3", "head"}
    for node, whole in held.items():
        fresh = state(node, updates=0)
        assert fresh.digests() != whole.digests()
        restore.load(fresh, fresh.units, str(newest.path), "digest")
        assert fresh.digests() == whole.digests()


def test_what_is_saved_is_the_state_at_that_moment(tmp_path: Path) -> None:
    held = {node: state(node) for node in (N0, N1)}
    before = {node: one.digests() for node, one in held.items()}
    saving = Saving(tmp_path)
    saving.save(held, 5)
    for one in held.values():
        for unit in one.units.values():
            unit.flat.fill_(1)
            unit.apply(1.0, 1.0)
    saving.finish()
    fresh = state(N1, updates=0)
    restore.load(fresh, fresh.units, str(folder_of(tmp_path, 5, 1)), "digest")
    assert fresh.digests() == before[N1] != held[N1].digests()


def test_old_checkpoints_go_and_the_last_finite_one_stays(tmp_path: Path, held: dict[NodeId, HeldState]) -> None:
    saving = Saving(tmp_path, keep=1)
    for step in (1, 2):
        saving.save(held, step)
        saving.finish()
    broken = {N0: held[N0], N1: state(N1)}
    with torch.no_grad():
        broken[N1].modules[4].get_parameter("up.weight")[0, 0] = float("nan")
    saving.save(broken, 3)
    saving.finish()
    assert [(c.step, c.manifest.finite) for c in complete(tmp_path)] == [(3, False), (2, True)]


def test_a_checkpoint_whose_other_part_never_comes_stays_torn(
    tmp_path: Path, held: dict[NodeId, HeldState], monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(tmp_path)
    with monkeypatch.context() as impatient:
        impatient.setattr(saver, "PARTS_WITHIN_S", 0.05)
        saving.save(held, 5, nodes=(N0,))
        saving.finish()
    assert complete(tmp_path) == [] and (folder_of(tmp_path, 5, 1) / "part-n0.json").exists()
    saving.save(held, 6)
    saving.finish()
    assert [c.step for c in complete(tmp_path)] == [6]
    assert not folder_of(tmp_path, 5, 1).exists()
    assert [step for step, _, _ in saving.saved] == [6]


def test_a_newer_view_ends_the_wait_for_parts_of_an_older_one(tmp_path: Path, held: dict[NodeId, HeldState]) -> None:
    saving = Saving(tmp_path)
    saving.save(held, 5, nodes=(N0,))
    saving.savers[N0].adopt(2)
    ended = threading.Thread(target=saving.finish)
    ended.start()
    ended.join(saver.PARTS_WITHIN_S / 2)
    assert not ended.is_alive()
    assert complete(tmp_path) == [] and saving.saved == []


def test_a_disk_that_cannot_be_written_ends_no_training(tmp_path: Path, held: dict[NodeId, HeldState]) -> None:
    (tmp_path / "file").write_text("in the way")
    saving = Saving(tmp_path / "file")
    saving.save(held, 5)
    saving.finish()
    assert saving.failed and all("checkpoint of step 5" in why for why in saving.failed)


def saved(root: Path, held: dict[NodeId, HeldState]) -> Path:
    saving = Saving(root)
    saving.save(held, 5)
    saving.finish()
    return folder_of(root, 5, 1)


def test_the_initial_weights_are_those_that_are_there(held: dict[NodeId, HeldState]) -> None:
    fresh = state(N0, updates=0)
    before = fresh.digests()
    restore.load(fresh, fresh.units, restore.INITIAL, "any")
    assert fresh.digests() == before


def wider(name: str) -> Any:
    def make() -> Any:
        for layer, module in layers()():
            yield layer, (nn.Sequential(nn.Linear(7, 7)) if layer == name else module)

    return make


@pytest.mark.parametrize(("made", "said"), [
    (layers(depth=3), "it has block.3, this model has not"),
    (layers(depth=5), "this model has block.4, it has not"),
    (wider("block.1"), "it has no block.1.0.weight, this model has"),
    (layers(dtype=torch.float32), r"its embed.weight is torch.float64 \(17, 12\), this model's torch.float32 \(17, 12\)"),
], ids=["a layer less", "a layer more", "another layer", "another dtype"])
def test_a_checkpoint_of_another_model_is_refused_with_the_first_difference(
    tmp_path: Path, held: dict[NodeId, HeldState], made: Any, said: str
) -> None:
    folder = saved(tmp_path, held)
    other = HeldState(facts_of(made, 3, TIES), made, 3, adamw)
    other.hold((0, 1, 2))
    before = other.digests()
    with pytest.raises(CheckpointError, match=f"is of another model: {said}") as caught:
        restore.load(other, other.units, str(folder), "another digest")
    assert caught.value.path == str(folder)
    assert other.digests() == before


def test_a_damaged_shard_is_named_and_the_unit_stays_as_it_was(tmp_path: Path, held: dict[NodeId, HeldState]) -> None:
    folder = saved(tmp_path, held)
    shard = folder / shard_file(next(name for name in held[N0].facts.units if name == "block.0"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    fresh = state(N0, updates=0)
    before = fresh.digests()["block.0"]  # type: ignore[index]
    with pytest.raises(CheckpointError, match="its checksum is not the one in the manifest") as caught:
        restore.load(fresh, fresh.units, str(folder), "digest")
    assert caught.value.path == str(shard)
    assert fresh.digests()["block.0"] == before  # type: ignore[index]


def test_a_torn_checkpoint_is_refused_also_when_it_is_asked_for_by_name(tmp_path: Path, held: dict[NodeId, HeldState]) -> None:
    folder = saved(tmp_path, held)
    (folder / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        restore.load(held[N0], held[N0].units, str(folder), "digest")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        read(tmp_path / "nowhere")
