"""Bring lost state from the ranks that have it to those that need it, by the repair plan.

A shard is one run of bytes: its tensors, one behind the other. A transfer moves a range of it, from host to host
(`host_transfer.py`) or from device to device (`device_transfer.py`), as the plan says. Everything small (headers, local
states) goes from host to host before, and no rank waits before it has sent all of its own.

Every wait ends with the communicator's own deadline, or when it is aborted.
"""

import dataclasses
from collections.abc import Callable, Sequence

from ..communicators.base import DeviceLinks
from ..protocol.errors import RecoveryError, StateLost
from ..protocol.types import LocalStateTransfer, RepairLinks, RepairPart, ShardTransfer
from .chunks import HOST, ShardMemory, TransferEnd
from .framework import Framework, OpenShard
from .host_transfer import move_over_hosts
from .letters import Letters, PeerLinks

ReadOwnState = Callable[[int, int], bytes | None]


@dataclasses.dataclass(frozen=True)
class Transferred:
    """What was received: the bytes of all, and this rank's local state if the plan brings it."""

    bytes_received: int
    local_state: bytes | None
    bytes_over_devices: int = 0  # of those received


@dataclasses.dataclass(frozen=True)
class Arrived:
    """What has arrived whole, with the right checksums, and is not adopted yet."""

    shards: dict[str, OpenShard]
    received: Transferred


def run_transfers(
    part: RepairPart, *, rank: int, framework: Framework, links: PeerLinks, read_local_state: ReadOwnState
) -> Transferred:
    """Carry out this rank's part of the plan. Runs in repair, in the train thread, on all ranks that have a part.

    `read_local_state(rank, step)` reads a copy of a local state from the black box here. Shards that arrived whole
    are adopted before this returns. Raises ChecksumMismatch (naming shard, range and source), StateLost when a copy
    that the plan counts on is gone, RecoveryError when plan and shard do not fit, and whatever the links raise.
    """
    opened = open_sources(part, rank=rank, framework=framework)
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
    framework: Framework,
    links: PeerLinks,
    read_local_state: ReadOwnState | None = None,
    in_flight: int | None = None,
) -> Arrived:
    """Send what is `opened`, and receive what the part brings; `in_flight` as `move_over_hosts`, raises as
    `run_transfers`.

    Runs in repair, or, for shards alone, in a thread beside the link-up: then of the framework only `accept_shard` is
    called, and only the memory of these shards is touched.
    """
    transfers = sorted(part.transfers, key=lambda t: (t.shard_id, t.destination, t.offset_bytes, t.source))
    local_states = sorted(part.local_states, key=lambda t: (t.rank, t.source))
    letters = Letters(rank, links)
    # The header comes with the first byte; a part holds only this rank's transfers, so it is a rule.
    headers = [t for t in transfers if t.offset_bytes == 0]
    for transfer in headers:
        if transfer.source == rank:
            letters.send(opened[transfer.shard_id].header, transfer.destination)
    own = None
    if read_local_state is not None:
        own = _local_states(local_states, rank, part.target_step, letters, read_local_state)
    accepted = {
        t.shard_id: framework.accept_shard(t.shard_id, letters.receive(t.source, f"the header of shard {t.shard_id!r}"))
        for t in headers
        if t.destination == rank
    }
    for item in local_states:
        if item.rank == rank and item.source != rank:
            own = letters.receive(item.source, f"the rank-local state of rank {rank}")
    letters.finish()
    device_links = links if part.links is RepairLinks.DEVICE and isinstance(links, DeviceLinks) else None
    ends = _ends(transfers, rank, opened, accepted, HOST if device_links is None else device_links.device_type)
    if device_links is None:
        move_over_hosts(ends, links, in_flight)
    else:
        from .device_transfer import move_over_devices  # a job without a device need not have torch

        move_over_devices(ends, device_links, letters)
    moved = sum(t.length_bytes for t in transfers if t.destination == rank)
    received = Transferred(moved + letters.bytes_received, own, 0 if device_links is None else moved)
    return Arrived(accepted, received)


def adopt(arrived: Arrived, framework: Framework) -> None:
    """Make the shards that have arrived the state of this rank. In repair, in the train thread."""
    for shard_id, shard in arrived.shards.items():
        framework.adopt_shard(shard_id, shard)


def _local_states(
    items: Sequence[LocalStateTransfer], rank: int, step: int, letters: Letters, read: ReadOwnState
) -> bytes | None:
    """Send the rank-local states that others lost; return this rank's own if it is here."""
    mine = None
    for item in items:
        if item.source != rank:
            continue
        blob = read(item.rank, step)
        if blob is None:
            raise StateLost(
                f"the plan takes rank {item.rank}'s local state of step {step} from the black box of rank {rank}, "
                "but it is not there, or was torn while it was written"
            )
        if item.rank == rank:
            mine = blob
        else:
            letters.send(blob, item.rank)
    return mine


def _ends(
    transfers: Sequence[ShardTransfer],
    rank: int,
    opened: dict[str, OpenShard],
    accepted: dict[str, OpenShard],
    home: str,
) -> list[TransferEnd]:
    """Return this rank's ends of the transfers. Raises RecoveryError when they leave holes in a shard."""
    sources = {shard_id: ShardMemory(shard.tensors, home) for shard_id, shard in opened.items()}
    targets = {shard_id: ShardMemory(shard.tensors, home) for shard_id, shard in accepted.items()}
    _covered(transfers, rank, targets)
    return [TransferEnd(t, rank, (sources if t.source == rank else targets)[t.shard_id]) for t in transfers]


def _covered(transfers: Sequence[ShardTransfer], rank: int, targets: dict[str, ShardMemory]) -> None:
    for shard_id, memory in targets.items():
        planned = sum(t.length_bytes for t in transfers if t.destination == rank and t.shard_id == shard_id)
        if planned != memory.size_bytes:
            raise RecoveryError(
                f"the repair plan moves {planned} bytes of shard {shard_id!r} to rank {rank}, but its source says that "
                f"it has {memory.size_bytes}; do all ranks hold the same state?"
            )
