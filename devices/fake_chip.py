"""The chip behind the fake device: a queue with a thread, memory that can be corrupted, links that can break.

Tensors are ordinary CPU tensors, on which the train thread computes, so training is numerically real. Collectives go
through the queue, as on an NPU: they are asynchronous, fail later than they are called, and are aborted by a stop.
There is one chip in a process.
"""

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

LINK_UP_S = 0.01  # time to build one communicator
FORCE_STOP = "FORCE STOP."
UCE = "UCE ERROR."
MULTI_BIT = "HBM MULTI BIT ECC ERROR.time is {time_us}"
MULTI_BIT_QUEUED = "HBM MULTI BIT ECC ERROR, EZ9999: device 0, time us= {time_us}."  # through the task queue
SUSPECT_MEMORY = "SUSPECT MEM ERROR"
UNSAFE = "There is unsafe data in the input tensor."
OUT_OF_MEMORY = (
    "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity; 59.10 GiB already allocated)"
)
RETRY_FAILED = "HCCL OP RETRY FAILED"
REMOTE = "SUSPECT REMOTE ERROR"
QUEUE_DEAD = (
    "The Inner error is reported as above. The process exits for this inner error, and the current working operator "
    "name is HcclAllreduce."
)
LOST = "NPU function error: aclrtSynchronizeDevice, error code is 507010"
BUSY = (
    "HCCL function error: hcclCommInitRootInfoConfig(numRanks, &rootInfo, rank, config, &(comm->hcclComm_)), error "
    "code is 7\nEJ0001: Failed to initialize the HCCP process. Reason: Maybe the last training process is running."
)
HELD_S = 0.8  # by a process that has ended: a new one comes to its first group before. A real one takes up to 10 s
MEGABYTE = 1 << 20
BUFFER_MB, PAIR_BUFFER_MB = 200, 20  # HCCL_BUFFSIZE and torch-npu's P2P_HCCL_BUFFSIZE, where they are not set
STOP_S, COMMUNICATOR_S = 0.03, 0.003  # what it takes to stop the device, and to resume or drop a communicator
_HOLDING_GIL = ctypes.PyDLL(None)  # its functions are called without giving the GIL away
_SETTLE_S = 0.3
_TICK_S = 0.002


class Task:
    """A task in the queue."""

    def __init__(self, run: Callable[["Task"], Any]) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []
        self._over = threading.Event()
        self.error: str | None = None
        self.result: Any = None
        self.goes_on = False  # beside the queue when `run` returns: another thread finishes it

    @property
    def over(self) -> bool:
        """Return whether the task was finished, well or with an error."""
        return self._over.is_set()

    def work(self) -> None:
        """Run the task, in the chip's thread."""
        if self.over:
            return
        try:
            self.result = self._run(self)
        except Exception as error:  # raised where the task is waited for
            self.finish(str(error))
        else:
            if not self.goes_on:
                self.finish(None)

    def finish(self, error: str | None) -> None:
        """Finish the task, well or with an error; the first call counts. Any thread."""
        with self._lock:
            if self._over.is_set():
                return
            self.error = error
            self._over.set()
            then, self._then = self._then, []
        for call in then:
            call()

    def when_over(self, call: Callable[[], None]) -> None:
        """Call `call` once the task is finished, in any thread."""
        with self._lock:
            if not self._over.is_set():
                self._then.append(call)
                return
        call()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the task is finished. Raises RuntimeError with the device's text."""
        if not self._over.wait(timeout_s):
            raise RuntimeError("Operation timed out! It is still under way.")
        if self.error is not None:
            raise RuntimeError(told(self.error))


