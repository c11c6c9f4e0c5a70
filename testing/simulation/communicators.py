"""The communicators of one generation, as the train threads see them: they connect, meet, pass things on, and break."""

import random
from collections.abc import Callable
from typing import Protocol

from ...protocol.types import Rendezvous
from .timeline import Timeline

JITTER_S = (0.002, 0.004, 0.03)  # peers learn of the same thing at different times
FAILURE_S = 0.02  # a broken connection is noticed within this

Key = tuple[object, ...]


class Member(Protocol):
    """A train thread, as its communicators know it."""

    rank: int

    def lose_connection(self, group: "Group", reason: str) -> None:
        """A peer has gone, or a link broke."""
        ...


class Group:
    """One generation's communicators. A collective completes when every rank has entered it."""

    def __init__(
        self,
        timeline: Timeline,
        chance: random.Random,
        size: int,
        *,
        fails: bool,
        serves: Callable[[Rendezvous], bool],
    ) -> None:
        """`serves` says whether a rendezvous store listens where a process looks for it."""
        self._serves = serves
        self._timeline = timeline
        self._chance = chance
        self._size = size
        self.frozen = False  # collectives hang without a word
        self._fails = fails  # the connections do not come up
        self._connecting: dict[int, tuple[Member, Callable[[], None]]] = {}
        self._stores: dict[int, Rendezvous] = {}
        self._members: dict[int, Member] = {}
        self._entered: dict[Key, dict[int, tuple[Member, Callable[[], None]]]] = {}
        self._posted: dict[Key, int] = {}
        self._receiving: dict[Key, Callable[[int], None]] = {}

    def connect(self, process: Member, store: Rendezvous, done: Callable[[], None]) -> None:
        """Wait for all ranks at a store, then go on."""
        if not self._serves(store):
            return
        self._connecting[process.rank] = (process, done)
        self._stores[process.rank] = store
        if len(self._connecting) == self._size and not self._fails and len(set(self._stores.values())) == 1:
            self._members = {rank: each for rank, (each, _) in self._connecting.items()}
            for _, call in self._connecting.values():
                self._soon(call)

    def leave(self, process: Member) -> None:
        """A process ends or aborts: it connects with no other any more, and its peers notice."""
        known = self._connecting.get(process.rank)
        if known is not None and known[0] is process and not self._members:
            del self._connecting[process.rank]
            del self._stores[process.rank]
        if self._members.get(process.rank) is process:
            for peer in self._members.values():
                if peer is not process:
                    self._notice(peer, f"connection closed by peer {process.rank}")

    def cut(self, process: Member) -> None:
        """A link of a process breaks under it."""
        self._notice(process, "connection reset")

    def enter(self, key: Key, process: Member, done: Callable[[], None]) -> None:
        """Enter a collective of all ranks."""
        entered = self._entered.setdefault(key, {})
        entered[process.rank] = (process, done)
        if len(entered) == self._size and not self.frozen:
            for _, call in entered.values():
                self._soon(call)

    def post(self, key: Key, value: int) -> None:
        """Send something to one peer; does not wait."""
        self._posted[key] = value
        waiting = self._receiving.pop(key, None)
        if waiting is not None:
            self._soon(lambda: waiting(value))

    def receive(self, key: Key, done: Callable[[int], None]) -> None:
        """Wait for what one peer sends."""
        if key in self._posted:
            value = self._posted[key]
            self._soon(lambda: done(value))
        else:
            self._receiving[key] = done

    def _soon(self, call: Callable[[], None]) -> None:
        self._timeline.after(self._chance.random() * self._chance.choice(JITTER_S), call)

    def _notice(self, peer: Member, reason: str) -> None:
        self._timeline.after(self._chance.random() * FAILURE_S, lambda: peer.lose_connection(self, reason))
