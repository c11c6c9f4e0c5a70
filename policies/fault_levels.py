"""What each level of a fault asks for: the one table between the names of the field and the ladder.

A detector says how bad a fault is, in the words of its cluster (`FaultLevel`). What a job does about it depends on two
more things: whether a rank runs where the fault is, and whether the fault lasts. `docs/faults.md` shows the table that
is made from this one.
"""

from ..protocol.enums import StrEnum
from ..protocol.types import FaultLevel


class Treatment(StrEnum):
    """What is done about a fault of a device or node that holds ranks, the mildest first."""

    NOTE = "note"  # nothing; it is shown
    WATCH = "watch"  # sub-healthy: the policy's `sub_health` says what is done
    CLOSE = "close"  # no new process there; what runs there stays until it fails
    RESTART = "restart"  # the process is restarted on the same device, when the device is well again
    LEAVE = "leave"  # the node is left, at once


def closed_text(node: str, level: FaultLevel, what: str) -> str:
    """Say why a node gets no new process. `what`: the fault's code and place."""
    return f"node {node} is to get no new process: {level} {what} stands there"


TREATMENTS: dict[FaultLevel, Treatment] = {
    FaultLevel.SOFTWARE: Treatment.RESTART,
    FaultLevel.NOT_HANDLE: Treatment.NOTE,
    FaultLevel.RESTART_REQUEST: Treatment.RESTART,
    FaultLevel.RESTART_BUSINESS: Treatment.RESTART,
    FaultLevel.FREE_RESTART_NPU: Treatment.LEAVE,
    FaultLevel.RESTART_NPU: Treatment.LEAVE,
    FaultLevel.SEPARATE_NPU: Treatment.LEAVE,
    FaultLevel.MANUALLY_SEPARATE_NPU: Treatment.LEAVE,
    FaultLevel.NODE: Treatment.LEAVE,
    FaultLevel.PRE_SEPARATE_NPU: Treatment.CLOSE,
    FaultLevel.SUB_HEALTH: Treatment.WATCH,
}


class LevelName(StrEnum):
    """What documents, code tables and policies may call a level: the names for devices, for nodes and for switches."""

    NOT_HANDLE_FAULT = "NotHandleFault"
    RESTART_REQUEST = "RestartRequest"
    RESTART_BUSINESS = "RestartBusiness"
    FREE_RESTART_NPU = "FreeRestartNPU"
    RESTART_NPU = "RestartNPU"
    SEPARATE_NPU = "SeparateNPU"
    PRE_SEPARATE_NPU = "PreSeparateNPU"
    SUB_HEALTH_FAULT = "SubHealthFault"
    MANUALLY_SEPARATE_NPU = "ManuallySeparateNPU"
    PRE_SEPARATE_FAULT = "PreSeparateFault"  # of a node
    SEPARATE_FAULT = "SeparateFault"
    NOT_HANDLE = "NotHandle"  # of a switch
    SUB_HEALTH = "SubHealth"
    RESTART_REQUEST_FAULT = "RestartRequestFault"
    RESET = "Reset"
    RESET_FAULT = "ResetFault"
    SEPARATE = "Separate"


_OF_NODES_AND_SWITCHES: dict[LevelName, FaultLevel] = {
    LevelName.PRE_SEPARATE_FAULT: FaultLevel.PRE_SEPARATE_NPU,
    LevelName.SEPARATE_FAULT: FaultLevel.SEPARATE_NPU,
    LevelName.NOT_HANDLE: FaultLevel.NOT_HANDLE,
    LevelName.SUB_HEALTH: FaultLevel.SUB_HEALTH,
    LevelName.RESTART_REQUEST_FAULT: FaultLevel.RESTART_REQUEST,
    LevelName.RESET: FaultLevel.RESTART_NPU,
    LevelName.RESET_FAULT: FaultLevel.RESTART_NPU,
    LevelName.SEPARATE: FaultLevel.SEPARATE_NPU,
}


def level_named(name: LevelName) -> FaultLevel:
    """Return the level that the field calls `name`."""
    return _OF_NODES_AND_SWITCHES.get(name) or FaultLevel(name.value)
