"""The watch over files, with real files: written in place, renamed over, swapped by a link as Kubernetes does, gone."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from midstep.detectors.documents import NO_SERIALS
from midstep.detectors.files import FileDetector
from midstep.protocol.compat import within
from midstep.protocol.types import Assertion, FaultKind, FaultReport

PATIENCE_S = 30.0
OCCUR, RECOVER = Assertion.OCCUR, Assertion.RECOVER


def device_info(*codes: str) -> str:
    """A raw device document with faults of these codes on device 0."""
    faults = [{"npu_name": "npu-0", "fault_code": ",".join(codes), "fault_level": "RestartNPU"}] if codes else []
    return json.dumps({"DeviceInfo": {"DeviceList": {"huawei.com/npu-Fault": json.dumps(faults)}}})


def replace(path: Path, text: str) -> None:
    """Write a file as careful programs do: beside it, then renamed over it."""
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text)
    draft.replace(path)


class Mounted:
    """A mounted ConfigMap: files that are links through `..data`, which is swapped as a whole."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.versions = 0
        directory.mkdir()

    def swap(self, **files: str) -> None:
        """Put a new version in place, atomically, and take the old one away."""
        self.versions += 1
        version = self.directory / f"..2026_11_{self.versions:02d}"
        version.mkdir()
        for key, text in files.items():
            (version / key).write_text(text)
            link = self.directory / key
            if not link.is_symlink():
                link.symlink_to(Path("..data") / key)
        draft = self.directory / "..data_tmp"
        draft.symlink_to(version.name)
        old = self.directory / "..data"
        before = os.readlink(old) if old.is_symlink() else None
        draft.replace(old)
        if before is not None:
            for path in (self.directory / before).iterdir():
                path.unlink()
            (self.directory / before).rmdir()


class Heard:
    """What a detector has told, in order."""

    def __init__(self) -> None:
        self.reports: list[FaultReport] = []

    async def until(self, holds: Callable[[list[tuple[str | None, Assertion]]], bool]) -> None:
        """Wait until what was told is as wanted: code (or `detector`) and assertion of each report."""

        async def look() -> None:
            while not holds(self.short):
                await asyncio.sleep(0.01)

        await within(PATIENCE_S, look())

    @property
    def short(self) -> list[tuple[str | None, Assertion]]:
        kinds = {FaultKind.DETECTOR: "detector"}
        return [(kinds.get(report.kind, report.code), report.assertion) for report in self.reports]


@contextlib.asynccontextmanager
async def watching(
    *sources: Path, state: Path | None = None, serials: Mapping[str, str] = NO_SERIALS
) -> AsyncIterator[Heard]:
    """Watch for as long as the context lasts."""
    heard = Heard()
    task = asyncio.create_task(FileDetector("files", sources, state, serials).watch(heard.reports.append))
    try:
        yield heard
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def run(story: Callable[[], object]) -> None:
    """Run a test's coroutine."""
    asyncio.run(story())  # type: ignore[arg-type]


@pytest.mark.parametrize("write", [replace, Path.write_text], ids=["renamed over", "in place"])
def test_a_file_that_changes_is_told_of(tmp_path: Path, write: Callable[[Path, str], object]) -> None:
    async def story() -> None:
        path = tmp_path / "mindx-dl-deviceinfo-n1.json"
        path.write_text(device_info("A"))
        async with watching(path) as heard:
            await heard.until(lambda told: told == [("A", OCCUR)])
            write(path, device_info("B"))
            await heard.until(lambda told: told[-2:] == [("A", RECOVER), ("B", OCCUR)])
            write(path, device_info())
            await heard.until(lambda told: told[-1:] == [("B", RECOVER)])
        assert {report.node for report in heard.reports} <= {"n1", None}

    run(story)


