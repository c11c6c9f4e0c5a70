"""The backend `fake_hccl` of torch.distributed: HCCL's behaviour on the fake chip, gloo's results.

Collectives are queued on the chip. A communicator is built when it is first used, by meeting the others in the group's
store, and costs a link-up. A stop of the device cuts its connections; `resume_hccl_comm` brings the same communicator
up again, `abort_hccl_comm` drops it so that the next use builds another. The rest of the names are those that
torch-npu's own Python calls on its backend.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from ..devices import fake as calls
from ..devices.fake_chip import CHIP, LINK_UP_S, RETRY_FAILED, Task, told
from ..protocol.types import StoreEndpoint
from . import messages
from .disposal import Disposal
from .hccl import HcclCommunicator
from .library import Library
from .links import Links
from .process_group import GLOO_SOURCES, WITH_FUTURE, WITHOUT_FUTURE
from .work import FuturelessWork, Promise

BACKEND = "fake_hccl"
PEER_GONE = "HCCL function error: HcclAllReduce, error code is 21"
OTHER_DEVICE = "HCCL function error: tensors on device {device}, communicator on device {chip}, error code is 2"
NOT_UP = "HCCL function error: HcclCommInitRootInfoConfig, error code is 9"
ABORTED = "aborted"
# They never wait for each other. An NPU is known to take only those of one batch together (docs/npu.md).
POINT_TO_POINT = ("send", "recv", "recv_anysource")
_HERE = StoreEndpoint("127.0.0.1", 1)  # only the route to it matters
_TICK_S = 0.005


class FakeLinks:
    """The links of this process's chip: one gloo device for all its communicators."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: Links | None = None
        self._peers: set[tuple[str, int]] = set()
        self._number = 0

    def up(self) -> Links:
        """Return the links, opened when they are first needed."""
        with self._lock:
            if self._links is None:
                self._links = Links(_HERE)
                CHIP.cuts.append(self.cut)
            return self._links

    def know(self, peers: Sequence[tuple[str, int]]) -> None:
        """Take note of where the others listen."""
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
_DISPOSAL = Disposal()


class FakeHcclGroup(dist.ProcessGroup):
    """What `fake_hccl` makes of a group."""

    def __init__(self, options: Any) -> None:
        """Make the group; nothing is connected before its first collective."""
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._store = options.store
        self._group_rank, self._size = options.group_rank, options.group_size
        self._timeout_s = options.timeout.total_seconds()
        self._comm: Any = None
        self._resumed = 0  # times since the last drop: each has its own place in the store
        self._keys: list[str] = []
        self.watchdog = 1

    # --- what torch-npu's Python calls ------------------------------------------------------------------------------

    def abort_hccl_comm(self, reason: str) -> None:
        """Drop the communicator."""
        self._let_go()
        self._resumed = 0
        CHIP.link_broken = False

    def resume_hccl_comm(self, device_id: int) -> None:
        """Have the communicator use its links again."""
        self._refuse_other_device(device_id)
        self._let_go()
        self._resumed += 1  # used before or not: others may have used it, and all must meet in one place

    def _let_go(self) -> None:
        """Leave the gloo group, if there is one, without waiting for what may still be under way in it."""
        left = [self._comm]
        self._comm = None
        _DISPOSAL.take(left)

    def _delete_tcpstore_key(self) -> None:
        for key in self._keys:
            try:
                self._store.delete_key(key)
            except RuntimeError:  # as the real one: the store may be gone, or another rank was faster
                break
        self._keys.clear()

    def set_watchdog_status(self, status: int) -> None:
        """Take note of whether the watchdog would run."""
        self.watchdog = status

    def clear_workmeta_list(self) -> None:
        """Forget the collectives that were under way."""

    # --- collectives --------------------------------------------------------------------------------------------------

    def queue(self, op: str, args: Any, kwargs: Any) -> "FakeWork":
        """Queue a collective."""
        self._refuse_other_device(calls.current_device())
        tensors = [tensor for argument in args[:2] for tensor in _tensors_in(argument)]
        return FakeWork(CHIP.submit(lambda task: self._do(task, op, args, kwargs), tensors), tensors)

    def _refuse_other_device(self, device_id: int) -> None:
        """Every thread has a current device, on which it makes things: at first device 0, not its process's."""
        if device_id != CHIP.index:
            raise RuntimeError(told(OTHER_DEVICE.format(device=device_id, chip=CHIP.index)))

    def _do(self, task: Task, op: str, args: Any, kwargs: Any) -> Any:
        """Carry out a collective. In the chip's thread."""
        if self._comm is None:
            self._comm = self._link_up(task)
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
            task.when_over(lambda: _leave(inner))
            inner.when_done(lambda: task.finish(_outcome(inner)))
            return None
        task.when_over(done.set)
        done.wait()
        if task.over:
            _leave(inner)
            return None
        wrong = _outcome(inner)
        if wrong is not None:
            raise RuntimeError(wrong)
        return work.get_future().value() if op not in WITHOUT_FUTURE else None

    def _link_up(self, task: Task) -> Any:
        """Meet the others in the store and connect. In the chip's thread."""
        time.sleep(LINK_UP_S)
        if CHIP.link_up_fails:
            CHIP.link_up_fails = False
            raise RuntimeError(NOT_UP)
        if CHIP.link_broken:
            raise RuntimeError(RETRY_FAILED)
        links = LINKS.up()
        name = f"{self._resumed}"
        key = f"{name}/{self._group_rank}"
        self._store.set(key, messages.encode(messages.Listener(*links.listener)))
        self._keys.append(key)
        others = [f"{name}/{place}" for place in range(self._size)]
        while not self._store.check(others):
            if task.over:
                raise RuntimeError(ABORTED)
            time.sleep(_TICK_S)
        LINKS.know([_endpoint(self._store.get(other)) for other in others])
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [links.device]
        options._timeout = timedelta(seconds=self._timeout_s)
        store = PrefixStore(name, self._store)
        gloo = dist.ProcessGroupGloo(store, self._group_rank, self._size, options)
        process_group = dist.ProcessGroup(store, self._group_rank, self._size)
        process_group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        process_group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        if task.over:  # nobody waits for it, and others may have been told to build another
            raise RuntimeError(ABORTED)
        return process_group


