"""The communicator of NPUs over torch-npu's own process groups, in real processes."""

# torch.npu is there once torch_npu was imported, which no type checker sees.
# mypy: disable-error-code="attr-defined, import-not-found, unused-ignore"

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from midstep.communicators.base import DeviceMessage
from midstep.communicators.device_communicator import NEVER
from midstep.devices import device_named
from midstep.devices.kinds import NPU_DEFAULTS
from midstep.protocol.errors import LinkUpFailed
from midstep.protocol.faults import FaultAction

if TYPE_CHECKING:
    from tests.contract.gloo.conftest import Rank, Ranks

WORLD = 3
VICTIM = 2
LINK_UP_S = 60.0
SHORT_S, CONNECT_S = 2.0, 8
# As a framework makes them; one is asked for twice.
GROUPS = ([0, 1], [1, 2], [0, 2], [0, 1])
USED = (1, 3)
UNEVEN = 0  # in that one collective is begun, by one of its members
IN_USE = [sum(rank in GROUPS[number] for number in USED) for rank in range(WORLD)]
COMMUNICATOR_BYTES = 2 * 200 * 2**20
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)

pytestmark = pytest.mark.timeout(300)


class Setup:
    """A rank with its device, its communicator and its groups."""

    def __init__(self, rank: Rank, *, connected: bool = True) -> None:
        from midstep.communicators.hccl import npu_communicator

        self.rank = rank
        self.device = device_named("npu")
        self.device.prepare(rank.number, dict(NPU_DEFAULTS), LINK_UP_S)
        self.communicator = npu_communicator()
        rank.init(self.communicator, connected=connected)
        made = [dist.new_group(members) for members in GROUPS]
        self.groups = [group for group in made if group != dist.GroupMember.NON_GROUP_MEMBER]

    def check(self) -> None:
        """Add up ones in every group, through the handles that were made at the start."""
        for group in (None, *self.groups):
            ones = torch.ones(3, device="npu")
            dist.all_reduce(ones, group=group)
            assert ones.tolist() == [float(dist.get_world_size(group))] * 3

    def stop_and_clean(self) -> None:
        self.communicator.abort("a peer is gone")
        self.device.stop()
        self.device.clean()

    def reconnect(self, link_up_s: float = LINK_UP_S) -> tuple[str, str]:
        try:
            self.communicator.reconnect(self.rank.hear(), self.rank.store, link_up_s)
        except LinkUpFailed as error:
            self.device.stop()
            self.device.clean()
            return "not up", str(error)
        return "up", ""


