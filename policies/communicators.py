"""What the devices of a job are and what links them, as a policy says it (`device:` and `communicator:`).

Which kinds there are is in `devices/kinds.py`: other packages can bring some.
"""

from typing import Annotated

import msgspec

from ..devices.kinds import GLOO, communicator_names, device_names
from ..protocol.types import RepairLinks
from .schema import Count, Seconds

DeviceName = Annotated[str, msgspec.Meta(extra={"names": device_names})]
CommunicatorName = Annotated[str, msgspec.Meta(extra={"names": communicator_names})]


class CommunicatorPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The collective layer: how long one attempt to build it may take, how many, and its own timeout."""

    name: CommunicatorName = GLOO
    link_up_s: Seconds = 1.5
    link_up_attempts: Count = 5
    collective_s: Seconds = 1800.0
    # Of lost shards, with devices that have links of their own: `device` falls back to `host` within an incident.
    repair_links: RepairLinks = RepairLinks.DEVICE
