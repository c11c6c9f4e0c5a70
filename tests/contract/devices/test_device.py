"""What a recovery asks of a device (devices/base.py), of every device that midstep has: in a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from tests.contract.makers import DeviceMaker, Setup

from midstep.devices.base import Damage
from midstep.processor.exceptions import chain_of, classify, known_patterns
from midstep.protocol.errors import RecoveryError
from midstep.protocol.faults import FaultAction, FaultKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.contract.gloo.conftest import Rank, Ranks

    from midstep.processor.exceptions import Finding

SMALL, LARGE = 4096, 1 << 20

pytestmark = [pytest.mark.makers("gloo", "fake", "npu"), pytest.mark.timeout(300)]
ON_NPUS = pytest.mark.makers("fake", "npu")  # the CPU has no faults of its own, and holds nothing of what was aborted


def raised(setup: Setup, action: FaultAction) -> Finding:
    """Inject a fault, and return what midstep makes of the text that is raised: at once, or by what comes next."""
    try:
        setup.device.inject(action)
        dist.all_reduce(torch.ones(1))
        setup.device.finish()
    except RuntimeError as error:
        found = classify(chain_of(error), known_patterns())
        if found.locate:
            setup.device.memory_error_raised()  # as the exception policy does
        return found
    raise AssertionError(f"{action} raised nothing")


def stop_and_start(rank: Rank) -> None:
    """Be stopped and cleaned in every order; say the damage, and whether the device works."""
    setup = Setup(rank)
    device = setup.device
    device.finish()
    damage = [device.clean()]
    for stops in (1, 2):
        for _ in range(stops):
            device.stop()
        device.release_unused()  # the control thread was faster with another stop
        damage.append(device.clean())
        device.release_unused()
    rank.say((damage, device.stopped, torch.ones(3, device=device.torch_device).sum().item()))
    device.finish()
    rank.say("finished")


def test_a_device_that_was_stopped_works_again_once_it_is_cleaned(ranks: Ranks) -> None:
    ranks.start(0, 1, stop_and_start)
    assert ranks.hear(0) == ([Damage.NONE] * 3, False, 3.0)
    assert ranks.hear(0) == "finished"


def hang(rank: Rank) -> None:
    """Wait for a device that hangs; be stopped by another thread; go on."""
    setup = Setup(rank)
    setup.check()
    setup.device.inject(FaultAction.HANG_COLLECTIVE)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    setup.say_how_it_ends(work)
    rank.say(setup.reconnect())
    setup.check()
    rank.say("checked")


@ON_NPUS
def test_a_thread_that_waits_for_a_device_raises_when_another_one_stops_it(ranks: Ranks) -> None:
    ranks.start(0, 1, hang)
    assert "FORCE STOP" in ranks.hear(0)
    ranks.say(1)
    assert ranks.hear(0) == ("up", "")
    assert ranks.hear(0) == "checked"


def struck(rank: Rank, actions: Sequence[FaultAction]) -> None:
    """Be struck by each of these; say what it is, what damage is found, and which tensors it names."""
    setup = Setup(rank)
    setup.check()
    small, large = (torch.nn.Parameter(torch.ones(size)) for size in (SMALL, LARGE))
    for action in actions:
        found = raised(setup, action)
        setup.stop()
        damage = setup.device.clean()
        rank.say((found.kind, found.locate, damage, *(setup.device.corrupted([each]) for each in (small, large))))
        setup.device.mark_safe([large])
        assert not setup.device.corrupted([small, large])
        setup.device.release_unused()
        setup.reconnect()
        setup.check()


STRUCK = {
    FaultAction.MEMORY_TEMPORARY: (FaultKind.MEMORY, True, Damage.TEMPORARY, False, False),
    FaultAction.MEMORY_PERSISTENT: (FaultKind.MEMORY, True, Damage.PERSISTENT, False, True),
    FaultAction.SUSPECT_MEMORY: (FaultKind.MEMORY, False, Damage.NONE, False, False),
    FaultAction.OUT_OF_MEMORY: (FaultKind.OUT_OF_MEMORY, False, Damage.NONE, False, False),
    FaultAction.LINK_DOWN: (FaultKind.LINK, False, Damage.NONE, False, False),
    FaultAction.REMOTE: (FaultKind.COMMUNICATION, False, Damage.NONE, False, False),
    # That some tensor is damaged is all that the library says of several bits, and it names none.
    FaultAction.MULTI_BIT: (FaultKind.MEMORY_MULTI_BIT, True, Damage.PERSISTENT, False, False),
}


@ON_NPUS
@pytest.mark.parametrize("action", STRUCK)
def test_a_fault_is_known_by_its_text_and_damaged_memory_found_where_it_is(ranks: Ranks, action: FaultAction) -> None:
    """A damaged tensor can be used again when it is marked as safe."""
    ranks.start(0, 1, lambda rank: struck(rank, [action]))
    ranks.say(1)
    assert ranks.hear(0) == STRUCK[action]


@ON_NPUS
@pytest.mark.parametrize("action", [each for each, expected in STRUCK.items() if expected[1]])
def test_a_memory_error_of_an_earlier_incident_is_not_found_again(ranks: Ranks, action: FaultAction) -> None:
    """torch-npu never forgets one: asked again it would answer that memory is lost, and the process be replaced."""
    later = (FaultAction.LINK_DOWN, FaultAction.SUSPECT_MEMORY)
    ranks.start(0, 1, lambda rank: struck(rank, [action, *later]))
    for generation in (1, 2, 3):
        ranks.say(generation)
    assert ranks.hear(0) == STRUCK[action]
    assert [ranks.hear(0) for _ in later] == [STRUCK[each] for each in later]


def lose(rank: Rank, action: FaultAction) -> None:
    """Be struck by something that no recovery in this process mends; say what it is, and how it is refused."""
    setup = Setup(rank)
    setup.check()
    found = raised(setup, action)
    try:
        setup.stop_and_clean()
    except RecoveryError as error:
        rank.say((found.kind, str(error)))


@ON_NPUS
@pytest.mark.parametrize(
    ("action", "kind", "words"),
    [
        (FaultAction.MEMORY_OUTSIDE, FaultKind.MEMORY, "outside torch's memory"),
        (FaultAction.DROP_DEVICE, FaultKind.DEVICE, "device 0"),
    ],
)
def test_a_device_that_this_process_cannot_mend_says_so(
    ranks: Ranks, action: FaultAction, kind: FaultKind, words: str
) -> None:
    ranks.start(0, 1, lambda rank: lose(rank, action))
    found, text = ranks.hear(0)
    assert found is kind
    assert words in text


def draw(rank: Rank) -> None:
    """Draw; take the place of another process that has drawn, and draw what it draws next."""
    setup = Setup(rank, connected=False)
    setup.maker.draw()
    rank.say(setup.device.capture_random())
    setup.device.restore_random(rank.hear())
    rank.say(setup.maker.draw())


def test_the_devices_random_numbers_come_back_in_another_process(ranks: Ranks) -> None:
    """A device without a generator of its own has nothing to bring back."""
    ranks.start_all(2, draw)
    first, second = ranks.hear_all()
    assert bool(first) is bool(second) is isinstance(ranks.maker, DeviceMaker)
    ranks.say(first)
    drawn = ranks.hear_all()
    assert drawn[0] == drawn[1]
    assert bool(drawn[0]) is isinstance(ranks.maker, DeviceMaker)


def read_clock(rank: Rank) -> None:
    device = Setup(rank).device
    rank.say([device.now_us() for _ in range(3)])


def test_the_devices_clock_goes_forward_where_it_has_one(ranks: Ranks) -> None:
    ranks.start(0, 1, read_clock)
    times = ranks.hear(0)
    if isinstance(ranks.maker, DeviceMaker):
        assert times == sorted(times)
    else:
        assert times == [None] * 3
