"""The communicator for CPU tensors: gloo groups that can be aborted, and reconnected in place."""

import threading
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from ...protocol.errors import CommunicatorAborted, ConfigurationError
from ...protocol.types import Rendezvous
from ...protocol.wording import ranks_text
from ..background import Abandoned, BackgroundTask, Disposal
from ..base import Gathering, Met, Transfer
from ..generation_scope import GenerationScope, incomplete_group
from ..handshake import Authenticator
from ..neighbours import Neighbours
from ..own_sockets import cut_connections
from ..pair_sockets import PairSockets
from ..process_group import BackendRegistration, group_name, group_names
from ..rendezvous import GenerationStore, StoreConnection
from ..scoped import ScopedCommunicator
from .connections import Connections, check_groups, connect_generation, connect_group
from .group import BACKEND, GlooBackend, GlooGroup
from .links import GlooLinks

_TAG = 0x6D73  # apart from the tags that a user's own sends use
_CLOSE_S = 0.8

_REGISTRATION = BackendRegistration(BACKEND)


class GlooCommunicator(ScopedCommunicator):
    """See Communicator. All groups share one gloo device and one scope."""

    name = "gloo"

    def __init__(self) -> None:
        """Register the backend with torch."""
        super().__init__()
        _REGISTRATION.register(["cpu", "cuda"])
        self._groups: list[GlooGroup] = []  # in the order of their creation
        self._group_counts: Counter[tuple[int, ...]] = Counter()  # by members, in this generation
        self._links: GlooLinks | None = None
        self._listening = threading.Lock()  # one listener at a time: gloo's is found among the new ones
        self._neighbours: Neighbours | None = None
        self._pairs: PairSockets | None = None
        self._generation_store: GenerationStore | None = None
        self._disposal = Disposal()
        self._whole_groups = False

    def only_whole_groups(self) -> None:
        """Refuse from now on groups that not all ranks are in."""
        self._whole_groups = True

    def grow(self, world_size: int) -> None:
        """Have all groups consist of so many ranks, from the next `reconnect` on."""
        self._members = tuple(range(world_size))
        for group in self._groups:
            group.grow(self._members)

    def _make_world(self, timeout: timedelta) -> None:
        """Make torch's default group, which asks `make_group` for it."""
        _REGISTRATION.make_world(self, self._rank, len(self._members), timeout)
        self.serve_scripts()

    def serve_scripts(self) -> None:
        """Make the groups for which the script names gloo: `new_group(backend="gloo")`."""
        _REGISTRATION.stand_in_for("gloo", self)

    def make_group(self, options: Any, given: Any = None) -> GlooGroup:
        """Make a group that torch asks for; connect it at once if the others are. Raises as `reconnect` does.

        Options that are `given` are of no use: they name devices of gloo, and all groups share one.
        """
        members = tuple(options.global_ranks_in_group) or self._members
        if self._whole_groups and members != self._members:
            raise ConfigurationError(
                f"a process group of {ranks_text(members)}: with scale.in_place in the policy the world may get more "
                "ranks, and only groups of all ranks can grow with it. Leave scale.in_place out: all processes restart "
                "to grow"
            )
        group = GlooGroup(self, members, options.group_rank, self._scope, options.timeout)
        if self._scope.reason is not None:
            raise self._scope.error("new_group")
        if self._generation_store is not None:
            self._connect_one(group)
        self._groups.append(group)
        return group

    def _connect_one(self, group: GlooGroup) -> None:
        store, links, scope = self._generation_store, self._links, self._scope
        assert store is not None
        assert links is not None
        name = group_name(group.members, self._group_counts[group.members])

        def work(task: BackgroundTask[GlooBackend]) -> GlooBackend:
            store.exchange(task, name, group.members, self._rank, None, missing=f"has not come to group {name}")
            return connect_group(store, name, group, links, link_up_s=self._link_up_s, collective_s=self._collective_s)

        # The members come here when their programs do, as with torch's own groups.
        task = self._in_background(work, scope, time.monotonic() + self._collective_s)
        try:
            backend = task.result()
        except Abandoned:
            raise scope.error("new_group") from None
        except Exception as error:  # what a store sends can make torch's C++ raise errors of any kind
            raise scope.fail("new_group", error) from error
        finally:
            self._task = None
        self._group_counts[group.members] += 1
        group.connect(backend, scope)

    def abort(self, reason: str) -> None:
        """End all collectives, a reconnect that is under way, and pair links."""
        with self._lock:
            if self._pairs is not None:
                self._pairs.abort(reason)
            super().abort(reason)

    def _cut(self) -> None:
        with self._lock:
            if self._task is not None and self._store is not None:
                self._task.abandon()
                cut_connections(self._store)
            if self._neighbours is not None:
                self._neighbours.cut()
            if self._links is not None:
                self._links.cut()

    def _link_up(
        self, generation: int, store: Rendezvous, scope: GenerationScope, deadline: float, old: GenerationScope
    ) -> None:
        """Connect all live groups, in place, to the members of `generation`, and check the links."""
        names = group_names(self._groups)
        with self._lock:
            connection = self._generation_store.connection if self._generation_store is not None else None
            self._generation_store = None
            self._close_neighbours()
            pairs = self._pairs_of(generation)
        task = self._in_background(
            lambda t: self._build(t, generation, connection, scope, pairs=pairs), scope, deadline
        )
        old.wait_released()
        self._install(task.result(), generation, names, scope)
        self._check_links(scope, deadline)

    def _give_up(self, scope: GenerationScope) -> None:
        self._disposal.dispose([group.disconnect(scope) for group in self._groups])

    def _build(
        self,
        task: BackgroundTask[Connections],
        generation: int,
        connection: StoreConnection | None,
        scope: GenerationScope,
        *,
        pairs: bool,
    ) -> Connections:
        """Meet the other members in the store, and connect the groups that all have. Runs in the task's thread."""
        endpoint = self._store
        assert endpoint is not None
        if connection is None or not connection.reaches(endpoint):
            connection = StoreConnection(endpoint, task.remaining_s())
        store = GenerationStore(connection, endpoint, generation)
        neighbours = self._listen(endpoint, scope, store.authenticator)
        assert self._links is not None
        groups = list(self._groups)
        return connect_generation(
            task, store, generation, groups, self._links, neighbours, self._collective_s, pairs=pairs
        )

    def _listen(
        self, endpoint: Rendezvous, scope: GenerationScope, authenticator: Authenticator, **how: Any
    ) -> Neighbours:
        """Open a listener for other ranks beside the gloo device's own. In a background thread."""
        with self._listening:
            if self._links is None:
                self._links = GlooLinks(endpoint)
            host, _ = self._links.listener
            return Neighbours(
                self._rank,
                len(self._members),
                host,
                limit_s=self._collective_s,
                scope=scope,
                authenticator=authenticator,
                **how,
            )

    def open_pairs(self, generation: int, store: Rendezvous, link_up_s: float) -> PairSockets:
        """Take part in pair links of `generation`, beside the link-up of all groups."""
        listen = partial(self._listen, buffer_bytes=None)
        with self._lock:
            self._pairs_of(generation)
            self._pairs = PairSockets(
                self._rank, generation, store, listen, limit_s=self._collective_s, link_up_s=link_up_s
            )
            return self._pairs

    def _pairs_of(self, generation: int) -> bool:
        """Return whether pair links of this generation are open; end those of an earlier one."""
        if self._pairs is not None and self._pairs.generation != generation:
            self._pairs.abort(f"generation {generation} began")
            self._pairs = None
        return self._pairs is not None

    def _install(self, result: Connections, generation: int, names: list[str], scope: GenerationScope) -> None:
        """Put the new backends behind the groups, and dispose of the old ones."""
        self._group_counts.clear()
        replaced: list[GlooBackend | None] = []
        kept = []
        for group, name in zip(self._groups, names, strict=True):
            if name in result.missing:
                replaced.append(group.disconnect(incomplete_group(result.missing[name], generation)))
                continue
            kept.append(group)
            self._group_counts[group.members] += 1
            replaced.append(group.connect(result.backends.pop(name), scope))
        self._groups = kept
        self._generation_store = result.generation_store
        with self._lock:
            self._neighbours = result.neighbours
            if self._pairs is not None:
                self._pairs.agreed = result.pairs
            if scope.reason is not None:
                result.neighbours.cut()
        self._disposal.dispose(replaced)

    def _check_links(self, scope: GenerationScope, deadline: float) -> None:
        """Pass the commit barrier, and use every group."""
        assert self._neighbours is not None
        self._neighbours.connect(deadline)
        check_groups(self._groups, deadline)
        if scope.reason is not None:
            raise scope.error("reconnect")

    def isend(self, tensor: torch.Tensor, rank: int) -> Transfer:
        """Start to send `tensor`, on the CPU, to `rank`."""
        return self._groups[0].start("send", True, False, ([tensor], rank, _TAG))

    def irecv(self, tensor: torch.Tensor, rank: int) -> Transfer:
        """Start to receive into `tensor`, on the CPU, from `rank`."""
        return self._groups[0].start("recv", True, False, ([tensor], rank, _TAG))

    def swap(self, blob: bytes, to: int, source: int, *, apart: bool = False) -> bytes:
        """Send `blob` to rank `to` and return what rank `source` sends."""
        neighbours = self._open_neighbours("swap")
        return neighbours.swap(blob, to, source, apart=apart) if neighbours is not None else blob

    def barrier(self, *, agrees: bool = False, verdict: int = 0, gathering: Gathering | None = None) -> Met:
        """Wait for all ranks; return what they have in common."""
        neighbours = self._open_neighbours("barrier")
        if neighbours is None:
            return Met(agrees, verdict)
        return neighbours.barrier(agrees=agrees, verdict=verdict, gathering=gathering)

    def _open_neighbours(self, op: str) -> Neighbours | None:
        if self._scope.reason is not None:
            raise self._scope.error(op)
        return self._neighbours

    def _close_neighbours(self) -> None:
        with self._lock:
            if self._neighbours is not None:
                self._neighbours.close()
            self._neighbours = None

    def remove(self, group: GlooGroup) -> None:
        """Remove a group that torch destroys."""
        self._groups = [other for other in self._groups if other is not group]
        closed = GenerationScope(self._cut)
        closed.end(CommunicatorAborted, "the group was destroyed")
        self._disposal.dispose([group.disconnect(closed)])

    def close(self) -> None:
        """Abort, destroy the groups, and wait a moment for their threads."""
        end = time.monotonic() + _CLOSE_S
        self.abort("the communicator was closed")
        _REGISTRATION.destroy_world(self)
        for group in list(self._groups):
            self.remove(group)
        self._close_neighbours()
        self._generation_store = None
        self._disposal.wait(end)
