"""What the contract of the communicator says of the fake device's groups (tests/contract/gloo/test_hccl.py), over
torch-npu's own: pairs, options, batches, late resumes and aborts.

Not here: communicators that are rebuilt since resuming them has failed, as no link of the fake CANN stays broken.
"""

# torch.npu is there once torch_npu was imported, which no type checker sees.
# mypy: disable-error-code="attr-defined, import-not-found, unused-ignore"

from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from midstep.communicators.base import DeviceMessage
from midstep.protocol.errors import CommunicatorAborted

from .test_hccl import GROUPS, LINK_UP_S, VICTIM, WORLD, Setup

if TYPE_CHECKING:
    from tests.contract.gloo.conftest import Rank, Ranks

LATE_S = 0.4
MEGABYTE = 1 << 20
BUFFER_MB = 64
OPTIONS = {"hccl_config": {"hccl_buffer_size": BUFFER_MB}}

pytestmark = pytest.mark.timeout(300)


def passes_on(rank: Rank, *, connected: bool) -> None:
    """Pass a number on along the world, as stages of a pipeline do; be connected again; say what has come up."""
    setup = Setup(rank, connected=connected)
    number, last = torch.zeros(1, device="npu"), WORLD - 1
    if connected:
        if rank.number:
            dist.recv(number, rank.number - 1)
        if rank.number != last:
            dist.send(number, rank.number + 1)
        torch.npu.synchronize()
        rank.say("passed on")
        setup.stop_and_clean()
    rank.say(setup.reconnect())
    rank.say(sorted(name.partition("/")[2] for name in setup.communicator.link_up_s))
    if rank.number:
        dist.recv(number, rank.number - 1)
    if rank.number != last:
        dist.send(number + 1, rank.number + 1)
    rank.say(number.item())


def test_pairs_that_have_sent_to_each_other_come_up_before_the_step(ranks: Ranks) -> None:
    """A newcomer hears of its pairs from its neighbours; the group that they are in was not used, and stays down."""
    ranks.start_all(WORLD, lambda rank: passes_on(rank, connected=True))
    assert ranks.hear_all() == ["passed on"] * WORLD
    ranks.signal(1, signal.SIGKILL)
    ranks.start(1, WORLD, lambda rank: passes_on(rank, connected=False))
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD
    assert ranks.hear_all() == [["0-1"], ["0-1", "1-2"], ["1-2"]]
    assert ranks.hear_all() == [0.0, 1.0, 2.0]


def with_options(rank: Rank, *, connected: bool) -> None:
    """Make a group with options of the library, use it, and say how much memory its communicator takes."""
    from tests.cann import faults

    setup = Setup(rank, connected=connected)
    group: Any = dist.new_group(pg_options=options())
    if connected:
        dist.all_reduce(torch.ones(1, device="npu"), group=group)
        rank.say(faults.used_bytes() // (BUFFER_MB * MEGABYTE))
        setup.stop_and_clean()
    rank.say(setup.reconnect())
    rank.say(faults.used_bytes() // (BUFFER_MB * MEGABYTE))
    dist.all_reduce(ones := torch.ones(1, device="npu"), group=group)
    rank.say(ones.item())


def options() -> Any:
    """Return options of a group as Megatron gives them."""
    import torch_npu

    made = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    made.hccl_config = OPTIONS["hccl_config"]
    return made


def test_options_that_a_script_gives_for_a_group_reach_the_library(ranks: Ranks) -> None:
    """In a newcomer, too, which makes its groups before it is connected: its buffers have the size asked for."""
    ranks.start_all(WORLD, lambda rank: with_options(rank, connected=True))
    assert ranks.hear_all() == [2] * WORLD
    ranks.signal(VICTIM, signal.SIGKILL)
    ranks.start(VICTIM, WORLD, lambda rank: with_options(rank, connected=False))
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD
    assert ranks.hear_all() == [2] * WORLD
    assert ranks.hear_all() == [float(WORLD)] * WORLD


def resumes_late(rank: Rank) -> None:
    """Be stopped; one rank's library takes its time to resume, and clears then what peers have signalled to it."""
    import torch_npu

    setup = Setup(rank)
    setup.check()
    setup.stop_and_clean()
    if rank.number == VICTIM:
        resume = torch_npu.distributed.reinit_process_group

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(LATE_S)
            return resume(*args, **kwargs)

        torch_npu.distributed.reinit_process_group = slowly
    rank.say(setup.reconnect(LINK_UP_S / 2))
    setup.check()


def test_no_rank_links_up_before_all_have_resumed(ranks: Ranks) -> None:
    """What a faster rank has sent to one that is still resuming would be dropped, and waited for until the end."""
    ranks.start_all(WORLD, resumes_late)
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD


def swaps(rank: Rank) -> None:
    """Send to both neighbours and receive from both, as one batch; then be stopped in one that nobody answers."""
    setup = Setup(rank)
    mine = torch.full((200_000,), float(rank.number), device="npu")
    left, right = (rank.number - 1) % WORLD, (rank.number + 1) % WORLD
    theirs = {left: torch.empty_like(mine), right: torch.empty_like(mine)}
    batch = [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.isend, mine, left)]
    batch += [dist.P2POp(dist.irecv, landing, source) for source, landing in theirs.items()]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    setup.device.finish()
    rank.say({source: sorted(set(landing.tolist())) for source, landing in theirs.items()})
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, mine, right)]):
        work.wait()
    stopper = threading.Timer(LATE_S, lambda: stop(setup))
    stopper.start()
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        rank.say(str(error).splitlines()[0])
    stopper.join()
    setup.device.clean()
    rank.say(setup.reconnect())
    setup.check()


