"""A step that one rank repeats for another, and what comes after it."""

from types import SimpleNamespace
from typing import Any

import pytest

from midstep.processor.replays import Replays
from midstep.protocol.errors import Interrupted

STEP = 8


def test_what_a_recovery_sends_is_no_collective_of_a_replay_that_it_has_ended() -> None:
    """Else the rank that was in it would send nothing over the devices' links, and all would wait for their limit."""
    communicator = SimpleNamespace(name="", listener=None)
    runtime: Any = SimpleNamespace(
        rank=1,
        communicator=communicator,
        injection_points=SimpleNamespace(replaying=False),
        local_states=SimpleNamespace(read=lambda rank, step: b"state"),
    )
    own: Any = SimpleNamespace(restore=lambda blob, step, repeats: None, remember_random=lambda: None)
    audits: Any = SimpleNamespace(is_on=False, is_due=lambda step: step == STEP, subjects=[0], done=[])
    framework: Any = SimpleNamespace()
    replays = Replays(runtime, framework, own, audits)
    with pytest.raises(Interrupted):
        replays.begins(STEP)
    assert replays.goes_on(STEP)
    assert replays.repeats
    assert not communicator.listener.given("send", ())
    replays.left()
    assert communicator.listener is None
    assert not replays.repeats
    assert not runtime.injection_points.replaying


class Stub:
    """A framework whose conditions are its name."""

    repeats_others = True

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def step_left(self, step: int) -> None:
        """Nothing was computed."""

    def capture_conditions(self) -> bytes:
        return b"own"

    def take_conditions(self, blob: bytes) -> None:
        self.taken.append(blob)


def test_conditions_go_with_the_first_micro_batch_of_a_step_alone() -> None:
    """Behind it a rank draws the numbers of the one that it repeats, and would hand those on as its own."""
    sent: list[bytes] = []

    def swap(data: bytes, to: int, source: int) -> bytes:
        assert (to, source) == (0, 0)
        sent.append(data)
        return data  # the other rank has handed over the same

    framework = Stub()
    device = SimpleNamespace(captured=0, restored=[], capture_random=lambda: b"numbers")
    device.restore_random = device.restored.append
    runtime: Any = SimpleNamespace(
        rank=1,
        world_size=2,
        communicator=SimpleNamespace(name="", listener=None, swap=swap),
        device=device,
        step_clock=SimpleNamespace(doing=lambda activity: None),
        injection_points=SimpleNamespace(replaying=False),
        local_states=SimpleNamespace(read=lambda rank, step: b"state"),
    )
    own: Any = SimpleNamespace(restore=lambda blob, step, repeats: None, remember_random=lambda: None)
    audits: Any = SimpleNamespace(is_on=False, is_due=lambda step: step == STEP, subjects=[0], done=[])
    replays = Replays(runtime, framework, own, audits)  # type: ignore[arg-type]
    assert replays.inputs([1]) == [1]
    assert sent == []
    with pytest.raises(Interrupted):
        replays.begins(STEP)
    assert replays.goes_on(STEP)
    assert [replays.inputs([number]) for number in range(3)] == [[0], [1], [2]]
    assert framework.taken == [b"own"]
    assert device.restored == [b"numbers"]
    assert [b"own" in each for each in sent] == [True, False, False]
