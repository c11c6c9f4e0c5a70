"""The local state of a rank holds what its framework captured and the random numbers of its device, whichever it is."""

import random
from typing import Any, cast

import pytest

from midstep.processor.local_state import LocalState
from midstep.protocol.errors import RecoveryError


class Framework:
    """Captures one word; writes down what it is told."""

    def __init__(self) -> None:
        self.word = b"own"
        self.told: list[Any] = []

    def capture_local(self) -> bytes:
        return self.word

    def restore_local(self, blob: bytes) -> None:
        self.word = blob
        self.told.append("restored")

    def rolled_back(self, step: int) -> None:
        self.told.append(step)

    def adopt_local(self, blob: bytes, *, random_numbers: bool) -> None:
        self.word = blob
        self.told.append(random_numbers)


class Device:
    """Its generator is a counter; or there is none."""

    name = "counting"

    def __init__(self, numbers: bytes) -> None:
        self.numbers = numbers

    def capture_random(self) -> bytes:
        return self.numbers

    def restore_random(self, state: bytes) -> None:
        self.numbers = state


def parts(framework: Framework, device: Device) -> LocalState:
    return LocalState(cast("Any", framework), cast("Any", device))


@pytest.mark.parametrize("numbers", [b"", b"5"])
def test_both_parts_come_back(numbers: bytes) -> None:
    framework, device = Framework(), Device(numbers)
    own = parts(framework, device)
    blob = own.capture()
    framework.word, device.numbers = b"later", b"9" if numbers else b""
    own.restore(blob, 12)
    assert (framework.word, device.numbers) == (b"own", numbers)
    assert framework.told == ["restored", 12]


def test_a_rank_that_an_earlier_world_did_not_have_keeps_its_own_random_numbers() -> None:
    blob = parts(Framework(), Device(b"5")).capture()
    for random_numbers, kept in ((True, b"5"), (False, b"9")):
        framework, device = Framework(), Device(b"9")
        parts(framework, device).adopt(cast("Any", framework), blob, random_numbers=random_numbers)
        assert device.numbers == kept
        assert framework.told == [random_numbers]


@pytest.mark.parametrize(("there", "here"), [(b"", b"9"), (b"5", b"")])
def test_a_state_of_another_kind_of_device_leaves_the_generator_alone_and_says_so(
    caplog: pytest.LogCaptureFixture, there: bytes, here: bytes
) -> None:
    """As when a checkpoint of a CPU job is loaded on NPUs."""
    device = Device(here)
    parts(Framework(), device).restore(parts(Framework(), Device(there)).capture(), 3)
    assert device.numbers == here
    assert "another kind of device" in caplog.text


def test_bytes_that_are_no_own_state_are_refused() -> None:
    with pytest.raises(RecoveryError, match="cannot be read"):
        parts(Framework(), Device(b"")).restore(b"\x93\x01", 3)


def test_what_was_drawn_since_the_numbers_were_remembered_is_drawn_again_once() -> None:
    """Those of this process and of the device: a train function that is called again draws before its first step."""
    device = Device(b"5")
    own = parts(Framework(), device)
    own.remember_random()
    first = random.random()
    device.numbers = b"6"
    own.recall_random()
    assert (random.random(), device.numbers) == (first, b"5")
    own.recall_random()
    assert random.random() != first
