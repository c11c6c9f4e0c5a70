"""The controller takes reports of faults from a detector, and refuses all else. Reports read as sentences."""

import io

import msgspec
import pytest
from rich.console import Console

from midstep.cli.views.status_view import fault_table
from midstep.controller.admission import refusal
from midstep.controller.endpoints.request_handler import describe_report
from midstep.controller.routes import Routes
from midstep.protocol.codec import PROTOCOL_VERSION
from midstep.protocol.incidents import StandingFault
from midstep.protocol.messages import Ack, Envelope, FaultReported, Message, NodeLost, StepCommitted
from midstep.protocol.types import Assertion, FaultKind, FaultLevel, FaultReport

ME = "detector/bmc"
GOOD = FaultReport(FaultKind.DEVICE, 1000.0, ME, "", node="n0", device=3, code="80E01801", assertion=Assertion.OCCUR)


def said(body: Message, sender: str = ME) -> Envelope:
    """A message of a detector."""
    return Envelope(PROTOCOL_VERSION, "job", sender, "controller", 1, 0, 1, 1, body)


@pytest.mark.parametrize("body", [FaultReported(GOOD), Ack(1, 1)])
def test_a_detector_may_report_faults(body: Message) -> None:
    assert refusal(ME, said(body), 4, Routes()) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seen_by": "detector/other"}, "speaks for another detector"),
        ({"seen_by": "node/n0"}, "speaks for another detector"),
        ({"kind": FaultKind.EXIT}, "not for a detector to see"),
        ({"kind": FaultKind.NODE_LOST}, "not for a detector to see"),
        ({"mendable": True}, "not for a detector to see"),
        ({"code": None}, "names neither code nor level"),
        ({"rank": 4}, "about no rank of this job"),
        ({"detail": "d" * 20_000}, "longer than a fault can be"),
    ],
)
def test_a_report_that_is_not_for_it_is_refused_with_the_reason(changes: dict[str, object], reason: str) -> None:
    assert refusal(ME, said(FaultReported(msgspec.structs.replace(GOOD, **changes))), 4, Routes()) == reason


@pytest.mark.parametrize("body", [NodeLost("n0", "gone", 1.0), StepCommitted(0, 1, 1, 5, 1.0, 0.1)])
def test_a_detector_says_nothing_else(body: Message) -> None:
    assert refusal(ME, said(body), 4, Routes()) == "not for a detector to say"


def test_a_detector_speaks_through_its_own_connection_and_for_no_node() -> None:
    assert refusal("detector/other", said(FaultReported(GOOD)), 4, Routes()) == "sender is not the connection's owner"
    assert refusal(ME, said(FaultReported(GOOD), "node/n0"), 4, Routes()) == "sender is not the connection's owner"
    assert refusal(ME, said(FaultReported(GOOD), "rank/0"), 4, Routes()) == "sender is not the connection's owner"


def test_a_report_reads_as_a_sentence() -> None:
    known = msgspec.structs.replace(GOOD, level=FaultLevel.RESTART_BUSINESS, meaning="memory is struck")
    assert describe_report(known) == "noted: RestartBusiness 80E01801 (memory is struck) of device 3 of node n0"
    gone = msgspec.structs.replace(known, assertion=Assertion.RECOVER, device=None)
    assert describe_report(gone) == "noted: device 80E01801 of node n0 has recovered"


def test_status_shows_what_stands_the_worst_first() -> None:
    noted = StandingFault(msgspec.structs.replace(GOOD, level=FaultLevel.NOT_HANDLE, code="81078603"), 940.0)
    worse = StandingFault(msgspec.structs.replace(GOOD, level=FaultLevel.SEPARATE_NPU, meaning="broken"), 999.0)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(fault_table((noted, worse), 1000.0, frozenset({"n0"})))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[1] == ["SeparateNPU", "80E01801", "n0,", "device", "3", "1.00", "s", "bmc", "broken"]
    assert lines[2][:7] == ["NotHandleFault", "81078603", "n0,", "device", "3", "1", "min"]
