"""Whoever has committed a step can rely on it that every rank's local state for that step lies with its buddy."""

from __future__ import annotations

import mmap
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.makers import Setup

from midstep.protocol.errors import CommunicatorError

if TYPE_CHECKING:
    from tests.contract.gloo.conftest import Rank, Ranks

WORLD = 4
SHIFT = 2
FATAL_STEP = 20
POINTS = ("before the swap", "between swap and barrier", "before the commit", "after the commit")

pytestmark = [pytest.mark.makers("gloo", "fake", "npu"), pytest.mark.timeout(300)]


class Ledgers:
    """What outlives the ranks: for each, what it has committed, and of which step its ward's state is."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)  # shared with what is forked
        self._words = memoryview(self._memory).cast("q")

    def keep(self, rank: int, step: int) -> None:
        self._words[rank] = step

    def commit(self, rank: int, step: int) -> None:
        self._words[WORLD + rank] = step

    def kept(self) -> list[int]:
        return [self._words[rank] for rank in range(WORLD)]

    def committed(self) -> list[int]:
        return [self._words[WORLD + rank] for rank in range(WORLD)]


def step_by_step(rank: Rank, ledgers: Ledgers, victim: int, point: str) -> None:
    setup = Setup(rank)
    communicator = setup.communicator

    def pass_by(here: str) -> None:
        if (rank.number, step, here) == (victim, FATAL_STEP, point):
            rank.say("dies")
            signal.pause()

    step = 0
    try:
        while True:
            step += 1
            pass_by("before the swap")
            own = f"{rank.number} at {step}".encode()
            ward = communicator.swap(own, (rank.number + SHIFT) % WORLD, (rank.number - SHIFT) % WORLD)
            assert ward == f"{(rank.number - SHIFT) % WORLD} at {step}".encode()
            ledgers.keep(rank.number, step)
            pass_by("between swap and barrier")
            communicator.barrier()
            pass_by("before the commit")
            ledgers.commit(rank.number, step)
            pass_by("after the commit")
    except CommunicatorError:
        rank.say(("stopped", communicator.failed is not None))
    setup.stop_and_clean()
    communicator.reconnect(rank.hear(), rank.store, setup.maker.link_up_s)
    rank.say(communicator.swap(b"again", (rank.number + SHIFT) % WORLD, (rank.number - SHIFT) % WORLD))
    rank.hear()


def join_late(rank: Rank) -> None:
    setup = Setup(rank, connected=False)
    communicator = setup.communicator
    communicator.reconnect(rank.hear(), rank.store, setup.maker.link_up_s)
    rank.say(communicator.swap(b"again", (rank.number + SHIFT) % WORLD, (rank.number - SHIFT) % WORLD))
    rank.hear()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("victim", [0, 3])
def test_own_states_of_a_committed_step_are_with_their_buddies_whoever_dies(
    ranks: Ranks, victim: int, point: str
) -> None:
    ledgers = Ledgers()
    ranks.start_all(WORLD, lambda rank: step_by_step(rank, ledgers, victim, point))
    assert ranks.hear(victim) == "dies"
    time.sleep(0.05)  # the others go on for as long as they can
    ranks.signal(victim, signal.SIGKILL)
    survivors = [rank for rank in range(WORLD) if rank != victim]
    for rank in survivors:
        assert ranks.hear(rank) == ("stopped", True)

    committed = ledgers.committed()
    newest = max(committed[rank] for rank in survivors)
    assert newest - min(committed[rank] for rank in survivors) <= 1
    assert all(kept >= newest for kept in ledgers.kept())
    assert newest == {"before the swap": 19, "between swap and barrier": 19}.get(point, 20)

    ranks.start(victim, WORLD, join_late)
    ranks.say(1)
    answers: list[Any] = ranks.hear_all()
    assert answers == [b"again"] * WORLD
