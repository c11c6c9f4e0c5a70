"""Checkpoints that are written from copies in host memory, beside the training.

A copy that is to be a checkpoint carries what its files need beyond the tensors (`prepared`). When it is whole, and its
state has passed a commit barrier, the agent has another process write it (`write_copy`): it needs nothing of the rank,
which may have died by then. Each such process writes the part of one rank. That of rank 0 waits until the parts of all
are there, and makes the checkpoint complete.

A world that goes back behind the step of a copy drops it first, and with it the checkpoint. One that keeps it says in
the file in which generation it counts now; the mark of the directory has to be of that generation when the checkpoint
is made complete.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec

from ...communicators import host_memory
from ...protocol.errors import CheckpointError
from ...protocol.host_copies import CopyFile, CopyHeader, read_disk
from .. import tree
from ..framework import OpenShard, Portable
from ..shard import Shard
from ..shard_layout import ShardLayout
from . import archive
from .dcp import file_name
from .writer import PUBLISHER, WorldMark, mark_of

if TYPE_CHECKING:
    from ..framework import Framework

POLL_S = 0.2  # between two looks for the parts of others
_MOST_SHARDS = 100_000


class CopiedShard(msgspec.Struct, frozen=True, array_like=True):
    """One shard in a copy. `head`, `layout`: what its file in a checkpoint needs, where this rank writes that."""

    shard_id: str
    header: bytes
    sizes: list[int]  # of its tensors
    head: bytes = b""  # the file has these bytes before those of the tensors
    layout: ShardLayout | None = None  # the file is one of torch.distributed.checkpoint


class CopyIndex(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a copy beside its tensors. `buffers`: packed, for torch.distributed.checkpoint."""

    shards: Annotated[list[CopiedShard], msgspec.Meta(max_length=_MOST_SHARDS)]
    local: bytes
    buffers: bytes = b""


INDEX = msgspec.msgpack.Decoder(CopyIndex)


class CopyOrder(Protocol):
    """An order to write the copy of one rank."""

    @property
    def job(self) -> str:
        """The job that it is of."""
        ...

    @property
    def directory(self) -> str:
        """Where checkpoints lie."""
        ...

    @property
    def keep(self) -> int:
        """How many complete ones stay there."""
        ...

    @property
    def within_s(self) -> float:
        """How long it may take, until the parts of all ranks are there."""
        ...


def prepared(framework: "Framework", plain: CopiedShard, opened: OpenShard, portable: Portable | None) -> CopiedShard:
    """Return a shard of a copy with what its file needs, if this rank writes it. `portable`: as torch has it."""
    if plain.shard_id not in framework.writes():
        return plain
    if portable is not None:
        return msgspec.structs.replace(plain, layout=portable.layout(plain.shard_id))
    return msgspec.structs.replace(plain, head=archive.head_of(opened))


def write_copy(
    order: CopyOrder,
    fd: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write the copy in a file as this rank's part of a checkpoint; that of rank 0 makes it complete.

    Raises HostCopyError where the copy is damaged, CheckpointError where the file system refuses, the copy is dropped
    meanwhile, another world has taken the directory over, or parts of other ranks do not come.
    """
    end_s = clock() + order.within_s
    file = CopyFile(fd)
    copy = file.sent(verified=True)
    header = copy.header
    attempt = f"{order.job}-g{header.generation}-copy"
    try:
        index = INDEX.decode(copy.content[: header.index_bytes])
        _write_shards(order.directory, header, index, copy.content[header.index_bytes :], attempt)
        _refuse_dropped(file, header)  # what was written above is then what its checksum is of
        # Comes last: that all rank-local states are there proves that all shards are, when it is published.
        archive.save_local(order.directory, header.step, header.rank, index.local, attempt=attempt)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"the copy of step {header.step} is not for this version: {error}") from error
    if header.rank != PUBLISHER:
        return
    while not _is_ready(order, fd, file, header, attempt):
        if clock() > end_s:
            raise CheckpointError(f"the parts of all ranks were not there within {order.within_s:g} s")
        sleep(POLL_S)
    archive.publish(order.directory, header.step, world_size=header.world_size, attempt=attempt)
    archive.prune(order.directory, keep=order.keep, written=header.step)


def _write_shards(directory: str, header: CopyHeader, index: CopyIndex, body: memoryview, attempt: str) -> None:
    step, at, number = header.step, 0, 0
    for each in index.shards:
        content = body[at : at + sum(each.sizes)]
        at += len(content)
        if each.head:
            archive.save_pieces(directory, step, each.shard_id, (each.head, content), attempt=attempt)
        elif each.layout is not None:
            name, shard = file_name(header.rank, number), _shard_of(each, content)
            buffers = tree.unpack(index.buffers) if index.buffers else {}
            archive.save_laid_out(directory, step, name, shard, layout=each.layout, buffers=buffers, attempt=attempt)
            number += 1


def _shard_of(copied: CopiedShard, content: memoryview) -> OpenShard:
    """Return the shard with its tensors on the memory of the copy."""
    tensors, at = [], 0
    for slot in tree.slots(copied.header):
        memory = content[at : at + slot.size_bytes]
        at += len(memory)
        flat = host_memory.on_memory(memory) if memory else None
        tensors.append(tree.empty(slot) if flat is None else flat.view(slot.dtype).reshape(slot.shape))
    return Shard(copied.header, tensors)


def _refuse_dropped(file: CopyFile, header: CopyHeader) -> None:
    if file.header != header:
        raise CheckpointError("its copy in host memory was dropped: the job went back behind it, or it took too long")


def _is_ready(order: CopyOrder, fd: int, file: CopyFile, header: CopyHeader, attempt: str) -> bool:
    """Return whether all parts are there, and the checkpoint counts. Raises CheckpointError where it never will."""
    _refuse_dropped(file, header)
    mark = mark_of(Path(order.directory))
    if mark is not None and mark.job != order.job:
        raise CheckpointError(f"{mark} has taken over {order.directory}")
    if not archive.is_written(order.directory, header.step, world_size=header.world_size, attempt=attempt):
        return False
    return mark is None or _counts(mark, fd)


def _counts(mark: WorldMark, fd: int) -> bool:
    """Return whether the world that trains now keeps the copy; it says so when its recovery is over."""
    return mark.generation == read_disk(fd)[1]
