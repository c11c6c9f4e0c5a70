"""The communicator of NPUs: HCCL's groups, rebuilt in place by torch-npu.

torch-npu's calls are an argument, so that a fake module can take their place. A reconnect either resumes or rebuilds:

- Without a newcomer, and with all links up before, the communicators are resumed: one call of
  `reinit_process_group(None, rebuild_link=False)` does it for every group.
- Otherwise every group's communicator is dropped (`rebuild_link=True`, group by group) and built again.

When all ranks have done so, and not before, every group that was in use is used once (`device_communicator.py`): what
a rank signals to a peer that is still resuming is cleared there. If resuming fails, the next reconnect rebuilds. What
the device executes ends with the device's own stop, which follows an abort.
"""

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from ..devices.device_busy import held_s, while_busy
from ..devices.library_calls import LIBRARY_CALLS
from .background import Abandoned, BackgroundTask
from .device_communicator import DeviceCommunicator, Named
from .device_group import DeviceGroup, note_batches
from .generation_scope import GenerationScope
from .process_group import BackendRegistration, set_group_name
from .rendezvous import ForwardingStore, GenerationStore

_log = logging.getLogger("midstep")

BACKEND = "midstep_hccl"  # torch-npu looks for hccl in the name
_GROUPS = "hccl/groups"
_BUSY = "the device is still in use by the process before"
_TICK_S = 0.1

_REGISTRATION = BackendRegistration(BACKEND)


class CollectiveLibrary(NamedTuple):
    """A device's collective library: torch-npu's calls, the torch.distributed backend it registers, its device."""

    calls: Any
    backend: str
    device: str


class HcclCommunicator(DeviceCommunicator):
    """See Communicator."""

    def __init__(self, library: CollectiveLibrary, name: str = "hccl") -> None:
        """Register the backend with torch."""
        super().__init__(name, _REGISTRATION, library.device)
        self._library = library
        self._forwarding = ForwardingStore()
        self._rebuilding = threading.Lock()  # held by the one thread that is inside the library
        self._device_index = 0

    def _make_world(self, timeout: timedelta) -> None:
        self._device_index = self._library.calls.npu.current_device()
        super()._make_world(timeout)

    def _connect_group(self, group: DeviceGroup, name: str, scope: GenerationScope) -> None:
        build_backend(self._library, group, name, self._forwarding, scope)

    def _renew(
        self,
        task: BackgroundTask[Any],
        kept: Named,
        generation_store: GenerationStore,
        scope: GenerationScope,
        *,
        resume: bool,
    ) -> None:
        """Resume or rebuild the communicators, and use them. One thread at a time: the library takes no interrupt."""
        task.stage = "an earlier attempt is still inside the collective library"
        if not self._rebuilding.acquire(timeout=task.remaining_s()):
            raise Abandoned
        try:
            self.use_device()
            LIBRARY_CALLS.restart()  # the attempt that was inside may have stopped the device when it came out
            self._drop_or_resume(task, kept, resume=resume)
            # Keys of dropped communicators are deleted where they were written, so the store is switched afterwards.
            self._forwarding.forward_to(generation_store.with_prefix(_GROUPS))
            for group, name in kept:
                if group.backend is None:
                    build_backend(self._library, group, name, self._forwarding, scope)
                else:
                    group.reconnect(scope)
            if any(_is_root(group) for group, _ in kept):
                task.stage = "the device is not free yet"
                self._await_free_device(task.remaining_s)
            task.stage = "not all ranks have dropped or resumed their communicators"
            self._host.barrier()  # a peer that resumes later would clear what this rank has signalled to it
            self._link_used(self._library.calls.npu.synchronize, task, kept)
        finally:
            self._rebuilding.release()
        _log.info("generation %d: %s %d groups", self.generation, "resumed" if resume else "rebuilt", len(kept))

    def _drop_or_resume(self, task: BackgroundTask[Any], kept: Named, *, resume: bool) -> None:
        renew = self._library.calls.distributed.reinit_process_group
        if resume:
            task.stage = "the communicators are not resumed"
            with LIBRARY_CALLS.inside("communicators are resumed"):
                renew(None, rebuild_link=False)
            return
        for group, name in kept:
            if group.backend is not None:
                task.stage = f"the communicator of group {name} is not dropped"
                task.remaining_s()
                with LIBRARY_CALLS.inside(f"the communicator of group {name} is dropped"):
                    renew(group, rebuild_link=True)
                group.dropped()

    def _await_free_device(self, check: Callable[[], object]) -> None:
        """Wait until the process before has let go of the device for sure. Raises what `check` does meanwhile."""
        while (left_s := held_s(self._library.calls)) > 0:
            check()
            time.sleep(min(left_s, _TICK_S))

    def build(self, group: DeviceGroup, what: str, call: Callable[[], Any]) -> Any:
        """Do the call as soon as the device is free. Raises as the call does, and when the group is aborted."""

        def attempt() -> Any:
            with LIBRARY_CALLS.inside(f"{what} is built"):
                return call()

        def before_next() -> None:
            # The library numbers the communicators of a group; this has it count from the beginning, as the peers do.
            # Not reinit_process_group: that would delete what the peers have left in the store.
            with LIBRARY_CALLS.inside(f"{what} is dropped"):
                group.backend.abort_hccl_comm(_BUSY)
            group.require_open(f"another attempt at {what}")

        if _is_root(group):
            self._await_free_device(lambda: group.require_open(what))
        return while_busy(attempt, before_next)

    def use_device(self) -> None:
        """Let this thread work on the device of this process: a new one would work on device 0."""
        self._library.calls.npu.set_device(self._device_index)


def _is_root(group: DeviceGroup) -> bool:
    """Return whether this rank tells its address to others: in the group, or in a pair of which it is the first."""
    return len(group.members) > 1 and (group.group_rank == 0 or any(peer > group.group_rank for peer in group.peers))


def build_backend(
    library: CollectiveLibrary, group: DeviceGroup, name: str, store: Any, scope: GenerationScope
) -> None:
    """Make the library's group behind `group`, with its own part of `store`. Connects nothing."""
    options = c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
    options.store = PrefixStore(name, store)
    options.group_rank = group.group_rank
    options.group_size = len(group.members)
    options.timeout = group.timeout
    options.group_id = name
    options.global_ranks_in_group = list(group.members)
    backend = dist.Backend._plugins[library.backend.upper()].creator_fn(options, group.given_options)
    process_group = backend
    if not isinstance(backend, dist.ProcessGroup):  # torch's own rule: a process group stands for itself
        process_group = dist.ProcessGroup(options.store, group.group_rank, len(group.members))
        process_group._register_backend(torch.device(library.device), dist.ProcessGroup.BackendType.CUSTOM, backend)
        process_group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        set_group_name(process_group, name)
    group.connect(process_group, backend, scope)


def npu_communicator() -> HcclCommunicator:
    """Return the communicator of real NPUs. Imports torch-npu."""
    import torch_npu  # type: ignore[import-not-found,unused-ignore]

    note_batches()
    return HcclCommunicator(CollectiveLibrary(torch_npu, "hccl", "npu"))
