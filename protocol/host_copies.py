"""The memory files of a rank that hold copies of its state and outlive its process: two of them, used in turn.

The agent makes both, keeps them over restarts of the rank, and passes their descriptors to every process that holds the
rank. They are empty until the process writes its first copy: then each grows to what a copy takes. So one that is being
written never costs the one before it. Where each copy is to be on two nodes there are two more, for the copies of a
rank of another node.

Layout of a file, native byte order (both ends are on one machine)::

    0      header    magic, layout version, state, rank, world size, step, generation, bytes of the index, bytes of the
                     body, xxh3 of everything below, xxh3 of the fields from the rank to that one
    96     disk      whether the copy is written to disk as a checkpoint, and the latest generation in which it counts
    128    index     the names and headers of the shards, and the rank-local state
           body      the tensors of all shards, one after the other

The state is `torn` before the first byte below it is changed, and `whole` after the checksum is there. A reader
checks the checksum before it uses anything. Of what is said about the disk, the process of the rank writes that it is
wanted, and the agent that it is over; the rank writes no other copy into the file in between.
"""

import enum
import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

from .errors import AgentError, HostCopyError
from .types import GuestCopy

FILES = 2  # for the copies of one rank
_MAGIC, _VERSION = 0x6D69_6473_7465_7032, 1
_HEADER = struct.Struct("@9qQQ")
_FIELDS = struct.Struct("@6qQ")  # those that have a checksum of their own
_STATE = struct.Struct("@q")
_SENT = struct.Struct("<6qQ")  # those fields as another machine gets them
SENT_BYTES = _SENT.size
_STATE_BYTES = 16  # where the state lies
_DISK = struct.Struct("@2q")
_DISK_BYTES = 96
_START = 128
_TORN, _WHOLE = 0, 1
_PIECE_BYTES = 8 << 20  # so that no hash holds the interpreter's lock for long


class Disk(enum.IntEnum):
    """How far a copy is on its way to the disk."""

    NO = 0
    PLANNED = 1  # it is to be a checkpoint, when the state that it is of has passed a commit barrier
    WANTED = 2  # the agent is to write it, or does
    OVER = 3  # it is written, or was given up


class CopyHeader(NamedTuple):
    """The header of a whole copy, without its checksum."""

    rank: int
    world_size: int
    step: int
    generation: int
    index_bytes: int
    body_bytes: int

    @property
    def content_bytes(self) -> int:
        """The bytes of index and body."""
        return self.index_bytes + self.body_bytes

    @property
    def size_bytes(self) -> int:
        """The bytes that it takes."""
        return _START + self.content_bytes


class SentCopy(NamedTuple):
    """A copy as it is sent to another node: its header, the checksum of its content, and that."""

    header: CopyHeader
    checksum: int
    content: memoryview

    def packed(self) -> bytes:
        """Return what goes before the content."""
        return _SENT.pack(*self.header, self.checksum)


def unpack_sent(data: bytes) -> tuple[CopyHeader, int]:
    """Return the header and the checksum of a copy that another node sends. Raises HostCopyError if it cannot be."""
    if len(data) != _SENT.size:
        raise HostCopyError(f"the header of a copy has {len(data)} bytes instead of {_SENT.size}")
    *fields, checksum = _SENT.unpack(data)
    header = CopyHeader(*fields)
    if min(header) < 0:
        raise HostCopyError("the header of a copy has negative numbers")
    return header, checksum


def create_copy_files(rank: int, nodes: int = 1) -> tuple[int, ...]:
    """Make the files of a rank, which are empty; with two `nodes` for each copy, those for another rank's behind them.

    Runs in the agent. Raises AgentError; the caller closes them.
    """
    fds: list[int] = []
    try:
        for index in range(nodes * FILES):
            fds.append(os.memfd_create(f"midstep-copy-{rank}-{index}", os.MFD_CLOEXEC))
    except OSError as error:
        for fd in fds:
            os.close(fd)
        raise AgentError(f"no memory file for the copies of rank {rank}: {error}") from error
    return tuple(fds)


