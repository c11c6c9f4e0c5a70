"""HCCL's communicator in real processes, on the fake device and on torch-npu: every group comes back.

Resumed or rebuilt, with a newcomer or without, whatever happened in the link-up before.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.contract.makers import BEFORE_STOP_S, MEGABYTE, DeviceMaker, Setup

from midstep.communicators.base import DeviceMessage
from midstep.communicators.device_communicator import NEVER
from midstep.protocol.environment import INCARNATION, STARTED_S
from midstep.protocol.errors import CommunicatorAborted
from midstep.protocol.faults import FaultAction

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.gloo.conftest import Rank, Ranks

WORLD = 4
VICTIM = 3
SHORT_S, CONNECT_S = 3.0, 8  # an attempt, and how long HCCL waits
BUSY_S = 1.0
BUFFER_MB = 64
# As a framework makes them: tensor parallel, data parallel, an expert group, and one that is asked for twice.
GROUPS = ([0, 1], [2, 3], [0, 2], [1, 3], [1, 2, 3], [0, 1])
UP = ("up", "")

pytestmark = [pytest.mark.makers("fake", "npu"), pytest.mark.timeout(300)]


def join_late(rank: Rank, before: Callable[[], object] = lambda: None) -> None:
    """Make model and groups alone; be connected, `before` which something may happen; use everything."""
    setup = Setup(rank, GROUPS, connected=False)
    alone = torch.full((2,), 7.0)
    dist.all_reduce(alone)
    assert alone.tolist() == [7.0, 7.0]
    for work in dist.batch_isend_irecv([dist.P2POp(op, alone, 0) for op in (dist.isend, dist.irecv)]):
        work.wait()
    assert alone.tolist() == [7.0, 7.0]
    setup.note_renewals()
    before()
    rank.say("checked")
    rank.say(setup.reconnect())
    setup.check()
    rank.say(setup.renewed)
    setup.communicator.close()


def survive_until_told(rank: Rank) -> None:
    """As a training process: the control thread stops the device, the train thread raises."""
    setup = Setup(rank, GROUPS)
    setup.check()
    setup.note_renewals()
    rank.say("checked")

    def control() -> None:
        assert rank.hear() == "stop"
        setup.stop()

    thread = threading.Thread(target=control, daemon=True)
    thread.start()
    text = ""
    try:
        while True:
            dist.all_reduce(ones := torch.ones(1000))
            ones.cpu()
    except RuntimeError as error:
        text = str(error).splitlines()[0]
    thread.join(30)
    setup.device.clean()
    rank.say(text)
    rank.say(setup.reconnect())
    setup.check()
    rank.say(setup.renewed)
    setup.communicator.close()


def stop_survivors(ranks: Ranks, victim: int = VICTIM) -> None:
    """Stop those that wait for the victim, which is stopped and then killed: a death by itself could be seen."""
    ranks.start_all(WORLD, survive_until_told)
    ranks.hear_all()
    ranks.signal(victim, signal.SIGSTOP)
    time.sleep(0.2)
    survivors = [number for number in range(WORLD) if number != victim]
    ranks.say("stop", *survivors)
    texts = [ranks.hear(number) for number in survivors]
    words = (*ranks.maker.stopped_words, "allreduce cannot")
    assert all(any(word in text for word in words) for text in texts), texts
    assert any("FORCE STOP" in text for text in texts), f"none waited for the stopped rank: {texts}"
    ranks.signal(victim, signal.SIGKILL)


def test_every_group_comes_back_with_a_newcomer(ranks: Ranks) -> None:
    """World, tensor parallel, data parallel and expert groups: the handles stay, the communicators are rebuilt."""
    stop_survivors(ranks)
    ranks.start(VICTIM, WORLD, join_late)
    assert ranks.hear(VICTIM) == "checked"
    ranks.say(1)
    assert ranks.hear_all() == [UP] * WORLD
    *survivors, newcomer = ranks.hear_all()
    assert all(renewed and all(renewed) for renewed in survivors), survivors
    assert newcomer == []


def join_a_busy_device(rank: Rank) -> None:
    """Take the place of a process that was killed a moment ago, and has not let go of the device yet."""
    maker = rank.maker
    assert isinstance(maker, DeviceMaker)

    def be_started() -> None:
        maker.calls.HELD_S = BUSY_S  # this process ends with the test
        maker.hold_device(BUSY_S)
        os.environ |= {INCARNATION: "2", STARTED_S: str(time.monotonic())}  # the process before had ended by then

    join_late(rank, be_started)


@pytest.mark.parametrize("victim", [VICTIM, 0])
def test_a_newcomer_waits_for_its_device_in_the_attempt_that_is_under_way(ranks: Ranks, victim: int) -> None:
    """HCCL refuses with error code 7 and EJ0001 until then; the peers wait meanwhile. Rank 0 is the root of groups."""
    stop_survivors(ranks, victim)
    ranks.start(victim, WORLD, join_a_busy_device)
    assert ranks.hear(victim) == "checked"
    began_s = time.monotonic()
    ranks.say(1)
    assert ranks.hear_all() == [UP] * WORLD
    ranks.hear_all()
    assert time.monotonic() - began_s > BUSY_S / 2


def interrupted_twice(rank: Rank) -> None:
    """Be stopped in a collective that one rank leaves out; then again, with a link that stays broken in one rank."""
    setup = Setup(rank, GROUPS)
    setup.check()
    setup.note_renewals()
    before = [group.backend for group in setup.communicator._groups]
    if rank.number != VICTIM:
        dist.all_reduce(torch.ones(100_000), async_op=True)
        time.sleep(BEFORE_STOP_S)
    setup.stop_and_clean()
    rank.say(setup.reconnect())
    setup.check()
    rank.say(setup.renewed)
    if rank.number == VICTIM:
        setup.inject(FaultAction.LINK_BROKEN)
    setup.stop_and_clean()
    rank.say(setup.reconnect(SHORT_S))
    rank.say(setup.renewed)
    rank.say(setup.reconnect())
    setup.check()
    rank.say(setup.renewed)
    assert [group.backend for group in setup.communicator._groups] == before
    setup.communicator.close()


def test_without_a_newcomer_communicators_are_resumed_and_rebuilt_only_if_that_fails(ranks: Ranks) -> None:
    """What was on its way when the devices were stopped is not taken for what comes afterwards."""
    ranks.start_all(WORLD, interrupted_twice)
    ranks.say(1)
    assert ranks.hear_all() == [UP] * WORLD
    assert ranks.hear_all() == [[False]] * WORLD
    ranks.say(2)
    answers = ranks.hear_all()
    assert [word for word, _ in answers] == ["not up"] * WORLD, answers
    assert "links of group" in answers[0][1]
    assert ranks.hear_all() == [[False]] * WORLD
    ranks.say(3)
    assert ranks.hear_all() == [UP] * WORLD
    assert all(renewed and all(renewed) for renewed in ranks.hear_all())


def fails_once(rank: Rank) -> None:
    """Build all communicators, of which one rank's first one does not come up; then again."""
    setup = Setup(rank, GROUPS)
    setup.check()
    if rank.number == VICTIM:
        setup.communicator._linked = NEVER  # as a newcomer: nothing is resumed
        setup.inject(FaultAction.LINK_UP_FAILS)
    setup.stop_and_clean()
    rank.say(setup.reconnect(SHORT_S))
    rank.say(setup.reconnect())
    setup.check()
    rank.say((setup.took_s, setup.communicator.link_up_s))
    setup.communicator.close()


