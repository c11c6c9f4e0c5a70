"""The backend `fake_hccl` of torch.distributed: HCCL's behaviour on the fake chip, gloo's results.

Collectives are queued on the chip. A communicator is built on its first use: its members meet in the group's store, and
that costs a link-up. A stop of the device shuts its connections down; `resume_hccl_comm` brings the same communicator
up again, `abort_hccl_comm` drops it so that the next use builds another. The other public names are those that
torch-npu's own Python calls on its backend.
"""

import contextlib
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ..devices import fake as calls
from ..devices.fake_chip import BUSY, CHIP, COMMUNICATOR_S, LINK_UP_S, RETRY_FAILED, Task, buffer_bytes, hold_gil, told
from ..protocol.types import StoreEndpoint
from . import handshake
from .background import Disposal
from .device_group import batch_for_device_groups
from .fake_works import PEER_GONE, BatchedMessage, Collected, FakeWork, keep_leftover, outcome, start_all, tensors_in
from .gloo.connections import connect_backend
from .gloo.group import GLOO_SOURCES
from .gloo.links import GlooLinks
from .gloo.work import FuturelessWork
from .hccl import CollectiveLibrary, HcclCommunicator
from .process_group import WITH_FUTURE, WITHOUT_FUTURE
from .rendezvous import ForwardingStore

BACKEND = "fake_hccl"
OTHER_DEVICE = "HCCL function error: tensors on device {device}, communicator on device {chip}, error code is 2"
FROM_ANY = "ProcessGroupHCCL does not support recv"
NOT_UP = "HCCL function error: HcclCommInitRootInfoConfig, error code is 9"
# Outside of a batch they never wait for each other, where an NPU's may (docs/npu.md).
PAIRED = ("send", "recv")  # each pair of ranks has a communicator of its own, built when it is first used
ALL = -1  # stands for the communicator of all members, beside those of pairs
_TICK_S = 0.005
CLEAR_S = 0.005  # a resume takes up to this


class _Signal(msgspec.Struct, frozen=True):
    """The note of a rank for its peers: where it listens, and since when, on the machine's clock."""

    listener: handshake.Listener
    at_s: float


_DISPOSAL = Disposal()


# --- a link-up that can be given up -----------------------------------------------------------------------------------

ABORTED = "aborted"


class StoreOfTask(ForwardingStore):
    """A group's store, for one task: what is abandoned must not reach into the store of the next generation."""

    def __init__(self, store: Any, task: Task) -> None:
        """Forward to `store`, up to the end of `task`."""
        super().__init__()
        self._task = task
        self.forward_to(store)

    @property
    def _inner(self) -> Any:
        if self._task.over:
            raise RuntimeError(ABORTED)
        return super()._inner

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys, up to the end of the task: a client of a store that waits takes no other call."""
        until_s = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() >= until_s:
                raise RuntimeError(f"wait timeout after {timeout}, keys: {', '.join(keys)}")
            time.sleep(_TICK_S)


def unless_over(task: Task, connect: Callable[[], Any]) -> Any:
    """Return what `connect` returns. Raises what it raises, and RuntimeError when the task is over before.

    A thread of its own waits: the chip has other tasks.
    """
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put(connect())
        except Exception as error:
            results.put(error)

    threading.Thread(target=run, name="fake-link-up", daemon=True).start()
    task.when_over(lambda: results.put(RuntimeError(ABORTED)))
    found = results.get()
    if isinstance(found, Exception):
        raise found
    return found


# --- the links of the chip, and what is queued on it ------------------------------------------------------------------

_HERE = StoreEndpoint("127.0.0.1", 1)  # only the route to it matters


class FakeLinks:
    """The links of this process's chip: one gloo device for all its communicators."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: GlooLinks | None = None
        self._peers: set[tuple[str, int]] = set()
        self._number = 0

    def up(self) -> GlooLinks:
        """Return the links; open them on first use."""
        with self._lock:
            if self._links is None:
                self._links = GlooLinks(_HERE)
                CHIP.cuts.append(self.cut)
            return self._links

    def add_peers(self, peers: Sequence[tuple[str, int]]) -> None:
        """Add the listeners of other ranks."""
        with self._lock:
            assert self._links is not None
            self._peers |= set(peers)
            self._number += 1
            self._links.expect(self._number, self._peers)

    def cut(self) -> None:
        """Shut all connections down."""
        if self._links is not None:
            self._links.cut()


LINKS = FakeLinks()


# --- the group --------------------------------------------------------------------------------------------------------


