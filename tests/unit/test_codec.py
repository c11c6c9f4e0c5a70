"""The codec gives back what went in, and refuses all else in one of two ways."""

import msgspec
import pytest

from midstep.protocol.codec import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, decode, encode
from midstep.protocol.errors import ForeignVersion, MalformedMessage, OversizedMessage
from midstep.protocol.messages import (
    Ack,
    Command,
    CommandToRank,
    EndJob,
    Envelope,
    FaultReported,
    Message,
    OrderRanks,
    Quiesce,
    RankFinished,
    RankReport,
    RanksReported,
    Rejoin,
    Report,
    StartProcess,
)
from midstep.protocol.types import (
    FaultKind,
    FaultReport,
    Rendezvous,
    RepairPart,
    RestoreSource,
    ShardTransfer,
    StepReport,
)


def envelope(body: Message, version: int = PROTOCOL_VERSION) -> Envelope:
    return Envelope(
        version=version,
        job="job",
        sender="controller",
        receiver="rank/3",
        term=2,
        generation=7,
        session=1_700_000_000_000_000_000,
        number=9,
        body=body,
    )


@pytest.mark.parametrize(
    "body",
    [
        Quiesce(rank=3, generation=7),
        OrderRanks((CommandToRank(3, 7, Quiesce(rank=3, generation=7)),)),
        RanksReported("n0", (RankReport(3, 1, RankFinished(3, 7, 1, 9), 0.5),)),
        Ack(session=5, number=1),
        EndJob(exit_code=1, reason="budget spent"),
        FaultReported(FaultReport(FaultKind.EXIT, 12.5, "node/n0", "signal 9", rank=3)),
        Rejoin(
            rank=3,
            generation=7,
            store=Rendezvous("127.0.0.1", 4000, "secret"),
            connected=False,
            part=RepairPart(8, RestoreSource.REPLICA, transfers=(ShardTransfer("all", 0, 40, 1, 3),)),
        ),
    ],
    ids=lambda body: type(body).__name__,
)
def test_an_envelope_comes_out_as_it_went_in(body: Message) -> None:
    assert decode(encode(envelope(body))) == envelope(body)


def test_every_report_and_command_has_a_tag_of_its_own() -> None:
    members = [*Report.__args__, RanksReported, *Command.__args__, Ack]
    tags = {msgspec.inspect.type_info(member).tag for member in members}  # type: ignore[attr-defined]
    assert len(tags) == len(members)


def test_a_message_of_another_version_is_refused_with_the_remedy() -> None:
    data = msgspec.msgpack.encode([PROTOCOL_VERSION + 1, "job", {"later": True}])
    remedy = f"version {PROTOCOL_VERSION + 1} .* speaks {PROTOCOL_VERSION}. Install the same release"
    with pytest.raises(ForeignVersion, match=remedy):
        decode(data)
    with pytest.raises(ForeignVersion, match=remedy):  # one that has the same form
        decode(encode(envelope(Quiesce(rank=0, generation=1), PROTOCOL_VERSION + 1)))


def test_an_unknown_message_is_refused() -> None:
    fields = msgspec.to_builtins(envelope(Quiesce(rank=0, generation=1)))
    fields[Envelope.__struct_fields__.index("body")]["type"] = "Explode"
    with pytest.raises(MalformedMessage):
        decode(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("length", range(60))
def test_a_truncated_message_is_refused(length: int) -> None:
    data = encode(envelope(Quiesce(rank=3, generation=7)))
    with pytest.raises(MalformedMessage):
        decode(data[: min(length, len(data) - 1)])


def test_deep_nesting_is_refused_and_does_not_exhaust_the_stack() -> None:
    with pytest.raises(MalformedMessage):
        decode(b"\x91" * 1_000_000)


def test_a_length_that_is_a_lie_is_refused_without_allocating_it() -> None:
    for lie in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
        with pytest.raises(MalformedMessage):
            decode(b"\x99\x01" + lie)


def test_what_is_too_big_is_refused_on_both_ends() -> None:
    with pytest.raises(OversizedMessage, match="EndJob"):
        encode(envelope(EndJob(exit_code=1, reason="x" * MAX_MESSAGE_BYTES)))
    with pytest.raises(OversizedMessage):
        decode(bytes(MAX_MESSAGE_BYTES + 1))


def test_text_that_is_no_unicode_is_escaped_and_sent() -> None:
    report = FaultReported(FaultReport(FaultKind.EXCEPTION, 1.0, "rank/3", "no file \udcff.bin", rank=3))
    body = decode(encode(envelope(report))).body
    assert isinstance(body, FaultReported)
    assert body.report.detail == "no file \\udcff.bin"


def test_what_the_format_cannot_carry_is_refused_before_it_is_sent() -> None:
    with pytest.raises(MalformedMessage, match="Quiesce"):
        encode(envelope(Quiesce(rank=2**70, generation=1)))


@pytest.mark.parametrize(
    ("kind", "field", "key"),
    [
        (StartProcess, "connected", "seated"),
        (Rejoin, "connected", "seated"),
        (StepReport, "local_states", "own_states"),
        (RepairPart, "local_states", "own_states"),
        (RepairPart, "restore_local", "restore_own"),
    ],
)
def test_a_field_that_was_renamed_keeps_its_key(kind: type[msgspec.Struct], field: str, key: str) -> None:
    """A journal and a message of an earlier version have it."""
    assert {each.name: each.encode_name for each in msgspec.structs.fields(kind)}[field] == key
