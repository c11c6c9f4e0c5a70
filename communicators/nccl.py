"""The communicator of NVIDIA GPUs: torch's ProcessGroupNCCL behind groups whose handles stay.

A communicator of NCCL cannot be used again after an abort, so every generation has new ones. They are made without
blocking, so that a link-up can be aborted, and by one thread that a recovery can stop waiting for: a peer that is lost
in the middle of it leaves NCCL waiting until TORCH_NCCL_NONBLOCKING_TIMEOUT.

An abort marks the scope first and the communicators then. Kernels of aborted collectives end within milliseconds, so
the device's queue drains and every thread that waits for it returns, as if all were well: what the collectives have
left in their tensors is worth nothing. That a scope has ended is therefore asked when a step's queue is done
(`Runtime.finish_step`). Releasing what NCCL holds takes half a second more. Threads do that while the new ones are
made; a link-up waits for them only if the one before it failed, which memory that was not free yet may have caused.

The first communicator in a process takes half a second longer than others. So each process makes one of its own while
its script builds the model, and a thread releases it again, for which no link-up waits; a process that is built ahead
has done so long before it is needed.
"""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed as dist

from ..protocol.errors import ConfigurationError
from .background import Abandoned, BackgroundTask
from .device_communicator import DeviceCommunicator, Named
from .device_group import DeviceGroup, batch_for_device_groups
from .generation_scope import GenerationScope
from .process_group import BackendRegistration, set_group_name
from .rendezvous import GenerationStore

_log = logging.getLogger("midstep")

BACKEND = "midstep_nccl"
_KEYS = "nccl/groups"
# From this release on ranks may share a GPU, where this variable is set.
SHARED_GPU_FROM = (2, 30)
SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
_LIBRARY = "libnccl.so.2"
_POLL_S = 0.02
_CLOSE_S = 0.8

_REGISTRATION = BackendRegistration(BACKEND)


class NcclLibrary(Protocol):
    """The calls of torch's that NCCL's groups need, so that a test can play them on a CPU."""

    device_type: str

    def take_device(self) -> None:
        """Keep to the device that this thread has chosen. Raises ConfigurationError if it cannot be used."""
        ...

    def load(self) -> Any:
        """Load what the first communicator in a process loads; return what to abort. Blocks for half a second."""
        ...

    def make(self, store: Any, group: DeviceGroup, name: str) -> tuple[Any, Any]:
        """Return a group that does the collectives of `group`, and what is to be aborted. Connects nothing."""
        ...

    def abort(self, backend: Any) -> None:
        """End what is under way in a backend, and release all that it holds. Blocks for half a second."""
        ...

    def leave(self, backend: Any) -> None:
        """Release a backend whose work is done."""
        ...

    def use_device(self) -> None:
        """Let this thread work on the device of this process."""
        ...

    def recording(self) -> bool:
        """Return whether this thread records a graph."""
        ...

    def synchronize(self) -> None:
        """Wait for the device."""
        ...


