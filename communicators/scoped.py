"""The base of every communicator: one scope for each generation, and the attempt that opens it.

A subclass says how the links of a generation come up (`_link_up`), how what is under way is cut (`_cut`), and what is
left of an attempt that failed (`_give_up`). When they may run, and what their callers hear, is decided here.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from ..protocol.errors import CommunicatorAborted, CommunicatorFailed, LinkUpFailed
from ..protocol.types import Rendezvous
from .background import BackgroundTask
from .base import CollectiveObserver, ContributionListener
from .generation_scope import GenerationScope, error_text

T = TypeVar("T")


class ScopedCommunicator:
    """See Communicator."""

    name = ""

    def __init__(self) -> None:
        self.generation = 0
        self.observer: CollectiveObserver | None = None
        self.listener: ContributionListener | None = None
        self._lock = threading.RLock()  # held by an abort until the links are down
        self._scope = GenerationScope(self._cut)
        self._store: Rendezvous | None = None
        self._task: BackgroundTask[Any] | None = None
        self._rank = 0
        self._members: tuple[int, ...] = ()
        self._collective_s = self._link_up_s = 0.0

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
        """Make the default process group; connect it if there is a `store`."""
        self._rank = rank
        self._members = tuple(range(world_size))
        self._collective_s, self._link_up_s = collective_s, link_up_s
        self.generation = generation
        self._make_world(timedelta(seconds=collective_s))
        if store is not None:
            self.reconnect(generation, store, link_up_s)

    def abort(self, reason: str) -> None:
        """End all collectives, and a reconnect that is under way."""
        with self._lock:
            self._scope.end(CommunicatorAborted, reason)
            self._cut()

    def reconnect(self, generation: int, store: Rendezvous, link_up_s: float) -> None:
        """Connect to the members of `generation`, and check the links."""
        deadline = time.monotonic() + link_up_s
        old = self._scope
        if old.end(CommunicatorAborted, f"generation {generation} began"):
            self._cut()
        scope = GenerationScope(self._cut)
        with self._lock:
            self.generation, self._scope, self._store = generation, scope, store
        try:
            self._link_up(generation, store, scope, deadline, old)
        except Exception as error:  # what a store sends can make torch's C++ raise errors of any kind
            text = str(error) if isinstance(error, LinkUpFailed) else error_text(error)
            what = f"generation {generation} was not linked up within {link_up_s:g} s: {text}"
            scope.end(CommunicatorFailed, what)
            self._cut()
            self._give_up(scope)
            if scope.aborted:
                raise scope.error("reconnect") from None
            raise LinkUpFailed(f"rank {self._rank}: {what}") from error
        finally:
            self._task = None
        if scope.reason is not None:
            raise scope.error("reconnect")

    def watch(self, observer: CollectiveObserver | None) -> None:
        """Report the collectives from now on to `observer`."""
        self.observer = observer

    def _in_background(
        self, work: Callable[[BackgroundTask[T]], T], scope: GenerationScope, deadline: float
    ) -> BackgroundTask[T]:
        """Start `work` as the attempt of `scope`, which an abort abandons."""
        task = BackgroundTask(work, deadline)
        with self._lock:
            self._task = task
            if scope.reason is not None:
                task.abandon()
        return task

    # --- what a subclass adds ---------------------------------------------------------------------------------------

    def _make_world(self, timeout: timedelta) -> None:
        """Make the default process group, where torch.distributed knows of one."""

    def _link_up(
        self, generation: int, store: Rendezvous, scope: GenerationScope, deadline: float, old: GenerationScope
    ) -> None:
        """Connect all groups in `scope`, until `deadline` on the monotonic clock. Raises whatever goes wrong."""
        raise NotImplementedError

    def _cut(self) -> None:
        """End what is under way. Any thread; also when nothing is."""
        raise NotImplementedError

    def _give_up(self, scope: GenerationScope) -> None:
        """Leave what an attempt has built that failed. `scope` is over."""
