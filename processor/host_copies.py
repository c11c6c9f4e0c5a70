"""This rank's copies in host memory: taken beside the training, loaded in a recovery.

After an update all shards and the rank-local state are copied into one of two memory files that outlive the process
(`protocol/host_copies.py`). At which steps says `copy_cadence.py`. Where shards change in update blocks alone
(`Steady`), a thread copies them while the next forward and backward pass run, and only the next update waits for it.
All others are copied on the spot, and so is what lies on a device. The checksum is always left to the thread, and so
is the way to a second node (`guest_copies.py`). Where checkpoints are asynchronous, some copies are marked for the
agent, which has them written to disk (`checkpoints/copied.py`); no other copy is written over one that is on its way.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import psutil

from ..communicators import host_memory
from ..protocol.errors import HostCopyError, MidstepError, RecoveryError
from ..protocol.host_copies import FILES, CopyFile, CopyHeader, Disk, SentCopy, unpack_sent
from ..protocol.messages import Rejoin
from ..protocol.types import Activity, CheckpointFormat, InjectionPoint, IntegrityAction, RepairPart, StepReport
from . import tree
from .checkpoints.copied import INDEX, CopiedShard, CopyIndex, prepared
from .copy_cadence import CopyCadence, check_room, file_to_write, may_be_written, stays
from .framework import OpenShard, Portable, Steady
from .guest_copies import GuestCopies, Keeper
from .transfer import move

if TYPE_CHECKING:
    from .framework import Framework
    from .runtime import Runtime
    from .votes import Votes

SETTLE_S = 60.0  # for a copy that is under way: it takes about as long as reading the memory once
_PIECE_BYTES = 8 << 20
_LOOK_S = 0.05  # from one look at how far the agent is to the next
_SHARE_OF_FREE = 2  # a half
_log = logging.getLogger("midstep")


class HostCopies:
    """Takes, keeps and loads the copies of one rank. Used by the train thread; without files it does nothing."""

    def __init__(self, runtime: "Runtime", framework: "Framework", votes: "Votes | None" = None) -> None:
        self._runtime = runtime
        self._framework = framework
        self._votes = votes
        fds = runtime.host_copy_fds
        self._files = [CopyFile(fd) for fd in fds[:FILES]]
        self._guests = GuestCopies(runtime, fds[FILES:], self._check_room)
        self._keeper = Keeper(runtime, None, wanted=False, before=None)
        settings = runtime.settings
        checkpoint_steps = settings.checkpoint_every_steps if settings.checkpoint_asynchronous else 0
        self._cadence = CopyCadence(settings.host_copy_every_steps, checkpoint_steps)
        self._portable = None
        if checkpoint_steps and settings.checkpoint_format is CheckpointFormat.DCP and isinstance(framework, Portable):
            self._portable = framework
        self._beside = isinstance(framework, Steady) and framework.changes_in_updates_alone
        self._most_bytes: int | None = None  # of a node
        self._under_way: _Copying | None = None
        self._is_beside = False  # a copy is under way in the step that has begun
        self._ranks_per_core = max(1.0, runtime.ranks_per_node / len(os.sched_getaffinity(0)))
        self._planned: tuple[CopyFile, int] | None = None  # the copy that is to be a checkpoint, and its step
        self._agreed = self._off = False
        self._thread: _CopyThread | None = None
        self._goes_back = settings.integrity_every_steps != 0 and settings.integrity_then is not IntegrityAction.REPORT

    def steps(self) -> tuple[int, ...]:
        """Return the steps of which a whole copy of this rank is here that this world can use."""
        self.settle()
        return tuple(sorted(step for step in self._steps() if step))

    def reported(self, report: StepReport) -> StepReport:
        """Return a report for barrier one with the copies that are here. They change no more until `resumed`.

        What was copied after the last state that is right, as votes have found now, is dropped first.
        """
        self._keeper.cut()
        sound = None if self._votes is None else self._votes.sound
        if sound is not None:
            self.forget_after(sound)
            self._guests.forget_after(sound)
        return msgspec.structs.replace(report, host_copies=self.steps(), guest_copies=self._guests.kept())

    def resumed(self, order: Rejoin | None) -> None:
        """Keep the copies of the step that the order names, and drop any other: all ranks stand at one step, and go on.

        With copies on two nodes the next one is due at once: of what was lost there is one left, or the keeper is new.
        """
        common, target = (0, 0) if order is None else (order.part.host_copy, order.part.target_step)
        self._planned = None
        for file, step in zip(self._files, self._steps(), strict=True):
            disk = file.disk
            if not stays(step, disk, common, goes_back=self._goes_back):
                file.drop()
            elif step:
                older = disk is Disk.PLANNED and step != common
                file.note(generation=self._runtime.generation, disk=Disk.NO if older else None)
                self._planned = (file, step) if disk is Disk.PLANNED and not older else self._planned
        twice = len(self._runtime.host_copy_fds) > FILES
        self._keeper = Keeper(self._runtime, order, wanted=twice, before=self._keeper)
        links = self._keeper.links
        self._guests.resumed(common, None if order is None else order.part.copy_guest, links)
        self._agreed = False
        self._cadence.resumed(common if links is None else 0, common or target)

    def agrees(self, step: int, step_s: float) -> bool:
        """Wait until the update may change what is copied; return whether this rank is for a copy after it.

        Runs before each commit barrier. Where the next copy is due it waits until the last one is whole.
        """
        if not self._files or self._off:
            return False
        self._await_copied()
        if not self._cadence.due(step):
            return False
        work = self._under_way
        if work is not None:
            work.waited_s += self._wait(work.whole)
            if work.error is not None:
                self._give_up(work.error)
                return False
            if not work.kept.is_set():
                return False  # no rank writes over the copy before it until this one is on two nodes
            self._under_way = None
            cpu_s = work.cpu_s * self._ranks_per_core
            self._cadence.became_whole(waited_s=work.waited_s, took_s=work.took_s, step_s=step_s, cpu_s=cpu_s)
        steps = self._steps()
        # Which one it is may change with the vote in this very barrier.
        files = {file_to_write(steps, each) for each in (self._voted, None if self._voted is None else step - 1)}
        if not all(may_be_written(self._files[each].disk) for each in files):
            return False
        return self._cadence.agrees(step)

    def agreed(self, *, by_all: bool) -> None:
        """Take note of what the commit barrier has told: whether all ranks are for a copy after this update."""
        self._agreed = by_all
        self._have_written()
        self._keeper.say()

    def take(self, step: int) -> None:
        """Begin the copy of `step`, if all ranks are for it. Runs when a step is over, before the next one."""
        self._cadence.over(step, time.monotonic(), beside=self._is_beside)
        agreed, self._agreed = self._agreed, False
        if agreed:
            self._begin_copy(step)
        self._is_beside = agreed or (self._under_way is not None and not self._under_way.whole.is_set())

    def _begin_copy(self, step: int) -> None:
        to_disk = self._cadence.goes_to_disk(step)
        self._cadence.began(step)
        try:
            self._under_way = work = self._begin(step, to_disk=to_disk)
            if to_disk:
                self._planned = (work.file, step)
            if not self._beside or any(not host_memory.on_host(each) for each in work.tensors):
                began_s = time.monotonic()
                self._runtime.step_clock.doing(Activity.PAUSED)
                work.copy()
                self._runtime.step_clock.doing(Activity.COMPUTING)
                work.waited_s = time.monotonic() - began_s
        except MidstepError as error:  # of the framework, too: it may hold by now what cannot be carried
            self._give_up(error)
            return
        if self._thread is None:
            self._thread = _CopyThread()
        self._thread.work(work)

    def settle(self) -> None:
        """Wait until the copy that is under way is whole, or has failed. Before state is written to in a recovery."""
        work, self._under_way = self._under_way, None
        if work is not None:
            self._wait(work.whole)
            if work.error is not None:
                self._give_up(work.error)

    def replace_checkpoint(self, step: int) -> bool:
        """Return whether checkpoints are made of copies now; else they are written as they are without any."""
        return bool(self._files) and not self._cadence.has_failed(step)

    def written(self, step: int) -> None:
        """Wait until the agent has written the last copy that is to be a checkpoint. When training is over, at `step`.

        One that is due still, as the one before it was being written, is taken now, on all ranks.
        """
        if not self._runtime.settings.checkpoint_asynchronous or not self._files:
            return
        self._runtime.step_clock.doing(Activity.CHECKPOINTING)
        self._await_written()
        if self._cadence.goes_to_disk(step) and self.replace_checkpoint(step) and not self._off:
            self._agreed = True
            self.take(step)
            self._await_written()

    def _await_written(self) -> None:
        self.settle()
        self._have_written()
        end_s = time.monotonic() + self._runtime.settings.save_s
        while any(file.disk is Disk.WANTED for file in self._files) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)

    def forget_after(self, step: int) -> None:
        """Drop copies of later steps, also those that are being written to disk: all ranks go back behind them."""
        self.settle()
        for file, found in zip(self._files, self._steps(), strict=True):
            if found > step:
                file.drop()

    def bring(self, part: RepairPart) -> int:
        """Bring copies from the ranks that keep them to those that have lost their own; return the bytes that came.

        In repair, on both ends. What is sent is checked first: a damaged copy raises HostCopyError and is dropped, so
        that the next attempt takes another one. Raises as `run_transfers`, too.
        """
        if not part.copy_transfers:
            return 0
        self.settle()
        rank, step = self._runtime.rank, part.target_step
        named = [msgspec.structs.replace(t, shard_id=f"copy of rank {t.destination}") for t in part.copy_transfers]
        opened: dict[str, OpenShard] = {}
        for transfer in named:
            if transfer.source == rank:
                file = self._guests.file_of(transfer.destination, step)
                try:
                    opened[transfer.shard_id] = _moved(file.sent(verified=True))
                except HostCopyError as error:
                    file.drop()
                    raise HostCopyError(f"rank {rank}, for rank {transfer.destination}: {error}") from error
        moving = RepairPart(step, part.restore, transfers=tuple(named))
        arriving = _Arriving(self._accept)
        arrived = move(moving, opened, rank=rank, framework=arriving, links=self._runtime.communicator)
        arriving.finish()
        return arrived.received.bytes_received

    def _accept(self, header: CopyHeader) -> CopyFile:
        """Return the file for a copy of this rank that comes from the rank that keeps it. Raises HostCopyError."""
        if (header.rank, header.world_size) != (self._runtime.rank, self._runtime.world_size):
            raise HostCopyError(
                f"rank {self._runtime.rank} is sent a copy of rank {header.rank} in a world of {header.world_size}"
            )
        self._check_room(header.content_bytes)
        return self._files[file_to_write(self._steps())]

    def load(self, step: int) -> bytes:
        """Load all shards from the copy of a step; return the rank-local state. In repair.

        Nothing is overwritten before the checksum was found to be right. Raises HostCopyError if it is not, and drops
        the copy, so that the next attempt takes another one; RecoveryError if it is not for this model.
        """
        self.settle()
        file = next((each for each, found in zip(self._files, self._steps(), strict=True) if found == step), None)
        if file is None:
            raise HostCopyError(f"rank {self._runtime.rank} has no whole copy of step {step} in host memory")
        try:
            _, index, body = file.read()
            found = INDEX.decode(index)
        except (HostCopyError, msgspec.MsgspecError) as error:
            file.drop()
            raise HostCopyError(f"rank {self._runtime.rank}: {error}; another source is taken") from error
        mine = {hold.shard_id for hold in self._framework.shards()}
        if mine != {each.shard_id for each in found.shards}:
            raise RecoveryError(f"the copy of step {step} in host memory is of other shards than rank's own: {mine}")
        at = 0
        for each in found.shards:
            shard = self._framework.accept_shard(each.shard_id, each.header)
            if each.sizes != [tensor.nbytes for tensor in shard.tensors]:
                raise RecoveryError(f"the copy of shard {each.shard_id!r} in host memory has tensors of other sizes")
            for tensor in shard.tensors:
                _fill(tensor, body[at : at + tensor.nbytes])
                at += tensor.nbytes
            self._framework.adopt_shard(each.shard_id, shard)
        return found.local

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _voted(self) -> int | None:
        """The newest state that passed a vote; None where ranks do not vote."""
        return self._votes.agreed if self._votes is not None and self._votes.is_on else None

    def _steps(self) -> list[int]:
        """Return the step of the copy in each file, 0 where none is of use."""
        mine = (self._runtime.rank, self._runtime.world_size)
        headers = [file.header for file in self._files]
        return [0 if each is None or (each.rank, each.world_size) != mine else each.step for each in headers]

    def _have_written(self) -> None:
        """Have the agent write the copy that is to be a checkpoint, once it is whole."""
        if self._planned is not None:
            file, step = self._planned
            header = file.header
            if header is not None and header.step == step:
                file.note(disk=Disk.WANTED)
                self._planned = None

    def _begin(self, step: int, *, to_disk: bool = False) -> "_Copying":
        """Open everything that is to be copied, and find the memory for it."""
        runtime, framework = self._runtime, self._framework
        local = runtime.local_states.read(runtime.rank, step)
        if local is None:
            raise HostCopyError(f"the rank-local state as of step {step} is not at hand")
        shards, tensors = list[CopiedShard](), list[Any]()
        for hold in framework.shards():
            opened = framework.open_shard(hold.shard_id)
            sizes = [tensor.nbytes for tensor in opened.tensors]
            plain = CopiedShard(hold.shard_id, opened.header, sizes)
            shards.append(prepared(framework, plain, opened, self._portable) if to_disk else plain)
            tensors += opened.tensors
        buffers = tree.pack(self._portable.buffers(), "buffers") if to_disk and self._portable is not None else b""
        index = msgspec.msgpack.encode(CopyIndex(shards, local, buffers))
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        file = self._files[file_to_write(self._steps(), self._voted)]
        self._check_room(len(index) + size_bytes)
        header = CopyHeader(runtime.rank, runtime.world_size, step, runtime.generation, len(index), size_bytes)
        half_done, hand_over = partial(self._half_done, step), self._keeper.hand_over
        disk = Disk.PLANNED if to_disk else Disk.NO
        return _Copying(file, header, index, tensors, disk=disk, half_done=half_done, hand_over=hand_over)

    def _half_done(self, step: int) -> None:
        self._runtime.injection_points.reached(InjectionPoint.HOST_COPY, step - 1)

    def _check_room(self, size_bytes: int) -> None:
        """Raise HostCopyError if copies of this size are not allowed."""
        if self._most_bytes is None:
            allowed = self._runtime.settings.host_copy_bytes
            self._most_bytes = allowed or psutil.virtual_memory().available // _SHARE_OF_FREE
        runtime = self._runtime
        nodes = runtime.settings.host_copy_nodes
        check_room(size_bytes, most_bytes=self._most_bytes, ranks=runtime.ranks_per_node, nodes=nodes)

    def _await_copied(self) -> None:
        work = self._under_way
        if work is not None:
            work.waited_s += self._wait(work.copied)

    def _wait(self, event: threading.Event) -> float:
        """Wait, and return for how many seconds; the step clock stands still meanwhile."""
        if event.is_set():
            return 0.0
        began_s = time.monotonic()
        clock = self._runtime.step_clock
        before = clock.activity
        clock.doing(Activity.PAUSED)
        if not event.wait(SETTLE_S):
            raise RecoveryError(f"rank {self._runtime.rank}: a copy in host memory has not ended in {SETTLE_S:g} s")
        clock.doing(before)
        return time.monotonic() - began_s

    def _give_up(self, error: MidstepError) -> None:
        """Make no more copies; those that are whole stay."""
        self._off, self._under_way, self._planned = True, None, None
        _log.warning("no copies in host memory any more, of any rank: rank %d: %s", self._runtime.rank, error)


class _Copying:
    """One copy that is being taken."""

    def __init__(
        self,
        file: CopyFile,
        header: CopyHeader,
        index: bytes,
        tensors: Sequence[Any],
        *,
        disk: Disk,
        half_done: Callable[[], None],
        hand_over: Callable[[SentCopy], None],
    ) -> None:
        self.tensors = tensors
        self.copied, self.whole, self.kept = threading.Event(), threading.Event(), threading.Event()
        self.error: MidstepError | None = None
        self.waited_s = self.took_s = self.cpu_s = 0.0
        self.file, self._header, self._index, self._disk = file, header, index, disk
        self._half_done, self._hand_over = half_done, hand_over

    def copy(self) -> None:
        """Copy the tensors. The training waits for that. Raises HostCopyError."""
        self.file.reserve(len(self._index), self._header.body_bytes)
        began_s = time.monotonic()  # memory is got once, and is no part of what the next copies take
        body, at = self.file.begin(self._header, self._index, self._disk), 0
        for tensor in self.tensors:
            _copy(tensor, body[at : at + tensor.nbytes])
            at += tensor.nbytes
        self._half_done()
        self.tensors = ()
        self.took_s = time.monotonic() - began_s
        self.copied.set()

    def finish(self) -> None:
        """Copy, if that has not been done, write the checksum, and hand the copy over. In the thread."""
        began_cpu_s = time.thread_time()
        try:
            if not self.copied.is_set():
                self.copy()
            began_s = time.monotonic()
            self.file.finish()
            copy = self.file.sent(verified=False)
            self.tensors = ()
            self.cpu_s = time.thread_time() - began_cpu_s
            self.whole.set()
            self._hand_over(copy)
            self.took_s += time.monotonic() - began_s
        except Exception as error:  # whatever it is, the training waits for the events
            self.error = error if isinstance(error, MidstepError) else HostCopyError(f"{type(error).__name__}: {error}")
        self.tensors = ()
        for event in (self.copied, self.whole, self.kept):
            event.set()


class _MovedCopy:
    """A copy as a shard that moves between ranks: its header, and one tensor of bytes on the memory of a file."""

    def __init__(self, header: bytes, content: memoryview) -> None:
        self.header = header
        self.tensors = (host_memory.on_memory(content),)


class _Arriving:
    """Takes the copies of a rank that arrive for it into its files."""

    def __init__(self, file_for: Callable[[CopyHeader], CopyFile]) -> None:
        self._file_for = file_for
        self._begun: list[tuple[CopyFile, int]] = []

    def accept_shard(self, shard_id: str, header: bytes) -> OpenShard:
        """Return where a copy arrives. Raises HostCopyError."""
        found, checksum = unpack_sent(header)
        file = self._file_for(found)
        content = file.accept(found)
        self._begun.append((file, checksum))
        return _MovedCopy(header, content)

    def finish(self) -> None:
        """Say that they are whole. Raises HostCopyError if they are not what was sent."""
        for file, checksum in self._begun:
            file.finish(checksum)


class _CopyThread:
    """The thread that copies and hashes. It ends with the process."""

    def __init__(self) -> None:
        self._work: queue.Queue[_Copying] = queue.Queue(maxsize=1)
        threading.Thread(target=self._run, name="midstep-copy", daemon=True).start()

    def work(self, work: _Copying) -> None:
        """Do this next. The one before it is whole."""
        self._work.put(work)

    def _run(self) -> None:
        while True:
            self._work.get().finish()


def _moved(copy: SentCopy) -> OpenShard:
    return _MovedCopy(copy.packed(), copy.content)


def _copy(tensor: Any, target: memoryview) -> None:
    """Copy a tensor's memory, piece by piece: numpy lets other threads run meanwhile."""
    source = host_memory.as_array(tree.tensor_bytes(tensor))
    array = np.frombuffer(target, np.uint8) if target else source
    for start in range(0, len(source), _PIECE_BYTES):
        np.copyto(array[start : start + _PIECE_BYTES], source[start : start + _PIECE_BYTES])


def _fill(tensor: Any, source: memoryview) -> None:
    """Put copied bytes into a tensor, which may lie on a device."""
    if not tensor.nbytes:
        return
    if host_memory.on_host(tensor):
        host_memory.memory_of(tensor)[:] = source
        return
    host = host_memory.empty(tensor.shape, tensor.dtype)
    host_memory.memory_of(host)[:] = source
    tensor.copy_(host)
