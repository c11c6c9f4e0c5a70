"""Hashes by which ranks compare what they hold: on a device the same bits as on the CPU, and what they find."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash

from midstep.devices import device_named
from midstep.devices.kinds import CPU, FAKE
from midstep.processor import tensor_hash
from midstep.processor.runtime import Runtime
from midstep.processor.shard import Shard, digests_of
from midstep.processor.tensor_hash import BLOCK_BYTES, BLOCK_WORDS, device_hashes, hashes

ON_CPU = torch.device("cpu")
MODULUS = 1 << 64
MIXED = (
    torch.arange(BLOCK_WORDS + 5, dtype=torch.float64),
    torch.tensor(-3.5),
    torch.arange(7, dtype=torch.bfloat16),
    torch.tensor([True, False, True]),
    torch.empty(0),
    torch.arange(12).to(torch.complex64).reshape(3, 4).T,
    torch.arange(2 * BLOCK_BYTES, dtype=torch.int64).to(torch.uint8)[3:-1],
)


def split_mix(place: int) -> int:
    """Return a number of SplitMix64 that was begun with 0."""
    found = place * 0x9E3779B97F4A7C15 % MODULUS
    found = (found ^ found >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    found = (found ^ found >> 27) * 0x94D049BB133111EB % MODULUS
    return found ^ found >> 31


WEIGHTS = [split_mix(place + 1) for place in range(2 * BLOCK_WORDS)]


def sums_of(data: bytes) -> list[int]:
    """Return the two sums of one block, in Python's own numbers."""
    words = np.frombuffer(data + bytes(-len(data) % 8), "<i8").tolist()
    first = sum(word * (weight | 1) for word, weight in zip(words, WEIGHTS, strict=False))
    second = sum((word >> 32) * weight for word, weight in zip(words, WEIGHTS[BLOCK_WORDS:], strict=False))
    return [first % MODULUS, second % MODULUS]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return what a tensor holds, in its order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def reference(group: Sequence[torch.Tensor]) -> int:
    """Hash as the definition says, without torch."""
    blocks: list[bytes] = []
    rests = b""
    for data in map(bytes_of, group):
        whole = len(data) - len(data) % BLOCK_BYTES
        blocks += [data[start : start + BLOCK_BYTES] for start in range(0, whole, BLOCK_BYTES)]
        rests += data[whole:] + bytes(-len(data) % 8)
    blocks += [rests[start : start + BLOCK_BYTES] for start in range(0, len(rests), BLOCK_BYTES)]
    numbers = [tensor.nbytes for tensor in group] + [number for block in blocks for number in sums_of(block)]
    return xxhash.xxh3_64_intdigest(np.array(numbers, np.uint64).tobytes())


def on_device(*group: torch.Tensor) -> int:
    """Hash one group, as a device does."""
    return device_hashes([group], ON_CPU)[0]


def test_what_is_hashed_does_not_change_between_releases() -> None:
    assert on_device() == 3244421341483603138
    assert on_device(torch.arange(1000, dtype=torch.int64)) == 1589961433236912866
    assert on_device(*MIXED) == 12803691801302270713


def test_a_device_hashes_as_plain_numbers_do() -> None:
    """Any dtype, shape, order in memory and address; each group for itself, all with one transfer."""
    groups = [MIXED, (), MIXED[1:2], [*MIXED[::-1], *MIXED], [torch.empty(0)]]
    assert device_hashes(groups, ON_CPU) == [reference(group) for group in groups]


def test_the_hash_does_not_depend_on_how_much_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on how many tensors are packed for that."""
    monkeypatch.setattr(tensor_hash, "PIECE_BYTES", 2 * BLOCK_BYTES)
    many = [torch.full((BLOCK_BYTES // 2 + 3 * number,), number, dtype=torch.uint8) for number in range(7)]
    many.append(torch.arange(5 * BLOCK_BYTES, dtype=torch.int64).to(torch.uint8)[1:])
    assert on_device(*many) == reference(many)


@pytest.mark.parametrize("bit", range(64))
def test_any_one_bit_is_found(bit: int) -> None:
    held = torch.arange(100, dtype=torch.int64)
    before = on_device(held)
    held[17] ^= -(1 << 63) if bit == 63 else 1 << bit
    assert on_device(held) != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("bit", ["sign", "lowest"])
def test_a_bit_that_changes_in_each_element_is_found(dtype: torch.dtype, bit: str) -> None:
    """Also the signs of numbers of 64 bits, which a sum of products alone loses by pairs."""
    held = torch.arange(4096).to(dtype)
    before = on_device(held)
    raw = held.view(torch.uint8).view(-1, dtype.itemsize)
    raw[:, -1 if bit == "sign" else 0] ^= 0x80 if bit == "sign" else 1
    assert on_device(held) != before


def test_things_that_change_places_are_found() -> None:
    """Words in a block, whole blocks, tensors, and bytes that go over to the next tensor."""
    held = torch.arange(3 * BLOCK_WORDS, dtype=torch.int64)
    blocks = held.view(3, BLOCK_WORDS)
    swapped = held.clone()
    swapped[[5, 6]] = held[[6, 5]]
    one, other = torch.tensor([1, 0], dtype=torch.uint8), torch.tensor([0], dtype=torch.uint8)
    found = [
        on_device(held),
        on_device(blocks[[1, 0, 2]]),
        on_device(swapped),
        on_device(one, other),
        on_device(other, one),
        on_device(one[:1], one),
        on_device(one[:1]),
        on_device(one),
    ]
    assert len(set(found)) == len(found)


def test_hashing_draws_no_random_numbers_and_changes_no_tensor() -> None:
    before, random = [each.clone() for each in MIXED], torch.get_rng_state()
    on_device(*MIXED)
    assert all(torch.equal(each, was) for each, was in zip(MIXED, before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_a_job_on_a_device_hashes_there_and_one_on_the_cpu_by_xxh3(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device counts as one, though its memory is the host's."""
    held = (torch.arange(3.0),)
    plain = xxhash.xxh3_64_intdigest(bytes_of(held[0]))
    found = {}
    for name in (CPU, FAKE):
        monkeypatch.setattr(Runtime, "_current", SimpleNamespace(device=device_named(name)))
        found[name] = hashes([held])
    assert found == {CPU: [plain], FAKE: [on_device(*held)]}


def test_a_header_is_part_of_the_whole_where_holders_have_the_same() -> None:
    shards = {"a": Shard(b"one", (torch.ones(2),)), "b": Shard(b"other", (torch.ones(2),))}
    with_header, without = digests_of(shards), digests_of(shards, with_header=False)
    assert with_header["a"].tensors == with_header["b"].tensors == without["a"].whole == without["b"].whole
    assert with_header["a"].whole != with_header["b"].whole
