"""Pods and hosts become lost, going or staying nodes: objects of the API go in, reports come out."""

from typing import Any

import pytest

from midstep.platforms.kubernetes import names
from midstep.platforms.kubernetes.fleet import (
    HostReading,
    PodFleet,
    PodPhase,
    PodReading,
    read_host,
    read_pod,
    troubles,
)
from midstep.protocol.messages import NodeGoing, NodeLost, NodeStaying

NOW = 100.0


def pod(node: str = "node0", phase: str = "Running", host: str = "m1", **status: Any) -> dict[str, Any]:
    """Return the pod of a node, as the API has it."""
    return {
        "metadata": {"name": names.pod_name("demo", node), "labels": names.labels("demo", role="agent", node=node)},
        "spec": {"nodeName": host} if host else {},
        "status": {"phase": phase, **status},
    }


def deleted(node: str = "node0", grace_s: int = 60) -> dict[str, Any]:
    """Return a pod that is being deleted."""
    found = pod(node)
    found["metadata"] |= {"deletionTimestamp": "2026-11-23T08:00:00Z", "deletionGracePeriodSeconds": grace_s}
    return found


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    """Return a pod whose agent has ended."""
    state = {"terminated": {"exitCode": code, "reason": reason}}
    return pod(phase="Failed", containerStatuses=[{"name": "agent", "state": state}])


def host(name: str = "m1", **spec: Any) -> dict[str, Any]:
    """Return a Node object."""
    return {"metadata": {"name": name}, "spec": spec}


@pytest.fixture
def fleet() -> PodFleet:
    """Return a fleet whose node0 runs on m1."""
    fleet = PodFleet()
    fleet.expect("node0")
    assert fleet.take_pod(read_pod(pod()), NOW) == []
    return fleet


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (ended(137, "OOMKilled"), "its pod ended: signal 9, OOMKilled"),
        (ended(143), "its pod ended: signal 15"),
        (ended(76), "its pod ended: exit code 76"),
        (ended(0, "Completed"), "its pod ended: exit code 0"),
        (pod(phase="Failed", reason="Evicted", message="low on memory"), "its pod ended: Evicted: low on memory"),
        (pod(phase="Failed"), "its pod ended: phase Failed"),
    ],
)
def test_a_pod_that_ends_is_a_lost_node_and_its_end_is_told(fleet: PodFleet, found: dict[str, Any], said: str) -> None:
    assert fleet.take_pod(read_pod(found), NOW) == [NodeLost("node0", said, NOW)]


def test_a_pod_that_is_forced_away_is_a_lost_node_once(fleet: PodFleet) -> None:
    assert fleet.take_removed(read_pod(pod()), NOW) == [NodeLost("node0", "its pod was deleted", NOW)]
    assert fleet.take_removed(read_pod(pod()), NOW) == []
    assert fleet.nodes() == []


def test_what_went_away_while_nothing_was_watched_is_missed_in_the_listing(fleet: PodFleet) -> None:
    fleet.take_pod(read_pod(pod("node1", host="m2")), NOW)
    said = fleet.take_all([read_pod(pod("node1", host="m2"))], NOW)

    assert said == [NodeLost("node0", "its pod was deleted", NOW)]


def test_a_pod_that_was_asked_for_and_is_not_listed_yet_is_not_lost() -> None:
    fleet = PodFleet()
    fleet.expect("node0")

    assert fleet.take_all([], NOW) == []
    assert fleet.nodes() == ["node0"]


def test_a_pod_that_is_being_deleted_is_a_node_that_goes_within_its_grace(fleet: PodFleet) -> None:
    assert fleet.take_pod(read_pod(deleted()), NOW) == [NodeGoing("node0", "its pod is being deleted", 60.0)]
    assert fleet.take_pod(read_pod(deleted()), NOW) == []
    assert fleet.take_removed(read_pod(deleted()), NOW) == [NodeLost("node0", "its pod was deleted", NOW)]


def test_a_pod_that_is_forced_away_is_not_told_to_be_going(fleet: PodFleet) -> None:
    assert fleet.take_pod(read_pod(deleted(grace_s=0)), NOW) == []


def test_what_the_controller_has_deleted_is_not_told_to_it(fleet: PodFleet) -> None:
    assert fleet.delete("node0") is not None

    assert fleet.take_pod(read_pod(deleted()), NOW) == []
    assert fleet.take_removed(read_pod(deleted()), NOW) == []
    assert fleet.nodes() == []


