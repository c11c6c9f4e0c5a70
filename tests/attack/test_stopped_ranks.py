"""Stopped processes: SIGSTOP, or a debugger, in a rank at any time"""

import os
import signal
import time
from collections.abc import Callable

import msgspec
import pytest

from midstep.controller.recovery.events import StopRequested
from midstep.controller.recovery.state import Phase
from midstep.protocol.messages import EndJob, FaultReported, NodeHeartbeat, StartProcess, StopProcess
from midstep.protocol.types import FaultAction, FaultKind, InjectionPoint, RankProgress
from midstep.testing.fake_cluster import FakeCluster, job, only

from ..chaos.agent.conftest import SETTINGS, Site
from ..chaos.comparing import assert_nobody_harmed
from ..chaos.conftest import StartJob
from ..chaos.jobs import ROOMY, inject
from .attack import attack

Play = Callable[..., None]

SUSPENDED_S = 3.0  # longer than a heartbeat takes to say so
SLEEP = "import time\nprint('running', flush=True)\ntime.sleep(600)\n"


def running() -> FakeCluster:
    """A running job of two nodes with two ranks each."""
    cluster = FakeCluster()
    cluster.start()
    return cluster


@attack(
    "a rank is stopped (SIGSTOP) while the others are being stopped for a recovery",
    holds="the deadline of the recovery is not waited for: the rank is replaced as soon as its agent sees it",
    reads="`unresponsive`: the process has been stopped for 3.0 s by a signal or a debugger",
)
def test_a_stopped_rank_ends_the_wait_of_a_recovery() -> None:
    """Its agent's report counts while everybody is being stopped, as the deadline's would."""
    cluster = running()
    cluster.feed(cluster.exited(1))
    cluster.feed(cluster.quiesced(0, 5), cluster.quiesced(3, 5, peers=[1]))
    cluster.expect(Phase.QUIESCING)

    report = cluster.fault(2, FaultKind.UNRESPONSIVE)
    bodies = cluster.feed(report)

    assert [body.rank for body in only(bodies, StartProcess)] == [2]
    assert cluster.feed(report) == []


@attack(
    "a rank is stopped while the emergency checkpoint of a job's end is written",
    holds="it is ended, and the others write the checkpoint without it",
)
def test_a_stopped_rank_does_not_hold_up_the_emergency_checkpoint() -> None:
    """The end of its process has the others save without it."""
    cluster = running()
    cluster.feed(StopRequested("enough"))
    cluster.expect(Phase.SAVING)
    cluster.feed(*(cluster.quiesced(rank, 5, peers=[2]) for rank in (0, 1, 3)))

    assert cluster.feed(cluster.fault(2, FaultKind.UNRESPONSIVE)) == [StopProcess(2, 1, grace_s=0.0)]
    assert cluster.machine.phase is Phase.SAVING


@attack(
    "a person stops a rank of a script that knows nothing of midstep, to look at it",
    holds="the rank is left as it is, as under torchrun",
)
def test_a_stopped_process_of_a_plain_script_is_left_alone() -> None:
    """A script that is not resilient has no step to bring back: nothing is restarted, and the report is counted."""
    plain = FakeCluster(job())
    for number in range(3):
        plain.feed(plain.node(f"node{number}"))

    assert only(plain.feed(plain.fault(1, FaultKind.UNRESPONSIVE)), EndJob) == []
    assert plain.machine.state.history.ignored == {"process that is stopped, of a script that is not resilient": 1}


@attack(
    "a rank is stopped while it starts, before its first step",
    holds="its agent reports it after `stall.suspended_s`, and not when it continues before",
)
@pytest.mark.chaos
def test_an_agent_reports_a_rank_that_is_stopped_before_its_first_step(play: Play) -> None:
    """No step has to be known for that."""

    async def scenario(site: Site) -> None:
        await site.agent()
        site.welcome(SLEEP, settings=msgspec.structs.replace(SETTINGS, stall_suspended_s=SUSPENDED_S))
        site.start(0)
        pid = (await site.started(0)).process.pid
        await site.says(0, "running")
        os.kill(pid, signal.SIGSTOP)
        await site.controller.until(NodeHeartbeat, lambda beat: _is_suspended(beat.ranks, 0))
        os.kill(pid, signal.SIGCONT)
        await site.eventually(lambda: _runs(site.controller.all(NodeHeartbeat)[-1].ranks), "the rank to run again")
        assert not site.controller.all(FaultReported)
        began_s = time.time()
        os.kill(pid, signal.SIGSTOP)

        report = (await site.controller.until(FaultReported)).report
        assert (report.kind, report.rank, report.incarnation) == (FaultKind.UNRESPONSIVE, 0, 0)
        assert report.at_s - began_s >= SUSPENDED_S
        assert "by a signal or a debugger, while starting" in report.detail

    play(scenario)


def _runs(clocks: tuple[RankProgress, ...]) -> bool:
    return bool(clocks) and not _is_suspended(clocks, 0)


def _is_suspended(clocks: tuple[RankProgress, ...], rank: int) -> bool:
    return any(clock.suspended for clock in clocks if clock.rank == rank)


@attack(
    "a rank is stopped in its second step, before any usual length of a step is known",
    holds="it is replaced within seconds; the others stay, and no step is lost",
    reads="`unresponsive: rank 3 on node1`",
)
@pytest.mark.soak
@pytest.mark.chaos
@pytest.mark.timeout(240)
def test_a_rank_that_is_stopped_in_the_first_steps_is_replaced(start_job: StartJob) -> None:
    """The stall clock has no history then, and none is needed."""
    policy = {**ROOMY, "stall": {"grace_s": 60.0}}
    job = start_job(faults=[inject(3, InjectionPoint.FORWARD, 1, action=FaultAction.STOP)], steps=20, policy=policy)

    assert job.wait() == 0, job.said()
    job.assert_nothing_left()
    (incident,) = job.report()["incidents"]
    assert_nobody_harmed(incident, {3})
    assert any("by a signal or a debugger" in report["detail"] for report in incident["reports"])
