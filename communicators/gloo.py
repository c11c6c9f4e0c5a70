"""The communicator for CPU tensors: gloo, made abortable and re-seatable."""

import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from ..protocol.errors import CommunicatorAborted, CommunicatorFailed, LinkUpFailed
from ..protocol.types import Rendezvous
from .base import CollectiveObserver, Transfer
from .group import BACKEND, Group, group_name, group_names, orphaned
from .life import Life, cause, settle
from .links import Links, cut_connections
from .neighbours import Neighbours
from .registration import Registration
from .retirement import Retirement
from .seating import Abandoned, Attempt, Connected, StoreLine, Table
from .words import GlooWord, Listener

_WORLD = "world"
_TAG = 0x6D73  # apart from the tags that a user's own sends use
_CLOSE_S = 0.8
_LEAST_S = 0.001  # torch takes 0 for no limit

_REGISTRATION = Registration(BACKEND)


class _Built(NamedTuple):
    """What a seating gives: groups by name, and of those that not all members have, who lacks them."""

    table: Table
    built: dict[str, Connected]
    missing: dict[str, list[int]]
    neighbours: Neighbours


class GlooCommunicator:
    """See Communicator. All groups share one gloo device, and one life."""

    name = "gloo"

    def __init__(self) -> None:
        """Register the backend with torch."""
        _REGISTRATION.register(["cpu"])
        self.generation = 0
        self.observer: CollectiveObserver | None = None
        self._lock = threading.RLock()  # held by an abort until the sockets are down
        self._life = Life(self._cut)
        self._groups: list[Group] = []  # in the order of their creation
        self._seated: Counter[tuple[int, ...]] = Counter()  # groups of these ranks so far in this generation
        self._links: Links | None = None
        self._neighbours: Neighbours | None = None
        self._table: Table | None = None
        self._store: Rendezvous | None = None
        self._attempt: Attempt[Any] | None = None
        self._retirement = Retirement()
        self._rank = 0
        self._members: tuple[int, ...] = ()
        self._collective_s = 0.0
        self._link_up_s = 0.0

    @property
    def failed(self) -> str | None:
        """Why no collective can succeed until the next `reseat`; None while all is well."""
        return self._life.reason

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
            self.reseat(generation, store, link_up_s)

    def _make_world(self, timeout: timedelta) -> None:
        """Make torch's default group, which asks `make_group` for it."""
        _REGISTRATION.make_world(self, self._rank, len(self._members), timeout)

    def make_group(self, options: Any) -> Group:
        """Make a group that torch asks for; seat it at once if the others are. Raises as `reseat` does."""
        members = tuple(options.global_ranks_in_group) or self._members
        group = Group(self, members, options.group_rank, self._life, options.timeout)
        if self._life.reason is not None:
            raise self._life.error("new_group")
        if self._table is not None:
            self._seat_one(group)
        self._groups.append(group)
        return group

    def _seat_one(self, group: Group) -> None:
        table, links, life = self._table, self._links, self._life
        assert table is not None
        assert links is not None
        name = group_name(group.members, self._seated[group.members])

        def work(attempt: Attempt[Connected]) -> Connected:
            table.meet(attempt, name, group.members, self._rank, None, missing=f"has not come to group {name}")
            return table.connect(name, group.place, len(group.members), links, self._link_up_s)

        # The members come here when their programs do, as with torch's own groups.
        attempt = Attempt(work, time.monotonic() + self._collective_s)
        with self._lock:
            self._attempt = attempt
            if life.reason is not None:
                attempt.abandon()
        try:
            connected = attempt.outcome()
        except Abandoned:
            raise life.error("new_group") from None
        except Exception as error:  # what a store sends can make torch's C++ raise errors of any kind
            raise life.fail("new_group", error) from error
        finally:
            self._attempt = None
        self._seated[group.members] += 1
        group.seat(connected, life)

    def abort(self, reason: str) -> None:
        """End all collectives, and a seating that is under way."""
        with self._lock:
            self._life.end(CommunicatorAborted, reason)
            self._cut()

    def _cut(self) -> None:
        with self._lock:
            if self._attempt is not None and self._store is not None:
                self._attempt.abandon()
                cut_connections(self._store)
            if self._neighbours is not None:
                self._neighbours.cut()
            if self._links is not None:
                self._links.cut()

    def reseat(self, generation: int, store: Rendezvous, link_up_s: float) -> None:
        """Connect all live groups, in place, to the members of `generation`, and check the links."""
        deadline = time.monotonic() + link_up_s
        old = self._life
        if old.end(CommunicatorAborted, f"generation {generation} began"):
            self._cut()
        life = Life(self._cut)
        names = group_names(self._groups)
        with self._lock:
            self.generation = generation
            self._life = life
            line = self._table.line if self._table is not None else None
            self._table = None
            self._leave_neighbours()
            self._store = store
            self._attempt = attempt = Attempt(lambda a: self._build(a, generation, line, life), deadline)
        try:
            settle(old)
            self._take_seats(attempt.outcome(), generation, names, life)
            self._check_links(life, deadline)
        except Exception as error:  # what a store sends can make torch's C++ raise errors of any kind
            what = f"generation {generation} was not linked up within {link_up_s:g} s: {cause(error)}"
            life.end(CommunicatorFailed, what)
            self._cut()
            self._retirement.take([group.unseat(life) for group in self._groups])
            if life.aborted:
                raise life.error("reseat") from None
            raise LinkUpFailed(f"rank {self._rank}: {what}") from error
        finally:
            self._attempt = None

    def _build(self, attempt: Attempt[_Built], generation: int, line: StoreLine | None, life: Life) -> _Built:
        """Meet the others and build what all have. Runs in the attempt's thread."""
        store, names = self._store, group_names(self._groups)
        assert store is not None
        if line is None or not line.leads_to(store):
            line = StoreLine(store, attempt.go_on())
        table = Table(line, store, generation, self._collective_s)
        if self._links is None:
            self._links = Links(store)
        links = self._links
        size, host = len(self._members), links.listener[0]
        neighbours = Neighbours(self._rank, size, host, limit_s=self._collective_s, life=life, seal=table.seal)
        word = GlooWord(Listener(*links.listener), tuple(names), neighbours.word)
        missing = f"has not come to group {_WORLD}"
        words = table.meet(attempt, _WORLD, self._members, self._rank, word, missing=missing)
        neighbours.expect([word.neighbours for word in words])
        links.expect(generation, [(word.listener.host, word.listener.port) for word in words])
        built: dict[str, Connected] = {}
        lacking: dict[str, list[int]] = {}
        for group, name in zip(list(self._groups), names, strict=True):
            without = [member for member in group.members if name not in words[member].groups]
            if without:
                lacking[name] = without
            else:
                built[name] = table.connect(name, group.place, len(group.members), links, attempt.go_on())
        return _Built(table, built, lacking, neighbours)

    def _take_seats(self, result: _Built, generation: int, names: list[str], life: Life) -> None:
        self._seated.clear()
        retired: list[Connected | None] = []
        kept = []
        for group, name in zip(self._groups, names, strict=True):
            if name in result.missing:
                retired.append(group.unseat(orphaned(result.missing[name], generation)))
                continue
            kept.append(group)
            self._seated[group.members] += 1
            retired.append(group.seat(result.built.pop(name), life))
        self._groups = kept
        self._table = result.table
        with self._lock:
            self._neighbours = result.neighbours
            if life.reason is not None:
                result.neighbours.cut()
        self._retirement.take(retired)

    def _check_links(self, life: Life, deadline: float) -> None:
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
        if life.reason is not None:
            raise life.error("reseat")

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
        if self._life.reason is not None:
            raise self._life.error(op)
        return self._neighbours

    def _leave_neighbours(self) -> None:
        with self._lock:
            if self._neighbours is not None:
                self._neighbours.close()
            self._neighbours = None

    def watch(self, observer: CollectiveObserver | None) -> None:
        """Report the collectives from now on to `observer`."""
        self.observer = observer

    def forget(self, group: Group) -> None:
        """Take leave of a group that torch destroys."""
        self._groups = [other for other in self._groups if other is not group]
        gone = Life(self._cut)
        gone.end(CommunicatorAborted, "the group was destroyed")
        self._retirement.take([group.unseat(gone)])

    def close(self) -> None:
        """Abort, destroy the groups, and wait a moment for their threads."""
        end = time.monotonic() + _CLOSE_S
        self.abort("the communicator was closed")
        _REGISTRATION.leave_world(self)
        for group in list(self._groups):
            self.forget(group)
        self._leave_neighbours()
        self._table = None
        self._retirement.wait(end)
