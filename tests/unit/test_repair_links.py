"""Lost shards travel over the devices' links once in an incident, and from host to host after that."""

import msgspec
import pytest

from midstep.controller.recovery.repair import choose_links, uses_devices
from midstep.policies.schema import CommunicatorPolicy
from midstep.protocol.types import RepairLinks, RepairPart, RepairPlan, RestoreSource, ShardTransfer

HOST, DEVICE = RepairLinks.HOST, RepairLinks.DEVICE
MOVED = (ShardTransfer("all", 0, 8, 0, 1),)


def plan_with(transfers: tuple[ShardTransfer, ...]) -> RepairPlan:
    """Return a plan of two ranks and a third one that has no part in the transfers."""
    parts = {rank: RepairPart(3, RestoreSource.REPLICA, transfers=transfers) for rank in (0, 1)}
    parts[2] = RepairPart(3, RestoreSource.REPLICA)
    return RepairPlan(3, RestoreSource.REPLICA, parts, ("2 of 3 ranks hold clean state of step 3",))


@pytest.mark.parametrize("name", ["hccl", "fake", "nccl"])
@pytest.mark.parametrize(
    ("wanted", "tried", "taken", "why"),
    [
        (DEVICE, False, DEVICE, "from device to device"),
        (DEVICE, True, HOST, "was not completed"),
        (HOST, False, HOST, "as communicator.repair_links says"),
    ],
)
def test_all_ranks_are_told_the_same_links_and_the_report_says_why(
    name: str, wanted: RepairLinks, tried: bool, taken: RepairLinks, why: str
) -> None:
    policy = CommunicatorPolicy(name=name, repair_links=wanted)
    plan = choose_links(plan_with(MOVED), policy, tried=tried)
    assert {part.links for part in plan.parts.values()} == {taken}
    assert uses_devices(plan) == (taken is DEVICE)
    assert why in plan.reasons[-1]
    assert plan.reasons[:-1] == plan_with(MOVED).reasons


@pytest.mark.parametrize(
    ("name", "transfers"),
    [
        ("gloo", MOVED),
        ("tcp", MOVED),
        ("external", MOVED),
        ("hccl", ()),
    ],
)
def test_a_plan_is_left_alone_where_there_are_no_such_links_or_nothing_moves(
    name: str, transfers: tuple[ShardTransfer, ...]
) -> None:
    plan = plan_with(transfers)
    assert choose_links(plan, CommunicatorPolicy(name=name), tried=False) == plan
    assert msgspec.json.decode(msgspec.json.encode(plan), type=RepairPlan) == plan
