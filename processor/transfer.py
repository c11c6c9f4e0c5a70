"""Bring lost state from the ranks that have it to those that need it, by the repair plan.

How the ranges of a shard move is in `range_transfer.py`, and between processes of one host in `process_memory.py`.
Everything small (headers, local states) goes from host to host before them, and no rank waits before it has sent all of
its own. Every wait ends with the communicator's own deadline, or when it is aborted.

Shards can move early, in a thread beside the link-up of all groups and over links between single pairs of ranks: the
two ends of a transfer are often ready long before the last group of the last rank is. Each rank decides for itself
whether it moves its shards early, and the communicator's link-up says whether all have. If so, repair waits for what is
left of it and adopts the shards; else it is ended, and repair moves everything in the ordinary way. All ranks know
which for sure once the groups are up, so no two ends can wait for each other in different ways. A shard arrives early
only in memory whose content counts as lost: if the link-up fails, nothing else is lost with it.
"""

import dataclasses
import threading
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from ..communicators.base import DeviceLinks, PairLinking, PairLinks
from ..protocol.errors import CommunicatorAborted, RecoveryError, StateLost
from ..protocol.messages import Rejoin
from ..protocol.types import InjectionPoint, LocalStateTransfer, RepairLinks, RepairPart, ShardTransfer
from . import range_transfer as ranges
from .framework import Concurrent, Framework, Informed, OpenShard
from .process_memory import MemoryReads, this_host
from .step_order import STORED

if TYPE_CHECKING:
    from .runtime import Runtime

ReadOwnState = Callable[[int, int], bytes | None]
STOP_S = 10.0  # for a thread that moves, and whose links were aborted; a chunk takes milliseconds
LEAVE_S = 0.1  # for one that has moved nothing, and touches no tensor: the store may keep it as long as a link-up


class Accepting(Protocol):
    """The part of a framework that says where a shard arrives."""

    def accept_shard(self, shard_id: str, header: bytes) -> OpenShard:
        """As `Framework.accept_shard`."""
        ...


@dataclasses.dataclass(frozen=True)
class Transferred:
    """The result of a transfer: the bytes received, and this rank's local state if the plan brings it."""

    bytes_received: int
    local_state: bytes | None
    bytes_over_devices: int = 0  # of those received
    bytes_read: int = 0  # of those received, out of the memory of other processes of this host

    @property
    def text(self) -> str:
        """Describe the way that was taken."""
        ways = f"{self.bytes_over_devices} of them over the devices, {self.bytes_read} read from a process of this host"
        return f"{self.bytes_received} bytes to this rank, {ways}"


@dataclasses.dataclass(frozen=True)
class Arrived:
    """Shards that have arrived whole, with the right checksums, and are not adopted yet."""

    shards: dict[str, OpenShard]
    received: Transferred


def run_transfers(
    part: RepairPart,
    *,
    rank: int,
    framework: Framework,
    links: ranges.PeerLinks,
    read_local_state: ReadOwnState,
    sent: Callable[[dict[str, OpenShard]], dict[str, OpenShard]] = lambda opened: opened,
) -> Transferred:
    """Carry out this rank's part of the plan. Runs in repair, in the train thread, on all ranks that have a part.

    `read_local_state(rank, step)` reads a copy of a local state from the black box here. `sent` may return other shards
    than those that are held here (`midstep inject --flip repair`). Shards that arrived whole
    are adopted before this returns. Raises ChecksumMismatch (naming shard, range and source), StateLost when a copy
    that the plan counts on is gone, RecoveryError when plan and shard do not fit, and whatever the links raise.
    """
    opened = sent(open_sources(part, rank=rank, framework=framework))
    arrived = move(part, opened, rank=rank, framework=framework, links=links, read_local_state=read_local_state)
    adopt(arrived, framework)
    return arrived.received


def open_sources(part: RepairPart, *, rank: int, framework: Framework) -> dict[str, OpenShard]:
    """Open the shards that this rank sends. In the train thread: a script's own code may be asked what it holds."""
    return {t.shard_id: framework.open_shard(t.shard_id) for t in part.transfers if t.source == rank}


