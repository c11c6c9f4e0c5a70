"""Two looks at the same documents: what is new, what is gone, and what cannot be read."""

from midstep.detectors.documents import Document
from midstep.detectors.files import Snapshots
from midstep.detectors.reading import Reading
from midstep.protocol.types import Assertion, FaultKind, FaultLevel, FaultReport


def reading(code: str, level: FaultLevel = FaultLevel.RESTART_NPU, assertion: Assertion = Assertion.OCCUR) -> Reading:
    """A fault of a device."""
    return Reading(FaultKind.DEVICE, f"n/0/{code}", "n", 0, code, level, assertion, at_s=50.0)


def said(*readings: Reading, error: str = "", snapshot: bool = True) -> Document:
    """What one look at one document finds."""
    return Document("a.json:n:DeviceInfoCfg", "DeviceInfoCfg", readings, error, snapshot)


def in_short(reports: list[FaultReport]) -> list[tuple[str | None, Assertion]]:
    """Code and assertion of each report."""
    return [(report.code, report.assertion) for report in reports]


def test_a_fault_is_told_when_it_comes_and_when_it_has_vanished_and_not_in_between() -> None:
    snapshots = Snapshots("detector/files")
    assert in_short(snapshots.take([said(reading("A"))], 100.0)) == [("A", Assertion.OCCUR)]
    assert snapshots.take([said(reading("A"))], 101.0) == []
    found = snapshots.take([said(reading("B"))], 102.0)
    assert in_short(found) == [("A", Assertion.RECOVER), ("B", Assertion.OCCUR)]
    assert [(report.at_s, report.age_s) for report in found] == [(102.0, 0.0), (102.0, 52.0)]
    assert {report.seen_by for report in found} == {"detector/files"}
    assert found[0].fault_id == "n/0/A"


def test_a_fault_that_gets_worse_is_told_again() -> None:
    snapshots = Snapshots("detector/files")
    snapshots.take([said(reading("A"))], 100.0)
    (worse,) = snapshots.take([said(reading("A", FaultLevel.SEPARATE_NPU))], 101.0)
    assert (worse.level, worse.assertion) == (FaultLevel.SEPARATE_NPU, Assertion.OCCUR)


def test_what_happened_once_does_not_recover() -> None:
    snapshots = Snapshots("detector/files")
    snapshots.take([said(reading("A", assertion=Assertion.ONCE))], 100.0)
    assert snapshots.take([said()], 101.0) == []


def test_a_document_that_cannot_be_read_is_told_once_and_its_last_good_state_stays_in_force() -> None:
    snapshots = Snapshots("detector/files")
    snapshots.take([said(reading("A"))], 100.0)
    (trouble,) = snapshots.take([said(error="DeviceInfoCfg: not JSON")], 101.0)
    assert (trouble.kind, trouble.level, trouble.assertion) == (
        FaultKind.DETECTOR,
        FaultLevel.NOT_HANDLE,
        Assertion.OCCUR,
    )
    assert trouble.detail == "a.json:n:DeviceInfoCfg: DeviceInfoCfg: not JSON"
    assert snapshots.take([said(error="DeviceInfoCfg: not JSON")], 102.0) == []
    assert list(snapshots.errors) == ["a.json:n:DeviceInfoCfg"]
    again = snapshots.take([said(reading("A"))], 103.0)
    assert [(report.kind, report.assertion) for report in again] == [(FaultKind.DETECTOR, Assertion.RECOVER)]
    assert again[0].fault_id == trouble.fault_id
    assert snapshots.errors == {}


def test_a_document_that_is_not_there_changes_nothing() -> None:
    snapshots = Snapshots("detector/files")
    snapshots.take([said(reading("A"))], 100.0)
    assert snapshots.take([], 101.0) == []
    assert in_short(snapshots.take([said()], 102.0)) == [("A", Assertion.RECOVER)]


def test_what_vanishes_from_a_message_has_not_recovered() -> None:
    snapshots = Snapshots("detector/files")
    snapshots.take([said(reading("A"), snapshot=False)], 100.0)
    assert snapshots.take([said(snapshot=False)], 101.0) == []
    recovered = reading("A", assertion=Assertion.RECOVER)
    assert in_short(snapshots.take([said(recovered, snapshot=False)], 102.0)) == [("A", Assertion.RECOVER)]


def test_a_time_to_come_or_none_is_taken_as_now() -> None:
    report = Snapshots("d").take([said(reading("A"))], 10.0)[0]
    assert report.at_s == 10.0
