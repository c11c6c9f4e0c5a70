"""Building gloo groups for a generation, in a thread that nobody has to wait for.

Gloo's own connecting can neither be aborted nor be trusted to be quick: it stalls for seconds when a peer dies at the
wrong moment. So it runs in a thread that is left alone when the deadline passes or an abort comes; what it builds
after that is thrown away by the thread itself.

Members meet in the store before anything is connected. The commonest trouble, somebody who never comes, is thereby
found while nothing is half built.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

from ..protocol.types import Rendezvous, StoreEndpoint
from . import messages
from .authenticated_store import AuthenticatedStore
from .authenticator import Authenticator
from .links import Links
from .name_resolution import limit_dns_in_this_thread

T = TypeVar("T")

_KNOCK = "midstep/knock"


class GlooBackend(NamedTuple):
    """A gloo group. `process_group` has the names of torch's ProcessGroup; `gloo` is the backend behind it.

    `store` is what both were given: a Python object must be kept for as long as C++ may call it.
    """

    process_group: Any
    gloo: dist.ProcessGroupGloo
    store: AuthenticatedStore


class Abandoned(Exception):
    """Nobody waits for this attempt any more."""


class BackgroundTask(Generic[T]):
    """Work in a background thread that its owner can stop waiting for."""

    def __init__(self, work: Callable[["BackgroundTask[T]"], T], deadline: float) -> None:
        """Start `work`. It calls `remaining_s` between its steps. `deadline` is on the monotonic clock."""
        self.deadline = deadline
        self.stage = "the store has not answered"  # what is missing, if this is as far as it gets
        self._work = work
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._abandoned = False
        self._result: T | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="midstep-connect", daemon=True).start()

    def _run(self) -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = self._work(self)
        except Exception as caught:  # handed to the owner
            error = caught
        with self._lock:
            if not self._abandoned:
                self._result, self._error = result, error
                self._over.set()
        # An unwanted result is dropped here: destroying a gloo group may block for as long as its timeout.

    def remaining_s(self) -> float:
        """Return the seconds left. Raises Abandoned once nobody waits, or no time is left."""
        left_s = self.deadline - time.monotonic()
        if self._abandoned or left_s <= 0:
            raise Abandoned
        return left_s

    def abandon(self) -> None:
        """Wake the owner, and throw away what comes. Any thread."""
        with self._lock:
            self._abandoned = True
            self._over.set()

    def result(self) -> T:
        """Wait for the result until the deadline. Raises Abandoned, TimeoutError with the stage, or what the work
        raised."""
        in_time = self._over.wait(max(0.0, self.deadline - time.monotonic()))
        with self._lock:
            if self._abandoned:
                raise Abandoned
            if not in_time and not self._over.is_set():
                self._abandoned = True
                raise TimeoutError(self.stage)
            if isinstance(self._error, Abandoned):
                raise TimeoutError(self.stage)
            if self._error is not None:
                raise self._error
            result, self._result = self._result, None
        assert result is not None
        return result


class StoreConnection:
    """A connection to the store. It is kept from generation to generation, as long as nothing goes wrong with it."""

    def __init__(self, endpoint: StoreEndpoint, limit_s: float) -> None:
        """Connect within `limit_s`. Raises RuntimeError (torch's). Only in a thread of its own, see names."""
        limit_dns_in_this_thread()
        self.endpoint = StoreEndpoint(endpoint.host, endpoint.port)
        self.store = TCPStore(
            endpoint.host,
            endpoint.port,
            is_master=False,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
        )

    def reaches(self, endpoint: StoreEndpoint) -> bool:
        """Say whether `endpoint` is at the other end, and still there."""
        if (self.endpoint.host, self.endpoint.port) != (endpoint.host, endpoint.port):
            return False
        try:
            self.store.check([_KNOCK])
        except Exception:  # torch's, of whatever kind; another connection is made then
            return False
        return True


class GenerationStore:
    """The place in the store where the members of a generation meet, and from which their groups are built."""

    def __init__(
        self, connection: StoreConnection, rendezvous: Rendezvous, generation: int, collective_s: float
    ) -> None:
        """Meet over `line`."""
        self.connection = connection
        self.authenticator = Authenticator(rendezvous, generation)
        self._collective_s = collective_s

    def with_prefix(self, name: str) -> AuthenticatedStore:
        """Return a part of the store that only the members of the generation can use."""
        return AuthenticatedStore(self.connection.store, self.connection.endpoint, self.authenticator, name)

    def exchange(
        self, task: BackgroundTask[Any], name: str, members: Sequence[int], rank: int, word: T, *, missing: str
    ) -> list[T]:
        """Leave `word` for the other members and return everybody's, in their order.

        `missing`: what to say of a member that does not come. Raises Abandoned when the task is over, LinkUpFailed
        when the store fails or holds what is no word.
        """
        store = self.with_prefix(name)
        store.set(_member_key(rank), messages.encode(word))
        heard = {rank: word}
        for member in members:
            if member == rank:
                continue
            task.stage = f"rank {member} {missing}"
            try:
                store.wait([_member_key(member)], timedelta(seconds=task.remaining_s()))
            except dist.DistStoreError as error:  # torch's word for a timeout
                raise Abandoned from error
            try:
                heard[member] = messages.decode(store.get(_member_key(member)), type(word))
            except ValueError as error:
                raise store.refuse(_member_key(member), str(error)) from error
        task.stage = f"group {name} is not connected"
        return [heard[member] for member in members]

    def connect(self, name: str, group_rank: int, size: int, links: Links, limit_s: float) -> GlooBackend:
        """Build the gloo group `name`, all members of which have exchanged messages. Raises RuntimeError (torch's)."""
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [links.device]
        options._timeout = timedelta(seconds=limit_s)  # of the connecting
        store = self.with_prefix(name)
        gloo = dist.ProcessGroupGloo(store, group_rank, size, options)
        gloo._set_default_timeout(timedelta(seconds=self._collective_s))  # of the collectives
        process_group = dist.ProcessGroup(store, group_rank, size)
        process_group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        process_group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        process_group._set_group_name(c10d.GroupName(name))
        return GlooBackend(process_group, gloo, store)


def _member_key(rank: int) -> str:
    return f"member/{rank}"
