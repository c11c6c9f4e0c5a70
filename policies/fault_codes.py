"""From a fault's code to its level, and from the level to its treatment.

A detector names a code, a level, or both. The level is decided here, once, before the report is journaled: the job's
own word on the code comes first, then the level that the detector named (its cluster may have been configured), then
the table that comes along (`configs/fault_codes.yaml`), then the policy's level for codes that neither has. The job's
reaction depends on two more things: whether a rank runs where the fault is, and whether the fault lasts.
`docs/faults.md` shows the table that is made from `TREATMENTS`.
"""

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec

from ..protocol.compat import StrEnum
from ..protocol.types import Assertion, FaultKind, FaultLevel, FaultReport


class Treatment(StrEnum):
    """A treatment of a fault of a device or node that holds ranks, the mildest first."""

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


def asks_to_leave(report: FaultReport) -> bool:
    """Return whether nothing may run where the fault is, whichever process it is."""
    return TREATMENTS[report.level] is Treatment.LEAVE and report.assertion is not Assertion.RECOVER


class LevelName(StrEnum):
    """A name of a level in documents, code tables and policies: those for devices, for nodes and for switches."""

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


# What a detector may say that it saw; the rest is for agents and processors to see.
DETECTABLE = frozenset(
    {
        FaultKind.DEVICE,
        FaultKind.MEMORY,
        FaultKind.MEMORY_MULTI_BIT,
        FaultKind.LINK,
        FaultKind.NODE,
        FaultKind.SWITCH,
        FaultKind.NETWORK,
        FaultKind.STORAGE,
        FaultKind.DETECTOR,
    }
)

WILDCARD = "*"

MAX_MEANING = 1000  # characters: it goes with every report


class CodeRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The meaning of a code: how bad it is, what it is about, and one line for people."""

    level: LevelName
    kind: FaultKind = FaultKind.DEVICE
    meaning: Annotated[str, msgspec.Meta(max_length=MAX_MEANING)] = ""


class CodeTable:
    """Rules by code. A pattern has `*` for any characters; the exact code wins, then the longer pattern.

    Codes are compared without regard to case: hexadecimal digits are written both ways.
    """

    def __init__(self, rules: Mapping[str, CodeRule]) -> None:
        self._exact = {code.lower(): rule for code, rule in rules.items() if WILDCARD not in code}
        patterns = sorted((code for code in rules if WILDCARD in code), key=lambda code: (-len(code), code))
        self._patterns = [(_pattern(code), rules[code]) for code in patterns]

    def find(self, code: str) -> CodeRule | None:
        """Return the rule for `code`; None when there is none."""
        by_pattern = (rule for pattern, rule in self._patterns if pattern.fullmatch(code))
        return self._exact.get(code.lower()) or next(by_pattern, None)


class FaultCodes:
    """The table that comes along, a job's own rules over it, and a level for what is in neither."""

    def __init__(
        self,
        table: Mapping[str, CodeRule],
        own: Mapping[str, CodeRule] | None = None,
        unknown: LevelName = LevelName.NOT_HANDLE_FAULT,
    ) -> None:
        self._table = CodeTable(table)
        self._own = CodeTable(own or {})
        self._unknown = level_named(unknown)

    def completed(self, report: FaultReport) -> FaultReport:
        """Return `report` with the level, kind and meaning of its code. One without a code is returned as it is.

        What a processor can mend while it lives was classified there, and is not judged again.
        """
        if report.code is None or report.mendable:
            return report
        own, usual = self._own.find(report.code), self._table.find(report.code)
        rule = own or usual
        if own is not None:
            level = level_named(own.level)
        elif report.level is not FaultLevel.SOFTWARE:
            level = report.level
        else:
            level = self._unknown if usual is None else level_named(usual.level)
        kind = rule.kind if rule is not None and report.kind is FaultKind.DEVICE else report.kind
        meaning = next((each.meaning for each in (own, usual) if each is not None and each.meaning), "")
        if rule is None:
            named = "as its detector says" if report.level is not FaultLevel.SOFTWARE else "by faults.unknown_code"
            meaning = f"unknown code, taken as {level} {named}"
        return msgspec.structs.replace(report, level=level, kind=kind, meaning=meaning)


def _pattern(code: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in code.split(WILDCARD)), re.IGNORECASE | re.DOTALL)
