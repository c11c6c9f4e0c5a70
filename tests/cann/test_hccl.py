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


def count_memory(rank: Rank) -> None:
    """Say how much of the device a communicator takes, when it is built and when it is gone."""
    from tests.cann import faults

    setup = Setup(rank)
    before = faults.used_bytes()
    setup.check()
    rank.say((faults.used_bytes() - before) // (1 << 20))


def test_a_communicator_takes_memory_of_the_device(ranks: Ranks) -> None:
    """Twice HCCL_BUFFSIZE, 200 MB if it is not set, for each group that is used; the world's is linked at the start."""
    ranks.start_all(WORLD, count_memory)
    used = ranks.hear_all()
    groups = [sum(number in members for members in GROUPS) for number in range(WORLD)]
    assert [megabytes // 400 for megabytes in used] == groups, used
