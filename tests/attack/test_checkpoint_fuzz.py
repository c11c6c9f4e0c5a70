"""Reading from a checkpoint directory: manifests, part records, marks, shard files, rank-local states"""

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from midstep import TrainState
from midstep.devices.cpu import CpuDevice
from midstep.processor import tree
from midstep.processor.checkpoints import archive
from midstep.processor.checkpoints.files import MARK, step_directory
from midstep.processor.checkpoints.writer import Fence
from midstep.processor.local_state import LocalState
from midstep.protocol.errors import CheckpointError, RecoveryError

from .attack import attack
from .fuzzing import CASES as ALL_CASES
from .fuzzing import LIMIT_S

CASES = ALL_CASES // 5  # each writes and reads files
SEED = 20261122
STEP, OLDER = 20, 10
SHARD_FILE, OWN_FILE = "replicated.safetensors", "own-0.bin"

pytestmark = pytest.mark.timeout(LIMIT_S)

NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 2**64, 10**400, 1e308, "", "x" * 5000, "../x", "/etc/passwd", "own-0.bin",
    "\u0000", "\ud800", [], {}, [[]], {"": {}}, [0, -5], [2**62, 2**63],
)  # fmt: skip


def mutated(good: bytes, chance: random.Random) -> bytes:
    """Return good bytes with something wrong: bits, a cut, a splice, a repetition, digits, or a nest of brackets."""
    data = bytearray(good)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        place, way = chance.randrange(len(data) + 1), chance.randrange(8)
        length = chance.choice((1, 2, 8, 100))
        if way == 0 and data:
            data[place % len(data)] ^= 1 << chance.randrange(8)
        elif way == 1:
            del data[place:]
        elif way == 2:
            del data[place : place + length]
        elif way == 3:
            data[place:place] = chance.randbytes(length)
        elif way == 4:
            start = chance.randrange(len(good))
            data[place : place + length] = good[start : start + length]
        elif way == 5:
            data[place:place] = chance.choice((b"9" * 30, b"-", b"\xff" * 8, b"\x00", b"\xc1", b'"'))
        elif way == 6:
            data[place:place] = chance.choice((b"[", b'{"x":', b"\x91", b"\x81\xa0")) * chance.choice((3, 3000))
        else:
            data[: len(data) and 8] = struct.pack("<Q", chance.choice((0, 7, len(data), 2**31, 2**63, 2**64 - 1)))
    return bytes(data)


def mutated_json(good: bytes, chance: random.Random) -> bytes:
    """Return a document with a value, or a key, that cannot be right; half of the time with wrong bytes instead."""
    if chance.random() < 0.5:
        return mutated(good, chance)
    document = json.loads(good)
    place = document
    while True:
        key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or chance.random() < 0.3:
            break
        place = inner
    way = chance.random()
    if way < 0.6:
        place[key] = chance.choice(NASTY)
    elif isinstance(place, dict):
        moved = place.pop(key)
        if way < 0.9:
            place[str(chance.choice(NASTY))] = moved
    return json.dumps(document).encode()


def state() -> TrainState:
    """Return the state of a small model."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return TrainState(model=model, optimizer=optimizer, values={"seen": {"samples": 3}})


class Reader:
    """The framework's part of a rank-local state, decoded and no more: what it holds is the script's to judge."""

    def restore_local(self, blob: bytes) -> None:
        """Decode it."""
        tree.unpack(blob)

    def rolled_back(self, step: int) -> None:
        """Nothing is kept beside it."""


class Directory:
    """A directory with two good checkpoints, of which the newer one is about to be spoilt."""

    def __init__(self, place: Path) -> None:
        self.place, self.state = place, state()
        reader: Any = Reader()
        self._reader = LocalState(reader, CpuDevice())
        for step in (OLDER, STEP):
            archive.save_shard(place, step, "replicated", self.state.open_shard("replicated"))
            archive.save_local(place, step, 0, LocalState(self.state, CpuDevice()).capture())
            archive.publish(place, step, world_size=1)
        self.newest = step_directory(place, STEP)
        self._good = {path: path.read_bytes() for path in self.newest.iterdir()}

    def good(self, name: str) -> bytes:
        """Return what a file of the newer checkpoint should hold."""
        return self._good[self.newest / name]

    def spoil(self, name: str, data: bytes, *, believed: bool = False) -> None:
        """Replace a file of the newer checkpoint; `believed`: with a manifest that has its size and checksum."""
        (self.newest / name).write_bytes(data)
        if believed:
            manifest = json.loads(self.good("manifest.json"))
            manifest["parts"][name] = {"size_bytes": len(data), "checksum": xxhash.xxh3_64_hexdigest(data)}
            (self.newest / "manifest.json").write_text(json.dumps(manifest))

    def mend(self) -> None:
        """Put everything back."""
        for path in self.newest.iterdir():
            if path not in self._good:
                path.unlink()
        for path, data in self._good.items():
            path.write_bytes(data)

    def load(self, step: int) -> None:
        """Load a checkpoint as a rank does."""
        archive.world_size_of(self.place, step)
        for hold in self.state.shards():
            archive.load_shard(self.place, step, hold.shard_id, self.state)
        self._reader.restore(archive.load_local(self.place, step, 0), step)


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    """Two good checkpoints."""
    return Directory(tmp_path / "checkpoints")


def refused(load: Callable[[], object]) -> bool:
    """Whether loading raises an error of midstep's; any other error is a failure of the test."""
    try:
        load()
    except (CheckpointError, RecoveryError):
        return True
    return False


