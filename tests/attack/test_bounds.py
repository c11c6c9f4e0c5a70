"""Numbers, names and texts that a holder of a key can send"""

import math

import msgspec
import pytest

from midstep.controller.endpoints.control_requests import Request
from midstep.protocol import codec
from midstep.protocol.errors import MalformedMessage
from midstep.protocol.messages import (
    Ack,
    CommandToRank,
    Envelope,
    FaultReported,
    Message,
    NodeHeartbeat,
    NodeJoined,
    NodeLost,
    OrderRanks,
    ProcessExited,
    Quiesce,
    RankFinished,
    RankJoined,
    RankQuiesced,
    RankReady,
    RankReport,
    RanksReported,
    StepCommitted,
)
from midstep.protocol.reports import ReportedValues
from midstep.protocol.types import (
    Activity,
    FaultKind,
    FaultReport,
    LocalStateCopy,
    RankProgress,
    RunningProcess,
    ShardHold,
    StepReport,
    StoreEndpoint,
)

from .attack import attack

GOOD = FaultReport(FaultKind.DEVICE, 1000.0, "detector/bmc", "hot", node="n0", device=3, code="80E01801")
STANDING = StepReport(7, False, True)
STORE = StoreEndpoint("127.0.0.1", 1)
CLOCK = RankProgress(0, 1, 1, 9, Activity.UPDATING, 3, 0.1, 0.1, 0.5)
PROCESS = RunningProcess(0, 4711, 1, 1)
FINISHED = RankFinished(0, 1, 1, 9)


def fault(**changes: object) -> Message:
    """A fault report with something wrong in it."""
    return FaultReported(msgspec.structs.replace(GOOD, **changes))


def clock(**changes: object) -> Message:
    """A heartbeat with something wrong in it."""
    return NodeHeartbeat("a", 1.0, (msgspec.structs.replace(CLOCK, **changes),))


def standing(**changes: object) -> Message:
    """A step report with something wrong in it."""
    return RankQuiesced(0, 1, 1, msgspec.structs.replace(STANDING, **changes), {})


def sent(body: Message, **changes: object) -> bytes:
    """The bytes that a manipulated sender puts on the wire: nothing is cut before."""
    envelope = Envelope(codec.PROTOCOL_VERSION, "demo", "node/a", "controller", 1, 1, 1, 1, body)
    return msgspec.msgpack.encode(msgspec.structs.replace(envelope, **changes))


