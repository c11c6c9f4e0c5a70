"""A step that one rank repeats for another, and what comes after it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from midstep.communicators.base import Met
from midstep.processor.framework import ModelReplica
from midstep.processor.replays import Replays
from midstep.protocol.errors import Interrupted

STEP = 8


def test_what_a_recovery_sends_is_no_collective_of_a_replay_that_it_has_ended() -> None:
    """Else the rank that was in it would send nothing over the devices' links, and all would wait for their limit."""
    communicator = SimpleNamespace(name="", listener=None, barrier=lambda verdict: Met(agrees=True, verdict=verdict))
    runtime: Any = SimpleNamespace(
        rank=1,
        communicator=communicator,
        step_clock=SimpleNamespace(doing=lambda activity: None),
        injection_points=SimpleNamespace(replaying=False),
        local_states=SimpleNamespace(read=lambda rank, step: b"state"),
    )
    own: Any = SimpleNamespace(restore=lambda blob, step, repeats: None, remember_random=lambda: None)
    replays = Replays(runtime, Stub(), own, audits())  # type: ignore[arg-type]
    with pytest.raises(Interrupted):
        replays.begins(STEP)
    assert replays.goes_on(STEP)
    assert replays.repeats
    assert not communicator.listener.given("send", (), (0, 1))
    replays.left()
    assert communicator.listener is None
    assert not replays.repeats
    assert not runtime.injection_points.replaying


def audits() -> Any:
    """Return the audits of one step, in which rank 0 is repeated."""
    return SimpleNamespace(
        is_on=True, proven=True, is_due=lambda step: step == STEP, subjects=lambda before: [before], begin=int
    )


ALONE = ModelReplica((1,), (0, 1))


class Stub:
    """A framework whose conditions are its name."""

    def __init__(self, replica: ModelReplica = ALONE) -> None:
        self.taken: list[bytes] = []
        self._replica = replica

    def model_replica(self) -> ModelReplica:
        return self._replica

    def step_left(self, step: int) -> None:
        """Nothing was computed."""

    def capture_conditions(self) -> bytes:
        return b"own"

    def take_conditions(self, blob: bytes) -> None:
        self.taken.append(blob)


def test_conditions_go_with_the_first_micro_batch_of_a_step_alone() -> None:
    """Behind it a rank draws the numbers of the one that it repeats, and would hand those on as its own."""
    sent: list[bytes] = []

    def swap(data: bytes, to: int, source: int, *, apart: bool) -> bytes:
        assert (to, source, apart) == (0, 0, True)
        sent.append(data)
        return data  # the other rank has handed over the same

    framework = Stub()
    device = SimpleNamespace(captured=0, restored=[], capture_random=lambda: b"numbers")
    device.restore_random = device.restored.append
    runtime: Any = SimpleNamespace(
        rank=1,
        world_size=2,
        communicator=SimpleNamespace(name="", listener=None, swap=swap, barrier=lambda verdict: Met(True, verdict)),
        device=device,
        step_clock=SimpleNamespace(doing=lambda activity: None),
        injection_points=SimpleNamespace(replaying=False),
        local_states=SimpleNamespace(read=lambda rank, step: b"state"),
    )
    own: Any = SimpleNamespace(restore=lambda blob, step, repeats: None, remember_random=lambda: None)
    replays = Replays(runtime, framework, own, audits())  # type: ignore[arg-type]
    assert replays.inputs([1]) == [1]
    assert sent == []
    with pytest.raises(Interrupted):
        replays.begins(STEP)
    assert replays.goes_on(STEP)
    assert [replays.inputs([number]) for number in range(3)] == [[0], [1], [2]]
    assert framework.taken == [b"own"]
    assert device.restored == [b"numbers"]
    assert [b"own" in each for each in sent] == [True, False, False]


def listener_of(rank: int, replica: ModelReplica) -> Any:
    """Return what listens to a rank's collectives while it repeats a step."""
    communicator = SimpleNamespace(name="", listener=None, barrier=lambda verdict: Met(agrees=True, verdict=verdict))
    return begun(rank, replica, communicator)[1]


