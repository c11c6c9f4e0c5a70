"""An agent gives the ranks of its node a store, a word with the controller, and a look at their step clocks."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from midstep.protocol.codec import envelopes_of, frame_of
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import (
    Ack,
    Envelope,
    FaultReported,
    NodeHeartbeat,
    NodeJoined,
    ProbeProgress,
    ProcessStarted,
    ProgressReported,
    RankFinished,
    RanksReported,
    Resume,
    StoreMoved,
)
from midstep.protocol.transport import DealerSocket, Received
from midstep.protocol.types import CONTROLLER, Activity, FaultKind, rank_address

pytestmark = pytest.mark.chaos

Play = Callable[..., None]

SLEEP = "import time\nprint('running', flush=True)\ntime.sleep(600)\n"
GLOO = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("sum", total.item(), "of", dist.get_world_size(), flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(9)
dist.barrier()
dist.destroy_process_group()
"""
STORE = """
import os, torch.distributed as dist
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
print("found", store.check(["mark"]))
store.set("mark", "here")
"""


def test_a_plain_script_trains_across_two_nodes_and_again_after_a_restart(play: Play) -> None:
    """`init_process_group("gloo")` works as under torchrun, also where the dead ranks' addresses are in the store."""

    async def scenario(site: Any) -> None:
        for node in ("node0", "node1"):
            await site.agent(node)
            site.welcome(GLOO, node=node)
        for incarnation, status in ((0, 9), (1, 0)):
            site.start(0, incarnation, "node0")
            site.start(1, incarnation, "node1", local_rank=0, group_rank=1)
            for rank in (0, 1):
                assert (await site.exited(rank, incarnation)).status == status
                assert "sum 3.0 of 2" in site.log(rank, incarnation)

    play(scenario, nodes=2)


def test_a_killed_store_serves_again_at_the_same_place_and_that_is_reported(play: Play) -> None:
    async def scenario(site: Any) -> None:
        joined = await site.agent()
        site.welcome(STORE)
        site.start(0)
        await site.exited(0)
        [store] = site.below("store")
        store.kill()

        moved = await site.controller.until(StoreMoved)
        assert moved == StoreMoved(node="node0", store=joined.store)
        site.start(1)
        assert (await site.exited(1)).status == 0
        assert "found False" in site.log(0)
        assert "found False" in site.log(1)
        site.start(0, incarnation=1)
        await site.exited(0, incarnation=1)
        assert "found True" in site.log(0, incarnation=1)

    play(scenario)


class Processor:
    """The wire end of a rank, inside the test."""

    def __init__(self, root: Path, rank: int, identity: str | None = None, session: int = 1) -> None:
        self.mailbox = Mailbox(job="agent-test", address=rank_address(rank), session=session)
        self.heard: list[Any] = []
        self._socket = DealerSocket(
            f"ipc://{root}/node0/agent.sock", identity=identity or rank_address(rank), curve=None
        )
        self._socket.attach(asyncio.get_running_loop(), self._received)

    def _received(self, batch: list[Received]) -> None:
        self.heard += [envelope for message in batch for envelope in envelopes_of(message.data)]

    def all(self, kind: type) -> list[Any]:
        return [envelope.body for envelope in self.heard if isinstance(envelope.body, kind)]

    def finish(self, committed: int, times: int = 1) -> None:
        body = RankFinished(rank=0, generation=1, incarnation=0, committed=committed)
        data = frame_of(self.mailbox.post(body, CONTROLLER, time.monotonic()))
        for _ in range(times):
            self._socket.send(data)

    def acknowledge(self, envelope: Envelope) -> None:
        self._socket.send(frame_of(self.mailbox.acknowledge(envelope)))

    def close(self) -> None:
        self._socket.close()


def test_messages_of_a_rank_pass_through_the_agent_both_ways(play: Play) -> None:
    """Its report in one of its node, and its command out of the orders for its node."""

    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(SLEEP)
        site.start(0)
        await site.says(0, "running")
        processor = Processor(site.root, 0)
        processor.finish(12)

        reported = await site.controller.until(RanksReported)
        assert reported.node == "node0"
        [report] = reported.reports
        assert (report.rank, report.incarnation, report.word.committed) == (0, 1, 12)
        assert 0 <= report.age_s < 60
        site.controller.order_rank(0, 2, Resume(rank=0, generation=2, step=12))
        await site.eventually(lambda: processor.all(Resume), "the command")
        assert processor.all(Resume)[0] == Resume(rank=0, generation=2, step=12)
        processor.close()

    play(scenario)


def test_a_rank_is_told_that_its_report_is_durable_when_the_controller_has_said_so(play: Play) -> None:
    """Not before; and what it says again meanwhile is said to the controller once."""

    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(SLEEP)
        site.start(0)
        await site.says(0, "running")
        processor = Processor(site.root, 0)
        site.controller.acknowledges = False
        processor.finish(12, times=3)
        await site.controller.until(RankFinished)
        await asyncio.sleep(1.0)
        assert processor.all(Ack) == []
        site.controller.acknowledges = True  # the agent sends it again, and that is answered
        await site.eventually(lambda: processor.all(Ack) == [Ack(1, 1)], "the acknowledgement")
        assert len(site.controller.all(RankFinished)) == 1
        processor.close()

    play(scenario)