def read_header(fd: int) -> CopyHeader | None:
    """Read the header of the copy in a file, without a look at the rest; None where none is whole."""
    try:
        found = os.pread(fd, _HEADER.size, 0)
        size_bytes = os.fstat(fd).st_size
    except OSError:
        return None
    if len(found) < _HEADER.size:
        return None
    magic, version, state, *fields, content, checksum = _HEADER.unpack(found)
    if (magic, version, state, checksum) != (_MAGIC, _VERSION, _WHOLE, _of_header(fields, content)):
        return None
    header = CopyHeader(*fields)
    return header if header.size_bytes <= size_bytes else None


def read_disk(fd: int) -> tuple[Disk, int]:
    """Read how far the copy in a file is on its way to the disk, and the latest generation in which it counts."""
    try:
        found = os.pread(fd, _DISK.size, _DISK_BYTES)
    except OSError:
        return Disk.NO, 0
    disk, generation = _DISK.unpack(found) if len(found) == _DISK.size else (Disk.NO, 0)
    return Disk(disk) if disk in tuple(Disk) else Disk.NO, generation


def note_disk(fd: int, disk: Disk) -> None:
    """Write how far it is. Raises OSError."""
    os.pwrite(fd, _STATE.pack(disk), _DISK_BYTES)


def note_generation(fd: int, generation: int) -> None:
    """Write that the copy in a file counts in this generation, too: the world keeps it. Raises OSError."""
    os.pwrite(fd, _STATE.pack(generation), _DISK_BYTES + _STATE.size)


def copied_steps(fds: Iterable[int], rank: int) -> tuple[int, ...]:
    """Return the steps of the copies of a rank in its files. Their content is not looked at."""
    headers = (read_header(fd) for fd in fds)
    return tuple(sorted(header.step for header in headers if header is not None and header.rank == rank))


def guest_copies(fds: Iterable[int], rank: int, world_size: int | None = None) -> tuple[GuestCopy, ...]:
    """Return the copies of other ranks in the files of a rank, in a world of this size. Their content is not looked at.

    Their size is that of index and body.
    """
    headers = [header for fd in fds if (header := read_header(fd)) is not None and header.rank != rank]
    return tuple(
        GuestCopy(header.rank, header.step, header.content_bytes)
        for header in sorted(headers)
        if world_size is None or header.world_size == world_size
    )


def copied_bytes(fds: Iterable[int]) -> int:
    """Return the memory that files have."""
    return sum(os.fstat(fd).st_size for fd in fds)


