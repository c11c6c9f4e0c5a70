"""The backend `fake_hccl` of torch.distributed: HCCL's behaviour on the fake chip, gloo's results.

Collectives are queued on the chip. A communicator is built on its first use: its members meet in the group's store, and
that costs a link-up. A stop of the device shuts its connections down; `resume_hccl_comm` brings the same communicator
up again, `abort_hccl_comm` drops it so that the next use builds another. The other public names are those that
torch-npu's own Python calls on its backend.
"""

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ..devices import fake as calls
from ..devices.fake_chip import BUSY, CHIP, COMMUNICATOR_S, LINK_UP_S, RETRY_FAILED, Task, hold_gil, told
from ..protocol.types import StoreEndpoint
from . import handshake
from .background import Disposal
from .device_group import batch_for_device_groups
from .gloo.connections import connect_backend
from .gloo.group import GLOO_SOURCES
from .gloo.links import GlooLinks
from .gloo.work import FuturelessWork, Promise
from .hccl import CollectiveLibrary, HcclCommunicator
from .process_group import WITH_FUTURE, WITHOUT_FUTURE
from .rendezvous import ForwardingStore

BACKEND = "fake_hccl"
PEER_GONE = "HCCL function error: HcclAllReduce, error code is 21"
OTHER_DEVICE = "HCCL function error: tensors on device {device}, communicator on device {chip}, error code is 2"
NOT_UP = "HCCL function error: HcclCommInitRootInfoConfig, error code is 9"
# Outside of a batch they never wait for each other, where an NPU's may (docs/npu.md).
POINT_TO_POINT = ("send", "recv", "recv_anysource")
PAIRED = ("send", "recv")  # each pair of ranks has a communicator of its own, built when it is first used
_TICK_S = 0.005
CLEAR_S = 0.005  # a resume takes up to this


class _Signal(msgspec.Struct, frozen=True):
    """The note of a rank for its peers: where it listens, and since when, on the machine's clock."""

    listener: handshake.Listener
    at_s: float


_DISPOSAL = Disposal()


# --- batches of sends and receives: one task of the queue, in which all start together --------------------------------
#
# torch-npu replaces torch's `batch_isend_irecv` for that; on an Ascend 910B it begins a batch in the group, makes each
# send and receive, and ends the batch. Between two ranks they are matched by their order.


class BatchedMessage(NamedTuple):
    """A send or receive of a batch, with the arguments of the group's method."""

    op: str
    tensors: list[torch.Tensor]
    peer: int
    tag: int


