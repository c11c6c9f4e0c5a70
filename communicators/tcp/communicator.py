"""The communicator for arrays in host memory without torch: collectives over TCP, abortable, reconnected in place.

One group, that of all ranks. Results depend on the values and the number of ranks, never on what arrives first.
"""

import time
from typing import Any

import numpy as np

from ...protocol.errors import CommunicatorFailed
from ...protocol.types import Rendezvous
from ..background import BackgroundTask
from ..base import CollectiveObserver, Gathering, Met, Transfer
from ..generation_scope import GenerationScope
from ..handshake import TcpMember
from ..messages import Messages
from ..neighbours import Neighbours
from ..own_sockets import cut_connections, local_address
from ..rendezvous import GenerationStore, StoreConnection
from ..scoped import ScopedCommunicator

_WORLD = "world"


PIECE_BYTES = 1 << 20  # a broadcast hands on so much while more comes in


class Ring:
    """The ring of all ranks: each sends to the next and receives from the previous one.

    An allreduce cuts the array into as many parts as there are ranks. Each part goes around once to be added up, in an
    order that follows from its number alone, and once more to be told to all. So every rank ends with the same bits,
    whatever the timing, and sends less than twice the array. Every call raises CommunicatorAborted or
    CommunicatorFailed.
    """

    def __init__(self, messages: Messages, rank: int, size: int) -> None:
        self._messages = messages
        self._rank = rank
        self._size = size
        self._next = (rank + 1) % size
        self._previous = (rank - 1) % size

    def allreduce(self, array: "np.ndarray[Any, Any]") -> None:
        """Add up `array` over all ranks, in place."""
        if self._size == 1:
            return
        parts = np.array_split(array.reshape(-1), self._size)
        arriving = np.empty(max(map(len, parts)), array.dtype)
        for step in range(self._size - 1):
            leaving, coming = parts[(self._rank - step) % self._size], parts[(self._rank - step - 1) % self._size]
            self._pass(leaving, arriving[: len(coming)])
            np.add(arriving[: len(coming)], coming, out=coming)
        for step in range(self._size - 1):
            self._pass(parts[(self._rank + 1 - step) % self._size], parts[(self._rank - step) % self._size])

    def broadcast(self, array: "np.ndarray[Any, Any]", source: int) -> None:
        """Copy `array` from rank `source` to all, in place, piece by piece along the ring."""
        flat = array.reshape(-1).view(np.uint8)
        pieces = [flat[start : start + PIECE_BYTES] for start in range(0, len(flat), PIECE_BYTES)]
        sends = []
        for piece in pieces if self._size > 1 else ():
            if self._rank != source:
                self._messages.irecv(piece, self._previous).wait()
            if self._next != source:
                sends.append(self._messages.isend(piece, self._next))
        for send in sends:
            send.wait()

    def _pass(self, leaving: "np.ndarray[Any, Any]", coming: "np.ndarray[Any, Any]") -> None:
        sending = self._messages.isend(leaving, self._next)
        self._messages.irecv(coming, self._previous).wait()
        sending.wait()


