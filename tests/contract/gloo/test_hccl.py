"""HCCL's communicator on the fake device, in real processes: every group comes back, resumed or rebuilt."""

from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from midstep.communicators.base import DeviceMessage
from midstep.communicators.fake import fake_communicator
from midstep.devices import device_named
from midstep.devices import fake as calls
from midstep.devices.fake_chip import CHIP
from midstep.protocol.errors import CommunicatorAborted, LinkUpFailed
from midstep.protocol.faults import FaultAction

if TYPE_CHECKING:
    from tests.contract.gloo.conftest import Rank, Ranks

WORLD = 4
VICTIM = 3
LINK_UP_S = 10.0
SHORT_S = 3.0
LATE_S = 0.4
OPTIONS = {"hccl_config": {"hccl_buffer_size": 64}}
# As a framework makes them: tensor parallel, data parallel, an expert group, and one that is asked for twice.
GROUPS = ([0, 1], [2, 3], [0, 2], [1, 3], [1, 2, 3], [0, 1])
ENVIRONMENT = {"HCCL_ASYNC_ERROR_HANDLING": "0"}


class Setup:
    """A rank with its device, its communicator and its groups."""

    def __init__(self, rank: Rank, *, connected: bool = True) -> None:
        self.rank = rank
        self.device = device_named("fake")
        self.device.prepare(rank.number, ENVIRONMENT, LINK_UP_S)
        self.communicator = fake_communicator()
        rank.init(self.communicator, connected=connected)
        made = [dist.new_group(members) for members in GROUPS]
        self.groups = [group for group in made if group != dist.GroupMember.NON_GROUP_MEMBER]

    def check(self) -> None:
        """Add up ones in every group, through the handles that were made at the start."""
        for group in (None, *self.groups):
            ones = torch.ones(3)
            dist.all_reduce(ones, group=group)
            assert ones.tolist() == [float(dist.get_world_size(group))] * 3
        assert all(group.connected for group in self.communicator._groups)

    def comms(self) -> list[int]:
        """How often each of the library's groups was linked again without being rebuilt."""
        return [group.backend._resumed for group in self.communicator._groups]

    def stop_and_clean(self) -> None:
        self.communicator.abort("a peer is gone")
        self.device.stop()
        self.device.clean()

    def say_how_it_ends(self, waiting: Any) -> None:
        """Stop the device while something waits on it, and say what that raises."""
        self.stop_and_clean()
        try:
            waiting.wait()
        except RuntimeError as error:
            self.rank.say(str(error).splitlines()[0])

    def reconnect(self, link_up_s: float = LINK_UP_S) -> tuple[str, str]:
        try:
            self.communicator.reconnect(self.rank.hear(), self.rank.store, link_up_s)
        except LinkUpFailed as error:
            self.device.stop()
            self.device.clean()
            return "not up", str(error)
        return "up", ""


def join_late(rank: Rank) -> None:
    """Make model and groups alone; be connected; use everything."""
    setup = Setup(rank, connected=False)
    alone = torch.full((2,), 7.0)
    dist.all_reduce(alone)
    assert alone.tolist() == [7.0, 7.0]
    for work in dist.batch_isend_irecv([dist.P2POp(op, alone, 0) for op in (dist.isend, dist.irecv)]):
        work.wait()
    assert alone.tolist() == [7.0, 7.0]
    rank.say("checked")
    rank.say("nothing")
    rank.say(setup.reconnect())
    setup.check()
    rank.say(setup.comms())
    setup.communicator.close()


def survive_until_told(rank: Rank) -> None:
    """As a training process: the control thread stops the device, the train thread raises."""
    setup = Setup(rank)
    setup.check()
    rank.say("checked")

    def control() -> None:
        assert rank.hear() == "stop"
        setup.communicator.abort("a peer is gone")
        setup.device.stop()

    thread = threading.Thread(target=control, daemon=True)
    thread.start()
    try:
        while True:
            dist.all_reduce(torch.ones(1000))
    except RuntimeError as error:
        text = str(error).splitlines()[0]
    thread.join(10)
    setup.device.clean()
    rank.say(text)
    rank.say(setup.reconnect())
    setup.check()
    rank.say(setup.comms())
    setup.communicator.close()


def test_every_group_comes_back_with_a_newcomer(ranks: Ranks) -> None:
    """World, tensor parallel, data parallel and expert groups: the handles stay, the communicators are rebuilt."""
    ranks.start_all(WORLD, survive_until_told)
    ranks.hear_all()
    ranks.signal(VICTIM, signal.SIGSTOP)  # and not dead at once, which a rank beside it would see without being stopped
    time.sleep(0.2)
    ranks.say("stop")
    texts = [ranks.hear(number) for number in range(WORLD) if number != VICTIM]
    assert all(text.startswith(("FORCE STOP", "HCCL function error", "allreduce cannot")) for text in texts), texts
    assert any(text.startswith("FORCE STOP") for text in texts), "nobody was waiting for the stopped rank"
    ranks.signal(VICTIM, signal.SIGKILL)
    ranks.start(VICTIM, WORLD, join_late)
    assert ranks.hear(VICTIM) == "checked"
    assert ranks.hear(VICTIM) == "nothing"
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD
    assert all(resumed == [0] * len(resumed) for resumed in ranks.hear_all())


