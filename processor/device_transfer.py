"""Transfer shards from device to device, over the links that collectives use, without a copy on the hosts.

In round k a rank sends and receives chunk k of all its transfers as one batch, which starts as a whole: rank A's batch
k waits only for batches of its peers with the same number, and those only for earlier ones, so none waits in a circle.
What is in one tensor of the device moves to and from its own memory, all else through staging on the device.

Nothing hashes on a device. The checksum of a range is the sum of its 32-bit words for each 64 KiB; it is made on both
devices and compared over the hosts, so that a link that changes bytes does not carry the proof as well.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..communicators.base import DeviceLinks, DeviceMessage, Transfer
from .chunks import Chunk, TransferEnd
from .letters import Letters

IN_FLIGHT = 16  # batches under way at once: each may need staging
BLOCK_WORDS = 16 * 1024
_WORD_BYTES = 4


def move_over_devices(ends: Sequence[TransferEnd], links: DeviceLinks, letters: Letters) -> None:
    """Move all ranges, in rounds. Runs in repair, in the train thread of all ranks that have a part.

    `ends` are in the order that all ranks keep; their memory is at home on the device. Raises ChecksumMismatch, when
    all are done, and whatever links, letters and the device raise.
    """
    ranges = [_Range(end, links.device_type) for end in ends]
    under_way: deque[_Batch] = deque()
    for index in range(max((item.rounds for item in ranges), default=0)):
        if len(under_way) == IN_FLIGHT:
            under_way.popleft().complete()
        messages = [(item, item.message(index)) for item in ranges if index < item.rounds]
        under_way.append(_Batch(index, messages, links.exchange([message for _, message in messages])))
    while under_way:
        under_way.popleft().complete()
    for item in ranges:
        if item.end.sending:
            letters.send(item.checksum(), item.end.peer)
    changed = [
        item.end
        for item in ranges
        if not item.end.sending
        and letters.receive(item.end.peer, f"the checksum of shard {item.end.transfer.shard_id!r}") != item.checksum()
    ]
    letters.finish()
    if changed:
        raise changed[0].changed()


@dataclass(frozen=True)
class _Batch:
    """Messages under way together: chunk `index` of each range that has so many. It keeps their memory."""

    index: int
    messages: list[tuple["_Range", DeviceMessage]]
    transfer: Transfer

    def complete(self) -> None:
        """Wait for it, and take in what came. On a device it is the device that waits, before what it does next."""
        self.transfer.wait()
        for item, message in self.messages:
            item.arrived(self.index, message.tensor)


class _Range:
    """One transfer under way: its chunks in order, and the sums of those that have moved."""

    def __init__(self, end: TransferEnd, device_type: str) -> None:
        self.end = end
        self._device_type = device_type
        self._chunks = end.chunks()
        self._staging: dict[int, Any] = {}
        self._sums: list[torch.Tensor] = []

    @property
    def rounds(self) -> int:
        """How many chunks there are."""
        return len(self._chunks)

    def message(self, index: int) -> DeviceMessage:
        """Return chunk `index`, to be sent or received."""
        chunk = self._chunks[index]
        buffer = self.end.memory.direct(chunk)
        if buffer is None:
            buffer = self._stage(index, chunk)
            if self.end.sending:
                self.end.memory.gather(chunk, buffer)
        if self.end.sending:
            self._sums.append(sums(buffer))
        return DeviceMessage(buffer, self.end.peer, self.end.sending)

    def arrived(self, index: int, buffer: torch.Tensor) -> None:
        """Take in chunk `index`, if it was to be received."""
        if self.end.sending:
            return
        self._sums.append(sums(buffer))
        chunk = self._chunks[index]
        if self.end.memory.direct(chunk) is None:
            self.end.memory.scatter(chunk, buffer)

    def checksum(self) -> bytes:
        """Return the sums of all chunks, as this end has them. Waits for the device."""
        return torch.cat(self._sums).cpu().numpy().tobytes() if self._sums else b""

    def _stage(self, index: int, chunk: Chunk) -> torch.Tensor:
        place = index % IN_FLIGHT  # its last user is done when this one is posted
        held = self._staging.get(place)
        if held is None or len(held) < chunk.length:
            held = self._staging[place] = torch.empty(chunk.length, dtype=torch.uint8, device=self._device_type)
        return held[: chunk.length]


def sums(data: torch.Tensor) -> torch.Tensor:
    """Return the sums of the 32-bit words of flat bytes, one for each 64 KiB and one for the rest, on their device."""
    length, ragged = len(data), len(data) % _WORD_BYTES
    if ragged or data.storage_offset() % _WORD_BYTES:
        whole = data.new_zeros(length + (_WORD_BYTES - ragged) % _WORD_BYTES)
        whole[:length] = data
        data = whole
    words = data.view(torch.int32)
    end = len(words) - len(words) % BLOCK_WORDS
    blocks = words[:end].view(-1, BLOCK_WORDS).sum(dim=1, dtype=torch.int64)
    return torch.cat((blocks, words[end:].sum(dtype=torch.int64).view(1)))
