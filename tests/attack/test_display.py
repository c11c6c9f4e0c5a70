"""The launcher's output: pipes, disks and terminals that do not take what it shows"""

import asyncio
import contextlib
import fcntl
import io
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from midstep.cli import showing
from midstep.controller.endpoints.discovery_files import JobResult
from midstep.launch.job import PreparedJob, Start, create_job

from .attack import attack

pytestmark = pytest.mark.timeout(60)

EXIT_CODE = 7


class Played:
    """Keeps a job that runs nothing: its ranks have printed what is in `logs`, and it is over."""

    logs: ClassVar[dict[str, bytes]] = {}

    def __init__(self, job: PreparedJob, look: Any = None, **how: Any) -> None:
        self._job = job
        self._look = look or (lambda: None)

    async def run(self) -> JobResult:
        for name, text in self.logs.items():
            (self._job.job_directory / "logs" / name).write_bytes(text)
        logging.getLogger("midstep").warning("the controller has ended with [/] and is started again")
        for _ in range(3):
            self._look()
            await asyncio.sleep(0.02)
        return JobResult(self._job.spec.job, EXIT_CODE, "as it was to end [/x]", 1, 0.0)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PreparedJob]:
    """A job that has been job and whose launcher is played; the display looks at it for real."""
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setattr(Played, "logs", {"rank-0.1.log": b"one\ntwo\n"})
    monkeypatch.setattr("midstep.launch.launcher.Launcher", Played)
    job = create_job(Start(command=(str(script),), job=f"display-{os.getpid()}", job_directory=tmp_path / "job"))
    yield job
    shutil.rmtree(job.run_directory, ignore_errors=True)


@contextlib.contextmanager
def output_on(descriptor: int, name: str, monkeypatch: pytest.MonkeyPatch, encoding: str = "utf-8") -> Iterator[None]:
    """Have a descriptor of a device or a pipe as stdout or stderr. It is closed afterwards."""
    stream = io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), encoding=encoding, write_through=True)
    with monkeypatch.context() as patch:
        patch.setattr(f"sys.{name}", stream)
        yield
    with contextlib.suppress(OSError, ValueError):
        stream.detach()
    os.close(descriptor)


