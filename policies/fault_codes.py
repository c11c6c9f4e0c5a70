"""From a fault's code to its level: the cluster's default table, with what a job wants otherwise.

Detectors name a code, a level, or both. Which level holds is decided here, once, before the report is journaled: the
job's own word on the code comes first, then the level that the detector named (its cluster may have been configured),
then the table that comes along (`configs/fault_codes.yaml`), then the policy's level for codes that neither has.
"""

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec

from ..protocol.types import FaultKind, FaultLevel, FaultReport
from .fault_levels import LevelName, level_named

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
    """What a code means: how bad it is, what it is about, and one line for people."""

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
        exact = self._exact.get(code.lower())
        if exact is not None:
            return exact
        return next((rule for pattern, rule in self._patterns if pattern.fullmatch(code)), None)


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

    def known(self, code: str) -> bool:
        """Say whether there is a rule for `code`."""
        return self._own.find(code) is not None or self._table.find(code) is not None

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
