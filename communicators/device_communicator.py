"""The base of communicators whose groups are a device's own, with a gloo group between the hosts.

Rank-local state, the commit barrier and copies over the hosts travel between the hosts: they must work while the
devices' links are down. In a reconnect the hosts are linked first. Then the ranks tell each other which groups they
have and have used, a subclass resumes or rebuilds the library's communicators (`_renew`), and every group that some
member has used before is used once. The others cost nothing: a communicator takes memory of the device, and a framework
makes many more groups than it uses.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from ..protocol.errors import CommunicatorAborted, CommunicatorFailed
from ..protocol.types import Rendezvous
from ..protocol.wording import ranks_text
from .background import BackgroundTask
from .base import DeviceMessage, Gathering, Met, Transfer
from .device_group import Batch, DeviceGroup
from .generation_scope import GenerationScope, incomplete_group
from .gloo.host_group import HostGroup
from .handshake import DeviceMember
from .pair_sockets import PairSockets
from .process_group import BackendRegistration, group_name, group_names
from .rendezvous import GenerationStore, StoreConnection
from .scoped import ScopedCommunicator

NEVER = -1
_LEAST_S = 0.001

Named = Sequence[tuple[DeviceGroup, str]]  # groups with their names, which are the same on all members


# --- the first use of a group in a generation -------------------------------------------------------------------------
#
# Only with its first use after a resume or rebuild does the library build a communicator; it checks no link before. So
# every group that was used before is used at once, in order, timed and checked: a link that does not come up is seen in
# this phase, and not in the middle of a step. Sends and receives outside of a batch have a communicator for each pair
# of ranks, as stages of a pipeline have. Each rank tells which groups it has used and to whom it has sent: so they come
# up in a newcomer, too, and in a member that was kept by a fault from using a group that another one had begun to use.


def link_up(
    synchronize: Callable[[], None], task: BackgroundTask[Any], groups: Named, also: str = ""
) -> dict[str, float]:
    """Use each group once that was used before, and the group `also`; return how long each took.

    `synchronize` waits for the device. In all ranks the order of the groups that they share is one.

    Runs in the task's thread. Raises Abandoned, CommunicatorFailed, and what the library does.
    """
    times_s = {}
    for group, name in groups:
        if len(group.members) < 2:
            continue
        if group.used or name == also:
            task.stage = f"the links of group {name} ({ranks_text(group.members)}) are not up"
            task.remaining_s()  # raises Abandoned when no time is left
            began_s = time.monotonic()
            _use(synchronize, group)
            times_s[name] = time.monotonic() - began_s
        for low, high in _in_order(group):
            task.stage = (
                f"the link between ranks {group.members[low]} and {group.members[high]} of group {name} is not up"
            )
            task.remaining_s()
            began_s = time.monotonic()
            _use_pair(synchronize, group, low, high)
            times_s[f"{name}/{low}-{high}"] = time.monotonic() - began_s
    return times_s


def tell_uses(groups: Named, members: Sequence[DeviceMember]) -> None:
    """Have each group know whether it is used, and every pair that this rank is in, whichever member has told it."""
    by_name = {name: group for group, name in groups}
    used = [(rank, name) for rank, member in enumerate(members) for name in member.used]
    for rank, name in used:
        if name in by_name and rank in by_name[name].members:
            by_name[name].used = True
    told = [(rank, name, place) for rank, member in enumerate(members) for name, place in member.pairs]
    for rank, name, place in told:
        group = by_name.get(name)
        if group is None or rank not in group.members or place >= len(group.members):
            continue
        if group.members[place] == group.members[group.group_rank]:
            group.peers.add(group.members.index(rank))


def _in_order(group: DeviceGroup) -> list[tuple[int, int]]:
    """Return this rank's pairs, in an order that all ranks keep, so that no two wait for each other in a circle.

    Even places first: along a pipeline half of the links come up at once, then the other half.
    """
    own = group.group_rank
    pairs = [(min(own, peer), max(own, peer)) for peer in group.peers if peer != own]
    return sorted(pairs, key=lambda pair: (pair[0] % 2, pair))


def _use_pair(synchronize: Callable[[], None], group: DeviceGroup, low: int, high: int) -> None:
    place, work = group.pair_check(high if group.group_rank == low else low)
    work.wait()
    synchronize()
    if place.item() != low:
        ranks = f"{group.members[low]} and {group.members[high]}"
        raise CommunicatorFailed(f"link check between ranks {ranks} gave {place.item():g}")


def _use(synchronize: Callable[[], None], group: DeviceGroup) -> None:
    """Add up ones in the group."""
    ones, work = group.link_check()
    work.wait()
    synchronize()
    if ones.item() != len(group.members):
        raise CommunicatorFailed(f"link check of {ranks_text(group.members)} gave {ones.item():g}")


# --- the communicator -------------------------------------------------------------------------------------------------


class DeviceCommunicator(ScopedCommunicator):
    """See Communicator and DeviceLinks. All groups share one scope."""

    def __init__(self, name: str, registration: BackendRegistration, device_type: str) -> None:
        """Register the backend with torch."""
        super().__init__()
        self.name = name
        self.link_up_s: dict[str, float] = {}  # of each group that came up in the last rebuild
        self.carries_shards = False  # after the next reconnect: see DeviceLinks
        self._registration = registration
        self._device = torch.device(device_type)
        registration.register([device_type])
        self._host = HostGroup()
        self._groups: list[DeviceGroup] = []  # in the order of their creation
        self._group_counts: Counter[tuple[int, ...]] = Counter()  # by members, in this generation
        self._connected = False
        self._linked = NEVER  # the generation in which all groups were last up

    @property
    def failed(self) -> str | None:
        """Why no collective can succeed until the next `reconnect`; None while all is well."""
        return self._scope.reason or self._host.failed

    @property
    def device_type(self) -> str:
        """The type of the device whose memory the library's links carry."""
        return self._device.type

    def _make_world(self, timeout: timedelta) -> None:
        self._host.init(
            rank=self._rank,
            world_size=len(self._members),
            generation=self.generation,
            store=None,
            collective_s=self._collective_s,
            link_up_s=self._link_up_s,
        )
        self._registration.make_world(self, self._rank, len(self._members), timeout)
        self._host.serve_scripts()

    def make_group(self, options: Any, given: Any = None) -> DeviceGroup:
        """Make a group that torch asks for. In a connected world the library links it on its first use."""
        members = tuple(options.global_ranks_in_group) or self._members
        if self._scope.reason is not None:
            raise self._scope.error("new_group")
        group = DeviceGroup(
            self,
            members,
            options.group_rank,
            self._scope,
            timeout=options.timeout,
            device=self._device,
            backend_name=self._registration.backend,
        )
        group.given_options = given
        if self._connected:
            name = group_name(members, self._group_counts[members])
            self._group_counts[members] += 1
            self._connect_group(group, name, self._scope)
        self._groups.append(group)
        return group

    def recording(self) -> bool:
        """Return whether this thread records what it queues into a graph of the device, to be replayed later."""
        return False

    def abort(self, reason: str) -> None:
        """Refuse collectives from now on, and end a reconnect and the traffic between hosts."""
        super().abort(reason)
        self._host.abort(reason)

    def _cut(self) -> None:
        with self._lock:
            if self._task is not None:
                self._task.abandon()

    def _link_up(
        self, generation: int, store: Rendezvous, scope: GenerationScope, deadline: float, old: GenerationScope
    ) -> None:
        """Connect the hosts, resume or rebuild every group's communicator, and check its links."""
        with self._lock:
            linked, self._linked = self._linked, NEVER
        self._host.reconnect(generation, store, max(_LEAST_S, deadline - time.monotonic()))
        task = self._in_background(lambda t: self._meet(t, generation, store, scope, linked), scope, deadline)
        kept = task.result()
        if scope.reason is not None:
            raise scope.error("reconnect")
        self._groups, self._connected, self._linked = kept, True, generation

    def _meet(
        self, task: BackgroundTask[Any], generation: int, store: Rendezvous, scope: GenerationScope, linked: int
    ) -> list[DeviceGroup]:
        """Renew the groups that all of their members have, and return them. Runs in the task's thread."""
        generation_store = GenerationStore(StoreConnection(store, task.remaining_s()), store, generation)
        names = group_names(self._groups)
        named = list(zip(self._groups, names, strict=True))
        pairs = [(name, peer) for group, name in named for peer in sorted(group.peers)]
        used = [name for group, name in named if group.used]
        if any(group.half_built for group in self._groups):
            linked = NEVER  # the library counts the communicators of a group, and others may not have begun this one
        own = DeviceMember(tuple(names), linked, tuple(used), tuple(pairs))
        missing = "has not said which groups it has"
        members = generation_store.exchange(task, self.name, self._members, self._rank, own, missing=missing)
        kept = []
        for group, name in named:
            without = [rank for rank in group.members if name not in members[rank].groups]
            if without:
                group.disconnect(incomplete_group(without, generation))
            else:
                kept.append((group, name))
        tell_uses(kept, members)
        self._group_counts = Counter(group.members for group, _ in kept)
        resume = linked != NEVER and all(member.linked == linked for member in members)
        self._renew(task, kept, generation_store, scope, resume=resume)
        return [group for group, _ in kept]

    def _renew(
        self,
        task: BackgroundTask[Any],
        kept: Named,
        generation_store: GenerationStore,
        scope: GenerationScope,
        *,
        resume: bool,
    ) -> None:
        """Resume or rebuild the communicators of these groups, and use each once that is used. In the task's thread.

        `resume`: no rank is new, and on all ranks all groups were up before.
        """
        raise NotImplementedError

    def _link_used(self, synchronize: Callable[[], None], task: BackgroundTask[Any], kept: Named) -> None:
        """Use each of these groups once that was used before; that of all ranks, too, if shards are to travel in it."""
        also = group_name(self._members, 0) if self.carries_shards else ""
        self.link_up_s = link_up(synchronize, task, kept, also)

    def build(self, group: DeviceGroup, what: str, call: Callable[[], Any]) -> Any:
        """Return what `call` returns, which begins with building a communicator of the group: `what`, in words."""
        return call()

    def _connect_group(self, group: DeviceGroup, name: str, scope: GenerationScope) -> None:
        """Put the library's group behind one that torch has just asked for. It is linked on its first use."""
        raise NotImplementedError

    def use_device(self) -> None:
        """Let this thread work on the device of this process: a new one would work on device 0."""
        raise NotImplementedError

    def open_pairs(self, generation: int, store: Rendezvous, link_up_s: float) -> PairSockets:
        """Take part in pair links of `generation` between hosts, beside the link-up of all groups."""
        links = self._host.open_pairs(generation, store, link_up_s)
        links.prepare_thread = self.use_device  # shards are copied from the device and to it
        return links

    def isend(self, tensor: torch.Tensor, rank: int) -> Transfer:
        """Start to send `tensor`, in host memory, to `rank`."""
        return self._host.isend(tensor, rank)

    def irecv(self, tensor: torch.Tensor, rank: int) -> Transfer:
        """Start to receive into `tensor`, in host memory, from `rank`."""
        return self._host.irecv(tensor, rank)

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

    def swap(self, blob: bytes, to: int, source: int, *, apart: bool = False) -> bytes:
        """Send `blob` to rank `to` and return what rank `source` sends, from host to host."""
        return self._host.swap(blob, to, source, apart=apart)

    def barrier(self, *, agrees: bool = False, verdict: int = 0, gathering: Gathering | None = None) -> Met:
        """Wait for all ranks, not for their devices; return whether all of them agree."""
        return self._host.barrier(agrees=agrees, verdict=verdict, gathering=gathering)

    def remove(self, group: DeviceGroup) -> None:
        """Remove a group that torch destroys."""
        self._groups = [other for other in self._groups if other is not group]
        closed = GenerationScope(self._cut)
        closed.end(CommunicatorAborted, "the group was destroyed")
        group.disconnect(closed)

    def close(self) -> None:
        """Abort, destroy the groups, and close the group between the hosts."""
        self.abort("the communicator was closed")
        self._registration.destroy_world(self)
        for group in list(self._groups):
            self.remove(group)
        self._host.close()
