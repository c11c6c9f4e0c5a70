"""Documents of detectors, and the watch over them"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import msgspec
import pytest

from midstep.detectors.documents import documents_in
from midstep.detectors.files import FileDetector
from midstep.detectors.lines import parse_line
from midstep.protocol.compat import within
from midstep.protocol.errors import DocumentError
from midstep.protocol.types import Assertion, FaultLevel, FaultReport

from .attack import attack

PATIENCE_S = 60.0
WORK_S = 10.0  # of the processor, for what takes a second or two on a machine with nothing else to do
NAMED = PurePath("mindx-dl-deviceinfo-n.yaml")


def separated(node: str = "node1", code: str = "80E18005") -> str:
    """A good document: a device that is to be left."""
    fault = {"npu_name": "npu-0", "fault_code": code, "fault_level": "SeparateNPU"}
    return json.dumps({"DeviceInfo": {"DeviceList": {"huawei.com/npu-Fault": json.dumps([fault])}}})


def public(**changes: Any) -> bytes:
    """A public fault with something changed."""
    fault = {
        "faultId": "f",
        "faultType": "NPU",
        "faultCode": "A",
        "faultTime": 1.0,
        "assertion": "occur",
        "influence": [{"nodeName": "n", "deviceIds": [1]}],
        **changes,
    }
    return json.dumps({"id": "1", "timestamp": 1, "version": "1", "resource": "r", "faults": [fault]}).encode()


def names_of(reports: list[FaultReport]) -> list[str]:
    """The nodes whose devices are to be left."""
    return [report.node or "" for report in reports if report.level is FaultLevel.SEPARATE_NPU]


def growing_aliases() -> bytes:
    """Twenty lines, each with eight aliases of the one before."""
    lines = [b"%c: &%c [%s]" % (n, n, b",".join([b"*%c" % (n - 1)] * 8)) for n in range(98, 118)]
    return b"\n".join([b"a: &a [x,x,x,x,x,x,x,x]", *lines])


def config_map(name: Any, **data: str) -> dict[str, Any]:
    """A ConfigMap, as kubectl prints it."""
    return {"kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def device_info(entry: dict[str, str], key: str = "npu-Fault") -> bytes:
    """A document with one entry."""
    return json.dumps({"DeviceInfo": {"DeviceList": {key: json.dumps([entry])}}}).encode()


HOSTILE = {
    "a tag whose value it cannot have": ("a.yaml", b"a: !!bool maybe"),
    "an empty number": ("a.yaml", b'a: !!float ""'),
    "a date that is none": ("a.yaml", b"a: !!timestamp x"),
    "an object of Python's": ("a.yaml", b"!!python/object/apply:os.abort []"),
    "a megabyte of one number to the base 60": ("a.yaml", b"a: " + b":".join([b"1"] * 500_000)),
    "a number of 5000 digits": ("a.json", b'{"data": {"DeviceInfoCfg": ' + b"9" * 5000 + b"}}"),
    "a name that is not UTF-8": ("\udcff.json", b"{}"),
    "a name with a line break": ("a\nb.json", b"{}"),
    "lists in lists": ("a.yaml", b"[" * 100_000),
    "aliases that grow": ("a.yaml", growing_aliases()),
    "an alias of itself": ("a.yaml", b"a: &a [*a]"),
    "a name that is a list": ("a.json", json.dumps(config_map(0)).encode().replace(b"0", b"[" * 900 + b"]" * 900)),
    "zeros": ("a.yaml", b"\0" * 1000),
    "another encoding": ("a.json", "{}".encode("utf-16")),
}


@attack(
    "leaves one hostile document among the good ones: tags, huge numbers, aliases, deep nesting, odd file names",
    holds="the others are read at once, and their faults reported",
    reads="which document is skipped, and what is wrong with it",
)
@pytest.mark.parametrize("case", HOSTILE)
def test_one_hostile_document_does_not_hide_a_good_one(tmp_path: Path, case: str) -> None:
    """A fault in a good file is reported, and the hostile one is told of as skipped."""
    name, data = HOSTILE[case]
    (tmp_path / name).write_bytes(data)
    (tmp_path / "mindx-dl-deviceinfo-node1.json").write_text(separated())
    state = tmp_path / "state"
    detector = FileDetector("files", [tmp_path], state)

    began = time.process_time()
    reports = detector.look(2.0)

    assert names_of(reports) == ["node1"]
    assert len(reports) == 2
    assert time.process_time() - began < WORK_S
    (skipped,) = (report for report in reports if report.node is None)
    assert skipped.detail.isprintable()
    assert skipped.fault_id.startswith("unreadable/")
    assert [msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=FaultReport) for report in reports] == reports
    again = FileDetector("files", [tmp_path], state)
    again._snapshots.restore(detector._snapshots.saved())
    assert again.look(3.0) == []


@attack(
    "leaves one hostile document inside a list of good ones",
    holds="the others of the list are read",
    reads="its place in the list",
)
def test_one_wrong_item_of_a_list_does_not_hide_the_others() -> None:
    """Each item is read on its own."""
    names = ("n0", "n1", "n2", "n2")
    good = [config_map(f"mindx-dl-deviceinfo-{name}", DeviceInfoCfg=separated()) for name in names]
    wrong: list[Any] = [3, {"kind": "List", "items": []}, config_map([[[]]])]
    tree = {"kind": "List", "items": [wrong[0], good[0], wrong[1], good[1], wrong[2], good[2], good[3]]}

    found = documents_in(PurePath("list.json"), json.dumps(tree).encode())

    assert [document.name for document in found if document.readings] == [
        f"list.json:mindx-dl-deviceinfo-{node}:DeviceInfoCfg" for node in ("n0", "n1")
    ]
    errors = [document.error for document in found if document.error]
    assert [error.split(":")[0] for error in errors] == ["items[0]", "items[2]", "items[4]", "DeviceInfoCfg"]
    assert errors[-1] == "DeviceInfoCfg: is twice in the file"


AMPLIFIED = {
    "one long description at many devices": public(
        description="d" * 2_000_000, influence=[{"nodeName": "n", "deviceIds": list(range(4097)) * 50}]
    ),
    "one long name of a fault at many devices": public(
        faultId="f" * 2_000_000, influence=[{"nodeName": "n", "deviceIds": list(range(4097)) * 50}]
    ),
    "a million codes": device_info({"npu_name": "npu-1", "fault_code": "A," * 1_000_000}),
    "a long key above many codes": device_info({"fault_code": "A," * 500_000}, "k" * 2_000_000 + "-Fault"),
    "a long level at many codes": device_info({"fault_code": "A," * 500_000, "fault_level": " " * 2_000_000}),
    "many lists": b"[" + b"[]," * 300_000 + b"[]]",
    "a million values in YAML": b"a: [" + b"1," * 1_000_000 + b"]",
    "a million questions": b"? " * 1_000_000,
    "a document of four megabytes": b"a: " + b"x" * 4_194_000,
}


@attack(
    "writes documents that are small and mean much: long texts said of many devices, a million codes",
    holds="the work and the memory for one document are bounded, and it is refused",
    reads="what there is too much of",
)
@pytest.mark.parametrize("case", AMPLIFIED)
def test_a_document_costs_no_more_than_its_size_allows(case: str) -> None:
    """Nothing is built that is not going to be believed."""
    name = PurePath("p.json") if case.startswith("one long") else NAMED

    began = time.process_time()
    (document,) = documents_in(name, AMPLIFIED[case])

    assert time.process_time() - began < WORK_S
    assert document.error or sum(len(reading.detail) for reading in document.readings) < 1e7
    assert len(document.error) <= 1000


@attack(
    "puts a pipe, a device or a directory in the place of a document",
    holds="it is not waited for",
    reads="that it is no regular file",
)
def test_a_pipe_in_the_place_of_a_document_is_not_waited_for(tmp_path: Path) -> None:
    """To open a pipe is to wait for its writer."""
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    (tmp_path / "mindx-dl-deviceinfo-node1.json").write_text(separated())

    reports = FileDetector("files", [pipe, tmp_path / "endless.json", tmp_path]).look(2.0)

    assert names_of(reports) == ["node1"]
    assert sorted(report.detail.rpartition("/")[2] for report in reports if report.node is None) == [
        "endless.json: cannot be read: is no regular file",
        "pipe.json: cannot be read: is no regular file",
    ]


@attack(
    "fills the watched directory with more files than are read",
    holds="it is said that there are too many",
    reads="how many files are read",
)
def test_more_files_than_are_read_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not looked at is not passed over in silence."""
    monkeypatch.setattr("midstep.detectors.files.MAX_FILES", 3)
    for number in range(4):
        (tmp_path / f"mindx-dl-deviceinfo-n{number}.json").write_text(separated())
    detector = FileDetector("files", [tmp_path])

    reports = detector.look(2.0)
    assert names_of(reports) == ["n0", "n1", "n2"]
    assert "has more than 3 files, and further ones are not read" in reports[-1].detail
    assert detector.look(3.0) == []
    monkeypatch.setattr("midstep.detectors.files.MAX_FILES", 4)
    reports = detector.look(4.0)
    assert names_of(reports) == ["n3"]
    assert reports[-1].assertion is Assertion.RECOVER


