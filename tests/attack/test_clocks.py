"""Clocks of machines that are wrong, or jump"""

import asyncio
import time
from collections.abc import Iterator

import pytest

from midstep.controller.journal.sqlite_file import journal_path
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import FaultReported, NodeJoined, ProcessExited
from midstep.protocol.types import FaultKind, FaultReport, RunningProcess, StoreEndpoint

from ..chaos.controller.conftest import Cluster
from ..contract.driver.conftest import Rig, StubMachine
from .attack import attack

HOUR_S = 3600.0
FEW_S = 60.0  # on a busy machine
PLACE = StoreEndpoint("127.0.0.1", 1)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A driver with its real sockets and journal."""
    made = Rig()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A real controller process, with nodes that are played."""
    made = Cluster()
    try:
        yield made
    finally:
        made.close()


def move_wall_clock(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """Have this process's wall clock stand elsewhere; others have their own."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + by_s)


@pytest.mark.chaos
@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
@attack(
    "a node's wall clock is an hour ahead or behind",
    holds="the report says how long the recovery took, on the controller's clock",
)
def test_a_recovery_is_as_long_as_it_took_whatever_the_nodes_clocks_say(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """The nodes are played in this process, whose clock is wrong; the controller has its own."""
    move_wall_clock(monkeypatch, ahead_s)
    cluster.start()
    cluster.host(1).kill(1)
    cluster.until(cluster.recovered)
    (incident,) = cluster.status().incidents
    assert incident.recovery_s is not None
    assert 0 <= incident.recovery_s < FEW_S
    assert abs(incident.began_s - (time.time() - ahead_s)) < FEW_S
    assert all(0 <= report.at_s - incident.began_s < FEW_S for report in incident.reports)


@attack(
    "a report says that it happened an hour ago, or in an hour",
    holds="its time is that at which the controller took it in, less the time that it was sent again",
)
def test_the_time_of_a_report_is_the_controllers(rig: Rig) -> None:
    """Whatever reading of a foreign clock it carries."""
    reports = [FaultReport(FaultKind.EXCEPTION, time.time() + by_s, "node/a", "", 0, "a") for by_s in (HOUR_S, -HOUR_S)]
    process = RunningProcess(0, 100, 1, 1)

    async def scenario() -> None:
        async with rig.controller():
            agent = rig.peer("node/a")
            agent.say(NodeJoined("a", "rack", PLACE))
            for report in reports:
                agent.say(FaultReported(report))
            agent.say(ProcessExited("a", process, 1, time.time() - HOUR_S, expected=False))
            await rig.until(lambda: "ProcessExited" in rig.machine.kinds())

    asyncio.run(scenario())
    times = [event.report.at_s for event, _ in rig.machine.events if isinstance(event, FaultReported)]
    times += [event.at_s for event, _ in rig.machine.events if isinstance(event, ProcessExited)]
    assert len(times) == 3
    assert all(abs(at_s - time.time()) < FEW_S for at_s in times)


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
@attack(
    "the wall clock of the controller's machine jumps by an hour between two controllers",
    holds="the next one continues the clock of the last: no duration is negative or an hour too long",
)
def test_the_next_controller_goes_on_with_the_clock_of_the_last(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    """The journal has what the machine's monotonic clock said when a term began."""

    async def term(number: int) -> float:
        machine = StubMachine(journal_path(rig.job_directory))
        async with rig.controller(machine) as (driver, _):
            driver.stop("noted")
            await rig.until(lambda: machine.kinds().count("StopRequested") == number)
        return machine.events[-1][1]

    first_s = asyncio.run(term(1))
    move_wall_clock(monkeypatch, by_s)
    assert 0 < asyncio.run(term(2)) - first_s < FEW_S


@attack(
    "a detector's clock was ahead when it started, and is right when it is started again",
    holds="what it reports is taken in again, as soon as its earlier session has been quiet for 30 s",
)
def test_a_detector_whose_clock_was_ahead_once_is_heard_again() -> None:
    """Sessions are numbered by the clock, so the later one is the lower one."""
    report = FaultReported(FaultReport(FaultKind.DEVICE, 0.0, "detector/dcgm", "", node="a", device=0))
    controller = Mailbox(job="demo", address="controller", session=1)
    for session, now in ((10**18 + 3600 * 10**9, 0.0), (10**18, 3600.0)):
        detector = Mailbox(job="demo", address="detector/dcgm", session=session)
        assert controller.take(detector.post(report, "controller", now), now).deliver