class FakeWork(dist.Work):
    """A queued collective. The thread that computes is the device, so a wait is one for the result."""

    def __init__(self, task: Task, tensors: list[torch.Tensor]) -> None:
        """Stand for `task`."""
        super().__init__()
        self._task = task
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for it. Raises RuntimeError with the device's text."""
        self._task.wait(timeout.total_seconds() or None)
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future that completes with it. For DDP's reducer."""
        promise = Promise()

        def settle() -> None:
            error = self._task.error
            failure = None if error is None else RuntimeError(told(error))
            promise.settle(failure, self._tensors if self._task.result is None else self._task.result)

        self._task.when_over(settle)
        return promise.future

    def is_completed(self) -> bool:
        """Say whether it is over."""
        return self._task.over

    def is_success(self) -> bool:
        """Say whether it was done, and well."""
        return self._task.over and self._task.error is None

    def exception(self) -> Any:
        """Return what went wrong, if something did."""
        return None if self._task.error is None else RuntimeError(told(self._task.error))

    def result(self) -> list[torch.Tensor]:
        """Return the tensors."""
        return self._tensors

    def source_rank(self) -> int:
        """Not known: nothing here receives from anybody."""
        return -1

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait for it."""
        self.wait()


def _leave(inner: Any) -> None:
    """It is over for its caller. If it was aborted, it may still touch its tensors for a moment."""
    if not inner.is_completed():
        CHIP.leftovers.append(inner.is_completed)


def _outcome(inner: Any) -> str | None:
    """Return what a complete collective of gloo has failed with."""
    try:
        inner.wait()
    except RuntimeError:  # gloo's words for a peer that is gone
        return PEER_GONE
    return None


def _tensors_in(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, list | tuple):
        return [tensor for item in argument for tensor in _tensors_in(item)]
    return []


def _endpoint(word: bytes) -> tuple[str, int]:
    try:
        listener = messages.decode(word, messages.Listener)
    except ValueError as error:
        raise RuntimeError(NOT_UP) from error
    return listener.host, listener.port


def _queued(op: str) -> Callable[..., FakeWork]:
    def call(self: FakeHcclGroup, *args: Any, **kwargs: Any) -> FakeWork:
        return self.queue(op, args, kwargs)

    call.__name__ = op
    call.__doc__ = f"Queue `{op}` on the chip."
    return call


for _op in WITH_FUTURE + WITHOUT_FUTURE:
    if hasattr(dist.ProcessGroup, _op):
        setattr(FakeHcclGroup, _op, _queued(_op))


def fake_communicator() -> HcclCommunicator:
    """Return the communicator of the fake device: the one of NPUs, on this backend."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(
            BACKEND, lambda options, _: FakeHcclGroup(options), extended_api=True, devices=["cpu"]
        )
    return HcclCommunicator(Library(calls, BACKEND, "cpu"), "fake")
