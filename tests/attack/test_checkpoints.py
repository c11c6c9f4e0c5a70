"""Checkpoint directories"""

import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from midstep.processor import tree
from midstep.processor.checkpoints import archive
from midstep.processor.checkpoints.files import MARK
from midstep.processor.checkpoints.writer import CheckpointWriter, Fence
from midstep.protocol.errors import CheckpointError
from midstep.protocol.types import JobSettings

from .attack import attack

pytestmark = pytest.mark.timeout(60)  # where something is waited for that never comes

NEWEST = 100


@dataclass
class Shard:
    """One small shard."""

    header: bytes
    tensors: Sequence[torch.Tensor]


def shard() -> Shard:
    """Return a shard that can be written."""
    tensors = [torch.arange(4.0)]
    return Shard(tree.flatten(tensors, "content")[0], tensors)


def save(directory: Path, step: int, *, ranks: int = 2, attempt: str = "0") -> Path:
    """Write a complete checkpoint."""
    for rank in range(ranks):
        archive.save_local(directory, step, rank, b"own %d %d" % (rank, step), attempt=attempt)
    archive.save_shard(directory, step, "replicated", shard(), attempt=attempt)
    return archive.publish(directory, step, world_size=ranks, attempt=attempt)


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten complete checkpoints, the newest of step 100, which nothing happens to."""
    place = tmp_path_factory.mktemp("ten")
    for step in range(10, NEWEST + 1, 10):
        save(place, step)
    return place


@pytest.fixture
def directory(ten: Path, tmp_path: Path) -> Path:
    """A directory with the same."""
    return Path(shutil.copytree(ten, tmp_path / "checkpoints"))


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A file outside of the checkpoint directory that nothing may happen to."""
    (tmp_path / "elsewhere").mkdir()
    kept = tmp_path / "elsewhere" / "own-0.bin"
    kept.write_bytes(b"kept")
    return kept


def stray_file(place: Path) -> None:
    """A file where a folder should be."""
    place.write_text("not a checkpoint")


def link_loop(place: Path) -> None:
    """A link to itself."""
    place.symlink_to(place)


def manifest_is_a_directory(place: Path) -> None:
    """Something that can be opened and not read."""
    (place / "manifest.json").mkdir(parents=True)


def manifest_is_a_pipe(place: Path) -> None:
    """Something that can be waited at for ever."""
    place.mkdir()
    os.mkfifo(place / "manifest.json")


def shard_is_a_pipe(place: Path) -> None:
    """The same behind a manifest that is right about its size."""
    made = save(place.parent, int(place.name.removeprefix("step-")))
    manifest = json.loads((made / "manifest.json").read_text())
    manifest["parts"]["replicated.safetensors"]["size_bytes"] = 0
    (made / "manifest.json").write_text(json.dumps(manifest))
    (made / "replicated.safetensors").unlink()
    os.mkfifo(made / "replicated.safetensors")


