"""The generators of python, numpy and torch, captured and put back."""

import random

import numpy as np
import pytest
import torch

from midstep.processor.random_state import RandomState
from midstep.protocol.errors import RecoveryError


class _Device:
    """A device whose generator is a counter."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0

    def capture(self) -> bytes:
        return self.count.to_bytes(4, "little")

    def restore(self, state: bytes) -> None:
        self.count = int.from_bytes(state, "little")


def _draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), *np.random.randn(3).tolist(), *torch.randn(5).tolist()]


def test_all_generators_draw_the_same_numbers_again() -> None:
    """Also when a pair of normal numbers was half used."""
    random.gauss(0, 1)
    np.random.randn()
    torch.randn(1)
    state = RandomState()
    blob = state.capture()
    first = _draw()
    state.restore(blob)
    assert _draw() == first


def test_a_capture_is_a_few_kilobytes() -> None:
    """It is kept at every step, so it must be small."""
    assert len(RandomState().capture()) < 12_000


def test_the_generator_of_a_device_is_captured_too() -> None:
    """Through the hook that the device gives."""
    device = _Device("npu")
    state = RandomState([device])
    device.count = 5
    blob = state.capture()
    device.count = 9
    state.restore(blob)
    assert device.count == 5


def test_a_capture_without_this_device_is_refused() -> None:
    """It says which device is missing."""
    with pytest.raises(RecoveryError, match="npu"):
        RandomState([_Device("npu")]).restore(RandomState().capture())


def test_bytes_that_are_no_capture_are_refused() -> None:
    """As a RecoveryError, not as a crash."""
    with pytest.raises(RecoveryError):
        RandomState().restore(b"\x93\x01")