def stop(setup: Setup) -> None:
    setup.communicator.abort("a peer is gone")
    setup.device.stop()


def test_a_batch_of_sends_and_receives_does_not_wait_for_itself_and_is_stopped_like_the_rest(ranks: Ranks) -> None:
    """Everybody sends first, as pipelines and buddies do."""
    ranks.start_all(WORLD, swaps)
    for number in range(WORLD):
        left, right = (number - 1) % WORLD, (number + 1) % WORLD
        assert ranks.hear(number) == {left: [float(left)], right: [float(right)]}
    assert all("FORCE STOP" in text for text in ranks.hear_all())
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD


def swaps_in_a_group(rank: Rank, *, connected: bool) -> None:
    """Use a group for batches alone, as stages of a pipeline do; be connected again; say how many groups came up."""
    setup = Setup(rank, connected=connected)
    if connected:
        if rank.number in GROUPS[0]:
            swap(rank, setup.groups[0])
        rank.say("swapped")
        setup.stop_and_clean()
    rank.say(setup.reconnect())
    rank.say(len(setup.communicator.link_up_s))
    if rank.number in GROUPS[0]:
        swap(rank, setup.groups[0])
    rank.say("swapped")


def swap(rank: Rank, group: Any) -> None:
    peer = 1 - rank.number
    mine, theirs = (torch.full((4,), float(number), device="npu") for number in (rank.number, VICTIM))
    batch = [dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert theirs.tolist() == [float(peer)] * 4


def test_a_group_that_was_used_for_batches_alone_is_in_use(ranks: Ranks) -> None:
    """Also where torch-npu makes a batch past midstep's group, as it does on CANN before 9.0, and here."""
    ranks.start_all(WORLD, lambda rank: swaps_in_a_group(rank, connected=True))
    assert ranks.hear_all() == ["swapped"] * WORLD
    ranks.signal(1, signal.SIGKILL)
    ranks.start(1, WORLD, lambda rank: swaps_in_a_group(rank, connected=False))
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD
    assert ranks.hear_all() == [1, 1, 0]
    assert ranks.hear_all() == ["swapped"] * WORLD


def moves_shards(rank: Rank) -> None:
    """Send several batches to a neighbour, one behind the other; then try to in a generation that is over."""
    setup = Setup(rank)
    told: list[str] = []
    setup.communicator.watch(SimpleNamespace(entered=lambda op, group: told.append(op), left=told.append))
    left, right = (rank.number - 1) % WORLD, (rank.number + 1) % WORLD
    mine = [torch.full((100_000,), float(10 * rank.number + turn), device="npu") for turn in range(3)]
    landing = [torch.empty_like(each) for each in mine]
    batches = []
    for turn in range(3):
        batch = [DeviceMessage(mine[turn], right, sending=True), DeviceMessage(landing[turn], left, sending=False)]
        batches.append(setup.communicator.exchange(batch))
    for each in batches:
        each.wait()
    rank.say([sorted(set(each.tolist())) for each in landing])
    rank.say(told)
    setup.communicator.abort("a peer is gone")
    with pytest.raises(CommunicatorAborted):
        setup.communicator.exchange([DeviceMessage(mine[0], right, sending=False)])
    rank.say("refused")


def test_shards_travel_in_order_unseen_by_the_step_clock_and_not_in_a_generation_that_is_over(ranks: Ranks) -> None:
    ranks.start_all(WORLD, moves_shards)
    for number in range(WORLD):
        assert ranks.hear(number) == [[float(10 * ((number - 1) % WORLD) + turn)] for turn in range(3)]
        assert ranks.hear(number) == []
    assert ranks.hear_all() == ["refused"] * WORLD


def aborted_link_up(rank: Rank) -> None:
    """End a rebuild that waits for somebody who does not come, from another thread."""
    setup = Setup(rank)
    setup.check()
    setup.stop_and_clean()
    if rank.number != VICTIM:
        control = threading.Timer(LATE_S, lambda: stop(setup))
        control.start()
        with pytest.raises(CommunicatorAborted):
            setup.communicator.reconnect(1, rank.store, LINK_UP_S)
        control.join()
        setup.device.clean()
    rank.say("aborted")
    rank.say(setup.reconnect())
    setup.check()


def test_an_abort_ends_a_rebuild_and_the_next_generation_works(ranks: Ranks) -> None:
    ranks.start_all(WORLD, aborted_link_up)
    assert ranks.hear_all() == ["aborted"] * WORLD
    ranks.say(2)
    assert ranks.hear_all() == [("up", "")] * WORLD