def move(
    part: RepairPart,
    opened: dict[str, OpenShard],
    *,
    rank: int,
    framework: Accepting,
    links: ranges.PeerLinks,
    read_local_state: ReadOwnState | None = None,
    in_flight: int | None = None,
) -> Arrived:
    """Send what is `opened`, and receive what the part brings; `in_flight` as `move_over_hosts`, raises as
    `run_transfers`.

    Runs in repair, or, for shards alone, in a thread beside the link-up: then of the framework only `accept_shard` is
    called, and only the memory of these shards is touched.
    """
    transfers = sorted(part.transfers, key=lambda t: (t.shard_id, t.destination, t.offset_bytes, t.source))
    received = [t for t in transfers if t.source != rank]
    local_states = sorted(part.local_states, key=lambda t: (t.rank, t.source))
    letters = ranges.Letters(rank, links)
    device_links = links if part.links is RepairLinks.DEVICE and isinstance(links, DeviceLinks) else None
    home = ranges.HOST if device_links is None else device_links.device_type
    readable = transfers if device_links is None else ()
    reads = MemoryReads(rank, readable, ranges.Letters(rank, links), host=this_host())
    reads.greet()
    # The header comes with the first byte; a part holds only this rank's transfers, so it is a rule.
    headers = [t for t in transfers if t.offset_bytes == 0]
    for transfer in headers:
        if transfer.source == rank:
            letters.send(opened[transfer.shard_id].header, transfer.destination)
    own = None
    if read_local_state is not None:
        own = _local_states(local_states, rank, part.target_step, letters, read_local_state)
    ends = _ends(rank, [t for t in transfers if t.source == rank], opened, home)
    reads.offer(ends.values())
    arriving = [
        (t.shard_id, letters.receive(t.source, f"the header of shard {t.shard_id!r}"))
        for t in headers
        if t.destination == rank
    ]
    for item in local_states:
        if item.rank == rank and item.source != rank:
            own = letters.receive(item.source, f"the rank-local state of rank {rank}")
    reads.answer()  # before memory is found for what arrives: its source hashes meanwhile
    accepted = {shard_id: framework.accept_shard(shard_id, header) for shard_id, header in arriving}
    letters.finish()
    _covered(received, rank, accepted)
    ends |= _ends(rank, received, accepted, home)
    reads.move(ends.values())
    if device_links is None:
        ranges.move_over_hosts([ends[t] for t in transfers if t not in reads.moved], links, in_flight)
        if reads.changed:
            raise reads.changed[0].changed()
    else:
        ranges.move_over_devices([ends[t] for t in transfers], device_links, letters)
    moved = sum(t.length_bytes for t in received)
    over_devices = 0 if device_links is None else moved
    return Arrived(accepted, Transferred(moved + letters.bytes_received, own, over_devices, reads.bytes_read))


def adopt(arrived: Arrived, framework: Framework) -> None:
    """Make the shards that have arrived the state of this rank. In repair, in the train thread."""
    for shard_id, shard in arrived.shards.items():
        framework.adopt_shard(shard_id, shard)


def _local_states(
    items: Sequence[LocalStateTransfer], rank: int, step: int, letters: ranges.Letters, read: ReadOwnState
) -> bytes | None:
    """Send the rank-local states that others lost; return this rank's own if it is here."""
    mine = None
    for item in items:
        if item.source != rank:
            continue
        origin = item.rank if item.origin is None else item.origin
        blob = read(origin, step)
        if blob is None:
            raise StateLost(
                f"the plan takes rank {origin}'s local state of step {step} from the black box of rank {rank}, "
                "but it is not there, or was torn while it was written"
            )
        if item.rank == rank:
            mine = blob
        else:
            letters.send(blob, item.rank)
    return mine


def _ends(
    rank: int, transfers: Sequence[ShardTransfer], shards: dict[str, OpenShard], home: str
) -> dict[ShardTransfer, ranges.TransferEnd]:
    """Return this rank's ends of transfers of these shards."""
    memories = {shard_id: ranges.ShardMemory(shard.tensors, home) for shard_id, shard in shards.items()}
    return {t: ranges.TransferEnd(t, rank, memories[t.shard_id]) for t in transfers}


def _covered(received: Sequence[ShardTransfer], rank: int, accepted: dict[str, OpenShard]) -> None:
    """Raise RecoveryError where what is received leaves holes in a shard."""
    for shard_id, shard in accepted.items():
        planned = sum(t.length_bytes for t in received if t.shard_id == shard_id)
        held = sum(tensor.nbytes for tensor in shard.tensors)
        if planned != held:
            raise RecoveryError(
                f"the repair plan moves {planned} bytes of shard {shard_id!r} to rank {rank}, but its source says that "
                f"it has {held}; do all ranks hold the same state?"
            )


class EarlyTransfer:
    """The thread that moves this rank's shards of one generation. It owns the links, and closes them."""

    def __init__(
        self, links: PairLinks, part: RepairPart, opened: dict[str, OpenShard], *, rank: int, framework: Framework
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
                in_flight=ranges.IN_FLIGHT_OF_PAIR,
            )
        except Exception as error:  # raised in repair; an allocation or a device can raise anything
            self._error = error
        finally:
            self._links.close()

    @property
    def agreed(self) -> bool:
        """True if all ranks move their shards early, once the groups are connected."""
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

    def __init__(self, runtime: "Runtime", framework: Framework) -> None:
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
        opened = runtime.injection_points.sent(open_sources(part, rank=runtime.rank, framework=self._framework))
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
        self._runtime.debug_log.note(f"shards have moved early, {arrived.received.text}")
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
        if order.connected or part.restore in STORED or part.links is not RepairLinks.HOST:
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