class CopyFile:
    """One of the files, mapped. Used by the process of the rank: by one thread at a time."""

    def __init__(self, fd: int) -> None:
        """Use `fd`, which is this object's from now on."""
        self._fd = fd
        self._memory: mmap.mmap | None = None
        self._writing: CopyHeader | None = None

    @property
    def header(self) -> CopyHeader | None:
        """The header of the copy that is here; None where none is whole."""
        return read_header(self._fd)

    @property
    def disk(self) -> Disk:
        """How far the copy that is here is on its way to the disk."""
        return Disk.NO if self.header is None else read_disk(self._fd)[0]

    def note(self, *, disk: Disk | None = None, generation: int | None = None) -> None:
        """Write how far the copy is on its way to the disk, or in which generation it counts. Raises OSError."""
        if disk is not None:
            note_disk(self._fd, disk)
        if generation is not None:
            note_generation(self._fd, generation)

    @property
    def capacity_bytes(self) -> int:
        """The memory that the file has."""
        return os.fstat(self._fd).st_size

    def reserve(self, index_bytes: int, body_bytes: int) -> None:
        """Have memory for a copy of this size. The one that is here is torn if it has to grow.

        Raises HostCopyError when the machine has none.
        """
        size_bytes = _START + index_bytes + body_bytes
        if size_bytes <= self.capacity_bytes:
            return
        self.drop()
        try:
            os.posix_fallocate(self._fd, 0, size_bytes)
        except OSError as error:
            raise HostCopyError(f"no memory for a copy of {size_bytes / 1e6:.0f} MB: {error}") from error
        self._memory = None

    def begin(self, header: CopyHeader, index: bytes, disk: Disk = Disk.NO) -> memoryview:
        """Begin to write a copy, for which there is memory; return where its body goes. It is torn until `finish`."""
        self.drop()
        memory = self._mapped()
        _DISK.pack_into(memory, _DISK_BYTES, disk, header.generation)
        memory[_START : _START + len(index)] = index
        self._writing = header
        return memoryview(memory)[_START + header.index_bytes : header.size_bytes]

    def finish(self, checksum: int | None = None) -> None:
        """Write the checksum of what was begun, and say that it is whole.

        `checksum`: that of what was sent; raises HostCopyError if something else has come.
        """
        assert self._writing is not None
        header, self._writing = self._writing, None
        memory = self._mapped()
        content = _of_content(memory, header)
        if checksum is not None and content != checksum:
            raise HostCopyError(f"the copy of step {header.step} of rank {header.rank} has arrived changed")
        _HEADER.pack_into(memory, 0, _MAGIC, _VERSION, _TORN, *header, content, _of_header(header, content))
        _STATE.pack_into(memory, _STATE_BYTES, _WHOLE)

    def read(self) -> tuple[CopyHeader, bytes, memoryview]:
        """Return the copy that is here: header, index, body. Raises HostCopyError if it is not what was written."""
        header, _, content = self.sent(verified=True)
        return header, bytes(content[: header.index_bytes]), content[header.index_bytes :]

    def accept(self, header: CopyHeader) -> memoryview:
        """Begin to write a copy that another node sends; return where its content goes. Raises HostCopyError."""
        self.reserve(header.index_bytes, header.body_bytes)
        self.begin(header, b"")
        return memoryview(self._mapped())[_START : header.size_bytes]

    def sent(self, *, verified: bool) -> SentCopy:
        """Return the copy that is here, for another node. Raises HostCopyError if none is, or if it is damaged.

        `verified`: whether its checksum is looked at; the process that gets it does that, too.
        """
        header = self.header
        if header is None:
            raise HostCopyError("no copy is whole here")
        memory = self._mapped()
        checksum = _HEADER.unpack_from(memory)[-2]
        if verified and _of_content(memory, header) != checksum:
            raise HostCopyError(f"the copy of step {header.step} is damaged: its checksum is another one")
        return SentCopy(header, checksum, memoryview(memory)[_START : header.size_bytes])

    def drop(self) -> None:
        """Say that no copy is here. The memory stays, for the next one."""
        self._writing = None
        if self.capacity_bytes >= _HEADER.size:
            _STATE.pack_into(self._mapped(), _STATE_BYTES, _TORN)

    def _mapped(self) -> mmap.mmap:
        if self._memory is None:
            try:
                self._memory = mmap.mmap(self._fd, self.capacity_bytes)
            except (OSError, ValueError) as error:
                raise HostCopyError(f"the memory of a copy cannot be mapped: {error}") from error
        return self._memory


def _of_header(fields: Sequence[int], content: int) -> int:
    return xxhash.xxh3_64_intdigest(_FIELDS.pack(*fields, content))


def _of_content(memory: mmap.mmap, header: CopyHeader) -> int:
    found = xxhash.xxh3_64()
    with memoryview(memory) as whole:
        for start in range(_START, header.size_bytes, _PIECE_BYTES):
            with whole[start : min(start + _PIECE_BYTES, header.size_bytes)] as piece:
                found.update(piece)
    return found.intdigest()