@attack(
    "the manifest has wrong bytes, types, sizes, names or nesting",
    holds="the checkpoint is passed over or loads as it was; the one before is always found and loads",
    reads="one warning that names the manifest",
)
def test_no_manifest_hides_the_checkpoint_before(directory: Directory) -> None:
    """Nor does any end the process that reads it."""
    chance, passed_over = random.Random(SEED), 0
    for _ in range(CASES):
        directory.spoil("manifest.json", mutated_json(directory.good("manifest.json"), chance))
        offered = archive.complete_steps(directory.place)
        assert offered in {(OLDER,), (OLDER, STEP)}
        passed_over += STEP not in offered
        refused(lambda: directory.load(STEP))
        directory.mend()
    assert passed_over > CASES // 2
    directory.load(STEP)
    directory.load(OLDER)


@attack(
    "the shard file or a rank-local state has wrong bytes, and the manifest is right",
    holds="it is refused by its size or checksum, marked, and not offered again",
    reads="an error that names the file",
)
@pytest.mark.parametrize("name", [SHARD_FILE, OWN_FILE])
def test_a_changed_part_is_refused_and_marked(directory: Directory, name: str) -> None:
    """Whatever was changed, and wherever."""
    chance, cases = random.Random(SEED), 0
    for _ in range(CASES):
        data = mutated(directory.good(name), chance)
        if data == directory.good(name):
            continue
        cases += 1
        directory.spoil(name, data)
        assert refused(lambda: directory.load(STEP))
        assert archive.complete_steps(directory.place) == (OLDER,)
        directory.mend()
    assert cases > CASES // 2
    directory.load(STEP)


@attack(
    "the shard file or a rank-local state was forged together with its manifest",
    holds="what cannot be understood is refused within bounded time and memory, and no code runs",
    reads="an error that names the file or what is wrong in it",
)
@pytest.mark.parametrize("name", [SHARD_FILE, OWN_FILE])
def test_a_forged_part_is_refused_or_loads(directory: Directory, name: str) -> None:
    """No other error than midstep's own, as that would end the process before the checkpoint is marked."""
    chance, cases = random.Random(SEED), 0
    for _ in range(CASES):
        directory.spoil(name, mutated(directory.good(name), chance), believed=True)
        cases += refused(lambda: directory.load(STEP))
        directory.mend()
    assert cases > CASES // 2
    directory.load(STEP)


@attack(
    "the index of a shard file was forged: offsets, shapes, types, header",
    holds="it is refused, and no memory is taken for what it claims",
    reads="an error that names the file",
)
def test_a_forged_index_is_refused_or_loads(directory: Directory) -> None:
    """The index alone, as it is a small part of the file."""
    good = directory.good(SHARD_FILE)
    (length,) = struct.unpack_from("<Q", good)
    chance, cases = random.Random(SEED), 0
    for _ in range(CASES):
        index = mutated_json(good[8 : 8 + length], chance)
        directory.spoil(SHARD_FILE, struct.pack("<Q", len(index)) + index + good[8 + length :], believed=True)
        cases += refused(lambda: directory.load(STEP))
        directory.mend()
    assert cases > CASES // 4
    directory.load(STEP)


@attack(
    "the record beside a part that was just written is damaged",
    holds="the checkpoint is not made complete, and the next one is",
    reads="an error that names the record",
)
def test_a_damaged_part_record_completes_nothing_wrong(tmp_path: Path) -> None:
    """Either it still says what the part is, or publishing is refused."""
    chance = random.Random(SEED)
    shard = state().open_shard("replicated")

    def write() -> Path:
        archive.save_shard(tmp_path, STEP, "replicated", shard)
        archive.save_local(tmp_path, STEP, 0, b"own")
        return tmp_path / f"step-{STEP:08d}.tmp-0" / f"{OWN_FILE}.part.json"

    record, damaged = write(), 0
    good = record.read_bytes()
    for _ in range(CASES):
        record.write_bytes(mutated_json(good, chance))
        if not refused(lambda: archive.publish(tmp_path, STEP, world_size=1)):
            refused(lambda: archive.load_local(tmp_path, STEP, 0))
            shutil.rmtree(tmp_path / f"step-{STEP:08d}")
            write()
            continue
        damaged += 1
        assert archive.complete_steps(tmp_path) == ()
    record.write_bytes(good)
    archive.publish(tmp_path, STEP, world_size=1)
    assert damaged > CASES // 2
    assert archive.load_local(tmp_path, STEP, 0) == b"own"


@attack(
    "the mark that says whose checkpoints count is damaged",
    holds="nothing is made complete on a guess, and the world has the directory again when the mark is mended",
    reads="an error in the log of rank 0 that names the mark and what to do",
)
def test_a_damaged_mark_completes_nothing(tmp_path: Path) -> None:
    """It is refused, or is the mark of another world."""
    chance, fence, damaged = random.Random(SEED), Fence(tmp_path), 0
    fence.take("gpt", 1, "node0")
    good = (tmp_path / MARK).read_bytes()
    for _ in range(CASES):
        (tmp_path / MARK).write_bytes(mutated_json(good, chance))
        try:
            other = fence.lost_to()
        except CheckpointError:
            damaged += 1
        else:
            assert other is None or str(other).isprintable()
    (tmp_path / MARK).write_bytes(good)
    assert fence.lost_to() is None
    assert damaged > CASES // 2
