"""Hashes of tensors, by which ranks compare what they hold: xxh3 on the host, and sums of products on a device.

A device has no xxh3, and to hash there what lies there saves its copy to the host. So a job on a device hashes by
operators that every torch has, with the same bits on each device and on the CPU. It does so for all tensors, wherever
they lie: ranks may hold one shard in different places (a peer copy in host memory, a value that a repair has brought).

The bytes of a tensor are read as words of 64 bits, and a block has 65,536 of them. Of the words x of a block two sums
are taken, modulo 2^64: of x * k and of (x >> 32) * m, where >> keeps the sign. The weights k and m are fixed random
numbers, one of each for each place in a block, and k is odd. The hash is the xxh3 of the sums of all blocks, and of the
lengths of the tensors. A tensor begins with whole blocks; what is left of each, filled up with zeros to whole words, is
packed into further blocks, behind all others. Decision 0246 says what this finds, and what it may miss.
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ..communicators.host_memory import TORCH, flat_view, memory_of, on_host
from ..devices.kinds import device_kind
from . import tree

if TYPE_CHECKING:
    import torch

BLOCK_WORDS = 1 << 16
_WORD_BYTES = 8
BLOCK_BYTES = BLOCK_WORDS * _WORD_BYTES
PIECE_BYTES = 32 * BLOCK_BYTES  # taken at once: memory on the device is a small multiple of it


def hashes(groups: "Sequence[Sequence[torch.Tensor]]") -> list[int]:
    """Hash each group of tensors, as the device of the job wants it. In the train thread; waits for the device.

    Only hashes from one job can be compared. Raises what the device raises.
    """
    device = _device_of_job()
    return [_host_hash(group) for group in groups] if device is None else device_hashes(groups, device)


def device_hashes(groups: "Sequence[Sequence[torch.Tensor]]", device: "torch.device") -> list[int]:
    """Hash each group of tensors on a device; they may lie elsewhere. One transfer to the host, of all sums."""
    adder = _Adder(device)
    ends = []
    for group in groups:
        adder.add(group)
        ends.append(adder.blocks)
    sums, found, begin = adder.sums(), [], 0
    for group, end in zip(groups, ends, strict=True):
        lengths = np.array([tensor.nbytes for tensor in group], np.uint64)
        found.append(xxhash.xxh3_64_intdigest(lengths.tobytes() + sums[begin:end].tobytes()))
        begin = end
    return found


def _device_of_job() -> "torch.device | None":
    """Return the device that hashes; None: the host does."""
    from .runtime import Runtime  # a process that writes shards to disk has none

    runtime = Runtime.current()
    if TORCH is None or runtime is None or not device_kind(runtime.device.name).memory_of_its_own:
        return None
    return runtime.device.torch_device


def _host_hash(tensors: "Sequence[torch.Tensor]") -> int:
    found = xxhash.xxh3_64()
    for tensor in tensors:
        found.update(memory_of(tree.tensor_bytes(tensor)))
    return found.intdigest()


@cache
def _weights() -> Any:
    """Return the weights k and m: numbers of SplitMix64, begun with 0.

    They stay on the host and go to the device for each hash. There they would have to outlive errors of its memory.
    """
    found = np.arange(1, 2 * BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found ^= found >> np.uint64(31)
    found[:BLOCK_WORDS] |= np.uint64(1)
    return found.view(np.int64).reshape(2, BLOCK_WORDS)


def _flat(tensor: "torch.Tensor") -> Any:
    """Return the bytes of a tensor where it lies: a view, or a copy of one that is not contiguous."""
    return flat_view(tensor.detach().contiguous().reshape(-1))


class _Adder:
    """Takes the sums of blocks, and leaves them on the device until all are there."""

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._weights = TORCH.from_numpy(_weights()).to(device)
        self._zeros = TORCH.zeros(_WORD_BYTES, dtype=TORCH.uint8, device=device)
        self._room = TORCH.empty(0, dtype=TORCH.int64, device=device)  # for products; small sums would fragment others
        self._sums: list[Any] = []  # by turns: of x * k, and of (x >> 32) * m
        self._rests: list[Any] = []  # of tensors, to be packed: whole words
        self._rest_bytes = 0
        self.blocks = 0

    def add(self, group: "Sequence[torch.Tensor]") -> None:
        """Take a group of tensors in. They may have any shape and dtype."""
        for tensor in group:
            data = _flat(tensor)
            whole = len(data) - len(data) % BLOCK_BYTES
            for start in range(0, whole, PIECE_BYTES):
                self._add_bytes(data[start : min(start + PIECE_BYTES, whole)])
        for tensor in group:
            data = _flat(tensor)
            self._pack(data[len(data) - len(data) % BLOCK_BYTES :])
            if self._rest_bytes >= PIECE_BYTES:
                packed = self._packed()
                end = len(packed) - len(packed) % BLOCK_BYTES
                self._add_bytes(packed[:end])
                self._rests, self._rest_bytes = [packed[end:].clone()], len(packed) - end
        if self._rest_bytes:
            self._add_bytes(self._packed())
        self._rests, self._rest_bytes = [], 0

    def sums(self) -> Any:
        """Return the sums of all blocks, a row for each. Waits for the device."""
        if not self._sums:
            return np.empty((0, 2), np.int64)
        return TORCH.stack((TORCH.cat(self._sums[::2]), TORCH.cat(self._sums[1::2])), dim=1).cpu().numpy()

    def _pack(self, rest: "torch.Tensor") -> None:
        gap = -len(rest) % _WORD_BYTES
        self._rests += [part for part in (rest, self._zeros[:gap]) if len(part)]
        self._rest_bytes += len(rest) + gap

    def _packed(self) -> Any:
        """Return all rests as flat bytes on the device. Those that lie elsewhere come there together."""
        away = [place for place, rest in enumerate(self._rests) if rest.device != self._zeros.device]
        if away:
            host = [rest if on_host(rest) else rest.cpu() for rest in map(self._rests.__getitem__, away)]
            arrived = TORCH.cat(host).to(self._device).split([len(rest) for rest in host])
            for place, rest in zip(away, arrived, strict=True):
                self._rests[place] = rest
        return TORCH.cat(self._rests)

    def _add_bytes(self, data: "torch.Tensor") -> None:
        """Take the sums of flat bytes, whole words; the last block need not be whole, which is as if zeros followed."""
        data = data.to(self._device)
        words = (data.clone() if data.storage_offset() % _WORD_BYTES else data).view(TORCH.int64)
        whole = len(words) - len(words) % BLOCK_WORDS
        if whole:
            self._add_rows(words[:whole].view(-1, BLOCK_WORDS))
        if whole < len(words):
            self._add_rows(words[whole:].view(1, -1))

    def _add_rows(self, blocks: "torch.Tensor") -> None:
        weights, upper_weights = self._weights[:, : blocks.shape[1]]
        upper = blocks.view(TORCH.int32)[:, 1::2]  # the halves of a word that hold its sign: devices are little-endian
        if len(self._room) < blocks.numel():
            self._room = blocks.new_empty(blocks.numel())
        products = self._room[: blocks.numel()].view(blocks.shape)
        self._sums.append(TORCH.mul(blocks, weights, out=products).sum(dim=1))
        self._sums.append(products.copy_(upper).mul_(upper_weights).sum(dim=1))  # the CPU would convert beside it
        self.blocks += len(blocks)