class TcpCommunicator(ScopedCommunicator):
    """See Communicator, and HostCollectives."""

    name = "tcp"

    def __init__(self) -> None:
        super().__init__()
        self._neighbours: Neighbours | None = None
        self._messages: Messages | None = None
        self._connection: StoreConnection | None = None

    def _cut(self) -> None:
        with self._lock:
            if self._task is not None and self._store is not None:
                self._task.abandon()
                cut_connections(self._store)
            if self._neighbours is not None:
                self._neighbours.cut()

    def _link_up(
        self, generation: int, store: Rendezvous, scope: GenerationScope, deadline: float, old: GenerationScope
    ) -> None:
        with self._lock:
            self._close_neighbours()
        task = self._in_background(lambda t: self._meet(t, generation, scope), scope, deadline)
        self._install(task.result(), scope, deadline)

    def _meet(self, task: BackgroundTask[Neighbours], generation: int, scope: GenerationScope) -> Neighbours:
        """Meet the other members in the store. Runs in the task's thread."""
        endpoint = self._store
        assert endpoint is not None
        connection = self._connection
        if connection is None or not connection.reaches(endpoint):
            connection = StoreConnection(endpoint, task.remaining_s())
        store = GenerationStore(connection, endpoint, generation)
        neighbours = Neighbours(
            self._rank,
            len(self._members),
            local_address(endpoint),
            limit_s=self._collective_s,
            scope=scope,
            authenticator=store.authenticator,
        )
        try:
            members = store.exchange(
                task,
                _WORLD,
                self._members,
                self._rank,
                TcpMember(neighbours.address),
                missing=f"has not come to group {_WORLD}",
            )
            neighbours.expect([member.neighbours for member in members])
            task.remaining_s()  # raises when the result is not waited for any more
        except BaseException:
            neighbours.close()
            raise
        self._connection = connection
        return neighbours

    def _install(self, neighbours: Neighbours, scope: GenerationScope, deadline: float) -> None:
        with self._lock:
            self._neighbours = neighbours
            self._messages = Messages(neighbours, scope, self._collective_s)
            if scope.reason is not None:
                neighbours.cut()
        neighbours.connect(deadline)
        if scope.reason is not None:
            raise scope.error("reconnect")

    def allreduce(self, array: "np.ndarray[Any, Any]") -> None:
        """Add up `array`, which is contiguous, over all ranks, in place: bit for bit the same on every rank."""
        with _observed(self.observer, "allreduce", self._members):
            ring = self._ring("allreduce")
            if ring is not None:
                ring.allreduce(array)

    def broadcast(self, array: "np.ndarray[Any, Any]", source: int) -> None:
        """Copy `array`, which is contiguous, from rank `source` to all, in place."""
        with _observed(self.observer, "broadcast", self._members):
            ring = self._ring("broadcast")
            if ring is not None:
                ring.broadcast(array, source)

    def isend(self, tensor: Any, rank: int) -> Transfer:
        """Start to send a buffer in host memory to `rank`."""
        return self._open_messages("send").isend(tensor, rank)

    def irecv(self, tensor: Any, rank: int) -> Transfer:
        """Start to receive into a buffer in host memory from `rank`."""
        return self._open_messages("recv").irecv(tensor, rank)

    def swap(self, blob: bytes, to: int, source: int, *, apart: bool = False) -> bytes:
        """Send `blob` to rank `to` and return what rank `source` sends."""
        neighbours = self._open("swap")
        return neighbours.swap(blob, to, source, apart=apart) if neighbours is not None else blob

    def barrier(self, *, agrees: bool = False, verdict: int = 0, gathering: Gathering | None = None) -> Met:
        """Wait for all ranks; return what they have in common."""
        neighbours = self._open("barrier")
        if neighbours is None:
            return Met(agrees, verdict)
        return neighbours.barrier(agrees=agrees, verdict=verdict, gathering=gathering)

    def _open(self, op: str) -> Neighbours | None:
        """Return the connections; None before the first `reconnect`, when a rank is alone with its own input."""
        if self._scope.reason is not None:
            raise self._scope.error(op)
        return self._neighbours

    def _open_messages(self, op: str) -> Messages:
        if self._open(op) is None or self._messages is None:
            raise CommunicatorFailed(f"{op}: the ranks are not connected yet")
        return self._messages

    def _ring(self, op: str) -> Ring | None:
        if self._open(op) is None:
            return None
        return Ring(self._open_messages(op), self._rank, len(self._members))

    def _close_neighbours(self) -> None:
        with self._lock:
            if self._neighbours is not None:
                self._neighbours.close()
            self._neighbours = self._messages = None

    def close(self) -> None:
        """Abort, and close the sockets."""
        self.abort("the communicator was closed")
        self._close_neighbours()


class _observed:  # noqa: N801 - used as a function
    """Reports one collective to the observer, if there is one."""

    def __init__(self, observer: CollectiveObserver | None, op: str, members: tuple[int, ...]) -> None:
        self._observer, self._op, self._members = observer, op, members
        self._began_s = 0.0

    def __enter__(self) -> None:
        if self._observer is not None:
            self._observer.entered(self._op, self._members)
            self._began_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._observer is not None:
            self._observer.waited(time.monotonic() - self._began_s)
            self._observer.left(self._op)
