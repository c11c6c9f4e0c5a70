"""Documents that were cut, changed, filled with nonsense or encoded wrongly: a right result or a clear error."""

import json
from pathlib import Path, PurePath
from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from midstep.detectors.documents import PARSERS, Document, documents_in
from midstep.detectors.files import Snapshots
from midstep.detectors.reading import MAX_ID, MAX_NAME
from midstep.protocol.types import FaultReport

DOCUMENTS = Path(__file__).parent / "documents"
FILES = sorted(path for path in DOCUMENTS.rglob("*") if path.is_file())
ENCODINGS = ("utf-16", "utf-32", "utf-8-sig", "latin-1", "cp037")

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
)
files = st.sampled_from(FILES)


def look(path: PurePath, data: bytes) -> tuple[Document, ...]:
    """What a detector makes of a file, with everything that has to hold of it, whatever the file is."""
    documents = documents_in(path, data)
    assert documents
    for document in documents:
        assert not (document.error and document.readings)
        assert len(document.error) < 2000
        assert "\n" not in document.error
        for reading in document.readings:
            assert 0 < len(reading.node) <= MAX_NAME
            assert len(reading.fault_id) <= MAX_ID
            assert reading.device is None or 0 <= reading.device <= 4096
            assert reading.code or reading.level
            assert 0 <= reading.at_s < 1e12
    for report in Snapshots("detector/fuzz").take(documents, 1e9):
        assert isinstance(report, FaultReport)
        assert 0 < report.at_s <= 1e9
    return documents


@settings(max_examples=60, deadline=None)
@given(path=files, cut=st.floats(0, 1))
def test_a_document_that_is_cut_anywhere(path: Path, cut: float) -> None:
    data = path.read_bytes()
    look(PurePath(path), data[: int(len(data) * cut)])


@settings(max_examples=80, deadline=None)
@given(path=files, at=st.floats(0, 1), put=st.binary(max_size=8), drop=st.integers(0, 8))
def test_a_document_with_bytes_that_are_changed(path: Path, at: float, put: bytes, drop: int) -> None:
    data = path.read_bytes()
    place = int(len(data) * at)
    look(PurePath(path), data[:place] + put + data[place + drop :])


def replaced(tree: Any, number: int, value: Any) -> tuple[Any, int]:
    """Copy a tree with its `number`-th node replaced, text that is JSON opened up on the way; and what is left over."""
    if number == 0:
        return value, -1
    number -= 1
    if isinstance(tree, str) and tree[:2] in {'{"', "[{", '["'}:
        inner, number = replaced(json.loads(tree), number, value)
        return json.dumps(inner), number
    if isinstance(tree, dict):
        made: Any = {}
        for key, item in tree.items():
            made[key], number = replaced(item, number, value) if number >= 0 else (item, number)
        return made, number
    if isinstance(tree, list):
        made = []
        for item in tree:
            copy, number = replaced(item, number, value) if number >= 0 else (item, number)
            made.append(copy)
        return made, number
    return tree, number


@settings(max_examples=120, deadline=None)
@given(path=files, number=st.integers(0, 120), value=trees)
def test_a_document_with_a_value_of_another_sort_anywhere(path: Path, number: int, value: Any) -> None:
    text = path.read_text()
    tree = yaml.safe_load(text) if text else None
    changed, _ = replaced(tree, number, value)
    data = json.dumps(changed).encode("utf-8", "surrogatepass")
    look(PurePath(path), data)


@settings(max_examples=60, deadline=None)
@given(key=st.sampled_from(sorted(PARSERS)), value=trees)
def test_nonsense_under_a_name_that_is_known(key: str, value: Any) -> None:
    text = json.dumps(value)
    look(PurePath("mindx-dl-deviceinfo-n.json"), json.dumps({key: value}).encode())
    look(PurePath("x.json"), json.dumps({"kind": "ConfigMap", "data": {key: text}}).encode())
    look(PurePath("mindx-dl-deviceinfo-n") / key, text.encode())


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200))
@example(data=b"[" * 100_000)
@example(data=b'{"a":' * 50_000)
@example(data=b"- " * 500_000)
@example(data=b"? " * 3_000)
@example(data=b"!!python/object/apply:os.system [true]")
@example(data=b"a: 0b\nb: 2026-99-99\n")
@example(data=b"1e999999: x")
@example(data=b'{"faults": [' + b"1" * 5000 + b"]}")
def test_bytes_that_are_anything(data: bytes) -> None:
    look(PurePath("mindx-dl-deviceinfo-n.yaml"), data)


@settings(max_examples=30, deadline=None)
@given(path=files, encoding=st.sampled_from(ENCODINGS))
def test_a_document_in_another_encoding(path: Path, encoding: str) -> None:
    documents = look(PurePath(path), path.read_text().encode(encoding))
    if encoding == "utf-8-sig" and path.read_text():
        assert all(not document.error for document in documents)


def test_a_document_that_is_huge_is_refused_without_being_read() -> None:
    (document,) = look(PurePath("mindx-dl-deviceinfo-n.json"), b"[" + b"1," * 3_000_000)
    assert "larger than" in document.error


def test_more_faults_than_a_document_can_have_are_refused() -> None:
    faults = [{"npu_name": "npu-1", "fault_code": ",".join(f"C{number}" for number in range(20_000))}]
    text = json.dumps({"DeviceInfo": {"DeviceList": {"npu-Fault": json.dumps(faults)}}})
    (document,) = look(PurePath("mindx-dl-deviceinfo-n.json"), text.encode())
    assert "more than 10000 faults; a real document has fewer" in document.error
