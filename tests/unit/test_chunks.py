"""How a shard is cut, so that both ends of a transfer cut alike."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midstep.processor.range_transfer import CHUNK_BYTES, DIRECT_BYTES, ShardMemory, cut
from midstep.protocol.errors import RecoveryError

_SIZES = st.lists(st.sampled_from([0, 1, 7, 4096, DIRECT_BYTES - 1, DIRECT_BYTES, CHUNK_BYTES + 5]), max_size=12)


@given(_SIZES, st.data())
@settings(max_examples=200, deadline=None)
def test_chunks_cover_the_range_exactly_once(sizes: list[int], data: st.DataObject) -> None:
    """No byte is left out or sent twice, and no chunk is too big."""
    offset = data.draw(st.integers(0, sum(sizes)))
    length = data.draw(st.integers(0, sum(sizes) - offset))
    chunks = cut(sizes, offset, length)
    assert all(0 < chunk.length <= CHUNK_BYTES for chunk in chunks)
    begins = [sum(sizes[:index]) for index in range(len(sizes))]
    pieces = sorted((begins[p.tensor] + p.start, p.length) for chunk in chunks for p in chunk.pieces)
    assert all(p.start + p.length <= sizes[p.tensor] for chunk in chunks for p in chunk.pieces)
    at = offset
    for start, size in pieces:
        assert start == at
        at += size
    assert at == offset + length


def test_small_tensors_between_big_ones_share_a_message() -> None:
    """A big tensor travels without a copy, the small ones around it together."""
    chunks = cut([8, DIRECT_BYTES, 8, DIRECT_BYTES, 8], 0, 24 + 2 * DIRECT_BYTES)
    assert [[piece.tensor for piece in chunk.pieces] for chunk in chunks] == [[1], [3], [0, 2, 4]]


def test_a_range_beyond_the_shard_is_refused() -> None:
    """The plan was made for another shard."""
    with pytest.raises(RecoveryError, match="same state"):
        cut([10, 10], 15, 6)


def test_small_tensors_are_gathered_and_scattered_across_their_borders() -> None:
    """A chunk may begin and end in the middle of a tensor."""
    source = [torch.arange(5, dtype=torch.int32), torch.tensor(1.5), torch.zeros(0), torch.ones(3, dtype=torch.bool)]
    target = [torch.zeros_like(tensor) for tensor in source]
    out, into = ShardMemory(source), ShardMemory(target)
    for offset, length in ((0, 3), (3, 19), (22, 5)):
        for chunk in cut(out.sizes, offset, length):
            staging = torch.empty(chunk.length, dtype=torch.uint8)
            out.gather(chunk, staging)
            into.scatter(chunk, staging)
    assert all(torch.equal(left, right) for left, right in zip(source, target, strict=True))
