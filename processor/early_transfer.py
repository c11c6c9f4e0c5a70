"""Shards that move early: in a thread beside the link-up of all groups, over links between single pairs of ranks.

The two ends of a transfer are often ready long before the last group of the last rank is. Each rank decides for itself
whether it moves its shards early, and the communicator's link-up says whether all have: then repair waits for what is
left of it and adopts the shards; else it is ended, and repair moves everything in the ordinary way. That is known for
sure on all ranks once the groups are up, so no two ends can wait for each other in different ways.

A shard arrives early only in memory whose content counts as lost. If the link-up fails, nothing else is lost with it.
"""

import threading
from collections.abc import Container
from typing import TYPE_CHECKING

import msgspec

from ..communicators.base import PairLinking, PairLinks
from ..protocol.errors import CommunicatorAborted, RecoveryError
from ..protocol.messages import Rejoin
from ..protocol.types import InjectionPoint, RepairLinks, RepairPart, RestoreSource
from .framework import Concurrent, Informed
from .host_transfer import IN_FLIGHT_OF_PAIR
from .transfer import Arrived, move, open_sources

if TYPE_CHECKING:
    from .framework import Framework, OpenShard
    from .runtime import Runtime

STOP_S = 10.0  # for a thread that moves, and whose links were aborted; a chunk takes milliseconds
LEAVE_S = (
    0.1  # for one that has moved nothing: the store may keep it for as long as a link-up, and it touches no tensor
)


class EarlyTransfer:
    """The thread that moves this rank's shards of one generation. It owns the links, and closes them."""

    def __init__(
        self, links: PairLinks, part: RepairPart, opened: "dict[str, OpenShard]", *, rank: int, framework: "Framework"
    ) -> None:
        """Start to find the peers, and to move what `opened` holds and what the part brings."""
        self._links = links
        self._part = part
        self._opened = opened
        self._rank = rank
        self._framework = framework
        self._lock = threading.Lock()
        self._given_up = False
        self._moving = False  # from here on tensors are touched
        self._arrived: Arrived | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="midstep-early", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        peers = {t.destination if t.source == self._rank else t.source for t in self._part.transfers}
        try:
            self._links.connect(sorted(peers))
            with self._lock:
                if self._given_up:
                    return
                self._moving = True
            self._arrived = move(
                self._part,
                self._opened,
                rank=self._rank,
                framework=self._framework,
                links=self._links,
                in_flight=IN_FLIGHT_OF_PAIR,
            )
        except Exception as error:  # raised in repair; an allocation or a device can raise anything
            self._error = error
        finally:
            self._links.close()

    @property
    def agreed(self) -> bool:
        """Whether all ranks move their shards early, once the groups are connected."""
        return self._links.agreed

    def result(self) -> Arrived:
        """Wait for what arrives, as long as the links do. Raises what `move` has raised in the thread."""
        self._thread.join()
        error, self._error = self._error, None  # its frames refer to this, and to sockets and tensors
        if error is not None:
            raise error
        assert self._arrived is not None
        return self._arrived

    def stop(self) -> None:
        """End it: after this the thread touches no tensor. Raises RecoveryError if it cannot be stopped."""
        with self._lock:
            self._given_up = True
        self._links.abort("the early transfer was given up")
        self._thread.join(STOP_S if self._moving else LEAVE_S)
        if self._moving and self._thread.is_alive():
            raise RecoveryError(
                f"rank {self._rank}: the thread that moves shards early has not ended within {STOP_S:g} s after its "
                "links were aborted, so this process cannot be recovered; midstep replaces it"
            )
        self._error = None


class EarlyTransfers:
    """The early transfers of one process, one for each attempt at most. Used by the train thread."""

    def __init__(self, runtime: "Runtime", framework: "Framework") -> None:
        self._runtime = runtime
        self._framework = framework
        self._under_way: EarlyTransfer | None = None
        self._has_failed = False  # since the last repair that succeeded

    def begin(self, order: Rejoin, held: Container[str]) -> None:
        """Start to move this rank's shards, if that may be done early. At the start of rebuild, on all ranks.

        `held` are the shards that this rank has reported as whole.
        """
        runtime, communicator, part = self._runtime, self._runtime.communicator, order.part
        if not isinstance(communicator, PairLinking) or not self._may(order, held):
            return
        opened = open_sources(part, rank=runtime.rank, framework=self._framework)
        links = communicator.open_pairs(order.generation, order.store, runtime.settings.link_up_s)
        if runtime.interrupted():  # the abort of the next generation came before there was anything to abort
            links.abort("the next generation is being opened")
        if part.transfers:
            shards = msgspec.structs.replace(part, local_states=())
            self._under_way = EarlyTransfer(links, shards, opened, rank=runtime.rank, framework=self._framework)

    def agreed(self) -> bool:
        """Return whether shards of this rank move early. In repair. If not all ranks do the same, end it before."""
        if self._under_way is None:
            return False
        if not self._under_way.agreed:
            self._runtime.debug_log.note("not all ranks move shards early, so all of them move in repair")
            self.stop()
            return False
        return True

    def arrived(self) -> Arrived:
        """Wait for what is left of the transfer, and return what has arrived. In repair, where it is `agreed`.

        Raises what the transfer has raised; this process then moves nothing early until a repair has succeeded.
        """
        assert self._under_way is not None
        try:
            arrived = self._under_way.result()
        except CommunicatorAborted:
            raise
        except Exception:
            self._has_failed = True
            raise
        self._under_way = None
        self._runtime.debug_log.note(f"shards have moved early, {arrived.received.bytes_received} bytes to this rank")
        return arrived

    def succeeded(self) -> None:
        """Take note that state was repaired, in whatever way."""
        self._has_failed = False

    def stop(self) -> None:
        """End what is under way when an attempt has failed. Raises RecoveryError if it cannot be ended."""
        if self._under_way is not None:
            self._under_way.stop()
            self._under_way = None
            self._runtime.debug_log.note("what was moving early was given up")

    def _may(self, order: Rejoin, held: Container[str]) -> bool:
        """Return whether this rank has nothing against moving its shards early, or has none to move."""
        part, rank, framework = order.part, self._runtime.rank, self._framework
        if order.connected or part.restore is RestoreSource.CHECKPOINT or part.links is not RepairLinks.HOST:
            return False
        if not part.transfers:
            return True
        replaced = self._runtime.callbacks.replaced
        if replaced(InjectionPoint.REBUILD) or replaced(InjectionPoint.REPAIR):
            return False  # theirs is what happens, and when
        if isinstance(framework, Informed) or not (isinstance(framework, Concurrent) and framework.moves_early):
            return False
        arriving = {transfer.shard_id for transfer in part.transfers if transfer.destination == rank}
        return not self._has_failed and not any(shard_id in held for shard_id in arriving)
