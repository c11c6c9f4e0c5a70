"""The watch over fault sources, and how its reports get to the controller"""

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midstep.controller.endpoints.discovery_files import write_endpoint
from midstep.detectors.reporter import FaultReporter
from midstep.launch import launcher as fault_watch
from midstep.launch.processes import Backoff
from midstep.policies.schema import FaultPolicy
from midstep.protocol.compat import within
from midstep.protocol.incidents import JobStatus
from midstep.protocol.keys import JobKeys
from midstep.protocol.link import ControllerLink
from midstep.protocol.types import CONTROLLER, Assertion, FaultKind, FaultReport, detector_address

from ..chaos.jobs import Job
from .attack import attack
from .test_fault_documents import HOSTILE, separated, until

PATIENCE_S = 60.0


@attack(
    "reports more faults at once than can be on their way to the controller",
    holds="they wait, and none is lost",
)
def test_more_faults_than_a_mailbox_takes_are_sent_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document has up to 10000; what was told once is not told again."""
    JobKeys.create(tmp_path / "keys", [detector_address("files")])
    posted: list[str] = []
    post = ControllerLink.post

    def counted(link: ControllerLink, body: Any) -> None:
        before = link.mailbox._outstanding
        post(link, body)
        posted.extend([body.report.fault_id] * (link.mailbox._outstanding - before))

    async def acknowledged(reporter: FaultReporter) -> None:
        while len(posted) < 6000:
            reporter._link.mailbox.forget(CONTROLLER)  # as if all were acknowledged
            await asyncio.sleep(0.01)

    async def story() -> None:
        async with FaultReporter("gpt", "tcp://127.0.0.1:9", "files", tmp_path / "keys") as reporter:
            for number in range(6000):
                reporter.tell(FaultReport(FaultKind.DEVICE, 1.0, "detector/files", "", fault_id=str(number)))
            await within(PATIENCE_S, acknowledged(reporter))

    monkeypatch.setattr(ControllerLink, "post", counted)
    asyncio.run(story())
    assert posted == [str(number) for number in range(6000)]


class Watch:
    """The launcher's part of the watch, with a program of the test's own in the place of `midstep detect`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
        run = root / "run"
        run.mkdir(mode=0o700)
        (root / "logs").mkdir()
        JobKeys.create(run / "keys", [CONTROLLER])
        write_endpoint(run, "tcp://127.0.0.1:9")
        self._job: Any = SimpleNamespace(
            job_directory=root,
            run_directory=run,
            fault_sources=(root / "faults",),
            policy=SimpleNamespace(faults=FaultPolicy()),
            spec=SimpleNamespace(job="gpt"),
        )
        self.lives = 0
        self.told: list[FaultReport] = []
        real = asyncio.create_subprocess_exec

        async def start(*_: str, **options: Any) -> asyncio.subprocess.Process:
            self.lives += 1
            return await real(sys.executable, "-S", "-c", program, str(self.lives), **options)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        monkeypatch.setattr(FaultReporter, "tell", lambda _, report: self.told.append(report))
        monkeypatch.setattr(fault_watch, "DETECTOR_BACKOFF", Backoff(first_s=0.0, longest_s=0.0))

    async def until(self, holds: Callable[["Watch"], bool]) -> None:
        """Watch until it is as wanted."""
        watching = asyncio.create_task(fault_watch.watch_faults(self._job))
        try:
            await until(lambda: holds(self), watching)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching


def run(story: Awaitable[None]) -> None:
    """Run a coroutine to its end."""

    async def whole() -> None:
        await story

    asyncio.run(whole())


@attack(
    "kills the watch over fault sources as soon as it starts, again and again",
    holds="it is started again without a limit, with growing pauses",
    reads="a standing fault in the job's status until the sources are watched again",
)
def test_a_watch_that_dies_comes_back_and_the_status_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fault stands from the first death to the first whole look, however many there are between."""
    dying = "import sys, time; sys.argv[1] == '13' or sys.exit(3); print(flush=True); time.sleep(600)"
    watch = Watch(tmp_path, monkeypatch, dying)

    run(watch.until(lambda watch: watch.lives == 13 and len(watch.told) == 2))

    assert [(report.assertion, report.fault_id) for report in watch.told] == [
        (Assertion.OCCUR, "fault-watch"),
        (Assertion.RECOVER, "fault-watch"),
    ]
    assert "nothing watches the fault sources: `midstep detect` ended with status 3" in watch.told[0].detail
    assert "detect.log" in watch.told[0].detail


@attack(
    "stops the watch over fault sources, or has it wait for a file for ever",
    holds="it is killed and started again when it gives no sign of life",
    reads="a standing fault in the job's status",
)
def test_a_watch_that_looks_at_nothing_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To be alive is not enough."""
    monkeypatch.setattr(fault_watch, "SILENCE_S", 0.3)
    watch = Watch(tmp_path, monkeypatch, "import time; time.sleep(600)")

    run(watch.until(lambda watch: watch.lives == 2))

    assert [report.assertion for report in watch.told] == [Assertion.OCCUR]
    assert "has looked at no file for 0.3 s" in watch.told[0].detail


@attack(
    "leaves hostile documents beside a good one, and kills the watch of a running job",
    holds="the fault in the good document stands in the status, also after the watch was killed",
    reads="standing faults: each hostile document, and the time without a watch",
)
@pytest.mark.chaos
@pytest.mark.timeout(180)
def test_a_running_job_shows_faults_hostile_documents_and_a_dead_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is in the status that operators look at."""
    documents = tmp_path / "documents"
    documents.mkdir()
    for case in ("a tag whose value it cannot have", "a name that is not UTF-8", "a name with a line break"):
        name, data = HOSTILE[case]
        (documents / f"{documents.name}-{name}").write_bytes(data)
    good = documents / "mindx-dl-deviceinfo-node7.json"
    good.write_text(separated(code="C1"))

    with tempfile.TemporaryDirectory(prefix="ms-") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        job = Job(tmp_path / "job", nodes=1, ranks_per_node=1, steps=10_000, options=["--fault-source", str(documents)])
        try:
            status = job.until(lambda status: "C1" in _codes(status) and status.phase == "running", "the good document")
            assert len([fault for fault in status.faults if "documents-" in fault.report.detail]) == 3
            watch = next(each for each in job.processes() if "detect" in each.cmdline())
            watch.kill()
            job.until(lambda status: "fault-watch" in _names(status), "the dead watch")
            good.write_text(separated(code="C2"))
            job.until(lambda status: _codes(status) == {"C2"} and "fault-watch" not in _names(status), "the next watch")
            job.launcher.terminate()
            assert job.wait() == 130, job.said()
            job.assert_nothing_left()
            assert list(Path(runtime, "midstep").iterdir()) == []
        finally:
            job.close()


def _codes(status: JobStatus) -> set[str]:
    return {fault.report.code for fault in status.faults if fault.report.code}


def _names(status: JobStatus) -> set[str]:
    return {fault.report.fault_id for fault in status.faults}
