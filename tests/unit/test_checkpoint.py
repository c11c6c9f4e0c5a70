"""Checkpoints: complete or not there, readable without running anything, never lost to a failed write."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from midstep.processor import tree
from midstep.processor.checkpoints import archive, files
from midstep.protocol.errors import CheckpointError


@dataclass
class _Shard:
    header: bytes
    tensors: Sequence[torch.Tensor]


@dataclass
class _Framework:
    tensors: list[torch.Tensor] = field(default_factory=list)

    def accept_shard(self, shard_id: str, header: bytes) -> _Shard:
        return _Shard(header, [torch.zeros(slot.shape, dtype=slot.dtype) for slot in tree.slots(header)])

    def adopt_shard(self, shard_id: str, shard: _Shard) -> None:
        self.tensors = list(shard.tensors)


def _content(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randn(1000, 7, generator=generator),
        torch.randn(3, generator=generator).bfloat16(),
        torch.tensor(step),
        torch.zeros(0),
        torch.ones(2, dtype=torch.complex128),
    ]


def _shard(step: int) -> _Shard:
    tensors = _content(step)
    return _Shard(tree.flatten(tensors, "content")[0], tensors)


def _save(directory: Path, step: int, ranks: int = 2) -> Path:
    for rank in range(ranks):
        archive.save_local(directory, step, rank, b"own %d %d" % (rank, step))
    archive.save_shard(directory, step, "replicated", _shard(step))
    return archive.publish(directory, step, world_size=ranks)


def _load(directory: Path, step: int) -> list[torch.Tensor]:
    framework: Any = _Framework()
    archive.load_shard(directory, step, "replicated", framework)
    return list(framework.tensors)


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    """Shards and rank-local states."""
    _save(tmp_path, 120)
    assert archive.complete_steps(tmp_path) == (120,)
    assert all(torch.equal(a, b) for a, b in zip(_load(tmp_path, 120), _content(120), strict=True))
    assert archive.load_local(tmp_path, 120, 1) == b"own 1 120"
    assert {path.name for path in (tmp_path / "step-00000120").iterdir()} == {
        "manifest.json",
        "own-0.bin",
        "own-1.bin",
        "replicated.safetensors",
    }


def test_the_shard_file_can_be_opened_with_safetensors(tmp_path: Path) -> None:
    """The format is a public one."""
    place = _save(tmp_path, 1)
    loaded = safetensors.torch.load_file(place / "replicated.safetensors")
    assert torch.equal(loaded["tensor.000000"], _content(1)[0])


def test_a_checkpoint_is_not_there_before_all_its_parts_are(tmp_path: Path) -> None:
    """Neither before publish nor with a part missing."""
    archive.save_local(tmp_path, 5, 0, b"x")
    archive.save_shard(tmp_path, 5, "replicated", _shard(5))
    assert archive.complete_steps(tmp_path) == ()
    with pytest.raises(CheckpointError, match=r"lacks own-1\.bin"):
        archive.publish(tmp_path, 5, world_size=2)
    with pytest.raises(CheckpointError, match=r"lacks other\.safetensors"):
        archive.publish(tmp_path, 5, world_size=1, shard_ids=["other"])
    assert archive.complete_steps(tmp_path) == ()
    archive.publish(tmp_path, 5, world_size=1)
    assert archive.complete_steps(tmp_path) == (5,)


def test_a_directory_that_does_not_exist_holds_no_checkpoints(tmp_path: Path) -> None:
    """It is made when the first one is written."""
    assert archive.complete_steps(tmp_path / "none") == ()


@pytest.mark.parametrize("victim", ["replicated.safetensors", "own-0.bin", "manifest.json"])
def test_a_truncated_file_leaves_the_older_checkpoint_to_use(tmp_path: Path, victim: str) -> None:
    """Seen by its size, before anything is loaded."""
    _save(tmp_path, 1)
    path = _save(tmp_path, 2) / victim
    path.write_bytes(path.read_bytes()[:-1])
    assert archive.complete_steps(tmp_path) == (1,)


@pytest.mark.parametrize("position", [3, 30, 400, -1])
def test_a_changed_bit_is_found_and_the_checkpoint_is_not_offered_again(tmp_path: Path, position: int) -> None:
    """In the index, the header or the data; the older one is used then."""
    _save(tmp_path, 1)
    path = _save(tmp_path, 2) / "replicated.safetensors"
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)
    assert archive.complete_steps(tmp_path) == (1, 2)
    with pytest.raises(Exception, match="damaged"):
        _load(tmp_path, 2)
    assert archive.complete_steps(tmp_path) == (1,)


def test_a_changed_own_state_is_found(tmp_path: Path) -> None:
    """By its checksum."""
    path = _save(tmp_path, 2) / "own-1.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="damaged"):
        archive.load_local(tmp_path, 2, 1)
    assert archive.complete_steps(tmp_path) == ()


def test_a_rank_that_was_not_in_the_world_is_named_and_nothing_is_marked(tmp_path: Path) -> None:
    """Another world size is not damage."""
    _save(tmp_path, 2)
    with pytest.raises(CheckpointError, match="world size"):
        archive.load_local(tmp_path, 2, 7)
    assert archive.complete_steps(tmp_path) == (2,)


def test_the_same_step_can_be_written_again(tmp_path: Path) -> None:
    """After a recovery; the newer one counts, nothing is left over."""
    _save(tmp_path, 3)
    archive.save_local(tmp_path, 3, 0, b"newer", attempt="g2")
    archive.save_shard(tmp_path, 3, "replicated", _shard(4), attempt="g2")
    archive.publish(tmp_path, 3, world_size=1, attempt="g2")
    assert archive.load_local(tmp_path, 3, 0) == b"newer"
    assert {path.name for path in tmp_path.iterdir()} == {"latest.json", "step-00000003"}


def test_old_checkpoints_and_old_attempts_are_pruned(tmp_path: Path) -> None:
    """The newest stay, and so does an attempt that is newer than them."""
    for step in (1, 2, 3):
        _save(tmp_path, step)
    archive.save_local(tmp_path, 2, 0, b"died", attempt="dead")
    archive.save_local(tmp_path, 4, 0, b"going on")
    assert archive.prune(tmp_path, keep=2) == (1,)
    assert {path.name for path in tmp_path.iterdir()} == {
        "latest.json",
        "step-00000002",
        "step-00000003",
        "step-00000004.tmp-0",
    }


def test_a_full_disk_is_named_and_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file; the older checkpoint is whole, and a later attempt works."""
    _save(tmp_path, 1)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"step-00000002.*replicated.*No space left"):
            archive.save_shard(tmp_path, 2, "replicated", _shard(2))
    assert archive.complete_steps(tmp_path) == (1,)
    _save(tmp_path, 2)
    assert archive.complete_steps(tmp_path) == (1, 2)


