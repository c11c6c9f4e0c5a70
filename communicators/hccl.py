"""The communicator of NPUs: HCCL's groups, rebuilt in place by torch-npu, with a gloo group between the hosts.

torch-npu's calls are an argument, so that a fake module can take their place. A reconnect either resumes or rebuilds:

- Without a newcomer, and with all links up before, the communicators are resumed: one call of
  `reinit_process_group(None, rebuild_link=False)` does it for every group.
- Otherwise every group's communicator is dropped (`rebuild_link=True`, group by group) and built again.

When all ranks have done so, and not before, every group is used once (`hccl_links.py`): what a rank signals to a peer
that is still resuming is cleared there. If resuming fails, the next reconnect rebuilds.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from packaging.version import Version
from torch import distributed as dist

from ..protocol.errors import CommunicatorAborted, CommunicatorFailed, LinkUpFailed
from ..protocol.types import Rendezvous
from .background import Abandoned, BackgroundTask
from .base import CollectiveObserver, DeviceMessage, Transfer
from .generation_scope import GenerationScope, error_text, incomplete_group
from .gloo.host_group import HostGroup
from .handshake import HcclMember
from .hccl_group import BACKEND, Batch, CollectiveLibrary, HcclGroup, build_backend
from .hccl_links import link_up, tell_peers
from .pair_sockets import PairSockets
from .process_group import BackendRegistration, group_name, group_names
from .rendezvous import ForwardingStore, GenerationStore, StoreConnection

_log = logging.getLogger("midstep")

NEVER = -1
_WORLD, _GROUPS = "hccl", "hccl/groups"
_CLOSE_S = 0.5
_RECORDER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
# From this torch on, its flight recorder asks groups for what those behind Python classes do not have.
_RECORDER_FAILS = Version("2.15")

_REGISTRATION = BackendRegistration(BACKEND)


class HcclCommunicator:
    """See Communicator. All groups share one scope. What the device executes ends with the device's stop."""

    def __init__(self, library: CollectiveLibrary, name: str = "hccl") -> None:
        """Register the backend with torch."""
        self.name = name
        self._library = library
        self._device = torch.device(library.device)
        _REGISTRATION.register([library.device])
        self.generation = 0
        self.observer: CollectiveObserver | None = None
        self.link_up_s: dict[str, float] = {}  # of each group, in the last rebuild
        self._host = HostGroup()
        self._lock = threading.RLock()
        self._scope = GenerationScope(self._cut)
        self._groups: list[HcclGroup] = []  # in the order of their creation
        self._group_counts: Counter[tuple[int, ...]] = Counter()  # by members, in this generation
        self._store = ForwardingStore()
        self._connected = False
        self._linked = NEVER
        self._task: BackgroundTask[Any] | None = None
        self._rebuilding = threading.Lock()  # held by the one thread that is inside the library
        self._device_index = 0
        self._rank = 0
        self._members: tuple[int, ...] = ()

    @property
    def failed(self) -> str | None:
        """Why no collective can succeed until the next `reconnect`; None while all is well."""
        return self._scope.reason or self._host.failed

    def init(
        self,
        *,
        rank: int,
        world_size: int,
        generation: int,
        store: Rendezvous | None,
        collective_s: float,
        link_up_s: float,
    ) -> None:
        """Make the default process group of torch.distributed; connect it if there is a `store`."""
        self._rank = rank
        self._device_index = self._library.calls.npu.current_device()
        self._members = tuple(range(world_size))
        self.generation = generation
        self._host.init(
            rank=rank,
            world_size=world_size,
            generation=generation,
            store=None,
            collective_s=collective_s,
            link_up_s=link_up_s,
        )
        if Version(torch.__version__) >= _RECORDER_FAILS:
            os.environ.setdefault(_RECORDER_VARIABLE, "0")
        _REGISTRATION.make_world(self, rank, world_size, timedelta(seconds=collective_s))
        if store is not None:
            self.reconnect(generation, store, link_up_s)

    def make_group(self, options: Any, given: Any = None) -> HcclGroup:
        """Make a group that torch asks for. In a connected world the library links it on its first use."""
        members = tuple(options.global_ranks_in_group) or self._members
        if self._scope.reason is not None:
            raise self._scope.error("new_group")
        group = HcclGroup(self, members, options.group_rank, self._scope, options.timeout, self._device)
        group.given_options = given
        if self._connected:
            name = group_name(members, self._group_counts[members])
            self._group_counts[members] += 1
            build_backend(self._library, group, name, self._store, self._scope)
        self._groups.append(group)
        return group

    def abort(self, reason: str) -> None:
        """Refuse collectives from now on, and end a reconnect and the traffic between hosts.

        What the device executes ends with the device's own stop, which follows.
        """
        with self._lock:
            self._scope.end(CommunicatorAborted, reason)
            self._cut()
        self._host.abort(reason)

    def _cut(self) -> None:
        with self._lock:
            if self._task is not None:
                self._task.abandon()

    def reconnect(self, generation: int, store: Rendezvous, link_up_s: float) -> None:
        """Connect the hosts, resume or rebuild every group's communicator, and check its links."""
        deadline = time.monotonic() + link_up_s
        self._scope.end(CommunicatorAborted, f"generation {generation} began")
        scope = GenerationScope(self._cut)
        with self._lock:
            self.generation, self._scope = generation, scope
            linked, self._linked = self._linked, NEVER
        try:
            self._host.reconnect(generation, store, link_up_s)
            task = BackgroundTask(lambda t: self._rebuild(t, generation, store, scope, linked), deadline)
            with self._lock:
                self._task = task
                if scope.reason is not None:
                    task.abandon()
            kept = task.result()
        except Exception as error:  # what a store sends can make torch's C++ raise errors of any kind
            text = str(error) if isinstance(error, LinkUpFailed) else error_text(error)
            what = f"generation {generation} was not linked up within {link_up_s:g} s: {text}"
            scope.end(CommunicatorFailed, what)
            if scope.aborted:
                raise scope.error("reconnect") from None
            raise LinkUpFailed(f"rank {self._rank}: {what}") from error
        finally:
            self._task = None
        if scope.reason is not None:
            raise scope.error("reconnect")
        self._groups, self._connected, self._linked = kept, True, generation

    def _rebuild(
        self, task: BackgroundTask[Any], generation: int, store: Rendezvous, scope: GenerationScope, linked: int
    ) -> list[HcclGroup]:
        """Resume or rebuild; return the groups that all their members have. Runs in the task's thread."""
        generation_store = GenerationStore(StoreConnection(store, task.remaining_s()), store, generation)
        names = group_names(self._groups)
        pairs = [(name, peer) for group, name in zip(self._groups, names, strict=True) for peer in sorted(group.peers)]
        own = HcclMember(tuple(names), linked, tuple(pairs))
        missing = "has not said which groups it has"
        members = generation_store.exchange(task, _WORLD, self._members, self._rank, own, missing=missing)
        kept = [
            (group, name) for group, name in zip(self._groups, names, strict=True) if not _without(group, name, members)
        ]
        for group, name in zip(self._groups, names, strict=True):
            without = _without(group, name, members)
            if without:
                group.disconnect(incomplete_group(without, generation))
        tell_peers(kept, members)
        resume = linked != NEVER and all(member.linked == linked for member in members)
        task.stage = "an earlier attempt is still inside the collective library"
        if not self._rebuilding.acquire(timeout=task.remaining_s()):
            raise Abandoned
        try:
            self._renew(task, kept, generation_store, generation, scope, resume=resume)
        finally:
            self._rebuilding.release()
        return [group for group, _ in kept]

    def _renew(
        self,
        task: BackgroundTask[Any],
        kept: Sequence[tuple[HcclGroup, str]],
        generation_store: GenerationStore,
        generation: int,
        scope: GenerationScope,
        *,
        resume: bool,
    ) -> None:
        """Resume or rebuild the communicators, and use them. One thread at a time: the library takes no interrupt."""
        calls = self._library.calls
        self._use_device()
        # Keys of dropped communicators are deleted where they were written, so the store is switched afterwards.
        if resume:
            task.stage = "the communicators are not resumed"
            calls.distributed.reinit_process_group(None, rebuild_link=False)
        else:
            for group, name in kept:
                if group.backend is not None:
                    task.stage = f"the communicator of group {name} is not dropped"
                    calls.distributed.reinit_process_group(group, rebuild_link=True)
        self._store.forward_to(generation_store.with_prefix(_GROUPS))
        self._group_counts = Counter(group.members for group, _ in kept)
        for group, name in kept:
            if group.backend is None:
                build_backend(self._library, group, name, self._store, scope)
            else:
                group.reconnect(scope)
        task.stage = "not all ranks have dropped or resumed their communicators"
        self._host.barrier()  # a peer that resumes later would clear what this rank has signalled to it
        self.link_up_s = link_up(calls, task, kept)
        _log.info("generation %d: %s %d groups", generation, "resumed" if resume else "rebuilt", len(kept))

    def open_pairs(self, generation: int, store: Rendezvous, link_up_s: float) -> PairSockets:
        """Take part in pair links of `generation` between hosts, beside the link-up of all groups."""
        links = self._host.open_pairs(generation, store, link_up_s)
        links.prepare_thread = self._use_device  # shards are copied from the device and to it
        return links

    def _use_device(self) -> None:
        """Let this thread work on the device of this process: a new one would work on device 0."""
        self._library.calls.npu.set_device(self._device_index)

    def isend(self, tensor: torch.Tensor, rank: int) -> Transfer:
        """Start to send `tensor`, in host memory, to `rank`."""
        return self._host.isend(tensor, rank)

    def irecv(self, tensor: torch.Tensor, rank: int) -> Transfer:
        """Start to receive into `tensor`, in host memory, from `rank`."""
        return self._host.irecv(tensor, rank)

    @property
    def device_type(self) -> str:
        """The type of the device whose memory the library's links carry."""
        return self._device.type

    def exchange(self, messages: Sequence[DeviceMessage]) -> Transfer:
        """Start to send and receive tensors on the device as one batch, in the group of all ranks.

        torch-npu puts its own way in place of torch's, and which one that is depends on release and machine.
        """
        if self._scope.reason is not None:
            raise self._scope.error("batch_isend_irecv")
        batch = [dist.P2POp(dist.isend if each.sending else dist.irecv, each.tensor, each.peer) for each in messages]
        observer, self.observer = self.observer, None  # the communicator's own traffic is not reported
        try:
            return Batch(dist.batch_isend_irecv(batch))
        finally:
            self.observer = observer

    def swap(self, blob: bytes, to: int, source: int) -> bytes:
        """Send `blob` to rank `to` and return what rank `source` sends, from host to host."""
        return self._host.swap(blob, to, source)

    def barrier(self) -> None:
        """Wait for all ranks; not for their devices."""
        self._host.barrier()

    def watch(self, observer: CollectiveObserver | None) -> None:
        """Report the collectives from now on to `observer`."""
        self.observer = observer

    def remove(self, group: HcclGroup) -> None:
        """Remove a group that torch destroys."""
        self._groups = [other for other in self._groups if other is not group]
        closed = GenerationScope(self._cut)
        closed.end(CommunicatorAborted, "the group was destroyed")
        group.disconnect(closed)

    def close(self) -> None:
        """Abort, destroy the groups, and close the group between the hosts."""
        self.abort("the communicator was closed")
        _REGISTRATION.destroy_world(self)
        for group in list(self._groups):
            self.remove(group)
        self._host.close()


def _without(group: HcclGroup, name: str, members: Sequence[HcclMember]) -> list[int]:
    return [rank for rank in group.members if name not in members[rank].groups]


def npu_communicator() -> HcclCommunicator:
    """Return the communicator of real NPUs. Imports torch-npu."""
    import torch_npu  # type: ignore[import-not-found,unused-ignore]

    return HcclCommunicator(CollectiveLibrary(torch_npu, "hccl", "npu"))