class FakeHcclGroup(dist.ProcessGroup):
    """A process group of the backend `fake_hccl`."""

    def __init__(self, options: Any, given: Any = None) -> None:
        """Make the group, with a script's own options; nothing is connected before its first collective."""
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._store = options.store
        self._group_rank, self._size = options.group_rank, options.group_size
        self._timeout_s = options.timeout.total_seconds()
        self._comms: dict[int, Any] = {}  # linked: that of all members, and by place of the peer those of pairs
        self._resumed = 0  # times since the last drop: each has its own place in the store
        self.given = given
        self._store_of_task: StoreOfTask | None = None
        self._keys: list[str] = []
        self.built: set[int] = set()  # communicators, which take memory of the device, linked or not
        self._batch: list[BatchedMessage] | None = None  # of the batch that was begun; it stays open until it is ended
        self.watchdog = 1

    def __del__(self) -> None:
        """Wait for nothing: a script drops its group while a collective is stuck, and gloo's would be waited for.

        The group and its tasks refer to each other, so this runs in whichever thread collects garbage.
        """
        with contextlib.suppress(AttributeError, RuntimeError):  # never made; no thread starts while Python ends
            self._leave_communicators()
            self._give_memory()

    @property
    def pairs(self) -> set[int]:
        """Peers with which it has a communicator of two."""
        return self.built - {ALL}

    # --- what torch-npu's Python calls ------------------------------------------------------------------------------

    def abort_hccl_comm(self, reason: str) -> None:
        """Drop the communicator."""
        hold_gil(COMMUNICATOR_S)
        self._leave_communicators()
        self._give_memory()
        self._resumed = 0
        CHIP.link_broken = False

    def resume_hccl_comm(self, device_id: int) -> None:
        """Let the communicator use its links again."""
        self._refuse_other_device(device_id)
        hold_gil(COMMUNICATOR_S)
        self._leave_communicators()
        time.sleep(CLEAR_S * random.SystemRandom().random())  # ranks are never done at one time
        CHIP.cleared_s = time.time()  # of all communicators of the device, as HCCL does
        self._resumed += 1  # used before or not: others may have used it, and all must meet in one place

    def _leave_communicators(self) -> None:
        """Dispose of the gloo groups, if there are any, without waiting for what may still be under way in them."""
        left = list(self._comms.values())
        self._comms.clear()
        _DISPOSAL.dispose(left)

    def _delete_tcpstore_key(self) -> None:
        for key in self._keys:
            try:
                self._store.delete_key(key)
            except RuntimeError:  # as the real one: the store may be gone, or another rank was faster
                break
        self._keys.clear()

    def _set_switch_nic_comm(self, rank: int, count: int, ranks: list[int], use_backup: list[bool]) -> bool:
        """Say that the network cards were switched; there are none."""
        return count == len(ranks) == len(use_backup)

    def set_watchdog_status(self, status: int) -> None:
        """Record whether the watchdog would run."""
        self.watchdog = status

    def clear_workmeta_list(self) -> None:
        """Forget the collectives that were under way."""

    # --- collectives --------------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a batch of sends and receives."""
        self._batch = self._batch or []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Queue the batch as one task, which is over when all of it is. Raises RuntimeError, with the batch closed."""
        batch, self._batch = self._batch or [], None
        self._refuse_other_device(calls.current_device())
        self._refuse_if_busy(ALL)
        tensors = [tensor for message in batch for tensor in message.tensors]
        return FakeWork(CHIP.submit(lambda task: self._do_batch(task, batch), tensors), tensors)

    def _do_batch(self, task: Task, batch: Sequence[BatchedMessage]) -> None:
        """Run a batch, over the group's own communicator. In the chip's thread."""
        started = start_all(self._linked(task, ALL), batch, self._timeout_s)
        task.when_over(started.release)
        started.wait()
        for inner in started.works:
            keep_leftover(inner)
        if started.refused or (not task.over and any(map(outcome, started.works))):
            raise RuntimeError(PEER_GONE)

    def queue(self, op: str, args: Any, kwargs: Any) -> dist.Work:
        """Queue a collective, or add a send or receive to the batch that was begun."""
        if op == "recv_anysource":
            raise RuntimeError(told(FROM_ANY))
        self._refuse_other_device(calls.current_device())
        if self._batch is not None and op in PAIRED:
            self._batch.append(BatchedMessage(op, *args))
            return Collected()
        self._refuse_if_busy(args[1] if op in PAIRED else ALL)
        tensors = [tensor for argument in args[:2] for tensor in tensors_in(argument)]
        return FakeWork(CHIP.submit(lambda task: self._do(task, op, args, kwargs), tensors), tensors)

    def _refuse_other_device(self, device_id: int) -> None:
        """Raise RuntimeError unless this is the chip's device: a thread's current device is 0 until it sets another."""
        if device_id != CHIP.index:
            raise RuntimeError(told(OTHER_DEVICE.format(device=device_id, chip=CHIP.index)))

    def _refuse_if_busy(self, peer: int) -> None:
        """Raise RuntimeError where a communicator is needed and the process before still has the device.

        One of this rank alone takes nothing of the device.
        """
        if self._size > 1 and peer not in self.built and CHIP.busy:
            raise RuntimeError(told(BUSY))

    def _do(self, task: Task, op: str, args: Any, kwargs: Any) -> Any:
        """Run a collective. In the chip's thread."""
        if op in PAIRED:
            comm, args = self._linked(task, args[1]), (args[0], int(args[1] > self._group_rank), *args[2:])
        else:
            comm = self._linked(task, ALL)
        try:
            work = getattr(comm, op)(*args, **kwargs)
        except RuntimeError as error:
            raise RuntimeError(PEER_GONE if GLOO_SOURCES in str(error) else str(error)) from error
        inner: Any = work
        done = threading.Event()
        if op in WITHOUT_FUTURE:
            inner = FuturelessWork(work, self._timeout_s)
            inner.when_done(done.set)
        else:
            work.get_future().add_done_callback(lambda _: done.set())
        if op in PAIRED:
            task.goes_on = True
            task.when_over(lambda: keep_leftover(inner))
            inner.when_done(lambda: task.finish(outcome(inner)))
            return None
        task.when_over(done.set)
        done.wait()
        if task.over:
            keep_leftover(inner)
            return None
        wrong = outcome(inner)
        if wrong is not None:
            raise RuntimeError(wrong)
        return work.get_future().value() if op not in WITHOUT_FUTURE else None

    @staticmethod
    def _build_one() -> None:
        """Build a communicator, as far as it can fail by itself. Raises RuntimeError."""
        time.sleep(LINK_UP_S)
        if CHIP.link_up_fails:
            CHIP.link_up_fails = False
            raise RuntimeError(NOT_UP)
        if CHIP.link_broken:
            raise RuntimeError(RETRY_FAILED)

    def _linked(self, task: Task, peer: int) -> Any:
        """Return the gloo group of all members, or that with `peer`; it is linked when it is first needed."""
        if peer not in self._comms:
            self._comms[peer] = self._link_up(task, peer)
        if peer not in self.built:
            self.built.add(peer)
            CHIP.buffer_bytes += self._buffer_bytes(peer)
        return self._comms[peer]

    def _give_memory(self) -> None:
        CHIP.buffer_bytes -= sum(map(self._buffer_bytes, self.built))
        self.built.clear()

    def _buffer_bytes(self, peer: int) -> int:
        return buffer_bytes(self.given, pair=peer != ALL)

    def _places(self, peer: int) -> list[int]:
        """Return the members of the communicator of all, or of that with `peer`, by their places in the group."""
        return list(range(self._size)) if peer == ALL else sorted((self._group_rank, peer))

    def _link_up(self, task: Task, peer: int) -> Any:
        """Meet the other members in the store and connect. In the chip's thread."""
        self._build_one()
        links = LINKS.up()
        places = self._places(peer)
        name = f"{self._resumed}" if peer == ALL else f"{self._resumed}.{places[0]}-{places[1]}"
        key = f"{name}/{self._group_rank}"
        self._store.set(key, handshake.encode(_Signal(handshake.Listener(*links.listener), time.time())))
        self._keys.append(key)
        others = [f"{name}/{place}" for place in places]
        while not self._store.check(others):
            if task.over:
                raise RuntimeError(ABORTED)
            time.sleep(_TICK_S)
        signals = [_signal(self._store.get(other)) for other in others]
        while any(signal.at_s < CHIP.cleared_s for signal in signals):
            if task.over:  # what came before this rank cleared it is lost, and is not sent again
                raise RuntimeError(ABORTED)
            time.sleep(_TICK_S)
        LINKS.add_peers([(signal.listener.host, signal.listener.port) for signal in signals])
        limits = {"link_up_s": self._timeout_s, "collective_s": self._timeout_s}
        own = self._store_of_task = StoreOfTask(self._store, task)  # torch does not keep the Python part of it

        def connect() -> Any:
            place = places.index(self._group_rank)
            return connect_backend(PrefixStore(name, own), name, place, len(places), links, **limits)

        return unless_over(task, connect).process_group


def _signal(data: bytes) -> _Signal:
    try:
        return handshake.decode(data, _Signal)
    except ValueError as error:
        raise RuntimeError(NOT_UP) from error


def _queued(op: str) -> Callable[..., dist.Work]:
    def call(self: FakeHcclGroup, *args: Any, **kwargs: Any) -> dist.Work:
        return self.queue(op, args, kwargs)

    call.__name__ = op
    call.__doc__ = f"Queue `{op}` on the chip."
    return call


for _op in WITH_FUTURE + WITHOUT_FUTURE:
    if hasattr(dist.ProcessGroup, _op):
        setattr(FakeHcclGroup, _op, _queued(_op))


def fake_communicator() -> HcclCommunicator:
    """Return the communicator of the fake device: the one of NPUs, on this backend.

    As torch-npu does when it is imported, it puts its own way of making batches in place of torch's.
    """
    batch_for_device_groups()
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, FakeHcclGroup, extended_api=True, devices=["cpu"])
    return HcclCommunicator(CollectiveLibrary(calls, BACKEND, "cpu"), "fake")