def interrupted_twice(rank: Rank) -> None:
    """Be stopped for nobody's fault, come back; then again, with a link that stays broken in one rank."""
    setup = Setup(rank)
    setup.check()
    before = [group.backend for group in setup.communicator._groups]
    setup.stop_and_clean()
    rank.say(setup.reconnect())
    setup.check()
    rank.say(setup.comms())
    if rank.number == VICTIM:
        CHIP.link_broken = True
    setup.stop_and_clean()
    rank.say(setup.reconnect(SHORT_S))
    rank.say(setup.reconnect())
    setup.check()
    rank.say(setup.comms())
    assert [group.backend for group in setup.communicator._groups] == before
    setup.communicator.close()


def test_without_a_newcomer_communicators_are_resumed_and_rebuilt_only_if_that_fails(ranks: Ranks) -> None:
    ranks.start_all(WORLD, interrupted_twice)
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD
    assert all(set(resumed) == {1} for resumed in ranks.hear_all())
    ranks.say(2)
    answers = ranks.hear_all()
    assert [word for word, _ in answers] == ["not up"] * WORLD, answers
    assert "links of group" in answers[0][1]
    ranks.say(3)
    assert ranks.hear_all() == [("up", "")] * WORLD
    assert all(set(resumed) == {0} for resumed in ranks.hear_all())


def fails_once(rank: Rank) -> None:
    """Have one rank's next communicator not come up."""
    setup = Setup(rank)
    setup.check()
    if rank.number == VICTIM:
        setup.device.inject(FaultAction.LINK_UP_FAILS)
    setup.stop_and_clean()
    rank.say(setup.reconnect(SHORT_S))
    rank.say(setup.reconnect())
    setup.check()
    rank.say(setup.communicator.link_up_s)
    setup.communicator.close()


def test_a_fault_during_the_link_up_is_seen_there_and_the_next_generation_works(ranks: Ranks) -> None:
    """Each rank gives up within its time, naming the group; after another rebuild the links of all groups are timed."""
    ranks.start_all(WORLD, fails_once)
    ranks.say(1)
    answers = ranks.hear_all()
    assert [word for word, _ in answers] == ["not up"] * WORLD, answers
    assert all("generation 1 was not linked up" in text for _, text in answers)
    ranks.say(2)
    assert ranks.hear_all() == [("up", "")] * WORLD
    for times in ranks.hear_all():
        assert len(times) >= 3
        assert all(seconds > 0 for seconds in times.values())


def resumes_late(rank: Rank) -> None:
    """Be stopped; one rank's library takes its time to resume, and clears then what peers have signalled to it."""
    setup = Setup(rank)
    setup.check()
    setup.stop_and_clean()
    if rank.number == VICTIM:
        resume = calls.distributed.reinit_process_group

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(LATE_S)
            return resume(*args, **kwargs)

        calls.distributed.reinit_process_group = slowly
    rank.say(setup.reconnect())
    setup.check()
    setup.communicator.close()


def test_no_rank_links_up_before_all_have_resumed(ranks: Ranks) -> None:
    """What a faster rank signals to one that is still resuming would be lost, and waited for until the end."""
    ranks.start_all(WORLD, resumes_late)
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD


def busy_at_first(rank: Rank) -> None:
    """Take the device of a process that was killed a moment ago: no communicator can be built for a while."""
    if rank.number == VICTIM:
        CHIP.busy_s = LATE_S
    setup = Setup(rank)
    setup.check()
    rank.say(CHIP.busy)
    setup.communicator.close()


def with_options(rank: Rank, *, connected: bool) -> None:
    """Make a group with options of the library, as Megatron does for each of its groups; say which it was made with."""
    setup = Setup(rank, connected=connected)
    dist.new_group(pg_options=OPTIONS)
    if connected:
        setup.check()
        rank.say("checked")
        setup.stop_and_clean()
    rank.say(setup.reconnect())
    rank.say([group.backend.given for group in setup.communicator._groups[-2:]])
    setup.communicator.close()


def passes_on(rank: Rank, *, connected: bool) -> None:
    """Pass a number on along the world, as stages of a pipeline do; be connected again; say which pairs are linked."""
    setup = Setup(rank, connected=connected)
    number, last = torch.zeros(1), WORLD - 1
    if connected:
        if rank.number:
            dist.recv(number, rank.number - 1)
        if rank.number != last:
            dist.send(number, rank.number + 1)
        rank.say("checked")
        setup.stop_and_clean()
    rank.say(setup.reconnect())
    backend: Any = setup.communicator._groups[0].backend
    timed = [name for name in setup.communicator.link_up_s if "/" in name]
    rank.say((sorted(backend.pairs), len(timed)))
    setup.communicator.close()


