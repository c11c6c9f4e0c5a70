"""Nested state goes to bytes and back, exactly, and nothing that could run does."""

import collections
import enum
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midstep.processor import tree
from midstep.protocol.errors import RecoveryError, UnsupportedState

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
_KEYS = st.text(st.characters(exclude_categories=["Cs"])) | st.integers() | st.tuples(st.integers(), st.text("ab"))
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(_KEYS, inner),
    max_leaves=20,
)


def _same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)


@given(_TREES)
@settings(max_examples=150, deadline=None)
def test_plain_structures_come_back_with_their_types(value: Any) -> None:
    """Every container, integer and float is what it was."""
    assert _same(tree.unpack(tree.pack(value, "value")), value)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ],
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of any dtype, also with no elements or no dimensions."""
    value = torch.randn(shape).mul(3).to(dtype)
    back = tree.unpack(tree.pack({"t": value}, "value"))["t"]
    assert back.dtype == dtype
    assert back.shape == value.shape
    assert torch.equal(back, value)


def test_not_a_number_and_negative_zero_keep_their_bits() -> None:
    """A float is its 64 bits, whatever they mean."""
    back = tree.unpack(tree.pack([math.nan, -0.0, math.inf], "value"))
    assert math.isnan(back[0])
    assert math.copysign(1, back[1]) == -1
    assert back[2] == math.inf


def test_a_tensor_that_is_held_twice_is_shared_again() -> None:
    """Sharing of one object is kept."""
    shared = torch.randn(3)
    back = tree.unpack(tree.pack({"a": shared, "b": [shared]}, "value"))
    back["a"][0] = 7.0
    assert back["b"][0][0] == 7.0


def test_views_of_one_storage_keep_their_values() -> None:
    """Overlapping and transposed tensors are carried as what they show."""
    base = torch.arange(12.0).reshape(3, 4)
    back = tree.unpack(tree.pack([base.t(), base[1:, ::2]], "value"))
    assert torch.equal(back[0], base.t())
    assert torch.equal(back[1], base[1:, ::2])


def test_numpy_and_torch_odds_and_ends_come_back() -> None:
    """Arrays of any order, scalars, dtypes, sizes, counters and ordered dicts."""
    value: dict[str, Any] = {
        "fortran": np.asfortranarray(np.arange(6, dtype=np.uint16).reshape(2, 3)),
        "empty": np.empty((0, 2)),
        "zero_d": np.array(3.5),
        "scalar": np.float32(0.1),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "counter": collections.Counter({30: 2}),
        "ordered": collections.OrderedDict(b=1, a=2),
    }
    back = tree.unpack(tree.pack(value, "value"))
    for name in ("fortran", "empty", "zero_d"):
        assert np.array_equal(back[name], value[name])
        assert back[name].dtype == value[name].dtype
    for name in ("scalar", "dtype", "size", "counter", "ordered"):
        assert type(back[name]) is type(value[name])
        assert back[name] == value[name]


class _Colour(enum.Enum):
    RED = 1


class _Number(int):
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [(_Colour.RED, "Colour"), (_Number(3), "Number"), ({1, 2}, "set"), (len, "builtin"), (object(), "object")],
)
def test_what_needs_pickle_is_refused_with_its_path_and_type(value: object, named: str) -> None:
    """The error says where it lies and what it is."""
    with pytest.raises(UnsupportedState, match=rf"optimizer\.param_groups\[0\]\.foo.*{named}"):
        tree.flatten({"param_groups": [{"foo": value}]}, "optimizer")


def test_keys_strings_and_depth_that_cannot_be_carried_are_refused() -> None:
    """Odd keys, broken unicode, and a structure that contains itself."""
    with pytest.raises(UnsupportedState, match="key"):
        tree.flatten({torch.float32: 1}, "value")
    with pytest.raises(UnsupportedState, match="unicode"):
        tree.flatten({"a": "\ud800"}, "value")
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedState, match="contain itself"):
        tree.flatten(loop, "value")


def test_tensors_that_are_not_plain_are_refused() -> None:
    """Sparse and meta tensors have no run of bytes."""
    for odd in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(UnsupportedState, match=r"value\.t"):
            tree.flatten({"t": odd}, "value")


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes_are_an_error_and_nothing_else(data: bytes) -> None:
    """They are refused as a RecoveryError."""
    with pytest.raises(RecoveryError):
        tree.unpack(data)


@given(st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_cut_or_changed_state_never_crashes(position: int, byte: int) -> None:
    """It decodes to something, or is refused as a RecoveryError."""
    packed = bytearray(tree.pack({"a": [1, (2.5, "x")], "t": torch.arange(4), "n": np.arange(3)}, "value"))
    with pytest.raises(RecoveryError):
        tree.unpack(bytes(packed[: min(position, len(packed) - 1)]))
    packed[position % len(packed)] = byte
    try:
        tree.unpack(bytes(packed))
    except RecoveryError as error:
        assert str(error)  # noqa: PT017 - either outcome is right, a crash is not


def test_the_outline_and_the_names_say_what_belongs_where() -> None:
    """Slots carry dtype, shape and size; names are the paths."""
    skeleton, _ = tree.flatten({"a": {"w": torch.zeros(2, 3)}, "b": [torch.zeros((), dtype=torch.int64)]}, "value")
    outline = tree.outline(skeleton)
    assert outline["a"]["w"] == tree.TensorSlot(0, torch.float32, (2, 3))
    assert outline["a"]["w"].size_bytes == 24
    assert tree.tensor_names(skeleton) == ["a.w", "b.0"]
