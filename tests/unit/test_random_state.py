"""The generators of python, numpy and torch, captured and put back."""

import random

import numpy as np
import pytest
import torch

from midstep.processor.local_state import RandomState
from midstep.protocol.errors import RecoveryError


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


def test_bytes_that_are_no_capture_are_refused() -> None:
    """As a RecoveryError, not as a crash."""
    with pytest.raises(RecoveryError):
        RandomState().restore(b"\x93\x01")