def test_agents_that_leave_when_the_job_has_ended_are_not_lost(fleet: PodFleet) -> None:
    fleet.ended = True

    assert fleet.take_pod(read_pod(ended(0, "Completed")), NOW) == []
    assert not fleet.has_running()


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"unschedulable": True}, "m1 is cordoned"),
        ({"taints": [{"key": "maintenance", "effect": "NoExecute"}]}, "m1 has the taint maintenance"),
        (
            {"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]},
            "m1 has the taint ToBeDeletedByClusterAutoscaler",
        ),
    ],
)
def test_nodes_leave_a_host_that_is_emptied_and_stay_when_it_is_not_after_all(
    fleet: PodFleet, spec: dict[str, Any], why: str
) -> None:
    assert fleet.take_host(read_host(host(**spec))) == [NodeGoing("node0", why, None)]
    assert fleet.take_host(read_host(host(**spec))) == []
    assert fleet.take_host(read_host(host())) == [NodeStaying("node0")]


@pytest.mark.parametrize(
    "taints",
    [
        [{"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}],
        [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}],
        [{"key": "npu", "effect": "NoSchedule"}],
    ],
)
def test_what_kubernetes_has_not_heard_of_a_host_moves_nothing(fleet: PodFleet, taints: list[dict[str, str]]) -> None:
    assert fleet.take_host(read_host(host(taints=taints))) == []


def test_nodes_leave_a_host_with_a_condition_that_was_named_and_with_no_other(fleet: PodFleet) -> None:
    def well_but_for(status: str) -> HostReading:
        deadlock = {"type": "KernelDeadlock", "status": status, "message": "task blocked for more than 120 seconds"}
        others = [{"type": "Ready", "status": "True"}, {"type": "ReadonlyFilesystem", "status": "True"}]
        return read_host({**host(), "status": {"conditions": [*others, deadlock]}}, ["KernelDeadlock"])

    why = "m1 has the condition KernelDeadlock: task blocked for more than 120 seconds"
    assert fleet.take_host(well_but_for("True")) == [NodeGoing("node0", why, None)]
    assert fleet.take_host(well_but_for("False")) == [NodeStaying("node0")]
    assert fleet.take_host(well_but_for("Unknown")) == []


def test_a_node_that_starts_on_a_host_that_is_emptied_goes_at_once(fleet: PodFleet) -> None:
    fleet.take_hosts([read_host(host("m2", unschedulable=True))])

    assert fleet.take_pod(read_pod(pod("node1", host="m2")), NOW) == [NodeGoing("node1", "m2 is cordoned", None)]


def test_a_host_is_isolated_only_when_the_controller_leaves_a_node_that_was_well(fleet: PodFleet) -> None:
    assert fleet.isolates("node0") == "m1"
    fleet.take_pod(read_pod(deleted()), NOW)
    assert fleet.isolates("node0") == ""
    assert fleet.isolates("unheard-of") == ""


def test_a_node_is_made_once_and_its_name_is_never_used_again(fleet: PodFleet) -> None:
    assert fleet.is_known("node0")
    fleet.take_removed(read_pod(pod()), NOW)
    assert fleet.is_known("node0")


def test_a_node_that_the_api_refuses_can_be_asked_for_again() -> None:
    fleet = PodFleet()
    fleet.expect("node0")
    fleet.forget("node0")

    assert not fleet.is_known("node0")


def test_pods_of_an_earlier_platform_process_are_found_again() -> None:
    fleet = PodFleet()
    fleet.take_all([read_pod(pod()), read_pod(pod("node1", phase="Pending", host=""))], NOW)

    assert fleet.nodes() == ["node0", "node1"]


def test_a_pod_that_waits_says_what_for() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    reading = read_pod(pod(phase="Pending", host="", conditions=[condition]))

    assert reading == PodReading("node0", "midstep-demo-node0", PodPhase.PENDING, waits_for="Unschedulable: 0/3 nodes")


def test_troubles_of_a_pod_are_those_that_a_user_can_do_something_about() -> None:
    statuses = [
        {"name": "controller", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}},
        {"name": "platform", "state": {"waiting": {"reason": "PodInitializing"}}},
    ]
    submit = [{"name": "submit", "state": {"terminated": {"exitCode": 1}}}]
    said = [
        (each.container, each.text, each.ended)
        for each in troubles(
            {"metadata": {}, "status": {"containerStatuses": statuses, "initContainerStatuses": submit}}
        )
    ]

    assert said == [
        ("submit", "ended with exit code 1", True),
        ("controller", "ImagePullBackOff: no such image", False),
    ]