def every_collective(rank: Rank) -> None:
    """Do each collective that torch knows, in every type that scripts use."""
    Setup(rank)
    own, size = rank.number, rank.world_size
    for kind in TYPES:

        def full(value: float, count: int = 2, kind: torch.dtype = kind) -> torch.Tensor:
            return torch.full((count,), value, dtype=kind, device="npu")

        given = full(own + 1)
        if kind != torch.uint8:
            dist.all_reduce(given)
            assert given.tolist() == [6, 6]
            dist.reduce(given, 0)
            parts = torch.arange(2 * size, device="npu").to(kind)
            taken = full(0)
            dist.reduce_scatter_tensor(taken, parts)
            assert taken.tolist() == [3 * 2 * own, 3 * (2 * own + 1)]
        dist.broadcast(given := full(own + 1), 1)
        assert given.tolist() == [2, 2]
        gathered = [full(0) for _ in range(size)]
        dist.all_gather(gathered, full(own))
        assert [each.tolist() for each in gathered] == [[0, 0], [1, 1], [2, 2]]
        out = full(0, size)
        dist.all_to_all_single(out, full(own, size))
        assert out.tolist() == [0, 1, 2]
        taken = full(0)
        after, before = (own + 1) % size, (own - 1) % size
        batch = [dist.P2POp(dist.isend, full(own), after), dist.P2POp(dist.irecv, taken, before)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert taken.tolist() == [before, before]
    if own < 2:
        place = torch.full((2,), float(own), device="npu")
        dist.send(place, 1) if own == 0 else dist.recv(place, 0)
        assert place.tolist() == [0.0, 0.0]
    dist.barrier()
    rank.say("done")


def test_every_collective_gives_what_torch_says(ranks: Ranks) -> None:
    ranks.start_all(WORLD, every_collective)
    assert ranks.hear_all() == ["done"] * WORLD


def join_late(rank: Rank) -> None:
    """Make model and groups alone; be connected; use everything."""
    setup = Setup(rank, connected=False)
    rank.say("made")
    rank.say(setup.reconnect())
    setup.check()
    rank.say("checked")


def survive_until_told(rank: Rank) -> None:
    """As a training process: the control thread stops the device, the train thread raises."""
    setup = Setup(rank)
    setup.check()
    rank.say("made")

    def control() -> None:
        assert rank.hear() == "stop"
        setup.communicator.abort("a peer is gone")
        setup.device.stop()

    thread = threading.Thread(target=control, daemon=True)
    thread.start()
    try:
        while True:
            dist.all_reduce(ones := torch.ones(1000, device="npu"))
            ones.cpu()
    except RuntimeError as error:
        text = str(error).splitlines()[0]
    thread.join(30)
    setup.device.clean()
    rank.say(text)
    rank.say(setup.reconnect())
    setup.check()
    rank.say("checked")


def test_every_group_comes_back_with_a_newcomer(ranks: Ranks) -> None:
    """Nothing tells the survivors that a peer is gone: they wait on the device until it is stopped."""
    ranks.start_all(WORLD, survive_until_told)
    ranks.hear_all()
    ranks.signal(VICTIM, signal.SIGKILL)
    time.sleep(0.5)
    survivors = [number for number in range(WORLD) if number != VICTIM]
    ranks.say("stop", *survivors)
    texts = [ranks.hear(number) for number in survivors]
    assert all("FORCE STOP" in text or text.startswith("allreduce cannot") for text in texts), texts
    assert any("FORCE STOP" in text for text in texts), texts
    ranks.start(VICTIM, WORLD, join_late)
    assert ranks.hear(VICTIM) == "made"
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD
    assert ranks.hear_all() == ["checked"] * WORLD


def join_a_busy_device(rank: Rank) -> None:
    """Take the place of a process that was killed a moment ago and has not let go of the device yet."""
    os.environ["FAKE_CANN_BUSY_S"] = "1"
    join_late(rank)


def test_a_newcomer_waits_for_its_device_in_the_attempt_that_is_under_way(ranks: Ranks) -> None:
    """EJ0001 comes when the root of the group has told its address, and the peers wait there already."""
    ranks.start_all(WORLD, survive_until_told)
    ranks.hear_all()
    ranks.signal(VICTIM, signal.SIGKILL)
    ranks.say("stop", 0, 1)
    texts = [ranks.hear(number) for number in (0, 1)]
    assert any("FORCE STOP" in text for text in texts), texts
    ranks.start(VICTIM, WORLD, join_a_busy_device)
    assert ranks.hear(VICTIM) == "made"
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD
    assert ranks.hear_all() == ["checked"] * WORLD


def fail_to_link_up(rank: Rank) -> None:
    """Build all communicators anew, of which one rank's does not come up; then again."""
    setup = Setup(rank)
    setup.check()
    if rank.number == VICTIM:
        setup.communicator._linked = NEVER  # as a newcomer: nothing is resumed
        setup.device.inject(FaultAction.LINK_UP_FAILS)
    setup.stop_and_clean()
    rank.say(setup.reconnect(SHORT_S))
    began_s = time.monotonic()
    rank.say(setup.reconnect())
    setup.check()
    rank.say(time.monotonic() - began_s)


def test_a_link_up_that_loses_a_rank_is_over_when_hccl_gives_it_up_and_not_before(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stop of the device ends it. The next attempt waits for it, and comes up."""
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", str(CONNECT_S))
    ranks.start_all(WORLD, fail_to_link_up)
    ranks.say(1)
    assert [word for word, _ in ranks.hear_all()] == ["not up"] * WORLD
    ranks.say(2)
    assert ranks.hear_all() == [("up", "")] * WORLD
    assert max(ranks.hear_all()) > (CONNECT_S - SHORT_S) / 2


def interrupted_twice(rank: Rank) -> None:
    """Be stopped for nobody's fault, come back; then again, in the middle of a collective that one rank leaves out."""
    setup = Setup(rank)
    setup.check()
    for number in range(2):
        if number and rank.number != VICTIM:
            dist.all_reduce(torch.ones(100_000, device="npu"))
            time.sleep(0.3)
        setup.stop_and_clean()
        rank.say(setup.reconnect())
        setup.check()
    rank.say("checked")


def test_without_a_newcomer_communicators_are_resumed(ranks: Ranks) -> None:
    """What was on its way when the devices were stopped is not taken for what comes afterwards."""
    ranks.start_all(WORLD, interrupted_twice)
    for generation in (1, 2):
        ranks.say(generation)
        assert ranks.hear_all() == [("up", "")] * WORLD
    assert ranks.hear_all() == ["checked"] * WORLD


def exchange(rank: Rank) -> None:
    setup = Setup(rank)
    after, before = (rank.number + 1) % WORLD, (rank.number - 1) % WORLD
    given, taken = torch.full((5000,), float(rank.number), device="npu"), torch.zeros(5000, device="npu")
    setup.communicator.exchange([DeviceMessage(given, after, True), DeviceMessage(taken, before, False)]).wait()
    assert (taken == float(before)).all()
    rank.say(taken[0].item())


def test_an_exchange_is_one_batch_between_devices(ranks: Ranks) -> None:
    ranks.start_all(WORLD, exchange)
    assert ranks.hear_all() == [float((number - 1) % WORLD) for number in range(WORLD)]


def communicators() -> int:
    """Return how many communicators' buffers are in the device's memory: 400 MB each; tensors are small."""
    from tests.cann import faults

    return faults.used_bytes() // COMMUNICATOR_BYTES


def use(setup: Setup, number: int) -> None:
    """Add up ones in one of GROUPS, if this rank is in it."""
    own = [members for members in GROUPS if setup.rank.number in members]
    if setup.rank.number in GROUPS[number]:
        place = len([members for members in GROUPS[:number] if setup.rank.number in members])
        dist.all_reduce(ones := torch.ones(1, device="npu"), group=setup.groups[place])
        assert ones.item() == len(own[place])


def come_back(setup: Setup) -> None:
    """Be connected again, say how many communicators there are; then use every group."""
    setup.rank.say(setup.reconnect())
    setup.rank.say(communicators())
    setup.check()
    setup.rank.say("checked")


def use_some(rank: Rank) -> None:
    """Use some groups; say how many communicators there are before that, after it, and after a recovery."""
    setup = Setup(rank)
    rank.say(communicators())
    for number in USED:
        use(setup, number)
    rank.say(communicators())
    setup.stop_and_clean()
    come_back(setup)


def join_those_in_use(rank: Rank) -> None:
    come_back(Setup(rank, connected=False))


@pytest.mark.parametrize("newcomer", [False, True], ids=["resumed", "rebuilt"])
def test_groups_that_were_not_used_take_no_memory_of_the_device(ranks: Ranks, newcomer: bool) -> None:
    """A communicator takes twice HCCL_BUFFSIZE, 200 MB if it is not set. Nothing is linked at the start, and after a
    fault exactly what was in use before, also in a process that has used nothing itself.
    """
    ranks.start_all(WORLD, use_some)
    assert ranks.hear_all() == [0] * WORLD
    assert ranks.hear_all() == IN_USE
    if newcomer:
        ranks.signal(VICTIM, signal.SIGKILL)
        ranks.start(VICTIM, WORLD, join_those_in_use)
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD
    assert ranks.hear_all() == IN_USE
    assert ranks.hear_all() == ["checked"] * WORLD


def begin_alone(rank: Rank) -> None:
    """Have one rank begin to use a group that the other member does not come to, until HCCL gives that up."""
    setup = Setup(rank)
    for number in USED:
        use(setup, number)
    if rank.number == GROUPS[UNEVEN][0]:
        try:
            use(setup, UNEVEN)
        except RuntimeError as error:
            rank.say(str(error).partition("\n")[0])
    rank.say("begun")
    setup.stop_and_clean()
    come_back(setup)


def test_a_group_that_one_member_has_begun_to_use_comes_up_in_all_of_them(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They agree on it. What the library counts of a link-up that failed is dropped: nothing is resumed then."""
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "2")
    ranks.start_all(WORLD, begin_alone)
    assert "HCCL" in ranks.hear(GROUPS[UNEVEN][0])
    assert ranks.hear_all() == ["begun"] * WORLD
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD
    assert ranks.hear_all() == [in_use + (rank in GROUPS[UNEVEN]) for rank, in_use in enumerate(IN_USE)]
    assert ranks.hear_all() == ["checked"] * WORLD


def be_stopped_inside(rank: Rank) -> None:
    """Begin to use a group alone, and be stopped by another thread while HCCL waits for the other member."""
    setup = Setup(rank)
    for number in USED:
        use(setup, number)
    rank.say("used")
    if rank.number == GROUPS[UNEVEN][0]:
        stopper = threading.Timer(0.3, lambda: rank.say(stop_and_look(setup)))
        stopper.start()
        with pytest.raises(RuntimeError, match="HCCL"):
            use(setup, UNEVEN)
        stopper.join()
        rank.say(setup.device.stopped)
    setup.stop_and_clean()
    come_back(setup)


def stop_and_look(setup: Setup) -> bool:
    """Stop the device as the control thread does; return whether that was done when the call had returned."""
    setup.communicator.abort("a peer is gone")
    setup.device.stop()
    return setup.device.stopped


def test_a_device_is_not_stopped_while_a_thread_is_inside_hccl_but_when_it_comes_out(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CANN would walk through a list of communicators that this thread changes. Nothing ends the link-up before."""
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "2")
    ranks.start_all(WORLD, be_stopped_inside)
    assert ranks.hear_all() == ["used"] * WORLD
    alone = GROUPS[UNEVEN][0]
    assert (ranks.hear(alone), ranks.hear(alone)) == (False, True)
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD
    assert ranks.hear_all() == [in_use + (rank in GROUPS[UNEVEN]) for rank, in_use in enumerate(IN_USE)]
    assert ranks.hear_all() == ["checked"] * WORLD