BAD: dict[str, Message] = {
    "no number": StepCommitted(0, 1, 1, 8, math.nan, 0.1),
    "infinite": StepCommitted(0, 1, 1, 8, math.inf, 0.1),
    "milliseconds": StepCommitted(0, 1, 1, 8, 1.7e12, 0.1),
    "negative duration": RankReady(0, 1, 1, 8, {"rebuild": -1.0}),
    "duration that is no number": RankReady(0, 1, 1, 8, {"rebuild": math.nan}),
    "thousands of phases": RankReady(0, 1, 1, 8, {str(number): 1.0 for number in range(1000)}),
    "negative rank": RankReady(-1, 1, 1, 8, {}),
    "huge rank": RankReady(2**40, 1, 1, 8, {}),
    "huge step": RankReady(0, 1, 1, 2**60, {}),
    "negative step": RankReady(0, 1, 1, -1, {}),
    "huge incarnation": RankJoined(0, 1, 2**60, 1, STANDING, 1.0),
    "megabytes of detail": fault(detail="x" * 6_000_000),
    "long detail": fault(detail="x" * 10_001),
    "long node": fault(node="n" * 1000),
    "long code": fault(code="c" * 1000),
    "long fault": fault(fault_id="i" * 1000),
    "long observer": fault(seen_by="detector/" + "x" * 1000),
    "seen at no time": fault(at_s=math.nan),
    "seen before all time": fault(at_s=-1.0),
    "negative device": fault(device=-1),
    "negative rank of a fault": fault(rank=-1),
    "clock that is no number": clock(step_age_s=math.nan),
    "clock of a huge step": clock(step=2**62),
    "too many reported values": NodeHeartbeat("a", 1.0, (), ReportedValues(0, 1, 1, dict.fromkeys("abcdefg", 1.0))),
    "long name of a reported value": NodeHeartbeat("a", 1.0, (), ReportedValues(0, 1, 1, {"x" * 33: 1.0})),
    "too many ranks": NodeHeartbeat("a", 1.0, (CLOCK,) * 5000),
    "too many processes": NodeJoined("a", "a", STORE, (PROCESS,) * 5000),
    "long node name": NodeJoined("a" * 1000, "a", STORE),
    "no port": NodeJoined("a", "a", StoreEndpoint("h", 70_000)),
    "no exit status": ProcessExited("a", PROCESS, 2**40, 1.0, expected=False),
    "long reason": NodeLost("a", "x" * 100_000, 1.0),
    "huge shard": standing(holds=(ShardHold("all", 2**60),)),
    "too many shards": standing(needs=("all",) * 70_000),
    "too many copies": standing(local_states=(LocalStateCopy(0, 1),) * 70_000),
    "huge number in an acknowledgement": Ack(1, 2**64 - 1),
    "no ranks' reports": RanksReported("a", ()),
    "too many ranks' reports": RanksReported("a", (RankReport(0, 1, FINISHED),) * 5000),
    "report of a negative rank": RanksReported("a", (RankReport(-1, 1, FINISHED),)),
    "report of a huge incarnation": RanksReported("a", (RankReport(0, 2**64 - 1, FINISHED),)),
    "report of no age": RanksReported("a", (RankReport(0, 1, FINISHED, math.nan),)),
    "report of an infinite age": RanksReported("a", (RankReport(0, 1, FINISHED, math.inf),)),
    "no orders": OrderRanks(()),
    "too many orders": OrderRanks((CommandToRank(0, 1, Quiesce(0, 1)),) * 5000),
}


@attack(
    "somebody with a key sends a time that is no number, a step of 2**62, a name of a megabyte, lists without end",
    holds="the decoder refuses what no job has, for every message in one place",
    reads="refused: MalformedMessage",
)
@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_what_no_job_has_is_not_decoded(body: Message) -> None:
    """Each of these is refused where it arrives."""
    with pytest.raises(MalformedMessage):
        codec.decode(sent(body))


@pytest.mark.parametrize(
    "changes",
    [{"number": 2**64 - 1}, {"session": -1}, {"session": 2**64 - 1}, {"term": 2**60}, {"sender": "node/" + "a" * 1000}],
    ids=str,
)
def test_an_envelope_that_no_sender_makes_is_not_decoded(changes: dict[str, object]) -> None:
    """The same of what is around a message."""
    with pytest.raises(MalformedMessage):
        codec.decode(sent(Ack(1, 1), **changes))


@attack(
    "a local program asks for the end of the job with a reason of a megabyte, or injects into rank -1",
    holds="requests at the control socket have the bounds of the wire",
)
@pytest.mark.parametrize(
    "request_",
    [
        {"type": "StopJobRequest", "reason": "x" * 1_000_000},
        {"type": "KillNodeRequest", "node": "n" * 1000},
        {"type": "InjectRequest", "fault": {"rank": -1, "injury": "kill"}},
        {"type": "InjectRequest", "fault": {"rank": 0, "injury": "kill", "rate": math.nan}},
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_request_that_no_operator_makes_is_not_decoded(request_: dict[str, object]) -> None:
    """The decoder of the control socket refuses it."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(request_), type=Request)


def test_a_long_text_is_cut_by_its_sender_and_arrives() -> None:
    """The error text of a train function may have any length: its fault report is not lost for it."""
    body = FaultReported(msgspec.structs.replace(GOOD, detail="Tensor " * 100_000))
    envelope = Envelope(codec.PROTOCOL_VERSION, "demo", "node/a", "controller", 1, 1, 1, 1, body)
    arrived = codec.decode(codec.encode(envelope)).body
    assert isinstance(arrived, FaultReported)
    assert arrived.report.detail.startswith("Tensor Tensor")
    assert arrived.report.detail.endswith("(cut)")
    assert msgspec.structs.replace(arrived.report, detail="hot") == GOOD