def test_a_mounted_configmap_that_is_swapped_is_told_of(tmp_path: Path) -> None:
    async def story() -> None:
        mounted = Mounted(tmp_path / "mindx-dl-deviceinfo-n2")
        mounted.swap(DeviceInfoCfg=device_info("A"))
        async with watching(tmp_path) as heard:
            await heard.until(lambda told: told == [("A", OCCUR)])
            mounted.swap(DeviceInfoCfg=device_info("A", "B"), ManuallySeparateNPU="npu-3")
            await heard.until(lambda told: ("B", OCCUR) in told and (None, OCCUR) in told)
            mounted.swap(DeviceInfoCfg=device_info(), ManuallySeparateNPU="")
            await heard.until(
                lambda told: (
                    sorted(map(str, told[-3:])) == sorted(map(str, [("A", RECOVER), ("B", RECOVER), (None, RECOVER)]))
                )
            )

    run(story)


def test_a_file_and_a_directory_that_come_later_are_found(tmp_path: Path) -> None:
    async def story() -> None:
        file, directory = tmp_path / "later" / "mindx-dl-deviceinfo-n3.json", tmp_path / "mounts"
        async with watching(file, directory) as heard:
            await heard.until(lambda told: told.count(("detector", OCCUR)) == 2)  # told that nothing is there
            file.parent.mkdir()
            file.write_text(device_info("A"))
            await heard.until(lambda told: ("A", OCCUR) in told)
            mounted = directory / "mindx-dl-deviceinfo-n4"
            mounted.mkdir(parents=True)
            (mounted / "DeviceInfoCfg").write_text(device_info("B"))
            await heard.until(lambda told: ("B", OCCUR) in told)

    run(story)


def test_a_document_that_is_wrong_is_told_of_and_what_it_said_before_stays_in_force(tmp_path: Path) -> None:
    async def story() -> None:
        path = tmp_path / "mindx-dl-deviceinfo-n5.json"
        path.write_text(device_info("A"))
        async with watching(tmp_path) as heard:
            await heard.until(lambda told: told == [("A", OCCUR)])
            replace(path, device_info("A")[:-5])
            await heard.until(lambda told: told[-1] == ("detector", OCCUR))
            assert str(path) in heard.reports[-1].detail
            assert "not JSON" in heard.reports[-1].detail
            path.unlink()
            await heard.until(lambda told: told.count(("detector", OCCUR)) == 2)
            assert "is gone; the faults that it last had stay in force" in heard.reports[-1].detail
            path.write_text(device_info())
            await heard.until(lambda told: told[-1] == ("A", RECOVER))
            assert ("detector", RECOVER) in heard.short

    run(story)


def test_a_watch_that_is_started_again_goes_on_where_the_last_one_was(tmp_path: Path) -> None:
    async def story() -> None:
        path, state = tmp_path / "mindx-dl-deviceinfo-n6.json", tmp_path / "state"
        path.write_text(device_info("A", "B"))
        async with watching(path, state=state) as heard:
            await heard.until(lambda told: told == [("A", OCCUR), ("B", OCCUR)])
            while not state.is_file():
                await asyncio.sleep(0.01)
        replace(path, device_info("B"))
        async with watching(path, state=state) as heard:
            await heard.until(lambda told: told == [("A", RECOVER)])
        state.write_bytes(b"what is this")
        async with watching(path, state=state) as heard:
            await heard.until(lambda told: told == [("B", OCCUR)])

    run(story)


def test_a_machine_that_is_named_by_its_serial_number_is_told_of_as_its_node(tmp_path: Path) -> None:
    async def story() -> None:
        fault = {"faultId": "f", "faultType": "Node", "faultCode": "A", "faultTime": 1, "assertion": "occur"}
        message = {"id": "m", "timestamp": 1, "version": "1.0", "resource": "bmc"}
        text = json.dumps({**message, "faults": [{**fault, "influence": [{"nodeSN": "2102312"}]}]})
        (tmp_path / "fault.json").write_text(text)
        async with watching(tmp_path, serials={"2102312": "node1"}) as heard:
            await heard.until(lambda told: told == [("A", OCCUR)])
        assert heard.reports[0].node == "node1"

    run(story)


def test_files_that_are_no_documents_are_not_looked_at(tmp_path: Path) -> None:
    async def story() -> None:
        (tmp_path / "notes.txt").write_text("nothing")
        (tmp_path / ".hidden.json").write_text("{")
        (tmp_path / "mindx-dl-deviceinfo-n7.json").write_text(device_info("A"))
        async with watching(tmp_path) as heard:
            await heard.until(lambda told: told == [("A", OCCUR)])

    run(story)
