"""Fault reports as JSON lines, which any program may send through the job's socket or `midstep detect --lines`.

A line must say where (`node`, with `device` where there is one; or `rank`) and what (`code`, or `level`, or both).
docs/faults.md describes the keys and has examples.
"""

import asyncio
import logging
import time

import msgspec

from ..policies.fault_codes import DETECTABLE, LevelName, level_named
from ..protocol.bounds import Device, Rank
from ..protocol.errors import DocumentError
from ..protocol.types import Assertion, FaultKind, FaultLevel, FaultReport, detector_address
from .reading import MAX_DEVICE, MAX_ID, Report, decoded, node_name, seconds

MAX_LINE_BYTES = 64 * 1024
MAX_NAME = 64  # of a detector
MAX_TEXT = 4000
MAX_RANK = 10_000_000

_log = logging.getLogger(__name__)


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line. `at_s`: seconds or milliseconds since 1970; without it, now. `fault_id` matches occur and recover."""

    code: str | None = None
    level: LevelName | None = None
    kind: FaultKind = FaultKind.DEVICE
    node: str | None = None
    device: Device | None = None
    rank: Rank | None = None
    assertion: Assertion = Assertion.OCCUR
    fault_id: str = ""
    at_s: float = 0.0
    detail: str = ""
    detector: str = ""


def parse_line(data: bytes, name: str, now: float) -> FaultReport:
    """Return the report in a line; `name` is the detector's where the line gives none.

    Raises DocumentError with the key and what is allowed.
    """
    if len(data) > MAX_LINE_BYTES:
        raise DocumentError("", f"longer than {MAX_LINE_BYTES} bytes")
    line = decoded("", data, Line)
    if not (line.code or line.level):
        raise DocumentError("code", "is missing; name a code, a level, or both")
    if (line.node is None) == (line.rank is None):
        raise DocumentError("node", "name either a node (with a device, or without) or a rank")
    if line.rank is not None and (line.device is not None or line.rank < 0):
        raise DocumentError("device", "is for a node: a rank, of at least 0, has its own device")
    if not 0 <= (line.device or 0) <= MAX_DEVICE:
        raise DocumentError("device", f"is out of range; allowed: 0 to {MAX_DEVICE}")
    if (line.rank or 0) > MAX_RANK:
        raise DocumentError("rank", f"is out of range; allowed: 0 to {MAX_RANK}")
    if line.kind not in DETECTABLE - {FaultKind.DETECTOR}:
        kinds = ", ".join(sorted(DETECTABLE - {FaultKind.DETECTOR}))
        raise DocumentError("kind", f"{line.kind} cannot be reported by a detector; allowed: {kinds}")
    texts = {"fault_id": (line.fault_id, MAX_ID), "code": (line.code or "", MAX_ID), "detail": (line.detail, MAX_TEXT)}
    for key, (text, limit) in texts.items():
        if len(text) > limit:
            raise DocumentError(key, f"longer than {limit} characters")
    at_s = seconds(line.at_s)
    return FaultReport(
        kind=line.kind,
        at_s=now,
        age_s=now - at_s if 0 < at_s <= now else 0.0,
        seen_by=detector_address(_name(line.detector or name)),
        detail=line.detail,
        rank=line.rank,
        node=None if line.node is None else node_name("node", line.node),
        device=line.device,
        level=FaultLevel.SOFTWARE if line.level is None else level_named(line.level),
        code=line.code or None,
        fault_id=line.fault_id,
        assertion=line.assertion,
    )


def _name(name: str) -> str:
    if not (0 < len(name) <= MAX_NAME and name.isascii() and name.replace("-", "").replace("_", "").isalnum()):
        raise DocumentError("detector", f"allowed: up to {MAX_NAME} letters, digits, - and _")
    return name


class LineDetector:
    """A detector that reads lines from a stream, e.g. from another program's output."""

    def __init__(self, name: str, stream: asyncio.StreamReader) -> None:
        """`stream` must have a limit of at least MAX_LINE_BYTES, and stays its creator's to close."""
        self._name = name
        self._stream = stream
        self.refused = 0

    async def watch(self, report: Report) -> None:
        """Report each line's fault until the stream ends. Invalid lines are logged and counted."""
        number = 0
        while True:
            number += 1
            try:
                line = await self._stream.readline()
            except ValueError:  # longer than the stream's limit; what was read of it is dropped
                self._refuse(number, f"longer than {MAX_LINE_BYTES} bytes")
                continue
            if not line:
                return
            if not line.strip():
                continue
            try:
                fault = parse_line(line, self._name, time.time())
            except DocumentError as error:
                self._refuse(number, str(error))
                continue
            # A connection reports in the name of one detector, whatever a line says.
            report(msgspec.structs.replace(fault, seen_by=detector_address(self._name)))

    def _refuse(self, number: int, why: str) -> None:
        self.refused += 1
        _log.error("line %d is skipped: %s", number, why)