@attack(
    "one entry of the directory is a stray file, a link to itself, or cannot be read",
    holds="the entry is passed over, all complete checkpoints are found, and pruning continues",
    reads="one warning that names the entry and what is wrong with it",
)
@pytest.mark.parametrize("plant", [stray_file, link_loop, manifest_is_a_directory, manifest_is_a_pipe, shard_is_a_pipe])
def test_one_bad_entry_hides_no_checkpoint(directory: Path, plant: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It stays where it is, and is said once."""
    plant(directory / "step-00009999")
    for _ in range(2):
        assert archive.complete_steps(directory) == tuple(range(10, NEWEST + 1, 10))
    assert archive.prune(directory, keep=2) == tuple(range(10, NEWEST - 10, 10))
    assert os.path.lexists(directory / "step-00009999")
    assert sum("step-00009999" in record.getMessage() for record in caplog.records) == 1


@attack(
    "the file server answers for one checkpoint with EIO, ESTALE, EACCES or ELOOP",
    holds="the others are found",
    reads="one warning with the error",
)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ELOOP])
def test_an_error_at_one_entry_hides_no_other(directory: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Wherever it strikes first, at the folder or at a file in it."""

    def broken(real: Any) -> Any:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and "step-00000050" in os.fspath(path):
                raise OSError(number, os.strerror(number), os.fspath(path))
            return real(path, *arguments, **options)

        return call

    for name in ("open", "lstat", "stat"):
        monkeypatch.setattr(os, name, broken(getattr(os, name)))
    monkeypatch.setattr(Path, "stat", broken(Path.stat))
    found = archive.complete_steps(directory)
    monkeypatch.undo()
    assert found == tuple(step for step in range(10, NEWEST + 1, 10) if step != 50)


DAMAGES: dict[str, Any] = {
    "no ranks": {"world_size": 0},
    "fewer ranks than none": {"world_size": -3},
    "more ranks than there are files": {"world_size": 10**6},
    "a rank number that no machine holds": {"world_size": 10**400},
    "a file above": {"parts": {"../../elsewhere/own-0.bin": {"size_bytes": 4, "checksum": "0" * 16}}},
    "a file from the root": {"parts": {"/etc/passwd": {"size_bytes": 4, "checksum": "0" * 16}}},
    "a file that midstep does not write": {"parts": {"model.pickle": {"size_bytes": 4, "checksum": "0" * 16}}},
    "nothing": {"parts": {}},
    "another step": {"step": 90},
    "a step that no message holds": {"step": 10**30},
    "another format": {"format": 7},
    "no object": None,
}


@attack(
    "a manifest is damaged or forged: no ranks, too many, another step, files elsewhere",
    holds="the checkpoint is passed over, no file that it names is opened, the one before is used",
    reads="one warning that names the manifest and what is wrong in it",
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_not_believed(directory: Path, elsewhere: Path, damage: str) -> None:
    """Whatever it says, the checkpoint before it is the newest one."""
    path = directory / f"step-{NEWEST:08d}" / "manifest.json"
    manifest = json.loads(path.read_text())
    changes = DAMAGES[damage]
    if changes is not None and "parts" in changes and changes["parts"]:
        changes = {"parts": {**manifest["parts"], **changes["parts"]}}
        (directory / f"step-{NEWEST:08d}" / "model.pickle").write_bytes(b"kept")
    path.write_text(json.dumps("manifest" if changes is None else {**manifest, **changes}))
    assert archive.complete_steps(directory)[-1] == NEWEST - 10
    with pytest.raises(CheckpointError):
        archive.world_size_of(directory, NEWEST)


@attack(
    "a manifest is nested 100,000 deep, or larger than any real one",
    holds="it is refused within bounded time and memory, and the one before is used",
    reads="one warning that names the manifest",
)
@pytest.mark.parametrize("text", [b'{"x":' * 100_000, b"[" * 100_000], ids=["objects", "lists"])
def test_a_manifest_nested_too_deep_is_damaged(directory: Path, text: bytes) -> None:
    """It ends no process."""
    (directory / f"step-{NEWEST:08d}" / "manifest.json").write_bytes(text)
    assert archive.complete_steps(directory)[-1] == NEWEST - 10


@attack(
    "a checkpoint's folder is a link to a folder elsewhere",
    holds="nothing is read, written or removed through the link",
    reads="one warning that links are not followed",
)
def test_a_link_to_elsewhere_is_followed_by_nothing(tmp_path: Path, elsewhere: Path) -> None:
    """Neither by a listing nor by pruning, whatever lies behind it."""
    directory, outside = tmp_path / "checkpoints", tmp_path / "outside"
    whole = save(outside, 10)
    save(directory, 20)
    save(directory, 30)
    (directory / "step-00000010").symlink_to(whole)
    (directory / "step-00000015.tmp-gone").symlink_to(elsewhere.parent)
    assert archive.complete_steps(directory) == (20, 30)
    archive.prune(directory, keep=1)
    assert archive.complete_steps(directory) == (30,)
    assert archive.complete_steps(outside) == (10,)
    assert elsewhere.read_bytes() == b"kept"


@attack(
    "somebody has put a link where the next checkpoint, or the mark, will be written",
    holds="nothing is written behind the link",
    reads="an error that names the file, or nothing where the link is replaced",
)
def test_nothing_is_written_through_a_planted_link(tmp_path: Path, elsewhere: Path) -> None:
    """The names of unfinished files can be guessed."""
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    (directory / "step-00000010.tmp-0").symlink_to(elsewhere.parent)
    with pytest.raises(CheckpointError, match="something else has its name"):
        archive.save_local(directory, 10, 0, b"overwritten")
    (directory / f"world.{os.getpid()}.new").symlink_to(elsewhere)
    Fence(directory).take("gpt", 1, "node0")
    assert elsewhere.read_bytes() == b"kept"
    assert [path.name for path in elsewhere.parent.iterdir()] == [elsewhere.name]


@attack(
    "a user keeps files of their own in the checkpoint directory",
    holds="pruning and publishing remove what midstep has written, and nothing else",
    reads="one warning that names the folder that could not be removed whole",
)
def test_what_midstep_has_not_written_is_not_removed(tmp_path: Path) -> None:
    """In a folder of midstep's, in an unfinished one, and in one that has the name of the next checkpoint."""
    old, unfinished = save(tmp_path, 10), tmp_path / "step-00000015.tmp-gone"
    unfinished.mkdir()
    mine = [old / "notes.txt", unfinished / "notes.txt", tmp_path / "step-00000030" / "weights.pt"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    save(tmp_path, 20)
    save(tmp_path, 30)
    assert archive.complete_steps(tmp_path) == (10, 20, 30)
    archive.prune(tmp_path, keep=1)
    assert archive.complete_steps(tmp_path) == (30,)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"mine") == [
        "notes.txt",
        "notes.txt",
        "weights.pt",
    ]


class Writer:
    """Rank 0 of a job with one rank, as far as its checkpoints go."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        settings = JobSettings(checkpoint_directory=str(directory), checkpoint_every_steps=10, checkpoint_keep=keep)
        local_states = SimpleNamespace(read=lambda rank, step: b"own")
        runtime: Any = SimpleNamespace(
            settings=settings, rank=0, job="gpt", node="node0", generation=1, world_size=1, local_states=local_states
        )
        framework: Any = SimpleNamespace(writes=lambda: ("replicated",), open_shard=lambda shard_id: shard())
        self.checkpoints = CheckpointWriter(runtime, framework)
        self.checkpoints.take_over(1)

    def write(self, step: int) -> None:
        """Write one checkpoint as training does."""
        self.checkpoints.save(step)
        self.checkpoints.publish_pending()


@attack(
    "a job writes into a directory with later checkpoints of an older job",
    holds="the checkpoint that was just written, and those before it that are to be kept, stay",
)
def test_an_older_job_does_not_cost_the_new_one_its_checkpoints(directory: Path) -> None:
    """Step numbers do not say which job wrote them."""
    writer = Writer(directory, keep=2)
    for step in (1, 2, 3):
        writer.write(step)
        assert step in archive.complete_steps(directory)
    assert archive.complete_steps(directory)[:3] == (2, 3, 10)


@pytest.fixture
def no_umask() -> Iterator[None]:
    """The umask that takes nothing away."""
    before = os.umask(0)
    yield
    os.umask(before)


@attack(
    "the job runs with umask 0 or 002, and its checkpoints lie where a group can write",
    holds="no file or folder that midstep makes can be written to by the group or by others",
)
@pytest.mark.usefixtures("no_umask")
def test_what_midstep_makes_can_be_written_to_by_its_user_only(tmp_path: Path) -> None:
    """The folders above that it makes are no exception, nor is what is unfinished."""
    directory = tmp_path / "made" / "by" / "midstep"
    Writer(directory, keep=2).write(10)
    archive.save_local(directory, 20, 0, b"own")
    made = [tmp_path / "made", *(tmp_path / "made").rglob("*")]
    assert {path.name for path in made} >= {MARK, "manifest.json", "own-0.bin", "replicated.safetensors"}
    open_to_others = {path.name: oct(path.stat().st_mode) for path in made if path.stat().st_mode & 0o027}
    assert not open_to_others


@attack(
    "the user names a checkpoint directory that a group can write to",
    holds="its mode is left as it is, and what midstep makes in it is not open",
    reads="a warning in the log of rank 0 with the mode",
)
def test_a_directory_that_others_can_write_to_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whether that is meant is the user's to know."""
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o2775)
    Writer(directory, keep=2)
    assert f"{directory} has mode 2775" in caplog.text
    assert directory.stat().st_mode & 0o7777 == 0o2775


@attack(
    "the mark in the directory is a pipe, a link, or has a line break in a name",
    holds="nothing waits at it, nothing is made complete on a guess",
    reads="an error in the log of rank 0 that names the mark and says to remove it",
)
@pytest.mark.parametrize("kind", ["pipe", "folder", "large", "line break"])
def test_a_mark_that_is_no_mark_is_named(tmp_path: Path, kind: str) -> None:
    """And what others have written there does not get into the log as a line of its own."""
    fence = Fence(tmp_path)
    fence.take("gpt", 1, "node0")
    mark = tmp_path / MARK
    good = json.loads(mark.read_text())
    node = "n\nmidstep: all is well" if kind == "line break" else "n" * 10**6
    mark.unlink()
    if kind == "pipe":
        os.mkfifo(mark)
    elif kind == "folder":
        mark.mkdir()
    else:
        mark.write_text(json.dumps({**good, "node": node}))
    with pytest.raises(CheckpointError, match=r"world\.json is damaged.*Remove it"):
        fence.lost_to()
    shutil.rmtree(mark) if kind == "folder" else mark.unlink()
    assert fence.lost_to() is None


@attack(
    "two processes write the rank-local state of the same rank at once, as a rank and its buddy do in an emergency",
    holds="neither disturbs the other, and the checkpoint is complete",
)
def test_a_part_may_be_written_by_two_processes_at_once(tmp_path: Path) -> None:
    """The one that comes last wins, with the same bytes."""
    failures: list[CheckpointError] = []

    def write(start: threading.Barrier) -> None:
        try:
            for _ in range(200):
                start.wait(30.0)
                archive.save_local(tmp_path, 7, 0, b"state" * 1000)
        except CheckpointError as error:
            failures.append(error)
            start.abort()
        except threading.BrokenBarrierError:
            return

    start = threading.Barrier(2)
    threads = [threading.Thread(target=write, args=(start,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(list((tmp_path / "step-00000007.tmp-0").iterdir())) == 2  # the part and its record, and no draft