def begun(rank: int, replica: ModelReplica, communicator: Any) -> tuple[Replays, Any]:
    """Return a rank that repeats a step, and what listens to its collectives."""
    runtime: Any = SimpleNamespace(
        rank=rank,
        communicator=communicator,
        step_clock=SimpleNamespace(doing=lambda activity: None),
        injection_points=SimpleNamespace(replaying=False),
        local_states=SimpleNamespace(read=lambda rank, step: b"state"),
    )
    own: Any = SimpleNamespace(restore=lambda blob, step, repeats: None, remember_random=lambda: None)
    replays = Replays(runtime, Stub(replica), own, audits())  # type: ignore[arg-type]
    with pytest.raises(Interrupted):
        replays.begins(STEP)
    assert replays.goes_on(STEP)
    return replays, communicator.listener


FLOATS, WHOLE = torch.ones(3), torch.ones(3, dtype=torch.int64)
SECOND_ROW = ModelReplica((2, 3), (1, 3))


def test_of_the_collectives_of_a_replay_those_within_the_replica_are_done() -> None:
    """All others end at once, but for sums of whole numbers, which are the same when ranks repeat each other."""
    listener = listener_of(3, SECOND_ROW)
    assert listener.given("_allgather_base", (torch.empty(6), FLOATS), (2, 3))
    assert listener.given("allreduce", ([FLOATS],), (3,))  # of which no other rank gets anything
    assert not listener.given("allreduce", ([FLOATS],), (1, 3))
    assert not listener.given("allreduce", ([FLOATS],), (0, 1, 2, 3))
    assert listener.given("allreduce", ([WHOLE],), (0, 1, 2, 3))
    assert not listener.given("_allgather_base", (torch.empty(4), WHOLE), (1, 3))
    assert [bool(each.within) for each in listener.contributions] == [True, False, False]
    assert [each.text for each in listener.contributions[1:]] == ["allreduce of 3 float32"] * 2


def test_all_ranks_of_a_replica_know_a_collective_by_the_same_number() -> None:
    """Each by another one; a message is the same at both ends, and another one in the other direction."""
    ours, theirs = (listener_of(rank, ModelReplica((2, 3), (rank - 2, rank))) for rank in (2, 3))
    root = SimpleNamespace(rootRank=0)
    assert ours.given("broadcast", ([FLOATS], root), (2, 3))
    assert theirs.given("broadcast", ([FLOATS], root), (2, 3))
    for _ in range(2):
        ours.given("send", ([FLOATS], 1, 0), (2, 3))
        theirs.given("recv", ([FLOATS], 0, 0), (2, 3))
    ours.given("recv", ([FLOATS], 1, 0), (2, 3))
    theirs.given("send", ([FLOATS], 0, 0), (2, 3))
    numbers = [each.within for each in ours.contributions]
    assert numbers == [each.within for each in theirs.contributions]
    assert len(set(numbers)) == 4
    assert [each.hash == 0 for each in ours.contributions] == [False, False, False, True]
    assert [each.hash == 0 for each in theirs.contributions] == [True, True, True, False]


def test_a_newcomer_repeats_what_all_others_repeat() -> None:
    """Its self-test would have collectives in which no other rank takes part: it learns that theirs is over."""
    communicator = SimpleNamespace(name="", listener=None, barrier=lambda verdict: Met(agrees=True, verdict=1))
    runtime: Any = SimpleNamespace(
        rank=1,
        communicator=communicator,
        step_clock=SimpleNamespace(doing=lambda activity: None),
        injection_points=SimpleNamespace(replaying=False),
    )
    newcomer = audits()
    newcomer.proven = False
    replays = Replays(runtime, Stub(), SimpleNamespace(), newcomer)  # type: ignore[arg-type]
    with pytest.raises(Interrupted):
        replays.begins(STEP)
    assert newcomer.proven


def test_what_follows_from_reduced_gradients_is_not_compared() -> None:
    """Their norm over the ranks of a row, say: in a replay they are not reduced over rows. Collectives are done."""
    replica = ModelReplica((2, 3), (1, 3))
    communicator = SimpleNamespace(name="", listener=None, barrier=lambda verdict: Met(agrees=True, verdict=verdict))
    replays, listener = begun(3, replica, communicator)
    listener.given("allreduce", ([FLOATS],), (2, 3))
    replays.compares(False)
    assert listener.given("allreduce", ([FLOATS],), (2, 3))
    assert not listener.given("allreduce", ([FLOATS],), (1, 3))
    assert len(listener.contributions) == 1
    replays.compares(True)
    listener.given("allreduce", ([FLOATS],), (2, 3))
    assert len(listener.contributions) == 2
