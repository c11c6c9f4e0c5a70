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
    own: Any = SimpleNamespace(restore=lambda blob, step: None, remember_random=lambda: None)
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
