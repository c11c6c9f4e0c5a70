"""`midstep inject --device-fault`: report a fault of a device or node, as a detector does."""

import time

import click

from ..controller.endpoints.control_requests import ReportFaultRequest
from ..policies.fault_codes import LevelName, level_named
from ..protocol.types import Assertion, FaultKind, FaultLevel, FaultReport, detector_address

INJECTOR = detector_address("inject")


def build(
    what: str, rank: int | None, node: str | None, device: int | None, *, recover: bool = False, once: bool = False
) -> ReportFaultRequest:
    """Return the report to make of a fault that is named by its level or by its code.

    What was reported is recovered by the same options with `recover`. Raises UsageError where they do not fit together.
    """
    if (rank is None) == (node is None):
        raise click.UsageError("name where the fault is: either --rank R or --node NAME (see `midstep status`).")
    if rank is not None and device is not None:
        raise click.UsageError("--device is for --node: a rank has its own device.")
    if recover and once:
        raise click.UsageError(
            "--once and --recover exclude each other: a single event does not last, so it cannot recover."
        )
    levels = {name.value.lower(): name for name in LevelName}
    named = levels.get(what.lower())
    where = f"rank{rank}" if rank is not None else f"{node}/{'' if device is None else device}"
    report = FaultReport(
        kind=FaultKind.DEVICE if rank is not None or device is not None else FaultKind.NODE,
        at_s=time.time(),
        seen_by=INJECTOR,
        detail="injected",
        rank=rank,
        node=node,
        device=device,
        level=FaultLevel.SOFTWARE if named is None else level_named(named),
        code=what if named is None else None,
        fault_id=f"{where}/{what.lower()}",
        assertion=Assertion.RECOVER if recover else Assertion.ONCE if once else Assertion.OCCUR,
    )
    return ReportFaultRequest(report)