class Chip:
    """The one fake device of a process."""

    def __init__(self) -> None:
        self.index = 0
        self.taken = False  # by this process
        self.stopped = False
        self.lost = False
        self.corrupted: list[tuple[int, int]] = []  # addresses and lengths, in bytes
        self.corrupted_unused = False  # memory that was free, or is no longer used
        self.corrupted_outside = False  # memory that is not the allocator's
        self.multi_bit = False
        self.unsafe: list[tuple[int, int]] = []
        self.check_unsafe = True
        self.link_broken = False  # until the communicators are rebuilt
        self.link_up_fails = False
        self.free_s = 0.0  # when the process before lets go of the device, on the monotonic clock
        self.buffer_bytes = 0  # of its memory, which communicators take
        self.cleared_s = 0.0  # when it last cleared what peers signal to it, on the machine's clock
        self.hang_next = False
        self.queue_dies = False  # with the next task
        self.queue_dead = False  # for good: tasks are taken and never carried out
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._open: set[Task] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self.cuts: list[Callable[[], None]] = []  # called by a stop: they end transfers under way
        self.leftovers: list[Callable[[], bool]] = []  # return True once an aborted transfer has released its tensors

    # --- the queue ------------------------------------------------------------------------------------------------

    def submit(self, run: Callable[[Task], Any], tensors: Sequence[torch.Tensor] = ()) -> Task:
        """Queue a task that uses `tensors`. Raises RuntimeError where the device refuses."""
        self.check()
        if self.check_unsafe and any(self.is_unsafe(tensor) for tensor in tensors):
            raise RuntimeError(told(UNSAFE))
        task = Task(run)
        with self._lock:
            self._open.add(task)
            self._ensure_thread()
        task.when_over(lambda: self._open.discard(task))
        self._tasks.put(task)
        return task

    def synchronize(self) -> None:
        """Wait for all tasks, those beside the queue included. Raises RuntimeError."""
        self.check()
        self.submit(lambda _: None).wait()
        for task in list(self._open):
            task.wait()

    def check(self) -> None:
        """Raise RuntimeError if the chip executes nothing."""
        if self.lost:
            raise RuntimeError(told(LOST))
        if self.stopped:
            raise RuntimeError(told(FORCE_STOP))

    def stop(self) -> None:
        """Abort all tasks. Any thread; no other thread of Python runs meanwhile."""
        hold_gil(STOP_S)
        self.stopped = True
        with self._lock:
            tasks = list(self._open)
        for task in tasks:
            task.finish(FORCE_STOP)
        for cut in list(self.cuts):
            cut()

    def restart(self) -> None:
        """Take work again once aborted tasks have released their tensors. Raises RuntimeError if the chip is lost."""
        if self.lost:
            raise RuntimeError(told(LOST))
        end = time.monotonic() + _SETTLE_S
        self.leftovers = [left for left in self.leftovers if not left()]
        while self.leftovers and time.monotonic() < end:
            time.sleep(_TICK_S)
            self.leftovers = [left for left in self.leftovers if not left()]
        self.hang_next = False
        self.stopped = False

    def _ensure_thread(self) -> None:
        if self.queue_dead:
            return
        if self._thread is None or self._pid != os.getpid():  # a fork does not have the thread
            self._pid = os.getpid()
            self._thread = threading.Thread(target=self._work, name="fake-npu", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            if self.queue_dies:
                self.queue_dead = True
                task.finish(QUEUE_DEAD)
                return
            if self.hang_next:
                self.hang_next = False
                while not task.over:
                    time.sleep(_TICK_S)
            if self.stopped:  # it came while the stop was under way
                task.finish(FORCE_STOP)
            task.work()
            del task  # it holds tensors

    @property
    def busy(self) -> bool:
        """Return whether the process before has not let go of the device yet: no communicator can be built."""
        return time.monotonic() < self.free_s

    # --- memory ---------------------------------------------------------------------------------------------------

    def forget_error(self) -> None:
        """Forget the last memory error: another one takes its place."""
        self.corrupted, self.corrupted_unused, self.corrupted_outside, self.multi_bit = [], False, False, False

    def cache_emptied(self) -> None:
        """Have memory that was temporary when it was corrupted be no longer the allocator's."""
        self.corrupted_outside |= self.corrupted_unused
        self.corrupted_unused = False

    def corrupt(self, tensor: torch.Tensor) -> None:
        """Overwrite a part of a tensor's memory with other bytes."""
        flat = tensor.detach().view(-1).view(torch.uint8)
        begin, end = flat.numel() // 3, flat.numel() // 3 + max(1, min(64, flat.numel() // 3))
        flat[begin:end] ^= 0x5A
        self.corrupted.append((tensor.data_ptr() + begin, end - begin))

    def is_unsafe(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's storage, which it may share with others, has a byte that is marked as unsafe."""
        begin, end = _extent(tensor)
        return any(begin < at + length and at < end for at, length in self.unsafe)

    def make_safe(self, tensor: torch.Tensor) -> None:
        """Mark the whole storage of a tensor as safe."""
        begin, end = _extent(tensor)
        self.unsafe = [(at, length) for at, length in self.unsafe if not (begin < at + length and at < end)]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's storage begins and ends: torch-npu marks whole allocations."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def buffer_bytes(given: Any, *, pair: bool) -> int:
    """Return how much of the device's memory a communicator takes: twice what the script's options say, if they do."""
    megabytes = (given or {}).get("hccl_config", {}).get("hccl_buffer_size")
    if megabytes is None:
        megabytes = PAIR_BUFFER_MB if pair else BUFFER_MB
    return 2 * int(megabytes) * MEGABYTE


def hold_gil(seconds: float) -> None:
    """Return after some time in which no thread of Python runs: torch-npu's calls do not give the GIL away either."""
    _HOLDING_GIL.usleep(int(seconds * 1_000_000))


def told(text: str) -> str:
    """Return an error text as torch-npu raises it, with its second line."""
    when = time.strftime("%Y-%m-%d-%H:%M:%S", time.localtime())
    rank = os.environ.get("RANK", "-1")
    place = f"(PID:{os.getpid()}, Device:{CHIP.index}, RankID:{rank})"
    return f"{text}\n[ERROR] {when} {place} ERR00100 PTA call acl api failed"


CHIP = Chip()