def test_a_publish_that_fails_keeps_the_old_one_of_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old folder gets its name back."""
    _save(tmp_path, 1)
    real = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise PermissionError(13, "Permission denied")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        _save(tmp_path, 1)
    assert archive.complete_steps(tmp_path) == (1,)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """Here a file is in the way."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        archive.save_local(tmp_path / "file", 1, 0, b"")


def test_discarding_an_attempt_leaves_the_rest(tmp_path: Path) -> None:
    """And doing it twice is no error."""
    _save(tmp_path, 1)
    archive.save_local(tmp_path, 2, 0, b"")
    archive.discard(tmp_path, 2)
    archive.discard(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"latest.json", "step-00000001"}


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    """An operator can read it."""
    manifest = json.loads((_save(tmp_path, 9) / "manifest.json").read_text())
    assert manifest["step"] == 9
    assert manifest["parts"]["own-0.bin"]["size_bytes"] == len(b"own 0 9")


def test_a_rank_that_reads_after_another_has_found_damage_says_what_that_was(tmp_path: Path) -> None:
    """It may be slower than the rank whose file it is, and be the first whose report is heard."""
    place = _save(tmp_path, 10)
    (place / "own-1.bin").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match=r"own-1\.bin is damaged: it has 7 bytes"):
        archive.load_local(tmp_path, 10, 1)

    for read in (lambda: archive.load_local(tmp_path, 10, 0), lambda: archive.world_size_of(tmp_path, 10)):
        with pytest.raises(CheckpointError, match=r"own-1\.bin is damaged: it has 7 bytes"):
            read()
    with pytest.raises(CheckpointError, match=r"own-1\.bin is damaged: it has 7 bytes"):
        _load(tmp_path, 10)


def test_a_mark_without_words_is_a_mark_all_the_same(tmp_path: Path) -> None:
    """The directory may take no file any more."""
    place = _save(tmp_path, 10)
    (place / "manifest.json").rename(place / "manifest.damaged.json")

    with pytest.raises(CheckpointError, match="was found to be damaged"):
        archive.load_local(tmp_path, 10, 0)


def test_a_checkpoint_that_was_marked_is_removed_whole(tmp_path: Path) -> None:
    """Also the file that says what was found."""
    place = _save(tmp_path, 10)
    (place / "own-1.bin").write_bytes(b"garbage")
    with pytest.raises(CheckpointError):
        archive.load_local(tmp_path, 10, 1)

    files.remove_checkpoint(place)

    assert not place.exists()