def test_pairs_that_have_sent_to_each_other_are_linked_before_the_step(ranks: Ranks) -> None:
    """A newcomer hears of its pairs from its neighbours. The library itself would link in the step."""
    ranks.start_all(WORLD, lambda rank: passes_on(rank, connected=True))
    assert ranks.hear_all() == ["checked"] * WORLD
    ranks.signal(2, signal.SIGKILL)
    ranks.start(2, WORLD, lambda rank: passes_on(rank, connected=False))
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD
    assert ranks.hear_all() == [([1], 1), ([0, 2], 2), ([1, 3], 2), ([2], 1)]


def test_options_that_a_script_gives_for_a_group_reach_the_library(ranks: Ranks) -> None:
    """In a newcomer, too, which makes its groups before it is connected."""
    ranks.start_all(WORLD, lambda rank: with_options(rank, connected=True))
    assert ranks.hear_all() == ["checked"] * WORLD
    ranks.signal(VICTIM, signal.SIGKILL)
    ranks.start(VICTIM, WORLD, lambda rank: with_options(rank, connected=False))
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD
    assert ranks.hear_all() == [[None, OPTIONS]] * WORLD


def test_a_newcomer_waits_until_the_process_before_has_let_go_of_the_device(ranks: Ranks) -> None:
    """HCCL refuses with error code 7 and EJ0001 until then; the peers wait meanwhile."""
    ranks.start_all(WORLD, busy_at_first)
    assert ranks.hear_all() == [False] * WORLD


def aborted_link_up(rank: Rank) -> None:
    """End a rebuild that waits for somebody who does not come, from another thread."""
    setup = Setup(rank)
    setup.check()
    setup.stop_and_clean()

    def control() -> None:
        time.sleep(0.3)
        setup.communicator.abort("the next generation is being opened")
        setup.device.stop()

    thread = threading.Thread(target=control, daemon=True)
    thread.start()
    answer: Any = None
    try:
        setup.communicator.reconnect(1, rank.store, LINK_UP_S)
    except Exception as error:
        answer = type(error).__name__
    thread.join(10)
    setup.device.clean()
    rank.say(answer)
    rank.say(setup.reconnect())
    setup.check()
    setup.communicator.close()


def comes_late(rank: Rank) -> None:
    setup = Setup(rank)
    setup.check()
    setup.stop_and_clean()
    rank.say("CommunicatorAborted")
    rank.say(setup.reconnect())
    setup.check()
    setup.communicator.close()


def test_an_abort_ends_a_rebuild_and_the_next_generation_works(ranks: Ranks) -> None:
    for number in range(WORLD - 1):
        ranks.start(number, WORLD, aborted_link_up)
    ranks.start(VICTIM, WORLD, comes_late)
    assert ranks.hear_all() == ["CommunicatorAborted"] * WORLD
    ranks.say(2)
    assert ranks.hear_all() == [("up", "")] * WORLD


def moves_shards(rank: Rank) -> None:
    """Send more to one neighbour than to the other, in batches; then wait for a neighbour that has been stopped."""
    setup = Setup(rank)
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
    try:
        setup.communicator.exchange([DeviceMessage(mine[0], right, sending=False)])
    except CommunicatorAborted as error:
        rank.say(type(error).__name__)
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
    assert all(text.startswith(("FORCE STOP", "HCCL function error")) for text in ranks.hear_all())
    assert ranks.hear_all() == ["CommunicatorAborted"] * WORLD
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD


def swaps(rank: Rank) -> None:
    """Send to both neighbours and receive from both, as one batch; then be stopped in a receive that nobody answers."""
    setup = Setup(rank)
    mine = torch.full((200_000,), float(rank.number))
    left, right = (rank.number - 1) % WORLD, (rank.number + 1) % WORLD
    theirs = {left: torch.empty_like(mine), right: torch.empty_like(mine)}
    batch = [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.isend, mine, left)]
    batch += [dist.P2POp(dist.irecv, landing, source) for source, landing in theirs.items()]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    setup.device.finish()
    rank.say({source: sorted(set(landing.tolist())) for source, landing in theirs.items()})
    waiting = dist.irecv(mine, right)
    assert waiting is not None
    setup.say_how_it_ends(waiting)
    rank.say(setup.reconnect())
    setup.check()
    setup.communicator.close()


def test_a_batch_of_sends_and_receives_does_not_wait_for_itself_and_is_stopped_like_the_rest(ranks: Ranks) -> None:
    """Everybody sends first, as pipelines and buddies do."""
    ranks.start_all(WORLD, swaps)
    for number in range(WORLD):
        left, right = (number - 1) % WORLD, (number + 1) % WORLD
        assert ranks.hear(number) == {left: [float(left)], right: [float(right)]}
    assert all(text.startswith(("FORCE STOP", "HCCL function error")) for text in ranks.hear_all())
    ranks.say(1)
    assert ranks.hear_all() == [("up", "")] * WORLD