def ended(job: PreparedJob) -> int:
    """Run the job to its end and return its exit code as the launcher gives it."""
    return showing.run_job(job, quiet=False)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@attack(
    "the reader of standard output or standard error goes away: `midstep run ... | head -1`, a terminal that is closed",
    holds="the job continues to its end, with its own exit code, and its logs are kept",
    reads="midstep: standard output is gone (Broken pipe): the job continues, and what its ranks print is in ...",
)
def test_a_reader_that_goes_away_ends_nothing(
    job: PreparedJob, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The exit code is the job's, and the other output says so."""
    reader, writer = os.pipe()
    os.close(reader)
    with output_on(writer, name, monkeypatch):
        assert ended(job) == EXIT_CODE
    shown = capfd.readouterr()
    if name == "stdout":
        assert "as it was to end [/x] (exit code 7)" in shown.err
        assert "standard output is gone (Broken pipe): the job continues" in shown.err
    else:
        assert "[rank 0] one\n[rank 0] two\n" in shown.out


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@attack(
    "the disk behind `midstep run > file` is full",
    holds="the job continues to its end, with its own exit code",
    reads="midstep: 12 lines could not be written here: No space left on device, as soon as there is space",
)
def test_a_full_disk_behind_an_output_ends_nothing(
    job: PreparedJob, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full is a disk that is full."""
    with output_on(os.open("/dev/full", os.O_WRONLY), name, monkeypatch):
        assert ended(job) == EXIT_CODE


@attack(
    "a text that the output's encoding lacks, or that is no text: PYTHONIOENCODING=ascii, bytes of a binary file",
    holds="the job continues; ranks' bytes are passed on as they are, other texts are escaped",
    reads="midstep: job ... in /data/gr\\\\xfc\\\\xdfe",
)
def test_an_output_that_knows_only_ascii_ends_nothing(
    job: PreparedJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither a rank's output nor a reason."""
    monkeypatch.setattr(Played, "logs", {"rank-0.1.log": "grüße\n".encode() + b"\xff\xfe\n"})
    shown = tmp_path / "shown"
    with output_on(os.open(shown, os.O_WRONLY | os.O_CREAT), "stdout", monkeypatch, "ascii"):
        assert ended(job) == EXIT_CODE
    assert shown.read_bytes() == "[rank 0] grüße\n".encode() + b"[rank 0] \xff\xfe\n"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@attack(
    "the reader of an output stops reading: `midstep run | less`, Ctrl-S, a log collector that hangs",
    holds="the job is not stopped by it, and the launcher ends 10 s after the job at the latest, with its exit code",
    reads="midstep: standard output is not read: 1048576 bytes or more are not shown; they are in ...",
)
def test_a_reader_that_does_not_read_stops_nothing(
    job: PreparedJob, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The job runs on while the write blocks, and its end is not held up either."""
    monkeypatch.setattr("midstep.cli.display.log_follower.STUCK_S", 0.3, raising=False)
    monkeypatch.setattr(Played, "logs", {"rank-0.1.log": b"x" * 99 + b"\n", "rank-1.1.log": b"y" * 5_000_000})
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"full" * 1024)
    os.set_blocking(writer, True)
    try:
        with output_on(writer, name, monkeypatch):
            assert ended(job) == EXIT_CODE
    finally:
        os.close(reader)
    if name == "stdout":
        assert "standard output is not read: " in capfd.readouterr().err


@attack(
    "a directory, a pipe or a link to nowhere lies where a rank's log is expected",
    holds="it is not shown; the others are",
)
def test_what_is_no_log_is_not_shown(
    job: PreparedJob, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """To open the pipe would take for ever."""
    logs = job.job_directory / "logs"
    (logs / "rank-3.1.log").mkdir()
    os.mkfifo(logs / "rank-4.1.log")
    (logs / "rank-5.1.log").symlink_to("nowhere")
    assert ended(job) == EXIT_CODE
    assert capfd.readouterr().out == "[rank 0] one\n[rank 0] two\n"


@attack(
    "a reason with square brackets, which a library for colours would take for its own: `ValueError: [/x]`",
    holds="it is shown as it is; nothing that is shown can end the launcher",
)
def test_a_text_is_no_markup(job: PreparedJob, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither a reason nor a line of the launcher's own log."""
    assert ended(job) == EXIT_CODE
    shown = capfd.readouterr().err
    assert "midstep: as it was to end [/x] (exit code 7)" in shown
    assert "midstep: the controller has ended with [/] and is started again" in shown


@attack(
    "everything that is shown raises an exception that was not thought of",
    holds="the job continues to its end, with its own exit code",
    reads="midstep: something of the job cannot be shown (RecursionError: ...); the job continues",
)
def test_whatever_the_display_raises_ends_nothing(
    job: PreparedJob, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Said once, and not at every look."""

    def fail(*_: object) -> None:
        raise RecursionError("of a view")

    monkeypatch.setattr("midstep.cli.display.display.JobFollower.look", fail)
    monkeypatch.setattr("midstep.cli.display.log_follower.LogFollower.look", fail)
    assert ended(job) == EXIT_CODE
    assert capfd.readouterr().err.count("cannot be shown (RecursionError: of a view)") == 1


@attack(
    "more lines at once for standard error than can be shown",
    holds="a bounded number waits; the rest is dropped and counted",
    reads="midstep: 4000 lines were not shown: there were too many at once",
)
def test_what_waits_to_be_shown_is_bounded(job: PreparedJob, capfd: pytest.CaptureFixture[str]) -> None:
    """The launcher's own log is among it."""
    from midstep.cli.display.display import MAX_WAITING, Display

    display = Display(job.job_directory, job.run_directory, quiet=True)
    for number in range(MAX_WAITING + 4000):
        display.say(f"line {number}")
    with display:
        pass
    shown = capfd.readouterr().err.splitlines()
    assert len(shown) == MAX_WAITING + 1
    assert shown[-1] == "midstep: 4000 lines were not shown: there were too many at once"


def test_all_of_a_long_log_is_shown_to_a_reader_that_reads(
    job: PreparedJob, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also what comes in the last moment, and a last line without an end."""
    lines = [f"{number:07} {'x' * 90}" for number in range(40_000)]
    monkeypatch.setattr(Played, "logs", {"rank-2.1.log": ("\n".join(lines) + "\nlast").encode()})
    assert ended(job) == EXIT_CODE
    assert capfd.readouterr().out.splitlines() == [f"[rank 2] {line}" for line in [*lines, "last"]]


@attack(
    "the launcher is started without standard output and error (`>&- 2>&-`)",
    holds="no file of the job takes their place, and the job runs",
)
def test_closed_descriptors_are_held(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next file would become standard error, and be written over."""
    from midstep.cli.display.plain import hold_standard_descriptors

    child = os.fork()
    if child == 0:
        for descriptor in range(3):
            os.close(descriptor)
        hold_standard_descriptors()
        opened = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
        os._exit(0 if opened > 2 and os.write(2, b"x") == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@attack(
    "signals: a closed terminal sends SIGHUP twice; a job under nohup must not hear it at all",
    holds="the job is asked once to stop, with its checkpoint; SIGHUP never ends it at once; what was ignored stays so",
    reads="midstep: SIGHUP: asking the job to stop; Ctrl-C once more ends it at once",
)
@pytest.mark.parametrize(
    ("ignored", "sent", "asked", "insisted"),
    [
        ((), ("SIGHUP", "SIGHUP"), True, False),
        ((), ("SIGINT", "SIGHUP"), True, False),
        ((), ("SIGHUP", "SIGINT"), True, True),
        ((), ("SIGTERM", "SIGTERM"), True, True),
        (("SIGHUP",), ("SIGHUP", "SIGHUP"), False, False),
    ],
)
def test_a_terminal_that_is_closed_insists_on_nothing(
    ignored: tuple[str, ...], sent: tuple[str, ...], asked: bool, insisted: bool
) -> None:
    """Only Ctrl-C and SIGTERM, and only the second of them."""
    from midstep.launch.processes import StopSignals

    reasons: list[str] = []

    async def play() -> tuple[bool, bool]:
        with StopSignals(reasons.append) as stop:
            for name in sent:
                os.kill(os.getpid(), signal.Signals[name])
                await asyncio.sleep(0.05)
            return stop.asked, stop.insisted.is_set()

    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:  # whatever the tests were started under: `nohup`, say
            signal.signal(number, signal.SIG_IGN if signal.Signals(number).name in ignored else signal.SIG_DFL)
        assert asyncio.run(play()) == (asked, insisted)
        assert reasons == ([f"midstep run received {sent[0]}"] if asked else [])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
