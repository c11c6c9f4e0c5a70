"""The communicator for CPU tensors: gloo, made abortable and re-seatable."""

import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from ..protocol.errors import CommunicatorAborted, CommunicatorFailed, LinkUpFailed
from ..protocol.types import Rendezvous
from .backend_registration import BackendRegistration
from .base import CollectiveObserver, Transfer
from .disposal import Disposal
from .generation_scope import GenerationScope, cause, settle
from .links import Links, cut_connections
from .messages import GlooMember, Listener
from .neighbours import Neighbours
from .process_group import BACKEND, Group, group_name, group_names, incomplete_group
from .rendezvous import Abandoned, BackgroundTask, GenerationStore, GlooBackend, StoreConnection

_WORLD = "world"
_TAG = 0x6D73  # apart from the tags that a user's own sends use
_CLOSE_S = 0.8
_LEAST_S = 0.001  # torch takes 0 for no limit

_REGISTRATION = BackendRegistration(BACKEND)


class _Built(NamedTuple):
    """What a seating gives: groups by name, and of those that not all members have, who lacks them."""

    generation_store: GenerationStore
    built: dict[str, GlooBackend]
    missing: dict[str, list[int]]
    neighbours: Neighbours


class GlooCommunicator:
    """See Communicator. All groups share one gloo device, and one scope."""

    name = "gloo"

    def __init__(self) -> None:
        """Register the backend with torch."""
        _REGISTRATION.register(["cpu"])
        self.generation = 0
        self.observer: CollectiveObserver | None = None
        self._lock = threading.RLock()  # held by an abort until the sockets are down
        self._scope = GenerationScope(self._cut)
        self._groups: list[Group] = []  # in the order of their creation
        self._group_counts: Counter[tuple[int, ...]] = Counter()  # groups of these ranks so far in this generation
        self._links: Links | None = None
        self._neighbours: Neighbours | None = None
        self._generation_store: GenerationStore | None = None
        self._store: Rendezvous | None = None
        self._task: BackgroundTask[Any] | None = None
        self._disposal = Disposal()
        self._rank = 0
        self._members: tuple[int, ...] = ()
        self._collective_s = 0.0
        self._link_up_s = 0.0

    @property
    def failed(self) -> str | None:
        """Why no collective can succeed until the next `reconnect`; None while all is well."""
        return self._scope.reason

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
        """Make the default process group of torch.distributed; seat it if there is a `store`."""
        self._rank = rank
        self._members = tuple(range(world_size))
        self._collective_s = collective_s
        self._link_up_s = link_up_s
        self.generation = generation
        self._make_world(timedelta(seconds=collective_s))
        if store is not None:
            self.reconnect(generation, store, link_up_s)

    def _make_world(self, timeout: timedelta) -> None:
        """Make torch's default group, which asks `make_group` for it."""
        _REGISTRATION.make_world(self, self._rank, len(self._members), timeout)

    def make_group(self, options: Any) -> Group:
        """Make a group that torch asks for; seat it at once if the others are. Raises as `reconnect` does."""
        members = tuple(options.global_ranks_in_group) or self._members
        group = Group(self, members, options.group_rank, self._scope, options.timeout)
        if self._scope.reason is not None:
            raise self._scope.error("new_group")
        if self._generation_store is not None:
            self._connect_one(group)
        self._groups.append(group)
        return group

    def _connect_one(self, group: Group) -> None:
        generation_store, links, scope = self._generation_store, self._links, self._scope
        assert generation_store is not None
        assert links is not None
        name = group_name(group.members, self._group_counts[group.members])

        def work(task: BackgroundTask[GlooBackend]) -> GlooBackend:
            generation_store.exchange(
                task, name, group.members, self._rank, None, missing=f"has not come to group {name}"
            )
            return generation_store.connect(name, group.group_rank, len(group.members), links, self._link_up_s)

        # The members come here when their programs do, as with torch's own groups.
        task = BackgroundTask(work, time.monotonic() + self._collective_s)
        with self._lock:
            self._task = task
            if scope.reason is not None:
                task.abandon()
        try:
            connected = task.result()
        except Abandoned:
            raise scope.error("new_group") from None
        except Exception as error:  # what a store sends can make torch's C++ raise errors of any kind
            raise scope.fail("new_group", error) from error
        finally:
            self._task = None
        self._group_counts[group.members] += 1
        group.connect(connected, scope)

    def abort(self, reason: str) -> None:
        """End all collectives, and a seating that is under way."""
        with self._lock:
            self._scope.end(CommunicatorAborted, reason)
            self._cut()

    def _cut(self) -> None:
        with self._lock:
            if self._task is not None and self._store is not None:
                self._task.abandon()
                cut_connections(self._store)
            if self._neighbours is not None:
                self._neighbours.cut()
            if self._links is not None:
                self._links.cut()

    def reconnect(self, generation: int, store: Rendezvous, link_up_s: float) -> None:
        """Connect all live groups, in place, to the members of `generation`, and check the links."""
        deadline = time.monotonic() + link_up_s
        old = self._scope
        if old.end(CommunicatorAborted, f"generation {generation} began"):
            self._cut()
        scope = GenerationScope(self._cut)
        names = group_names(self._groups)
        with self._lock:
            self.generation = generation
            self._scope = scope
            connection = self._generation_store.connection if self._generation_store is not None else None
            self._generation_store = None
            self._leave_neighbours()
            self._store = store
            self._task = task = BackgroundTask(lambda a: self._build(a, generation, connection, scope), deadline)
        try:
            settle(old)
            self._install(task.result(), generation, names, scope)
            self._check_links(scope, deadline)
        except Exception as error:  # what a store sends can make torch's C++ raise errors of any kind
            what = f"generation {generation} was not linked up within {link_up_s:g} s: {cause(error)}"
            scope.end(CommunicatorFailed, what)
            self._cut()
            self._disposal.take([group.disconnect(scope) for group in self._groups])
            if scope.aborted:
                raise scope.error("reconnect") from None
            raise LinkUpFailed(f"rank {self._rank}: {what}") from error
        finally:
            self._task = None

    def _build(
        self, task: BackgroundTask[_Built], generation: int, connection: StoreConnection | None, scope: GenerationScope
    ) -> _Built:
        """Meet the others and build what all have. Runs in the attempt's thread."""
        store, names = self._store, group_names(self._groups)
        assert store is not None
        if connection is None or not connection.reaches(store):
            connection = StoreConnection(store, task.remaining_s())
        generation_store = GenerationStore(connection, store, generation, self._collective_s)
        if self._links is None:
            self._links = Links(store)
        links = self._links
        size, host = len(self._members), links.listener[0]
        neighbours = Neighbours(
            self._rank,
            size,
            host,
            limit_s=self._collective_s,
            scope=scope,
            authenticator=generation_store.authenticator,
        )
        word = GlooMember(Listener(*links.listener), tuple(names), neighbours.address)
        missing = f"has not come to group {_WORLD}"
        words = generation_store.exchange(task, _WORLD, self._members, self._rank, word, missing=missing)
        neighbours.expect([word.neighbours for word in words])
        links.expect(generation, [(word.listener.host, word.listener.port) for word in words])
        built: dict[str, GlooBackend] = {}
        lacking: dict[str, list[int]] = {}
        for group, name in zip(list(self._groups), names, strict=True):
            without = [member for member in group.members if name not in words[member].groups]
            if without:
                lacking[name] = without
            else:
                built[name] = generation_store.connect(
                    name, group.group_rank, len(group.members), links, task.remaining_s()
                )
        return _Built(generation_store, built, lacking, neighbours)

    def _install(self, result: _Built, generation: int, names: list[str], scope: GenerationScope) -> None:
        self._group_counts.clear()
        retired: list[GlooBackend | None] = []
        kept = []
        for group, name in zip(self._groups, names, strict=True):
            if name in result.missing:
                retired.append(group.disconnect(incomplete_group(result.missing[name], generation)))
                continue
            kept.append(group)
            self._group_counts[group.members] += 1
            retired.append(group.connect(result.built.pop(name), scope))
        self._groups = kept
        self._generation_store = result.generation_store
        with self._lock:
            self._neighbours = result.neighbours
            if scope.reason is not None:
                result.neighbours.cut()
        self._disposal.take(retired)

    def _check_links(self, scope: GenerationScope, deadline: float) -> None:
        """Pass the commit barrier, and add up ones in every group, all groups at once."""
        assert self._neighbours is not None
        self._neighbours.connect(deadline)
        checks = []
        for group in self._groups:
            if len(group.members) > 1:
                ones = torch.ones(1)
                checks.append((group, ones, group.start("allreduce", False, False, ([ones],))))
        for group, ones, work in checks:
            work.wait(timedelta(seconds=max(_LEAST_S, deadline - time.monotonic())))
            if ones.item() != len(group.members):
                raise CommunicatorFailed(f"link check of ranks {group.members} gave {ones.item()}")
        if scope.reason is not None:
            raise scope.error("reconnect")

    def isend(self, tensor: torch.Tensor, rank: int) -> Transfer:
        """Start to send `tensor` to `rank`."""
        return self._groups[0].start("send", True, False, ([tensor], rank, _TAG))

    def irecv(self, tensor: torch.Tensor, rank: int) -> Transfer:
        """Start to fill `tensor` from `rank`."""
        return self._groups[0].start("recv", True, False, ([tensor], rank, _TAG))

    def swap(self, blob: bytes, to: int, source: int) -> bytes:
        """Send `blob` to rank `to` and return what rank `source` sends."""
        neighbours = self._present("swap")
        return neighbours.swap(blob, to, source) if neighbours is not None else blob

    def barrier(self) -> None:
        """Wait for all ranks."""
        neighbours = self._present("barrier")
        if neighbours is not None:
            neighbours.barrier()

    def _present(self, op: str) -> Neighbours | None:
        if self._scope.reason is not None:
            raise self._scope.error(op)
        return self._neighbours

    def _leave_neighbours(self) -> None:
        with self._lock:
            if self._neighbours is not None:
                self._neighbours.close()
            self._neighbours = None

    def watch(self, observer: CollectiveObserver | None) -> None:
        """Report the collectives from now on to `observer`."""
        self.observer = observer

    def remove(self, group: Group) -> None:
        """Take leave of a group that torch destroys."""
        self._groups = [other for other in self._groups if other is not group]
        gone = GenerationScope(self._cut)
        gone.end(CommunicatorAborted, "the group was destroyed")
        self._disposal.take([group.disconnect(gone)])

    def close(self) -> None:
        """Abort, destroy the groups, and wait a moment for their threads."""
        end = time.monotonic() + _CLOSE_S
        self.abort("the communicator was closed")
        _REGISTRATION.destroy_world(self)
        for group in list(self._groups):
            self.remove(group)
        self._leave_neighbours()
        self._generation_store = None
        self._disposal.wait(end)