class NcclCommunicator(DeviceCommunicator):
    """See Communicator."""

    def __init__(self, library: NcclLibrary, registration: BackendRegistration = _REGISTRATION) -> None:
        """Register the backend with torch."""
        super().__init__("nccl", registration, library.device_type)
        self._library = library
        self._pending: list[threading.Thread] = []  # threads that any link-up waits for
        self._releasing: list[threading.Thread] = []  # of the communicators that the last link-up made
        self._failed = False  # the last link-up
        self._generation_store: GenerationStore | None = None

    def _make_world(self, timeout: timedelta) -> None:
        self._library.take_device()
        super()._make_world(timeout)
        with self._lock:
            self._pending.append(self._in_thread("midstep-nccl-load", self._load))

    def _load(self) -> None:
        try:
            alone = self._library.load()
        except Exception as error:  # the link-up meets it, too, and can report it
            _log.warning("NCCL could not be loaded ahead of its use: %s", error)
            return
        with self._lock:
            self._releasing.append(self._in_thread("midstep-abort", self._abort_one, alone))

    def _cut(self) -> None:
        """Abandon an attempt, and abort every communicator: each in a thread, as a kernel may wait behind another's."""
        with self._lock:
            super()._cut()
            left = [group.leave_backend() for group in self._groups if group.backend is not None]
            aborting = [self._in_thread("midstep-abort", self._abort_one, backend) for backend in left]
            self._releasing = [thread for thread in self._releasing if thread.is_alive()] + aborting

    def _in_thread(self, name: str, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def _abort_one(self, backend: Any) -> None:
        try:
            self._library.abort(backend)
        except Exception as error:  # of a context that is lost: there is nothing left to release
            _log.warning("a communicator of NCCL could not be aborted: %s", error)

    def _renew(
        self,
        task: BackgroundTask[Any],
        kept: Named,
        generation_store: GenerationStore,
        scope: GenerationScope,
        *,
        resume: bool,
    ) -> None:
        """Make new communicators, and use each once that was used before."""
        self._library.use_device()
        began_s = time.monotonic()
        with self._lock:
            awaited = self._pending + (self._releasing if self._failed else [])
            self._failed = True
        task.stage = "NCCL is not loaded, or communicators of earlier generations are not released"
        for thread in awaited:
            while thread.is_alive():
                thread.join(min(_POLL_S, task.remaining_s()))
        ready_s = time.monotonic()
        self._generation_store = generation_store
        for group, name in kept:
            task.stage = f"the communicator of group {name} cannot be made"
            task.remaining_s()
            self._connect_group(group, name, scope)
        task.stage = "not all ranks have come to make their communicators"
        self._host.barrier()  # NCCL's own meeting cannot be aborted: nobody goes there before all are here
        met_s = time.monotonic()
        self._link_used(self._library.synchronize, task, kept)
        with self._lock:
            self._pending, self._releasing, self._failed = self._releasing, [], False
        _log.info(
            "generation %d: made %d groups: %.2f s until NCCL was ready, %.2f s until all ranks had come, "
            "%.2f s until those in use were up",
            self.generation,
            len(kept),
            ready_s - began_s,
            met_s - ready_s,
            time.monotonic() - met_s,
        )

    def _connect_group(self, group: DeviceGroup, name: str, scope: GenerationScope) -> None:
        assert self._generation_store is not None
        store = self._generation_store.with_prefix(f"{_KEYS}/{name}")
        process_group, backend = self._library.make(store, group, name)
        with self._lock:
            group.connect(process_group, backend, scope, store)
            over = scope.reason is not None
        if over:  # an abort has come just before, and has not seen it
            self._cut()
            raise Abandoned

    def use_device(self) -> None:
        """Let this thread work on the device of this process: a new one would work on device 0."""
        self._library.use_device()

    def recording(self) -> bool:
        """Return whether this thread records a CUDA graph."""
        return self._library.recording()

    def remove(self, group: DeviceGroup) -> None:
        """Remove a group that torch destroys."""
        backend = group.leave_backend()
        super().remove(group)
        if backend is not None:
            self._library.leave(backend)

    def close(self) -> None:
        """Abort, destroy the groups, and wait a moment for what is being released."""
        end = time.monotonic() + _CLOSE_S
        super().close()
        for thread in (*self._pending, *self._releasing):
            thread.join(max(0.0, end - time.monotonic()))


class TorchNccl:
    """The calls of torch."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._index = 0

    def take_device(self) -> None:
        """Keep to the device that this thread has chosen. Raises ConfigurationError if NCCL cannot share it."""
        self._index = torch.cuda.current_device()
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        problem = sharing_problem(ranks, torch.cuda.device_count(), nccl_version(), os.environ.get(SHARED_GPU))
        if problem is not None:
            raise ConfigurationError(problem)

    def load(self) -> Any:
        """Make a communicator of this process alone, and use it once on a stream of its own."""
        self.use_device()
        nccl: Any = _process_group_nccl()
        options = nccl.Options()
        options.config.blocking = 0
        alone = nccl(dist.HashStore(), 0, 1, options)  # type: ignore[attr-defined,unused-ignore]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call,unused-ignore]
        with torch.cuda.stream(stream):
            alone.allreduce([torch.ones(1, device=self.device_type)]).wait()
        stream.synchronize()
        return alone

    def make(self, store: Any, group: DeviceGroup, name: str) -> tuple[Any, Any]:
        """Make a ProcessGroupNCCL, with the options that the script has given for the group, if it has."""
        nccl: Any = _process_group_nccl()
        options = nccl.Options() if group.given_options is None else group.given_options
        options._timeout = group.timeout
        options.config.blocking = 0
        options.group_name = name
        options.global_ranks_in_group = list(group.members)
        size = len(group.members)
        backend = nccl(store, group.group_rank, size, options)
        process_group = dist.ProcessGroup(store, group.group_rank, size)
        kind = dist.ProcessGroup.BackendType.NCCL
        process_group._register_backend(torch.device(self.device_type), kind, backend)
        process_group._set_default_backend(kind)
        set_group_name(process_group, name)
        return process_group, backend

    def abort(self, backend: Any) -> None:
        """Abort the communicators of a ProcessGroupNCCL."""
        self.use_device()
        backend.abort()

    def leave(self, backend: Any) -> None:
        """Shut the communicators of a ProcessGroupNCCL down, when their work is done."""
        (getattr(backend, "shutdown", None) or backend._shutdown)()  # the second before torch 2.8

    def use_device(self) -> None:
        """Choose the device for this thread."""
        torch.cuda.set_device(self._index)

    def recording(self) -> bool:
        """Return whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._index)


def _process_group_nccl() -> Any:
    return dist.ProcessGroupNCCL  # type: ignore[attr-defined,unused-ignore]


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that is loaded; torch's own answer is of the one that it was built with."""
    try:
        number = ctypes.c_int()
        ctypes.CDLL(_LIBRARY).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # linked into torch
        built: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call,unused-ignore]
        return built
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def sharing_problem(ranks: int, gpus: int, version: tuple[int, ...], shared: str | None) -> str | None:
    """Return why `ranks` ranks of a node cannot use its `gpus` GPUs with this NCCL; None if they can. Pure.

    `shared` is the value of NCCL_MULTI_RANK_GPU_ENABLE.
    """
    if ranks <= gpus or (version[:2] >= SHARED_GPU_FROM and shared == "1"):
        return None
    needed, found = (".".join(str(part) for part in each) for each in (SHARED_GPU_FROM, version))
    return (
        f"{ranks} ranks of this node share {gpus} GPU{'' if gpus == 1 else 's'}, which NCCL allows from {needed} on "
        f"where {SHARED_GPU}=1 is set (found: NCCL {found}, {SHARED_GPU}={shared or 'not set'}). Start no more ranks "
        "than there are GPUs, or set communicator.name to gloo in the policy, which moves tensors through the hosts"
    )


def nccl_communicator() -> NcclCommunicator:
    """Return the communicator of NVIDIA GPUs. Raises ConfigurationError where torch is built without NCCL."""
    if not dist.is_nccl_available():
        raise ConfigurationError(
            f"the communicator nccl needs a torch that is built with NCCL, and torch {torch.__version__} is not. "
            "Install a CUDA build of torch, or use `midstep run --device cpu`."
        )
    batch_for_device_groups()
    return NcclCommunicator(TorchNccl())