def test_a_command_is_repeated_to_its_rank_until_it_is_taken_in(play: Play) -> None:
    """By the agent: to the controller it is acknowledged at once."""

    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(SLEEP)
        site.start(0)
        await site.says(0, "running")
        site.controller.order_rank(0, 2, Resume(rank=0, generation=2, step=12))
        await site.eventually(lambda: site.controller.waits == 0, "the acknowledgement")
        processor = Processor(site.root, 0)  # which was not there yet
        processor.finish(1)
        await site.eventually(lambda: len(processor.all(Resume)) > 1, "the command, again")
        first = next(envelope for envelope in processor.heard if isinstance(envelope.body, Resume))
        processor.acknowledge(first)
        await asyncio.sleep(0.5)
        heard = len(processor.all(Resume))
        await asyncio.sleep(3.0)
        assert len(processor.all(Resume)) == heard
        processor.close()

    play(scenario)


def test_nobody_speaks_for_another_rank_nor_for_one_that_is_gone(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(SLEEP)
        for incarnation in (0, 1):  # a processor's session is its incarnation
            site.start(0, incarnation)
            await site.says(0, "running", incarnation)
        refused = {
            "sender is not the connected rank": Processor(site.root, 0, identity="rank/1"),
            "session of an earlier process": Processor(site.root, 0, session=0),
            "unknown rank": Processor(site.root, 5),
        }
        for reason, processor in refused.items():
            processor.finish(1)
            await site.mentions(reason)
            processor.close()

        right = Processor(site.root, 0)
        right.finish(2)
        await site.controller.until(RankFinished)
        assert [body.committed for body in site.controller.all(RankFinished)] == [2]
        right.close()

    play(scenario)


CLOCK = """
import os, time
from midstep.protocol.blackbox import BlackBox
from midstep.protocol.types import Activity
box = BlackBox.attach(int(os.environ["MIDSTEP_BLACK_BOX_FD"]))
def step(number):
    now = time.monotonic()
    box.write_progress(pid=os.getpid(), incarnation=0, generation=1, step=number, activity=Activity.COMPUTING,
                       collectives=2 * number, activity_began_s=now, step_began_s=now, median_step_s=0.2)
for number in range(8):
    step(number)
    time.sleep(0.2)
print("running", flush=True)
box.set_activity(Activity.COLLECTIVE, time.monotonic())
time.sleep(600)
"""


def test_a_rank_whose_step_clock_stands_still_is_reported_as_a_stall_less_and_less_often(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(CLOCK)
        site.start(0)

        report = (await site.controller.until(FaultReported)).report
        assert (report.kind, report.rank, report.incarnation) == (FaultKind.STALL, 0, 0)
        assert "step 7" in report.detail
        assert "collective for" in report.detail
        await asyncio.sleep(1.0)
        assert len(site.controller.all(FaultReported)) <= 3  # each time that its age doubles

    play(scenario)


def test_a_probe_is_answered_with_step_clocks_read_now_and_says_who_is_stopped(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(CLOCK)
        site.start(0)
        started = await site.started(0)
        await site.says(0, "running")
        os.kill(started.process.pid, 19)
        while psutil.Process(started.process.pid).status() != psutil.STATUS_STOPPED:  # the signal takes a moment
            await asyncio.sleep(0.01)
        site.controller.order(ProbeProgress(probe=5))

        answer = await site.controller.until(ProgressReported)
        [progress] = answer.ranks
        assert (answer.probe, progress.rank, progress.step) == (5, 0, 7)
        assert (progress.activity, progress.collectives, progress.suspended) == (Activity.COLLECTIVE, 14, True)
        assert progress.step_age_s >= progress.activity_age_s >= 0

    play(scenario)


def test_heartbeats_carry_the_step_clocks_and_a_fresh_process_is_starting(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(SLEEP)
        site.start(1)

        beat = await site.controller.until(NodeHeartbeat, lambda body: bool(body.ranks))
        [progress] = beat.ranks
        assert (progress.rank, progress.incarnation, progress.generation) == (1, 0, 1)
        assert progress.activity is Activity.STARTING

    play(scenario)


def test_an_agent_joins_with_its_store_before_anything_slow(play: Play) -> None:
    async def scenario(site: Any) -> None:
        joined = await site.agent()

        assert isinstance(joined, NodeJoined)
        assert (joined.node, joined.failure_domain, joined.processes) == ("node0", "node0", ())
        assert joined.store.port > 0
        site.welcome(SLEEP)
        site.start(1)
        await site.controller.until(ProcessStarted)
        assert len(site.controller.all(NodeJoined)) == 1  # and not once more when it heard of a controller at last

    play(scenario)