class Collected(dist.Work):
    """The handle of a send or receive in a batch that has not started. Its caller waits for the batch."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True


class Started:
    """Sends and receives under way. `refused`: not all could be started."""

    def __init__(self, works: Sequence[Any], *, refused: bool) -> None:
        self.works = works
        self.refused = refused
        self._left = len(works)
        self._lock = threading.Lock()
        self._over = threading.Event()
        for work in works:
            work.when_done(self._one_done)
        if refused or not works:
            self.release()

    def _one_done(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self.release()

    def release(self) -> None:
        """Let the waiting thread continue: all are done, or their task is over."""
        self._over.set()

    def wait(self) -> None:
        """Wait until all are done, or released."""
        self._over.wait()


def start_all(comm: Any, batch: Sequence[BatchedMessage], timeout_s: float) -> Started:
    """Start the sends and receives of a batch over a group of gloo."""
    works: list[FuturelessWork] = []
    try:
        for m in batch:
            works.append(FuturelessWork(getattr(comm, m.op)(m.tensors, m.peer, m.tag), timeout_s))
    except RuntimeError:  # gloo's, of a peer that is gone
        return Started(works, refused=True)
    return Started(works, refused=False)


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


class FakeWork(dist.Work):
    """A queued collective. The device computes in a thread, so `wait` waits for the result."""

    def __init__(self, task: Task, tensors: list[torch.Tensor]) -> None:
        """Wrap `task`."""
        super().__init__()
        self._task = task
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the result. Raises RuntimeError with the device's text."""
        self._task.wait(timeout.total_seconds() or None)
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future that completes with the collective. For DDP's reducer."""
        promise = Promise()

        def settle() -> None:
            promise.settle(self.exception(), self._tensors if self._task.result is None else self._task.result)

        self._task.when_over(settle)
        return promise.future

    def is_completed(self) -> bool:
        """Return whether it is over."""
        return self._task.over

    def is_success(self) -> bool:
        """Return whether it completed without an error."""
        return self._task.over and self._task.error is None

    def exception(self) -> Any:
        """Return its error, or None."""
        return None if self._task.error is None else RuntimeError(told(self._task.error))

    def result(self) -> list[torch.Tensor]:
        """Return the tensors."""
        return self._tensors

    def source_rank(self) -> int:
        """Return -1: the sender is not known."""
        return -1

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait for the result."""
        self.wait()


# --- the group --------------------------------------------------------------------------------------------------------


class FakeHcclGroup(dist.ProcessGroup):
    """A process group of the backend `fake_hccl`."""

    def __init__(self, options: Any, given: Any = None) -> None:
        """Make the group, with a script's own options; nothing is connected before its first collective."""
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._store = options.store
        self._group_rank, self._size = options.group_rank, options.group_size
        self._timeout_s = options.timeout.total_seconds()
        self._comm: Any = None
        self._resumed = 0  # times since the last drop: each has its own place in the store
        self.given = given
        self._store_of_task: StoreOfTask | None = None
        self._keys: list[str] = []
        self.pairs: set[int] = set()  # peers with which it has a communicator of two
        self._cleared_s = 0.0  # when this rank last cleared what peers signal to it
        self._batch: list[BatchedMessage] | None = None  # of the batch that was begun; it stays open until it is ended
        self.watchdog = 1

    def __del__(self) -> None:
        """Wait for nothing: a script drops its group while a collective is stuck, and gloo's would be waited for.

        The group and its tasks refer to each other, so this runs in whichever thread collects garbage.
        """
        with contextlib.suppress(AttributeError, RuntimeError):  # never made; no thread starts while Python ends
            self._leave_communicator()

    # --- what torch-npu's Python calls ------------------------------------------------------------------------------

    def abort_hccl_comm(self, reason: str) -> None:
        """Drop the communicator."""
        hold_gil(COMMUNICATOR_S)
        self._leave_communicator()
        self.pairs.clear()
        self._resumed = 0
        CHIP.link_broken = False

    def resume_hccl_comm(self, device_id: int) -> None:
        """Let the communicator use its links again."""
        self._refuse_other_device(device_id)
        hold_gil(COMMUNICATOR_S)
        self._leave_communicator()
        time.sleep(CLEAR_S * random.SystemRandom().random())  # ranks are never done at one time
        self._cleared_s = time.time()
        self._resumed += 1  # used before or not: others may have used it, and all must meet in one place

    def _leave_communicator(self) -> None:
        """Dispose of the gloo group, if there is one, without waiting for what may still be under way in it."""
        left = [self._comm]
        self._comm = None
        _DISPOSAL.dispose(left)

    def _delete_tcpstore_key(self) -> None:
        for key in self._keys:
            try:
                self._store.delete_key(key)
            except RuntimeError:  # as the real one: the store may be gone, or another rank was faster
                break
        self._keys.clear()

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
        tensors = [tensor for message in batch for tensor in message.tensors]
        return FakeWork(CHIP.submit(lambda task: self._do_batch(task, batch), tensors), tensors)

    def _do_batch(self, task: Task, batch: Sequence[BatchedMessage]) -> None:
        """Run a batch, over the group's own communicator. In the chip's thread."""
        if self._comm is None:
            self._comm = self._link_up(task)
        started = start_all(self._comm, batch, self._timeout_s)
        task.when_over(started.release)
        started.wait()
        for inner in started.works:
            _keep_leftover(inner)
        if started.refused or (not task.over and any(map(_outcome, started.works))):
            raise RuntimeError(PEER_GONE)

    def queue(self, op: str, args: Any, kwargs: Any) -> dist.Work:
        """Queue a collective, or add a send or receive to the batch that was begun."""
        self._refuse_other_device(calls.current_device())
        if self._batch is not None and op in PAIRED:
            self._batch.append(BatchedMessage(op, *args))
            return Collected()
        tensors = [tensor for argument in args[:2] for tensor in _tensors_in(argument)]
        return FakeWork(CHIP.submit(lambda task: self._do(task, op, args, kwargs), tensors), tensors)

    def _refuse_other_device(self, device_id: int) -> None:
        """Raise RuntimeError unless this is the chip's device: a thread's current device is 0 until it sets another."""
        if device_id != CHIP.index:
            raise RuntimeError(told(OTHER_DEVICE.format(device=device_id, chip=CHIP.index)))

    def _do(self, task: Task, op: str, args: Any, kwargs: Any) -> Any:
        """Run a collective. In the chip's thread."""
        if self._comm is None:
            self._comm = self._link_up(task)
        if op in PAIRED and args[1] not in self.pairs:
            self._build_one()
            self.pairs.add(args[1])
        try:
            work = getattr(self._comm, op)(*args, **kwargs)
        except RuntimeError as error:
            raise RuntimeError(PEER_GONE if GLOO_SOURCES in str(error) else str(error)) from error
        inner: Any = work
        done = threading.Event()
        if op in WITHOUT_FUTURE:
            inner = FuturelessWork(work, self._timeout_s)
            inner.when_done(done.set)
        else:
            work.get_future().add_done_callback(lambda _: done.set())
        if op in POINT_TO_POINT:
            task.goes_on = True
            task.when_over(lambda: _keep_leftover(inner))
            inner.when_done(lambda: task.finish(_outcome(inner)))
            return None
        task.when_over(done.set)
        done.wait()
        if task.over:
            _keep_leftover(inner)
            return None
        wrong = _outcome(inner)
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
        if CHIP.busy:
            raise RuntimeError(BUSY)

    def _link_up(self, task: Task) -> Any:
        """Meet the other members in the store and connect. In the chip's thread."""
        self._build_one()
        links = LINKS.up()
        name = f"{self._resumed}"
        key = f"{name}/{self._group_rank}"
        self._store.set(key, handshake.encode(_Signal(handshake.Listener(*links.listener), time.time())))
        self._keys.append(key)
        others = [f"{name}/{place}" for place in range(self._size)]
        while not self._store.check(others):
            if task.over:
                raise RuntimeError(ABORTED)
            time.sleep(_TICK_S)
        signals = [_signal(self._store.get(other)) for other in others]
        while any(signal.at_s < self._cleared_s for signal in signals):
            if task.over:  # what came before this rank cleared it is lost, and is not sent again
                raise RuntimeError(ABORTED)
            time.sleep(_TICK_S)
        LINKS.add_peers([(signal.listener.host, signal.listener.port) for signal in signals])
        limits = {"link_up_s": self._timeout_s, "collective_s": self._timeout_s}
        own = self._store_of_task = StoreOfTask(self._store, task)  # torch does not keep the Python part of it

        def connect() -> Any:
            return connect_backend(PrefixStore(name, own), name, self._group_rank, self._size, links, **limits)

        return unless_over(task, connect).process_group


def _keep_leftover(inner: Any) -> None:
    """Register a work that is over for its caller, while it may still access its tensors."""
    if not inner.is_completed():
        CHIP.leftovers.append(inner.is_completed)


def _outcome(inner: Any) -> str | None:
    """Return the error text of a complete collective of gloo; None if there is none."""
    try:
        inner.wait()
    except RuntimeError:  # gloo's, of any peer that is gone
        return PEER_GONE
    return None


def _tensors_in(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, list | tuple):
        return [tensor for item in argument for tensor in _tensors_in(item)]
    return []


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
