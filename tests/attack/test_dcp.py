"""Directories of torch.distributed.checkpoint (DCP)"""

import contextlib
import io
import os
import pickle
import resource
import shutil
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict_saver import save

import midstep
from midstep.processor.checkpoints import archive
from midstep.processor.checkpoints.dcp_metadata import read_index
from midstep.processor.checkpoints.entries import survey
from midstep.protocol.errors import CheckpointError

from .attack import attack

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),  # of torch
]

OLDER, NEWEST = 10, 20
STEPS = {OLDER: 1.0, NEWEST: 2.0}
WITHIN_S = 20.0
MOST_BYTES = 8 << 30  # of addresses, far from what a forged number asks for


def model(value: float) -> Any:
    """Return a model of which every parameter has one value."""
    linear = torch.nn.Linear(8, 8)
    for parameter in linear.parameters():
        torch.nn.init.constant_(parameter, value)
    return linear


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints that plain torch has written, which nothing happens to."""
    directory = tmp_path_factory.mktemp("written")
    for step, value in STEPS.items():
        save({"model": model(value).state_dict()}, checkpoint_id=str(directory / f"step-{step:08d}"))
    return directory


@pytest.fixture
def directory(written: Path, tmp_path: Path) -> Path:
    """A directory with the same."""
    return Path(shutil.copytree(written, tmp_path / "checkpoints"))


@pytest.fixture
def place(directory: Path) -> Path:
    """The newest checkpoint in it."""
    return directory / f"step-{NEWEST:08d}"


@pytest.fixture
def bounded() -> Iterator[None]:
    """Have this process refuse memory, and the test fail, where far too much is asked for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MOST_BYTES, hard))
    began_s = time.monotonic()
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.monotonic() - began_s < WITHIN_S


def offered(directory: Path) -> tuple[int, ...]:
    """Return the steps that a rank says it can read."""
    return survey(str(directory), 0.0, foreign=True)[0]


def load_newest_that_loads(directory: Path) -> int:
    """Load as attempts do: the newest that is offered, and after an error what is offered then. Return its step."""
    for _ in STEPS:
        step, linear = offered(directory)[-1], model(0.0)
        try:
            archive.load_shard(directory, step, "replicated", midstep.TrainState(linear))
        except CheckpointError:
            continue
        assert (linear.weight == STEPS[step]).all()
        return step
    raise AssertionError("no checkpoint is left")


def forged(place: Path, change: Callable[[Any], Any]) -> None:
    """Write the metadata of a checkpoint with something else in it."""
    path = place / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(metadata) or metadata))


class Call:
    """Calls something where it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        """Return what is called."""
        return self._call


def as_whole(code: Any) -> Callable[[Any], Any]:
    """Return what puts code in the place of all."""
    return lambda _metadata: code


def as_planner_data(code: Any) -> Callable[[Any], Any]:
    """Return what puts code where nothing of midstep looks."""

    def change(metadata: Any) -> None:
        metadata.planner_data = {"model": code}

    return change


CODE: dict[str, Callable[[Path], Any]] = {
    "os.system": lambda trap: Call(os.system, f"touch {trap}"),
    "eval": lambda trap: Call(eval, f"open({str(trap)!r}, 'w')"),
    "open": lambda trap: Call(open, str(trap), "w"),
    "a method": lambda trap: Call(getattr, trap, "touch"),
    "torch.load": lambda trap: Call(torch.load, str(trap)),
    "an unknown class": lambda trap: Call(io.BytesIO),
}


@attack(
    "the `.metadata` of a checkpoint names `os.system`, `eval`, or any class that torch's metadata does not have",
    holds="no code runs, the checkpoint is passed over, and the one before it is used",
    reads="one warning with the file and the name in it",
)
@pytest.mark.parametrize("wrap", [as_whole, as_planner_data])
@pytest.mark.parametrize("code", CODE)
def test_metadata_runs_no_code(directory: Path, wrap: Any, code: str, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever in it the name stands."""
    place, trap = directory / f"step-{NEWEST:08d}", directory.parent / "trap"
    forged(place, wrap(CODE[code](trap)))
    assert load_newest_that_loads(directory) == OLDER
    assert not trap.exists()
    assert ".metadata is damaged: it names" in caplog.text


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda raw: b"",
    "no pickle": lambda raw: b"{}",
    "a memo of 32 GB": lambda raw: b"\x80\x04]r" + struct.pack("<I", 2**32 - 1) + b".",
    "a text of 2 TB": lambda raw: b"\x80\x04\x8d" + struct.pack("<Q", 2**41) + b".",
    "bytes of 2 TB": lambda raw: b"\x80\x05\x96" + struct.pack("<Q", 2**41) + b".",
    "a number of 2 GB": lambda raw: b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1) + b".",
    "lists in lists": lambda raw: b"\x80\x04" + b"(" * 1_000_000 + b"l" * 1_000_000 + b".",
    "a registered extension": lambda raw: b"\x80\x04\x82\x01.",
    "an object outside of it": lambda raw: b"\x80\x04P1\n.",
    "itself": lambda raw: b"\x80\x04]\x94h\x00a.",
}


