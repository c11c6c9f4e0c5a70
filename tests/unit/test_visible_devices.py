"""Faults of a machine's devices find the ranks that compute on them, whatever part of the machine a node has."""

import io

import msgspec
import pytest
from rich.console import Console

from midstep.cli.views.status_view import status_view
from midstep.protocol.environment import CONTAINER, PROCESS, visible_devices
from midstep.protocol.incidents import StandingFault
from midstep.protocol.messages import FaultReported, NodeJoined, Quiesce, StartProcess
from midstep.protocol.types import FaultKind, FaultLevel, FaultReport, RunningProcess, StoreEndpoint
from midstep.testing.fake_cluster import FakeCluster, job, only


@pytest.mark.parametrize(
    ("container", "process", "expected"),
    [
        ("", "", ()),
        ("", "4,5,6,7", (4, 5, 6, 7)),
        ("", " 3, 1 ", (3, 1)),
        ("4-7", "", (4, 5, 6, 7)),
        ("Ascend910-4,Ascend910-5", "", (4, 5)),
        ("4-7", "1,3", (5, 7)),
        ("8,9,10,11", "8,9", (8, 9)),
        ("", "all", ()),
        ("", "7-4", ()),
        ("", "-1", ()),
        ("", "0-99999999", ()),
    ],
)
def test_devices_are_those_that_a_rank_can_see_by_the_machines_numbers(
    container: str, process: str, expected: tuple[int, ...]
) -> None:
    """In a container CANN and CUDA count from 0 again; documents do not."""
    for names in zip(CONTAINER, PROCESS, strict=True):
        assert visible_devices(dict(zip(names, (container, process), strict=True))) == expected


def on(devices: tuple[int, ...] = (), environment: dict[str, str] | None = None) -> FakeCluster:
    """Two nodes of two ranks and a spare, on machines of which they have these devices."""
    cluster = FakeCluster(msgspec.structs.replace(job(), environment=environment or {}))
    cluster.start()
    for name in ("node0", "node1", "node2"):
        cluster.feed(NodeJoined(name, name, StoreEndpoint("127.0.0.1", 1), cluster_processes(cluster, name), devices))
    return cluster


def cluster_processes(cluster: FakeCluster, node: str) -> tuple[RunningProcess, ...]:
    """What runs on a node, as its agent says."""
    held = [rank for rank in cluster.machine.status(cluster.now).ranks if rank.node == node]
    return tuple(RunningProcess(rank.rank, rank.pid or 1, rank.incarnation, 1) for rank in held)


def fault(device: int, node: str = "node0") -> FaultReported:
    return FaultReported(
        FaultReport(
            FaultKind.DEVICE,
            1.0,
            "detector/files",
            "",
            node=node,
            device=device,
            level=FaultLevel.SEPARATE_NPU,
            code="C",
        )
    )


def blamed(cluster: FakeCluster) -> list[int | None]:
    return [report.rank for incident in cluster.machine.incidents for report in incident.reports]


@pytest.mark.parametrize(("device", "rank"), [(5, 1), (4, 0)])
def test_a_fault_of_a_device_is_one_of_the_rank_that_sees_it(device: int, rank: int) -> None:
    cluster = on((4, 5))
    bodies = cluster.feed(fault(device))
    assert only(bodies, Quiesce)
    assert only(bodies, StartProcess)
    assert blamed(cluster) == [rank]


@pytest.mark.parametrize("device", [0, 1, 6])
def test_a_fault_of_another_jobs_device_on_the_same_machine_hurts_no_rank(device: int) -> None:
    cluster = on((4, 5))
    assert cluster.feed(fault(device)) == []
    assert cluster.machine.incidents == ()


def test_what_the_job_gives_its_ranks_to_see_counts_before_what_the_agent_sees() -> None:
    cluster = on((4, 5), {PROCESS[0]: "6,7"})
    assert cluster.feed(fault(4)) == []
    assert cluster.feed(fault(7))
    assert blamed(cluster) == [1]


def test_without_a_word_of_it_a_device_is_that_of_its_local_rank() -> None:
    cluster = on()
    assert cluster.feed(fault(1))
    assert blamed(cluster) == [1]


def test_a_node_that_the_job_does_not_have_is_said_to_be_a_stranger() -> None:
    """Not only noted: it may be one of the job's under another name."""
    cluster = on()
    cluster.feed(fault(1, "worker-7"))
    status = cluster.machine.status(cluster.now)
    assert [type(each) for each in status.faults] == [StandingFault]
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(status_view(status))
    said = console.export_text()
    assert "worker-7, device 1 (not of this job)" in said
    assert "no node of this job is named worker-7" in said
    assert "faults.node_names" in said