def test_a_fault_during_the_link_up_is_seen_there_and_the_next_generation_works(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank gives up within its time, naming the group; after another rebuild the links of all groups are timed.

    A link-up that the stop of a device does not end is over when HCCL gives it up: the next attempt waits for it.
    """
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", str(CONNECT_S))
    ranks.start_all(WORLD, fails_once)
    ranks.say(1)
    answers = ranks.hear_all()
    assert [word for word, _ in answers] == ["not up"] * WORLD, answers
    assert all("generation 1 was not linked up" in text for _, text in answers)
    ranks.say(2)
    assert ranks.hear_all() == [UP] * WORLD
    timed = ranks.hear_all()
    for _, times in timed:
        assert len(times) >= 3
        assert all(seconds > 0 for seconds in times.values())
    waited = max(took_s for took_s, _ in timed) > (CONNECT_S - SHORT_S) / 2
    assert waited is not ranks.maker.stop_ends_link_up


def resumes_late(rank: Rank) -> None:
    """Be stopped; one rank's library takes its time to resume, and clears then what peers have signalled to it."""
    setup = Setup(rank, GROUPS)
    setup.check()
    setup.stop_and_clean()
    if rank.number == VICTIM:
        library = setup.maker.calls.distributed
        resume = library.reinit_process_group

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(BEFORE_STOP_S)
            return resume(*args, **kwargs)

        library.reinit_process_group = slowly
    rank.say(setup.reconnect())
    setup.check()
    setup.communicator.close()


def test_no_rank_links_up_before_all_have_resumed(ranks: Ranks) -> None:
    """What a faster rank signals to one that is still resuming would be lost, and waited for until the end."""
    ranks.start_all(WORLD, resumes_late)
    ranks.say(1)
    assert ranks.hear_all() == [UP] * WORLD


def resumes_the_second_late(rank: Rank, *, meets: bool) -> None:
    """Be stopped, with two groups of all ranks; resume one late in one rank, while the others use the first or wait."""
    setup = Setup(rank, [list(range(WORLD))])
    setup.check()
    setup.stop_and_clean()
    library, host = setup.maker.calls.distributed, setup.communicator._host
    resume, meet = library.reinit_process_group, host.barrier

    def one_by_one(group: Any = None, rebuild_link: bool = True) -> None:
        first, second = (each.backend for each in setup.communicator._groups)
        first.resume_hccl_comm(setup.maker.calls.npu.current_device())
        time.sleep(2.5 * BEFORE_STOP_S)
        second.resume_hccl_comm(setup.maker.calls.npu.current_device())

    if rank.number == VICTIM:
        library.reinit_process_group = one_by_one
    if not meets:
        host.barrier = lambda: time.sleep(BEFORE_STOP_S)  # the first is resumed everywhere by then
    rank.say(setup.reconnect(0.0 if meets else SHORT_S))
    library.reinit_process_group, host.barrier = resume, meet
    rank.say(setup.reconnect())
    setup.check()
    setup.communicator.close()


@pytest.mark.parametrize("meets", [True, False], ids=["all meet first", "none waits"])
def test_a_resume_clears_what_was_signalled_in_every_group_of_the_device(ranks: Ranks, meets: bool) -> None:
    """So it is not enough that all ranks have resumed the group that is used: all have to have resumed all."""
    ranks.start_all(WORLD, lambda rank: resumes_the_second_late(rank, meets=meets))
    ranks.say(1)
    answers = ranks.hear_all()
    assert [word for word, _ in answers] == ["up" if meets else "not up"] * WORLD, answers
    ranks.say(2)
    assert ranks.hear_all() == [UP] * WORLD


def with_options(rank: Rank, *, connected: bool) -> None:
    """Make a group with options of the library, as Megatron does for each of its groups; say what memory it takes."""
    setup = Setup(rank, connected=connected)
    group = dist.new_group(pg_options=setup.maker.options(BUFFER_MB))
    if connected:
        dist.all_reduce(torch.ones(1), group=group)
        rank.say(setup.maker.used_bytes() // (BUFFER_MB * MEGABYTE))
        setup.stop_and_clean()
    rank.say(setup.reconnect())
    rank.say(setup.maker.used_bytes() // (BUFFER_MB * MEGABYTE))
    dist.all_reduce(ones := torch.ones(1), group=group)
    rank.say(ones.item())
    setup.communicator.close()


def test_options_that_a_script_gives_for_a_group_reach_the_library(ranks: Ranks) -> None:
    """In a newcomer, too, which makes its groups before it is connected: its buffers have the size asked for."""
    ranks.start_all(WORLD, lambda rank: with_options(rank, connected=True))
    assert ranks.hear_all() == [2] * WORLD
    ranks.signal(VICTIM, signal.SIGKILL)
    ranks.start(VICTIM, WORLD, lambda rank: with_options(rank, connected=False))
    ranks.say(1)
    assert ranks.hear_all() == [UP] * WORLD
    assert ranks.hear_all() == [2] * WORLD
    assert ranks.hear_all() == [float(WORLD)] * WORLD


def passes_on(rank: Rank, *, connected: bool) -> None:
    """Pass a number on along the world, as stages of a pipeline do; be connected again; say what has come up."""
    setup = Setup(rank, connected=connected)
    last = WORLD - 1

    def pass_on() -> float:
        number = torch.zeros(1)
        if rank.number:
            dist.recv(number, rank.number - 1)
        if rank.number != last:
            dist.send(number + 1, rank.number + 1)
        setup.device.finish()
        return number.item()

    if connected:
        rank.say(pass_on())
        setup.stop_and_clean()
    rank.say(setup.reconnect())
    rank.say(sorted(name.partition("/")[2] for name in setup.communicator.link_up_s))
    rank.say(pass_on())
    setup.communicator.close()


def test_pairs_that_have_sent_to_each_other_are_linked_before_the_step(ranks: Ranks) -> None:
    """A newcomer hears of its pairs from its neighbours; the group that they are in was not used, and stays down."""
    passed = [float(number) for number in range(WORLD)]
    ranks.start_all(WORLD, lambda rank: passes_on(rank, connected=True))
    assert ranks.hear_all() == passed
    ranks.signal(2, signal.SIGKILL)
    ranks.start(2, WORLD, lambda rank: passes_on(rank, connected=False))
    ranks.say(1)
    assert ranks.hear_all() == [UP] * WORLD
    assert ranks.hear_all() == [["0-1"], ["0-1", "1-2"], ["1-2", "2-3"], ["2-3"]]
    assert ranks.hear_all() == passed


def aborted_link_up(rank: Rank) -> None:
    """End a rebuild that waits for a rank that does not come, from another thread."""
    setup = Setup(rank, GROUPS)
    setup.check()
    setup.stop_and_clean()
    if rank.number != VICTIM:
        stopper = setup.stop_soon()
        with pytest.raises(CommunicatorAborted):
            setup.communicator.reconnect(1, rank.store, setup.maker.link_up_s)
        stopper.join()
        setup.device.clean()
    rank.say("aborted")
    rank.say(setup.reconnect())
    setup.check()
    setup.communicator.close()


def test_an_abort_ends_a_rebuild_and_the_next_generation_works(ranks: Ranks) -> None:
    ranks.start_all(WORLD, aborted_link_up)
    assert ranks.hear_all() == ["aborted"] * WORLD
    ranks.say(2)
    assert ranks.hear_all() == [UP] * WORLD


def moves_shards(rank: Rank) -> None:
    """Send several batches to a neighbour, one behind the other; then be stopped in one that gets no answer."""
    setup = Setup(rank, GROUPS)
    told: list[str] = []
    setup.communicator.watch(SimpleNamespace(entered=lambda op, group: told.append(op), left=told.append))
    left, right = (rank.number - 1) % WORLD, (rank.number + 1) % WORLD
    mine = [torch.full((100_000,), float(10 * rank.number + turn)) for turn in range(3)]
    landing = [torch.empty_like(each) for each in mine]
    batches = []
    for turn in range(3):
        batch = [DeviceMessage(mine[turn], right, sending=True), DeviceMessage(landing[turn], left, sending=False)]
        batches.append(setup.communicator.exchange(batch))
    for each in batches:
        each.wait()
    rank.say([sorted(set(each.tolist())) for each in landing])
    rank.say(told)
    setup.say_how_it_ends(setup.communicator.exchange([DeviceMessage(mine[0], right, sending=False)]))
    rank.say(setup.aborted(lambda: setup.communicator.exchange([DeviceMessage(mine[0], right, sending=False)])))
    rank.say(setup.reconnect())
    setup.check()
    setup.communicator.close()


def test_shards_travel_over_the_devices_links_unseen_by_the_step_clock(ranks: Ranks) -> None:
    """Batches are in order, a stop ends them, and none is begun in a generation that is over."""
    ranks.start_all(WORLD, moves_shards)
    for number in range(WORLD):
        left = (number - 1) % WORLD
        assert ranks.hear(number) == [[float(10 * left + turn)] for turn in range(3)]
        assert ranks.hear(number) == []
    for text in ranks.hear_all():
        assert any(word in text for word in ranks.maker.stopped_words), text
    assert all("a peer is gone" in reason for reason in ranks.hear_all())
    ranks.say(1)
    assert ranks.hear_all() == [UP] * WORLD


class OneOf:
    """A batch of one receive that gets no answer."""

    def __init__(self, tensor: torch.Tensor, peer: int) -> None:
        self._works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, peer)])

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def swaps(rank: Rank) -> None:
    """Send to both neighbours and receive from both, as one batch; then be stopped in one that gets no answer."""
    setup = Setup(rank, GROUPS)
    mine = torch.full((200_000,), float(rank.number))
    left, right = (rank.number - 1) % WORLD, (rank.number + 1) % WORLD
    theirs = {left: torch.empty_like(mine), right: torch.empty_like(mine)}
    batch = [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.isend, mine, left)]
    batch += [dist.P2POp(dist.irecv, landing, source) for source, landing in theirs.items()]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    setup.device.finish()
    rank.say({source: sorted(set(landing.tolist())) for source, landing in theirs.items()})
    setup.say_how_it_ends(OneOf(mine, right))
    rank.say(setup.reconnect())
    setup.check()
    setup.communicator.close()


def test_a_batch_of_sends_and_receives_does_not_wait_for_itself_and_is_stopped_like_the_rest(ranks: Ranks) -> None:
    """All send first, as pipelines and buddies do."""
    ranks.start_all(WORLD, swaps)
    for number in range(WORLD):
        left, right = (number - 1) % WORLD, (number + 1) % WORLD
        assert ranks.hear(number) == {left: [float(left)], right: [float(right)]}
    for text in ranks.hear_all():
        assert any(word in text for word in ranks.maker.stopped_words), text
    ranks.say(1)
    assert ranks.hear_all() == [UP] * WORLD
