"""What lost shards travel over: the devices' own links, or from host to host. Pure.

The devices' links are faster, and have just been rebuilt and checked. But they may be what is broken, in a way that a
check does not see. So an incident tries them once; any further attempt goes from host to host.
"""

import msgspec

from ...devices.kinds import communicator_kind
from ...policies.communicators import CommunicatorPolicy
from ...protocol.types import RepairLinks, RepairPlan

_BY_DEVICE = "shards travel from device to device"
_BY_POLICY = "shards travel from host to host, as communicator.repair_links says"
_TRIED = "shards travel from host to host: an attempt of this incident over the devices' links was not completed"


def choose_links(plan: RepairPlan, communicator: CommunicatorPolicy, *, tried: bool) -> RepairPlan:
    """Return the plan with the links that its shards travel over, and the reason.

    `tried`: an attempt of this incident has been ordered to use the devices' links.
    """
    moves = any(part.transfers for part in plan.parts.values())
    if not moves or not communicator_kind(communicator.name).device_links:
        return plan
    links, reason = RepairLinks.DEVICE, _BY_DEVICE
    if communicator.repair_links is RepairLinks.HOST:
        links, reason = RepairLinks.HOST, _BY_POLICY
    elif tried:
        links, reason = RepairLinks.HOST, _TRIED
    parts = {rank: msgspec.structs.replace(part, links=links) for rank, part in plan.parts.items()}
    return msgspec.structs.replace(plan, parts=parts, reasons=(*plan.reasons, reason))


def uses_devices(plan: RepairPlan) -> bool:
    """Return whether shards of the plan travel over the devices' links."""
    return any(part.links is RepairLinks.DEVICE for part in plan.parts.values())
