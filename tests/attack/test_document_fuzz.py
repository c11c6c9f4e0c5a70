"""Documents and lines of detectors, changed at random

Good ones are cut, spliced, nested and given other values; `MIDSTEP_FUZZ_CASES` says how often.
"""

import json
import os
import random
import tempfile
import time
from pathlib import Path, PurePath
from typing import Any

import msgspec
import pytest
import yaml

from midstep.controller.admission import unbelievable
from midstep.detectors.documents import Document, documents_in
from midstep.detectors.files import FileDetector, Snapshots
from midstep.detectors.lines import parse_line
from midstep.detectors.reading import MAX_ID, MAX_NAME
from midstep.protocol.errors import DocumentError
from midstep.protocol.types import FaultReport

from .attack import attack
from .fuzzing import CASES, LIMIT_S
from .text_mutation import mutated, mutated_tree

pytestmark = pytest.mark.timeout(LIMIT_S)

WORK_S = 10.0  # of the processor, for one case that takes milliseconds
NOW_S = 1e9
GOOD_FILES = sorted(
    path for path in (Path(__file__).parents[1] / "unit/detectors/documents").rglob("*") if path.is_file()
)
GOOD_LINES = (
    b'{"code": "80E01801", "node": "node0", "device": 1}',
    b'{"level": "SeparateNPU", "rank": 3, "assertion": "once", "at_s": 1732155001234, "detail": "fan 3 stands still"}',
    b'{"kind": "switch", "code": "00AB12", "node": "n", "fault_id": "a", "assertion": "recover", "detector": "bmc"}',
)


def assert_sendable(report: FaultReport) -> None:
    """The controller takes it, the wire and the journal carry it, and a terminal shows it."""
    assert unbelievable(report) is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=FaultReport) == report


def assert_documented(documents: tuple[Document, ...]) -> None:
    """A right result or an error in words, for each document; an empty list has none."""
    assert len({document.name for document in documents}) == len(documents)
    for document in documents:
        assert document.name.isprintable()
        assert not (document.error and document.readings)
        assert document.error.isprintable()
        assert len(document.error) <= 1000
        for reading in document.readings:
            assert 0 < len(reading.node) <= MAX_NAME
            assert len(reading.fault_id) <= MAX_ID
    snapshots = Snapshots("detector/fuzz")
    for report in snapshots.take(documents, NOW_S):
        assert_sendable(report)
    again = Snapshots("detector/fuzz")
    again.restore(snapshots.saved())
    assert again.take(documents, NOW_S) == []


@attack(
    "changes documents of every kind at random: bits, cuts, splices, other values, huge numbers, nesting",
    holds="each is read or refused in bounded work, and what is reported can be sent",
    reads="what is wrong with which document",
)
def test_changed_documents_are_read_or_refused() -> None:
    """Nothing else leaves the reader, and what it returns can be sent and saved."""
    chance = random.Random(31)
    texts = [path.read_bytes() for path in GOOD_FILES]
    good = [(path, data, yaml.safe_load(data)) for path, data in zip(GOOD_FILES, texts, strict=True)]
    for case in range(CASES):
        path, data, tree = chance.choice(good)
        name = PurePath(path.parent.name, chance.choice([path.name, "mindx-dl-deviceinfo-n1.json", "a.yaml"]))
        if chance.random() < 0.5:
            changed = json.dumps(mutated_tree(tree, chance)).encode("utf-8", "surrogatepass")
        else:
            changed = mutated(data, texts, chance)
        began = time.process_time()
        assert_documented(documents_in(name, changed))
        assert time.process_time() - began < WORK_S, (case, changed[:200])


@attack(
    "changes lines of other programs' detectors at random",
    holds="each is taken or refused, and the next good one is taken",
    reads="key and what is allowed",
)
def test_changed_lines_are_taken_or_refused() -> None:
    """Only the documented error leaves the parser."""
    chance = random.Random(32)
    refused = 0
    for _ in range(CASES):
        line = chance.choice(GOOD_LINES)
        if chance.random() < 0.5:
            changed = json.dumps(mutated_tree(json.loads(line), chance)).encode("utf-8", "surrogatepass")
        else:
            changed = mutated(line, GOOD_LINES, chance)
        try:
            report = parse_line(changed, "fuzz", NOW_S)
        except DocumentError:
            refused += 1
        else:
            assert_sendable(report)
    assert 0 < refused < CASES
    for line in GOOD_LINES:
        assert_sendable(parse_line(line, "fuzz", NOW_S))


@attack(
    "leaves changed documents under changed names beside a good one",
    holds="after each look the good one is in force",
)
def test_a_good_document_is_read_among_changed_ones() -> None:
    """The watch looks again and again at what is there."""
    chance = random.Random(33)
    texts = [path.read_bytes() for path in GOOD_FILES]
    fault = {"npu_name": "npu-0", "fault_code": "C", "fault_level": "SeparateNPU"}
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        detector = FileDetector("fuzz", [root])
        good = root / "mindx-dl-deviceinfo-good.json"
        for case in range(max(1, CASES // 30)):
            for number in range(5):
                name = mutated(b"mindx-dl-deviceinfo-n.json", [b"PublicFault", b".yaml", b"\xff"], chance)[:60]
                path = (
                    os.fsencode(root) + b"/" + b"%d" % number + name.replace(b"/", b"").replace(b"\0", b"") + b".json"
                )
                Path(os.fsdecode(path)).write_bytes(mutated(chance.choice(texts), texts, chance)[:100_000])
            listed = {"npu-Fault": json.dumps([{**fault, "fault_code": f"C{case}"}])}
            good.write_text(json.dumps({"DeviceInfo": {"DeviceList": listed}}))
            codes: list[Any] = [report.code for report in detector.look(NOW_S + case) if report.node == "good"]
            assert f"C{case}" in codes
            for path_of in list(root.iterdir()):
                if path_of != good:
                    path_of.unlink()
