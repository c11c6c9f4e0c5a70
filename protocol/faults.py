"""Fault kinds, fault levels, and the report of one observation of a fault.

Import these from `protocol.types`, with the other nouns.
"""

import msgspec

from .bounds import Count, Device, Name, Rank, Seconds, Text
from .enums import StrEnum


class FaultKind(StrEnum):
    """What was seen to be wrong."""

    EXCEPTION = "exception"  # the train function raised
    EXIT = "exit"  # the process ended
    STALL = "stall"  # the step clock stands still
    COMMUNICATION = "communication"  # a collective failed, and no rank is known to be at fault
    LINK_UP = "link_up"  # a communicator could not be built
    UNRESPONSIVE = "unresponsive"  # a command was not carried out before its deadline, or the process is stopped
    CORRUPTION = "corruption"  # a checksum was wrong, or a rank is at another step than it was ordered to
    NODE_LOST = "node_lost"  # the node or its agent is gone
    START_FAILED = "start_failed"  # a replacement process never joined
    DEVICE = "device"  # a detector reported the device
    MEMORY = "memory"  # an uncorrectable error in device memory
    MEMORY_MULTI_BIT = "memory_multi_bit"  # of several bits, found only some time after the memory was read
    LINK = "link"  # a link between devices failed, and the operator's own retries with it
    OUT_OF_MEMORY = "out_of_memory"
    NODE = "node"  # a detector reported the machine; it may still run
    SWITCH = "switch"
    NETWORK = "network"
    STORAGE = "storage"
    NODE_JOINED = "node_joined"  # no fault: a world that was made smaller can grow again
    DETECTOR = "detector"  # what a detector reads cannot be understood: nothing is known to be wrong with the job


class FaultLevel(StrEnum):
    """How severe a fault is; the levels of devices have MindCluster's names."""

    SOFTWARE = "Software"
    NOT_HANDLE = "NotHandleFault"
    RESTART_REQUEST = "RestartRequest"
    RESTART_BUSINESS = "RestartBusiness"
    FREE_RESTART_NPU = "FreeRestartNPU"
    RESTART_NPU = "RestartNPU"
    SEPARATE_NPU = "SeparateNPU"
    PRE_SEPARATE_NPU = "PreSeparateNPU"
    SUB_HEALTH = "SubHealthFault"
    MANUALLY_SEPARATE_NPU = "ManuallySeparateNPU"  # separated until a person has looked: it failed too often
    NODE = "Node"


class Assertion(StrEnum):
    """What a detector says of a fault that can last: it is there, it is gone, or it has passed already."""

    OCCUR = "occur"
    RECOVER = "recover"
    ONCE = "once"


class FaultReport(msgspec.Struct, frozen=True):
    """One observation of a fault.

    `at_s` is when it was said: the controller sets it, on its own clock, when it takes the report in. `age_s` is how
    long the fault had stood then, as its observer says. `generation` and `incarnation` say which process of the rank it
    is about.
    """

    kind: FaultKind
    at_s: Seconds
    seen_by: Name
    detail: Text
    rank: Rank | None = None
    node: Name | None = None
    generation: Count = 0
    incarnation: Count = 0
    level: FaultLevel = FaultLevel.SOFTWARE
    code: Name | None = None  # a device fault's code, as its detector names it
    device: Device | None = None  # the device on `node`, as its detector counts them
    fault_id: Name = ""  # the name by which its detector matches OCCUR and RECOVER; "" for what cannot last
    assertion: Assertion = Assertion.ONCE
    mendable: bool = False  # the process that has it lives, and can mend it without being replaced
    meaning: Text = ""  # of the code, in one line
    age_s: Seconds = 0.0
    output: Text = ""  # the end of what the process had printed that is gone
    trusted_step: Count | None = None  # updates after which no rank's state can be trusted; None: nothing has spread