@attack(
    "makes and removes broken documents without end",
    holds="those that are gone, and had no faults, are forgotten",
)
def test_broken_documents_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    """Memory does not grow with what was there once; what a good document said last stays in force."""
    detector = FileDetector("files", [tmp_path])
    good = tmp_path / "mindx-dl-deviceinfo-node1.json"
    good.write_text(separated())
    detector.look(1.0)
    good.unlink()
    for number in range(20):
        broken = tmp_path / f"{number}.json"
        broken.write_text("{")
        detector.look(2.0)
        broken.unlink()
        assert [report.assertion for report in detector.look(3.0)] == [Assertion.RECOVER]

    assert list(detector._read) == [good]
    assert [name.rpartition("/")[2] for name in detector._snapshots.errors] == [good.name]


@attack(
    "makes directories and files whose names are not UTF-8 while they are watched",
    holds="the watch continues, and reads what is in them",
)
def test_names_that_are_not_utf8_do_not_end_the_watch(tmp_path: Path) -> None:
    """The kernel's word about them is not needed."""

    async def story() -> list[FaultReport]:
        reports: list[FaultReport] = []
        watching = asyncio.create_task(FileDetector("files", [tmp_path]).watch(reports.append))
        try:
            await asyncio.sleep(0.1)
            inner = tmp_path / "in\udcffside"
            inner.mkdir()
            (tmp_path / "\udcfe.json").write_bytes(b"{}")
            (inner / "mindx-dl-deviceinfo-node2.json").write_text(separated())
            await until(lambda: "node2" in names_of(reports), watching)
            (tmp_path / "mindx-dl-deviceinfo-node1.json").write_text(separated())
            await until(lambda: "node1" in names_of(reports), watching)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        return reports

    assert sorted(names_of(asyncio.run(story()))) == ["node1", "node2"]