@attack(
    "the `.metadata` of a checkpoint is no pickle, or one that asks for all memory",
    holds="it is refused within bounded time and memory, and the one before is used",
    reads="one warning that names the file",
)
@pytest.mark.parametrize("damage", BYTES)
def test_metadata_of_any_bytes_is_refused(directory: Path, place: Path, damage: str, bounded: None) -> None:
    """Nothing but an error of midstep comes of it."""
    path = place / ".metadata"
    path.write_bytes(BYTES[damage](path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
        read_index(place)
    assert load_newest_that_loads(directory) == OLDER


@attack(
    "the `.metadata` of a checkpoint was cut anywhere, or one of its bits has flipped",
    holds="it is refused, or says what it said: whatever it says, nothing outside of the directory is opened",
    reads="one warning that names the file",
)
def test_metadata_that_was_cut_or_changed_leads_nowhere(directory: Path, place: Path) -> None:
    """At many lengths, and with a flipped bit in many bytes."""
    path = place / ".metadata"
    raw = path.read_bytes()
    for length in range(0, len(raw), 5):
        path.write_bytes(raw[:length])
        with pytest.raises(CheckpointError):
            read_index(place)
    for index in range(0, len(raw), 5):
        path.write_bytes(raw[:index] + bytes([raw[index] ^ 1 << index % 8]) + raw[index + 1 :])
        with contextlib.suppress(CheckpointError):
            read_index(place)


def elsewhere(name: str) -> Callable[[Any], None]:
    """Return what has all tensors lie in another file."""

    def change(metadata: Any) -> None:
        for where, what in metadata.storage_data.items():
            metadata.storage_data[where] = _StorageInfo(name, what.offset, what.length)

    return change


def moved(start: int, size_bytes: int | None = None) -> Callable[[Any], None]:
    """Return what has all tensors lie elsewhere in their files."""

    def change(metadata: Any) -> None:
        for where, what in metadata.storage_data.items():
            length = what.length if size_bytes is None else size_bytes
            metadata.storage_data[where] = _StorageInfo(what.relative_path, start, length)

    return change


def reshaped(size: tuple[int, ...], sizes: tuple[int, ...], offsets: tuple[int, ...]) -> Callable[[Any], None]:
    """Return what gives the weight, and the only part of it, other sizes."""

    def change(metadata: Any) -> None:
        weight = metadata.state_dict_metadata["model.weight"]
        weight.size, weight.chunks[0].sizes = torch.Size(size), torch.Size(sizes)
        old = next(where for where in metadata.storage_data if where.fqn == "model.weight")
        weight.chunks[0].offsets = torch.Size(offsets)
        object.__setattr__(old, "offset", torch.Size(offsets))

    return change


def without_places(metadata: Any) -> None:
    """Say of nothing where it is."""
    metadata.storage_data = {}


LIES: dict[str, Callable[[Any], None]] = {
    "a file above": elsewhere("../step-00000010/__0_0.distcp"),
    "the directory above": elsewhere(".."),
    "a file from the root": elsewhere("/etc/passwd"),
    "a name with a zero in it": elsewhere("__0_0.distcp\0"),
    "a file that is not there": elsewhere("__7_0.distcp"),
    "the metadata": elsewhere(".metadata"),
    "an offset behind the end": moved(1 << 40),
    "an offset before the start": moved(-1),
    "more bytes than the file has": moved(0, 1 << 40),
    "fewer bytes than the tensor has": moved(0, 4),
    "an offset that no machine holds": moved(10**400),
    "a tensor of 2**120 elements": reshaped((1 << 60, 1 << 60), (1 << 60, 1 << 60), (0, 0)),
    "a tensor of which nearly all is missing": reshaped((1 << 50, 8), (8, 8), (0, 0)),
    "a part outside of its tensor": reshaped((8, 8), (8, 8), (1, 0)),
    "a part of other dimensions": reshaped((8, 8), (64,), (0,)),
    "a negative size": reshaped((-8, -8), (8, 8), (0, 0)),
    "nothing of where": without_places,
}


@attack(
    "the `.metadata` of a checkpoint names files elsewhere, offsets outside of files, or parts outside of tensors",
    holds="the checkpoint is passed over, nothing that it names is opened, and the one before is used",
    reads="one warning with the file and what cannot be true in it",
)
@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_be_true_is_not_believed(directory: Path, place: Path, lie: str, bounded: None) -> None:
    """Before anything is read into the model."""
    forged(place, LIES[lie])
    assert offered(directory) == (OLDER,)
    assert load_newest_that_loads(directory) == OLDER


def linked(part: Path) -> None:
    """A link to another file."""
    part.rename(part.with_name("elsewhere"))
    part.symlink_to("elsewhere")


def pipe(part: Path) -> None:
    """Something that can be waited at for ever."""
    part.unlink()
    os.mkfifo(part)


def cut(part: Path) -> None:
    """A file without its end."""
    part.write_bytes(part.read_bytes()[:-1])


def emptied(part: Path) -> None:
    """A file of nothing but zeros."""
    part.write_bytes(bytes(part.stat().st_size))


def code_for_tensors(part: Path) -> None:
    """Pickles that call `os.system` in the place of tensors."""
    buffer = io.BytesIO()
    torch.save(Call(os.system, f"touch {part.parent.parent / 'trap'}"), buffer)
    size_bytes = part.stat().st_size
    part.write_bytes((buffer.getvalue() * (size_bytes // len(buffer.getvalue()) + 1))[:size_bytes])


def compressed(part: Path) -> None:
    """A tensor that grows a thousand times when it is read."""
    size_bytes, buffer = part.stat().st_size, io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive_file:
        archive_file.writestr("archive/data.pkl", bytes(1 << 20))
    part.write_bytes(buffer.getvalue().ljust(size_bytes, b"\0"))


@attack(
    "a file of tensors is a link, a pipe, cut, empty, compressed, or has code in the place of a tensor",
    holds="no code runs and nothing is waited for, the file is marked as damaged, and the checkpoint before is used",
    reads="an error that names the file, and one warning from then on",
)
@pytest.mark.parametrize("damage", [linked, pipe, cut, emptied, code_for_tensors, compressed])
def test_a_file_that_is_not_what_it_was_costs_one_checkpoint(directory: Path, place: Path, damage: Any) -> None:
    """Found at once, or when it is read; then no other attempt takes it."""
    damage(place / "__0_0.distcp")
    assert load_newest_that_loads(directory) == OLDER
    assert offered(directory) == (OLDER,)
    assert not (directory / "trap").exists()
