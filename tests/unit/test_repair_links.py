"""Lost shards travel over the devices' links once in an incident, and from host to host after that."""

import msgspec
import pytest

from midstep.controller.journal.records import Founding
from midstep.controller.recovery.machine import RecoveryMachine
from midstep.controller.recovery.repair import choose_links, uses_devices
from midstep.devices.kinds import has_device_links
from midstep.policies.schema import CommunicatorPolicy, Policy
from midstep.protocol.types import RepairLinks, RepairPart, RepairPlan, RestoreSource, ShardTransfer
from midstep.testing.fake_cluster import FakeCluster, job

HOST, DEVICE = RepairLinks.HOST, RepairLinks.DEVICE
MOVED = (ShardTransfer("all", 0, 8, 0, 1),)


def plan_with(transfers: tuple[ShardTransfer, ...]) -> RepairPlan:
    """Return a plan of two ranks and a third one that has no part in the transfers."""
    parts = {rank: RepairPart(3, RestoreSource.REPLICA, transfers=transfers) for rank in (0, 1)}
    parts[2] = RepairPart(3, RestoreSource.REPLICA)
    return RepairPlan(3, RestoreSource.REPLICA, parts, ("2 of 3 ranks hold clean state of step 3",))


@pytest.mark.parametrize(
    ("wanted", "tried", "taken", "why"),
    [
        (DEVICE, False, DEVICE, "from device to device"),
        (DEVICE, True, HOST, "was not completed"),
        (HOST, False, HOST, "as communicator.repair_links says"),
    ],
)
def test_all_ranks_are_told_the_same_links_and_the_report_says_why(
    wanted: RepairLinks, tried: bool, taken: RepairLinks, why: str
) -> None:
    plan = choose_links(plan_with(MOVED), wanted, tried=tried)
    assert {part.links for part in plan.parts.values()} == {taken}
    assert uses_devices(plan) == (taken is DEVICE)
    assert why in plan.reasons[-1]
    assert plan.reasons[:-1] == plan_with(MOVED).reasons


def test_a_plan_that_moves_nothing_is_left_alone() -> None:
    plan = plan_with(())
    assert choose_links(plan, DEVICE, tried=False) == plan
    assert msgspec.json.decode(msgspec.json.encode(plan), type=RepairPlan) == plan


@pytest.mark.parametrize(
    ("name", "have"),
    [("hccl", True), ("fake", True), ("nccl", True), ("gloo", False), ("tcp", False), ("external", False)],
)
def test_the_machine_of_a_job_is_told_whether_there_are_such_links(name: str, have: bool) -> None:
    """Of a communicator that another package brings, and that is not installed here, it says that there are none."""
    policy = Policy(communicator=CommunicatorPolicy(name=name))
    assert Founding(job(), policy, False, 0.0, b"").machine().state.device_links is have
    assert not has_device_links(f"{name} of another package")


@pytest.mark.parametrize("have", [True, False])
def test_the_machine_chooses_links_only_where_devices_have_some(have: bool) -> None:
    class Linked(FakeCluster):
        def new_machine(self) -> RecoveryMachine:
            return RecoveryMachine(self.policy, self.job, device_links=have)

    cluster = Linked().start()
    cluster.feed(cluster.exited(1))
    cluster.recover(5)
    reasons = cluster.machine.incidents[-1].repair_reasons
    assert any("from device to device" in reason for reason in reasons) is have