@attack(
    "fills the disk that the watch keeps its state on",
    holds="faults are reported all the same",
)
def test_a_state_that_cannot_be_written_does_not_end_the_watch(tmp_path: Path) -> None:
    """After a restart, faults that stand are told again, which does no harm."""
    (tmp_path / "mindx-dl-deviceinfo-node1.json").write_text(separated())
    reports: list[FaultReport] = []
    detector = FileDetector("files", [tmp_path], tmp_path / "nothing" / "state")

    asyncio.run(detector._check_and_report(reports.append))

    assert names_of(reports) == ["node1"]


@attack(
    "sends a line with numbers that no message can carry",
    holds="the line is refused, and the next one is taken",
    reads="which numbers are devices and ranks",
)
@pytest.mark.parametrize("key", ["device", "rank"])
def test_a_line_with_a_huge_number_is_refused(key: str) -> None:
    """What was taken can be sent and written down."""
    where = '"node": "n", ' if key == "device" else ""
    for digits in (20, 40, 400):
        with pytest.raises(DocumentError, match=r"about no (device|rank)|at `\$.(device|rank)`"):
            parse_line(f'{{{where}"code": "A", "{key}": {"9" * digits}}}'.encode(), "x", 1.0)
    report = parse_line(f'{{{where}"code": "A", "{key}": 3}}'.encode(), "x", 1.0)
    assert msgspec.msgpack.encode(report)


async def until(holds: Callable[[], bool], task: "asyncio.Task[None]") -> None:
    """Wait until something holds, while a watch runs."""

    async def look() -> None:
        while not holds():
            assert not task.done(), "the watch has ended"
            await asyncio.sleep(0.02)

    await within(PATIENCE_S, look())
