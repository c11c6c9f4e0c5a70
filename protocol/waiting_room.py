"""Connections that have proven nothing yet: how many there may be, and which of them goes for one that comes.

A handshake is a matter of milliseconds, but not when all nodes of a job connect at once. If each that comes pushed
another one out, none of them would ever get to its end. So a connection has its time, and while all places are taken
by connections that still have theirs, those that come wait in the listener's backlog, which the kernel bounds.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import msgspec

from .connection import Connection
from .connection_limits import ConnectionLimits

SILENT_S = 0.2  # for the first word
HANDSHAKE_S = 1.0  # and until the keys are to be looked at; from then on it goes for no other


class Push(msgspec.Struct, frozen=True):
    """A connection that goes for one that comes (None: the one that comes is closed), and why."""

    connection: Connection | None
    reason: str


class WaitingRoom:
    """The connections without a proof, in the order in which they came. `add` and `discard` keep it up."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._all: OrderedDict[Connection, None] = OrderedDict()
        self._by_address: dict[str, OrderedDict[Connection, None]] = {}

    def add(self, connection: Connection) -> None:
        """Take in a connection that has just been accepted."""
        self._all[connection] = None
        self._by_address.setdefault(connection.address, OrderedDict())[connection] = None

    def discard(self, connection: Connection) -> None:
        """Let go of one that has proven who it is, or was closed."""
        if connection not in self._all:
            return
        del self._all[connection]
        same = self._by_address[connection.address]
        del same[connection]
        if not same:
            del self._by_address[connection.address]

    def overdue(self, now: float) -> Iterator[Connection]:
        """Yield those that have taken longer than any handshake may."""
        for connection in list(self._all):
            if now - connection.began_s < self._limits.handshake_s:
                return
            yield connection

    def is_closed(self, connections: int, now: float) -> bool:
        """Say whether nothing is to be accepted: all places are taken, by connections that still have their time.

        `connections`: how many there are in all, with and without a proof.
        """
        full = len(self._all) >= self._limits.unproven or connections >= self._limits.connections
        return full and bool(self._all) and self._to_go(self._all, now) is None

    def push(self, address: str, connections: int, now: float) -> Push | None:
        """Return what goes for a connection from `address`, if anything has to. Ask `is_closed` before."""
        same = self._by_address.get(address, ())
        if len(same) >= self._limits.unproven_per_address:
            return Push(self._to_go(same, now), "too many connections without a handshake from one address")
        if len(self._all) >= self._limits.unproven:
            return Push(self._to_go(self._all, now), "too many connections without a handshake")
        if connections >= self._limits.connections and self._all:
            return Push(self._to_go(self._all, now), "too many connections")
        return None

    @staticmethod
    def _to_go(connections: Iterable[Connection], now: float) -> Connection | None:
        """Return the oldest that has had its time, and has not asked for admission, which needs a key."""
        for connection in connections:
            age_s = now - connection.began_s
            if age_s < SILENT_S:
                return None  # and those behind it are younger
            if not connection.asks and (connection.router is None or age_s >= HANDSHAKE_S):
                return connection
        return None
