"""Checkpoints on disk: torn or damaged ones are never used, and the last good one is never dropped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from everstep.errors import CheckpointError
from everstep.quantities import UnitName
from everstep.runtime.checkpoints import (
    MANIFEST,
    VERSION,
    Checkpoint,
    Shard,
    check_shard,
    complete,
    folder_of,
    manifest_of,
    newest_usable,
    prune,
    read,
    shard_file,
    verify,
    write_atomically,
    write_manifest,
)

UNITS = (UnitName("a"), UnitName("tie:a/b.weight"))


def written(root: Path, step: int, view: int = 1, finite: bool = True, manifest: bool = True) -> Path:
    folder = folder_of(root, step, view)
    folder.mkdir(parents=True)
    shards = {}
    for unit in UNITS:
        data = f"{unit} at {step}".encode() * 10
        shards[unit] = Shard(file=shard_file(unit), sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data), finite=finite)
        write_atomically(folder / shard_file(unit), data)
    if manifest:
        write_manifest(folder, manifest_of(step, view, "digest", shards))
    return folder


def steps(root: Path) -> list[tuple[int, int]]:
    return [(checkpoint.manifest.view, checkpoint.step) for checkpoint in complete(root)]


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    checkpoint = read(written(tmp_path, 50, 3))
    assert (checkpoint.step, checkpoint.manifest.view, checkpoint.manifest.digest) == (50, 3, "digest")
    assert checkpoint.path.name == "step-00000050.view-3"
    assert check_shard(checkpoint, "a") == b"a at 50" * 10
    verify(checkpoint)
    assert not list(tmp_path.rglob("*.part"))


def test_names_of_units_make_files_of_their_own() -> None:
    names = ["a.b", "a/b", "a b", "a_b", "../a", "", "é", "a" * 50, "tie:a.b"]
    files = [shard_file(UnitName(name)) for name in names]
    assert len(set(files)) == len(files)
    assert all("/" not in file and Path(file).name == file for file in files)


def test_a_torn_checkpoint_is_never_loaded(tmp_path: Path) -> None:
    good, torn = written(tmp_path, 10), written(tmp_path, 20, manifest=False)
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint: manifest\.json No such file") as caught:
        read(torn)
    assert caught.value.path == str(torn)
    assert steps(tmp_path) == [(1, 10)]
    newest, damaged = newest_usable(tmp_path)
    assert newest == read(good) and damaged == []


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (flip, "its checksum is not the one in the manifest"),
    "a truncated file": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "should have 70 bytes, has 69: truncated"),
    "a file that is gone": (lambda path: path.unlink(), "cannot be read: No such file"),
    "a folder in its place": (lambda path: (path.unlink(), path.mkdir()), "cannot be read: Is a directory"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path, how: str) -> None:
    damage, said = DAMAGE[how]
    written(tmp_path, 10)
    written(tmp_path, 20)
    bad = written(tmp_path, 30)
    damage(bad / shard_file(UnitName("a")))
    with pytest.raises(CheckpointError, match=said) as caught:
        verify(read(bad))
    assert caught.value.path == str(bad / shard_file(UnitName("a")))
    newest, damaged = newest_usable(tmp_path)
    assert newest is not None and newest.step == 20
    assert [str(error) for error in damaged] == [str(caught.value)]


def test_where_none_is_whole_there_is_none(tmp_path: Path) -> None:
    assert newest_usable(tmp_path) == (None, [])
    assert newest_usable(tmp_path / "nowhere") == (None, [])
    flip(written(tmp_path, 10) / shard_file(UnitName("a")))
    newest, damaged = newest_usable(tmp_path)
    assert newest is None and len(damaged) == 1


MANIFESTS: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{", "damaged"),
    "empty": (b"", "damaged"),
    "not text": (b'{"version": "\xff"}', "damaged"),
    "another shape": (b'{"version": 1}', "damaged: Object missing required field"),
    "another version": (
        msgspec.json.encode(manifest_of(1, 1, "d", {})).replace(f'"version":{VERSION}'.encode(), b'"version":99'),
        f"written as version 99, this program reads {VERSION}",
    ),
}


@pytest.mark.parametrize("how", MANIFESTS)
def test_a_manifest_that_cannot_be_read_makes_no_checkpoint(tmp_path: Path, how: str) -> None:
    data, said = MANIFESTS[how]
    written(tmp_path, 10)
    folder = written(tmp_path, 20)
    (folder / MANIFEST).write_bytes(data)
    with pytest.raises(CheckpointError, match=said) as caught:
        read(folder)
    assert caught.value.path == str(folder / MANIFEST)
    assert steps(tmp_path) == [(1, 10)]


def test_a_unit_that_is_not_in_it_is_said_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no unit z"):
        check_shard(read(written(tmp_path, 10)), "z")


def test_the_newest_is_that_of_the_highest_view_whenever_it_was_written(tmp_path: Path) -> None:
    written(tmp_path, 40, view=3)
    written(tmp_path, 90, view=2)  # by somebody who did not know that it was rolled back
    written(tmp_path, 50, view=3)
    assert steps(tmp_path) == [(3, 50), (3, 40), (2, 90)]
    newest, _ = newest_usable(tmp_path)
    assert newest is not None and newest.step == 50


def test_pruning_keeps_the_newest_and_the_last_finite_one(tmp_path: Path) -> None:
    for step in (10, 20):
        written(tmp_path, step)
    for step in (30, 40, 50):
        written(tmp_path, step, finite=False)
    prune(tmp_path, keep=2)
    assert steps(tmp_path) == [(1, 50), (1, 40), (1, 20)]
    written(tmp_path, 60)
    prune(tmp_path, keep=2)
    assert steps(tmp_path) == [(1, 60), (1, 50)]
    prune(tmp_path, keep=2)
    assert steps(tmp_path) == [(1, 60), (1, 50)]


def test_pruning_takes_torn_ones_that_are_older_and_leaves_those_being_written(tmp_path: Path) -> None:
    old = written(tmp_path, 5, manifest=False)
    written(tmp_path, 10), written(tmp_path, 20)
    late = written(tmp_path, 90, view=0, manifest=False)
    begun = written(tmp_path, 30, manifest=False)
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / "step-mine.view-x").mkdir()
    prune(tmp_path, keep=1)
    assert steps(tmp_path) == [(1, 20)]
    assert not old.exists() and not late.exists() and begun.exists()
    assert (tmp_path / "notes.txt").exists()


def test_pruning_where_nothing_is_whole_touches_nothing(tmp_path: Path) -> None:
    torn = written(tmp_path, 5, manifest=False)
    prune(tmp_path, keep=1)
    assert torn.exists()


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_checkpoint_says_whether_all_of_it_is_finite(tmp_path: Path) -> None:
    def of(*finite: bool) -> Checkpoint:
        shards = {str(i): Shard(file="f", sha256="", num_bytes=0, finite=f) for i, f in enumerate(finite)}
        return Checkpoint(tmp_path, manifest_of(1, 1, "d", shards))

    assert of(True, True).manifest.finite and not of(True, False).manifest.finite
