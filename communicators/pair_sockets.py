"""Links between single pairs of ranks of one generation, which wait for no other rank.

All groups of a generation are up when its slowest rank is. State that was lost can be on its way before that: its
source and its destination find each other in a part of the store of their own, and connect to each other. A thread of
the caller's does all of it, so the link-up of the groups, in the train thread, is not held up.

Whether all ranks do the same is said in the exchange of the link-up itself. Until then a rank moves state early in the
hope that its peers do; `agreed` is the same on all ranks once their groups are up.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..protocol.errors import CommunicatorAborted, CommunicatorFailed, LinkUpFailed, MidstepError
from ..protocol.types import Rendezvous
from .generation_scope import GenerationScope, error_text
from .handshake import Authenticator, PairMember
from .messages import Messages, PendingMessage
from .neighbours import Neighbours
from .rendezvous import GenerationStore, StoreConnection

_NAME = "pairs"
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.02  # between two looks for the peers: a wait in the store could not be ended

Listen = Callable[[Rendezvous, GenerationScope, Authenticator], Neighbours]


class PairSockets:
    """See PairLinks. One rank's links in one generation, made by its communicator, which can abort them."""

    def __init__(
        self, rank: int, generation: int, rendezvous: Rendezvous, listen: Listen, *, limit_s: float, link_up_s: float
    ) -> None:
        """Open nothing yet. `limit_s` is the time in which something has to move, `link_up_s` to reach the store."""
        self.generation = generation
        self.agreed = False  # set by the communicator in its link-up
        self.prepare_thread: Callable[[], None] | None = None  # what a thread needs that uses the device
        self._rank = rank
        self._rendezvous = rendezvous
        self._listen = listen
        self._limit_s = limit_s
        self._link_up_s = link_up_s
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._scope = GenerationScope(self._cut)
        self._neighbours: Neighbours | None = None
        self._messages: Messages | None = None

    def connect(self, peers: Sequence[int]) -> None:
        """Find `peers` in the store; the first message makes a link. Raises LinkUpFailed, and as `isend` does."""
        if self.prepare_thread is not None:
            self.prepare_thread()
        try:
            neighbours = self._meet(peers)
        except Exception as error:  # what a store sends can make torch's C++ raise errors of any kind
            self._raise_if_over()  # an abort cuts the connections to the store
            if isinstance(error, MidstepError):
                raise
            where = f"{self._rendezvous.host}:{self._rendezvous.port}"
            raise LinkUpFailed(
                f"rank {self._rank} did not find its pairs in the rendezvous store at {where}: {error_text(error)}"
            ) from error
        self._messages = Messages(neighbours, self._scope, self._limit_s)
        self._raise_if_over()

    def _meet(self, peers: Sequence[int]) -> Neighbours:
        """Exchange addresses with `peers`."""
        deadline = time.monotonic() + self._limit_s
        # A connection of its own: the clients of one take turns, and the link-up waits in it for all ranks.
        connection = StoreConnection(self._rendezvous, self._link_up_s)
        store = GenerationStore(connection, self._rendezvous, self.generation)
        neighbours = self._listen(self._rendezvous, self._scope, store.authenticator)
        with self._lock:
            self._neighbours = neighbours
        store.publish(_NAME, self._rank, PairMember(neighbours.address))
        pause_s = _FIRST_LOOK_S
        while not store.have_published(_NAME, peers):
            self._over.wait(pause_s)
            pause_s = min(1.5 * pause_s, _LAST_LOOK_S)
            self._raise_if_over()
            if time.monotonic() > deadline:
                raise self._scope.fail("pair links", TimeoutError(f"ranks {[*peers]} have not all come to the store"))
        found = store.read(_NAME, peers, PairMember)
        neighbours.expect_some({peer: member.neighbours for peer, member in found.items()})
        return neighbours

    def isend(self, tensor: Any, rank: int) -> PendingMessage:
        """Start to send `tensor`, in host memory, to a peer."""
        return self._open("send").isend(tensor, rank)

    def irecv(self, tensor: Any, rank: int) -> PendingMessage:
        """Start to receive into `tensor`, in host memory, from a peer."""
        return self._open("recv").irecv(tensor, rank)

    def abort(self, reason: str) -> None:
        """End what is under way: the thread that moves it raises CommunicatorAborted. Any thread; returns at once."""
        self._scope.end(CommunicatorAborted, reason)
        self._cut()

    def close(self) -> None:
        """Close the sockets. In the thread that has connected them."""
        self._scope.end(CommunicatorAborted, "the pair links were closed")
        with self._lock:
            neighbours, self._neighbours, self._messages = self._neighbours, None, None
        if neighbours is not None:
            neighbours.close()

    def _open(self, op: str) -> Messages:
        self._raise_if_over()
        if self._messages is None:
            raise CommunicatorFailed(f"{op}: the pair is not linked yet")
        return self._messages

    def _raise_if_over(self) -> None:
        if self._scope.reason is not None:
            self._cut()  # for one that ended while they were made
            raise self._scope.error("pair links")

    def _cut(self) -> None:
        self._over.set()
        with self._lock:
            if self._neighbours is not None:
                self._neighbours.cut()
