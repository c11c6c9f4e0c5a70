"""What the devices of a job are and what links them, as a policy says it (`device:` and `communicator:`)."""

import msgspec

from ..protocol.enums import StrEnum
from ..protocol.types import RepairLinks
from .bounds import Count, Seconds


class CommunicatorName(StrEnum):
    """The collective layers that can be re-seated."""

    GLOO = "gloo"
    HCCL = "hccl"
    FAKE = "fake"
    EXTERNAL = "external"  # the groups are the framework's own, as under `midstep run --mindio`
    TCP = "tcp"


class DeviceName(StrEnum):
    """The devices that training processes may compute on."""

    CPU = "cpu"
    NPU = "npu"
    FAKE = "fake"


# What each device is linked with.
# The first is what a device has where nothing else is asked for.
COMMUNICATORS = {
    DeviceName.CPU: (CommunicatorName.GLOO, CommunicatorName.TCP),
    DeviceName.NPU: (CommunicatorName.HCCL,),
    DeviceName.FAKE: (CommunicatorName.FAKE,),
}


class CommunicatorPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The collective layer: how long one attempt to build it may take, how many, and its own timeout."""

    name: CommunicatorName = CommunicatorName.GLOO
    link_up_s: Seconds = 1.5
    link_up_attempts: Count = 5
    collective_s: Seconds = 1800.0
    # Of lost shards, with devices that have links of their own: `device` falls back to `host` within an incident.
    repair_links: RepairLinks = RepairLinks.DEVICE
