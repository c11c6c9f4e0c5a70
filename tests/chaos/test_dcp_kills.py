"""Processes that are killed, or meet a full disk, while they write a checkpoint of torch.distributed.checkpoint.

The rank itself, or the process that writes it from a copy in host memory.
"""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint  # in this process: those that are forked would each import it
from torch.distributed.checkpoint.filesystem import FileSystemReader

import midstep
from midstep.agent.channel import WriteCheckpoint
from midstep.processor import tree
from midstep.processor.checkpoints import archive
from midstep.processor.checkpoints.copied import CopiedShard, CopyIndex, write_copy
from midstep.processor.checkpoints.dcp import file_name
from midstep.processor.checkpoints.entries import survey
from midstep.protocol.errors import CheckpointError
from midstep.protocol.host_copies import CopyFile, CopyHeader, create_copy_files

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

CALLS = ("open", "mkdir", "fsync", "replace", "rename", "unlink", "rmdir")
STEPS = (1, 2)
MOST_CALLS = 200
Saves = Callable[[Path, int], None]


def model(value: float) -> Any:
    """Return a small model of which every parameter has one value."""
    linear = torch.nn.Linear(4, 4)
    for parameter in linear.parameters():
        torch.nn.init.constant_(parameter, value)
    return linear


def save(directory: Path, step: int) -> None:
    """Write a complete checkpoint of one rank, and drop the one before."""
    archive.save_portable(directory, step, file_name(0, 0), "replicated", midstep.TrainState(model(step)))
    archive.save_local(directory, step, 0, b"own")
    archive.publish(directory, step, world_size=1)
    archive.prune(directory, keep=1, written=step)


def save_copy(directory: Path, step: int) -> None:
    """Do the same from a copy in host memory."""
    state = midstep.TrainState(model(step))
    opened, (fd, other) = state.open_shard("replicated"), create_copy_files(0)
    plain = CopiedShard("replicated", opened.header, [tensor.nbytes for tensor in opened.tensors])
    shard = msgspec.structs.replace(plain, layout=state.layout("replicated"))
    index = msgspec.msgpack.encode(CopyIndex([shard], b"own"))
    tensors = b"".join(bytes(tree.tensor_bytes(tensor).numpy()) for tensor in opened.tensors)
    file = CopyFile(fd)
    file.reserve(len(index), len(tensors))
    file.begin(CopyHeader(0, 1, step, 1, len(index), len(tensors)), index)[:] = tensors
    file.finish()
    write_copy(WriteCheckpoint("gpt", str(directory), 1, 60.0), fd)
    os.close(fd)
    os.close(other)


def at_call(number: int, happens: Callable[[], None]) -> None:
    """Have something happen before one of the calls that change a file system. In a process of its own."""
    made = 0

    def counted(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made == number:
                happens()
            return real(*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def die() -> None:
    """End at once, as in a kill."""
    os.kill(os.getpid(), signal.SIGKILL)


def disk_is_full() -> None:
    """Refuse a call."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def saving_in_a_process(directory: Path, number: int, happens: Callable[[], None], saves: Saves) -> int:
    """Write the later checkpoint in a process to which something happens; return its exit code."""
    process = os.fork()
    if process == 0:
        code = 3
        try:
            at_call(number, happens)
            saves(directory, STEPS[1])
            code = 0
        except CheckpointError:
            code = 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def assert_a_whole_one_is_left(directory: Path) -> None:
    """What has the name of a checkpoint is one, for midstep and for torch, and its content is right."""
    offered = survey(str(directory), 0.0, foreign=True)[0]
    assert offered, sorted(directory.rglob("*"))
    for step in offered:
        linear = model(0.0)
        archive.load_shard(directory, step, "replicated", midstep.TrainState(linear))
        assert (linear.weight == step).all()
    for place in directory.glob("step-*"):
        if "." not in place.name and (place / ".metadata").exists():
            metadata = FileSystemReader(place).read_metadata()
            assert all((place / each.relative_path).exists() for each in metadata.storage_data.values())


@pytest.mark.parametrize("saves", [save, save_copy])
@pytest.mark.parametrize("happens", [die, disk_is_full])
def test_whenever_it_happens_a_whole_checkpoint_is_left(
    tmp_path: Path, happens: Callable[[], None], saves: Saves
) -> None:
    """Before each call that changes the file system, in turn; the next attempt succeeds."""
    for number in range(1, MOST_CALLS):
        directory = tmp_path / str(number)
        save(directory, STEPS[0])
        code = saving_in_a_process(directory, number, happens, saves)
        assert code in {0, 1, -signal.SIGKILL}, code
        assert_a_whole_one_is_left(directory)
        saves(directory, STEPS[1])
        assert survey(str(directory), 0.0, foreign=True)[0][-1] == STEPS[1]
        if code == 0 and happens is die:
            break
        if happens is disk_is_full and number > 40:
            break
    assert number > 10
