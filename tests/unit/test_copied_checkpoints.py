"""Checkpoints that are written from copies in host memory: complete or absent, and nothing is asked of the rank."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

import midstep
from midstep.agent.channel import WriteCheckpoint
from midstep.processor.checkpoints import archive
from midstep.processor.checkpoints.copied import write_copy
from midstep.processor.checkpoints.entries import survey
from midstep.processor.checkpoints.writer import Fence
from midstep.processor.host_copies import HostCopies
from midstep.protocol.errors import CheckpointError, HostCopyError
from midstep.protocol.host_copies import CopyFile, Disk, create_copy_files, note_disk, read_disk, read_header
from midstep.protocol.types import CheckpointFormat, JobSettings, RepairPart, RestoreSource

from .test_dcp import STEP, Trained, read
from .test_host_copies import Clock

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of torch, without a world


@pytest.fixture
def fds(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, ...]]:
    monkeypatch.setattr(midstep.TrainState, "_rank", 0)
    made = create_copy_files(0)
    yield made
    for fd in made:
        os.close(fd)


def copies_of(
    trained: Trained,
    fds: tuple[int, ...],
    *,
    every: int = STEP,
    world_size: int = 1,
    form: CheckpointFormat = CheckpointFormat.SAFETENSORS,
) -> HostCopies:
    """Return the copies of rank 0, each `every`th of which is to be a checkpoint."""
    settings = JobSettings(
        host_copies=True,
        host_copy_every_steps=1,
        checkpoint_every_steps=every,
        checkpoint_format=form,
        checkpoint_asynchronous=True,
    )
    runtime: Any = SimpleNamespace(
        rank=0,
        world_size=world_size,
        ranks_per_node=1,
        generation=1,
        host_copy_fds=fds,
        settings=settings,
        step_clock=Clock(),
        injection_points=SimpleNamespace(reached=lambda *_: None),
        local_states=SimpleNamespace(read=lambda rank, step: b"local state at %d" % step),
    )
    return HostCopies(runtime, trained.state)


def train(copies: HostCopies, steps: range) -> list[int]:
    """Do some steps of which each has a copy, if nothing is in its way; return those that have."""
    taken = []
    for step in steps:
        agrees = copies.agrees(step, 0.1)
        copies.agreed(by_all=agrees)
        copies.take(step)
        taken += [step] if agrees else []
    return taken


def wanted(fds: tuple[int, ...]) -> list[int]:
    """Return the files whose copies are to be written."""
    return [fd for fd in fds if read_header(fd) is not None and read_disk(fd)[0] is Disk.WANTED]


def order(directory: Path, within_s: float = 0.0) -> WriteCheckpoint:
    """Return an order of the agent."""
    return WriteCheckpoint("gpt", str(directory), 2, within_s)


@pytest.mark.parametrize("form", CheckpointFormat)
def test_a_copy_is_written_as_the_rank_itself_writes_it(
    tmp_path: Path, fds: tuple[int, ...], form: CheckpointFormat
) -> None:
    """Bit for bit, and of the step that it was copied at, though the rank has trained on."""
    wrote = Trained(1)
    train(copies_of(wrote, fds, form=form), range(1, STEP + 2))
    (fd,) = wanted(fds)
    expected = wrote.bits()
    with torch.no_grad():
        for parameter in wrote.model.parameters():
            parameter.zero_()
    write_copy(order(tmp_path), fd)
    assert survey(str(tmp_path), 0.0)[0] == (STEP,)
    assert read(tmp_path, Trained(2)).bits() == expected
    assert archive.load_local(tmp_path, STEP, 0) == b"local state at %d" % STEP
    named = list((tmp_path / f"step-{STEP:08d}").glob("*.distcp"))
    assert bool(named) is (form is CheckpointFormat.DCP)


def test_no_copy_is_written_over_one_that_is_on_its_way_to_the_disk(fds: tuple[int, ...]) -> None:
    """One more is taken, into the other file; then the next one waits until the agent has said that it is over."""
    copies = copies_of(Trained(1), fds, every=3)
    assert train(copies, range(1, 8)) == [1, 2, 3, 4]
    (fd,) = wanted(fds)
    header = read_header(fd)
    assert header is not None
    assert header.step == 3
    note_disk(fd, Disk.OVER)
    assert train(copies, range(8, 10)) == [8, 9]
    copies.settle()
    assert copies.steps() == (8, 9)


def test_a_state_is_wanted_on_disk_after_the_next_commit_barrier(fds: tuple[int, ...]) -> None:
    """Before that a vote may find it wrong."""
    copies = copies_of(Trained(1), fds, every=2)
    train(copies, range(1, 3))
    copies.settle()
    assert not wanted(fds)
    copies.agreed(by_all=False)
    assert len(wanted(fds)) == 1


def test_a_recovery_keeps_what_is_on_its_way_and_drops_what_was_rolled_back(fds: tuple[int, ...]) -> None:
    """A process is lost while the agent writes: it writes on, unless all go back behind the step."""
    trained = Trained(1)
    copies = copies_of(trained, fds, every=3)
    train(copies, range(1, 5))
    copies.settle()
    newcomer = copies_of(trained, fds, every=3)
    after = SimpleNamespace(part=RepairPart(4, RestoreSource.REPLICA, host_copy=4))
    newcomer.resumed(after)  # type: ignore[arg-type]
    assert newcomer.steps() == (3, 4)
    assert len(wanted(fds)) == 1
    newcomer.forget_after(2)
    assert newcomer.steps() == ()
    assert not wanted(fds)


def test_a_copy_that_was_planned_is_written_after_a_recovery_that_keeps_it(fds: tuple[int, ...]) -> None:
    """By the next process of the rank, too."""
    trained = Trained(1)
    copies = copies_of(trained, fds, every=3)
    train(copies, range(1, 4))
    copies.settle()
    newcomer = copies_of(trained, fds, every=3)
    after = SimpleNamespace(part=RepairPart(3, RestoreSource.HOST_COPY, host_copy=3))
    newcomer.resumed(after)  # type: ignore[arg-type]
    assert not wanted(fds)
    newcomer.agreed(by_all=False)
    assert len(wanted(fds)) == 1


def test_a_checkpoint_without_all_parts_is_none(tmp_path: Path, fds: tuple[int, ...]) -> None:
    """Of another rank nothing comes: its node has died, say."""
    train(copies_of(Trained(1), fds, world_size=2), range(1, STEP + 2))
    with pytest.raises(CheckpointError, match="the parts of all ranks were not there within"):
        write_copy(order(tmp_path), wanted(fds)[0])
    assert survey(str(tmp_path), 0.0)[0] == ()


def test_a_copy_that_is_dropped_meanwhile_becomes_no_checkpoint(tmp_path: Path, fds: tuple[int, ...]) -> None:
    """All go back behind it while its process waits for the parts of others."""
    train(copies_of(Trained(1), fds, world_size=2), range(1, STEP + 2))
    (fd,) = wanted(fds)
    with pytest.raises(CheckpointError, match="went back behind it"):
        write_copy(order(tmp_path, within_s=60.0), fd, sleep=lambda _: CopyFile(fd).drop())
    assert survey(str(tmp_path), 0.0)[0] == ()


def test_a_damaged_copy_becomes_no_checkpoint(tmp_path: Path, fds: tuple[int, ...]) -> None:
    """Not a byte of it is written."""
    train(copies_of(Trained(1), fds), range(1, STEP + 2))
    (fd,) = wanted(fds)
    header = read_header(fd)
    assert header is not None
    (byte,) = os.pread(fd, 1, header.size_bytes - 1)
    os.pwrite(fd, bytes([byte ^ 1]), header.size_bytes - 1)
    with pytest.raises(HostCopyError, match="damaged"):
        write_copy(order(tmp_path), fd)
    assert list(tmp_path.iterdir()) == []


def test_only_the_world_that_trains_makes_a_checkpoint_of_its_copy(tmp_path: Path, fds: tuple[int, ...]) -> None:
    """In a recovery it waits until the world says that it keeps the copy. What another job has taken is left alone."""
    train(copies_of(Trained(1), fds), range(1, STEP + 2))
    (fd,) = wanted(fds)
    Fence(tmp_path).take("gpt", 2, "node-0")
    with pytest.raises(CheckpointError, match="were not there"):
        write_copy(order(tmp_path), fd)
    Fence(tmp_path).take("another", 1, "node-0")
    with pytest.raises(CheckpointError, match=r"job another .* has taken over"):
        write_copy(order(tmp_path), fd)
    assert survey(str(tmp_path), 0.0)[0] == ()
    Fence(tmp_path).take("gpt", 2, "node-0")
    CopyFile(fd).note(generation=2)
    write_copy(order(tmp_path), fd)
    assert survey(str(tmp_path), 0.0)[0] == (STEP,)


def test_without_copies_checkpoints_are_written_as_without_the_policy(fds: tuple[int, ...]) -> None:
    """All ranks find that out at the same step: none has taken a copy for twice as long as checkpoints are apart."""
    copies = copies_of(Trained(1), fds, every=4)
    assert [step for step in range(1, 13) if step % 4 == 0 and not copies.replace_checkpoint(step)] == [8, 12]
    train(copies, range(13, 14))
    assert copies.replace_checkpoint(16)
    plain = msgspec.structs.replace(copies._runtime.settings, checkpoint_asynchronous=False)
    copies._runtime.settings = plain
    assert not HostCopies(copies._runtime, Trained(1).state).replace_checkpoint(4)


def test_the_last_step_is_written_when_training_is_over(tmp_path: Path, fds: tuple[int, ...]) -> None:
    """Though the copy before it was still being written when it was due."""
    copies = copies_of(Trained(1), fds, every=3)
    train(copies, range(1, 7))

    def agent() -> None:
        for _ in range(2):
            while not wanted(fds):
                time.sleep(0.001)
            (fd,) = wanted(fds)
            write_copy(order(tmp_path), fd)
            note_disk(fd, Disk.OVER)

    thread = threading.Thread(target=agent, daemon=True)
    thread.start()
    copies.written(6)
    thread.join(10.0)
    assert survey(str(tmp_path), 0.0)[0] == (3, 6)
