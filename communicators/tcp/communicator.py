"""The communicator for arrays in host memory without torch: collectives over TCP, abortable, reconnected in place.

One group, that of all ranks. Results depend on the values and the number of ranks, never on what arrives first.
"""

import threading
import time
from typing import Any

import numpy as np

from ...protocol.errors import CommunicatorAborted, CommunicatorFailed, LinkUpFailed
from ...protocol.types import Rendezvous
from ..background import BackgroundTask
from ..base import CollectiveObserver, Transfer
from ..generation_scope import GenerationScope, error_text
from ..handshake import TcpMember
from ..messages import Messages
from ..neighbours import Neighbours
from ..own_sockets import cut_connections, local_address
from ..rendezvous import GenerationStore, StoreConnection
from .ring import Ring

_WORLD = "world"


class TcpCommunicator:
    """See Communicator, and HostCollectives."""

    name = "tcp"

    def __init__(self) -> None:
        self.generation = 0
        self.observer: CollectiveObserver | None = None
        self._lock = threading.RLock()
        self._scope = GenerationScope(self._cut)
        self._neighbours: Neighbours | None = None
        self._messages: Messages | None = None
        self._connection: StoreConnection | None = None
        self._store: Rendezvous | None = None
        self._task: BackgroundTask[Any] | None = None
        self._rank = 0
        self._world_size = 1
        self._collective_s = 0.0

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
        """Connect all ranks if there is a `store`."""
        self._rank = rank
        self._world_size = world_size
        self._collective_s = collective_s
        self.generation = generation
        if store is not None:
            self.reconnect(generation, store, link_up_s)

    def abort(self, reason: str) -> None:
        """End all collectives, and a reconnect that is under way."""
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

    def reconnect(self, generation: int, store: Rendezvous, link_up_s: float) -> None:
        """Connect to the members of `generation`, and check the links."""
        deadline = time.monotonic() + link_up_s
        if self._scope.end(CommunicatorAborted, f"generation {generation} began"):
            self._cut()
        scope = GenerationScope(self._cut)
        with self._lock:
            self.generation = generation
            self._scope = scope
            self._store = store
            self._close_neighbours()
            self._task = task = BackgroundTask(lambda t: self._meet(t, generation, scope), deadline)
        try:
            self._install(task.result(), scope, deadline)
        except Exception as error:
            what = f"generation {generation} was not linked up within {link_up_s:g} s: {error_text(error)}"
            scope.end(CommunicatorFailed, what)
            self._cut()
            if scope.aborted:
                raise scope.error("reconnect") from None
            raise LinkUpFailed(f"rank {self._rank}: {what}") from error
        finally:
            self._task = None

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
            self._world_size,
            local_address(endpoint),
            limit_s=self._collective_s,
            scope=scope,
            authenticator=store.authenticator,
        )
        try:
            members = store.exchange(
                task,
                _WORLD,
                range(self._world_size),
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
        with _observed(self.observer, "allreduce", self._world_size):
            ring = self._ring("allreduce")
            if ring is not None:
                ring.allreduce(array)

    def broadcast(self, array: "np.ndarray[Any, Any]", source: int) -> None:
        """Copy `array`, which is contiguous, from rank `source` to all, in place."""
        with _observed(self.observer, "broadcast", self._world_size):
            ring = self._ring("broadcast")
            if ring is not None:
                ring.broadcast(array, source)

    def isend(self, tensor: Any, rank: int) -> Transfer:
        """Start to send a buffer in host memory to `rank`."""
        return self._open_messages("send").isend(tensor, rank)

    def irecv(self, tensor: Any, rank: int) -> Transfer:
        """Start to receive into a buffer in host memory from `rank`."""
        return self._open_messages("recv").irecv(tensor, rank)

    def swap(self, blob: bytes, to: int, source: int) -> bytes:
        """Send `blob` to rank `to` and return what rank `source` sends."""
        neighbours = self._open("swap")
        return neighbours.swap(blob, to, source) if neighbours is not None else blob

    def barrier(self) -> None:
        """Wait for all ranks."""
        neighbours = self._open("barrier")
        if neighbours is not None:
            neighbours.barrier()

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
        return Ring(self._open_messages(op), self._rank, self._world_size)

    def _close_neighbours(self) -> None:
        with self._lock:
            if self._neighbours is not None:
                self._neighbours.close()
            self._neighbours = self._messages = None

    def watch(self, observer: CollectiveObserver | None) -> None:
        """Report the collectives from now on to `observer`."""
        self.observer = observer

    def close(self) -> None:
        """Abort, and close the sockets."""
        self.abort("the communicator was closed")
        self._close_neighbours()


class _observed:  # noqa: N801 - used as a function
    """Reports one collective to the observer, if there is one."""

    def __init__(self, observer: CollectiveObserver | None, op: str, world_size: int) -> None:
        self._observer, self._op = observer, op
        self._members = tuple(range(world_size))

    def __enter__(self) -> None:
        if self._observer is not None:
            self._observer.entered(self._op, self._members)

    def __exit__(self, *_: object) -> None:
        if self._observer is not None:
            self._observer.left(self._op)
