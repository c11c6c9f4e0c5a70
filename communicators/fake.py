"""The backend `fake_hccl` of torch.distributed: HCCL's behaviour on the fake chip, gloo's results.

Collectives are queued on the chip. A communicator is built on its first use: its members meet in the group's store, and
that costs a link-up. A stop of the device shuts its connections down; `resume_hccl_comm` brings the same communicator
up again, `abort_hccl_comm` drops it so that the next use builds another. The other public names are those that
torch-npu's own Python calls on its backend.
"""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ..devices import fake as calls
from ..devices.fake_chip import BUSY, CHIP, COMMUNICATOR_S, LINK_UP_S, RETRY_FAILED, Task, hold_gil, told
from . import handshake
from .background import Disposal
from .device_group import batch_for_device_groups
from .fake_batch import BatchedMessage, Collected, start_all
from .fake_link_up import ABORTED, StoreOfTask, unless_over
from .fake_links import LINKS
from .fake_work import FakeWork
from .gloo.connections import connect_backend
from .gloo.group import GLOO_SOURCES
from .gloo.work import FuturelessWork
from .hccl import CollectiveLibrary, HcclCommunicator
from .process_group import WITH_FUTURE, WITHOUT_FUTURE

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
