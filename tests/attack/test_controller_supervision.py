"""The launcher's watch over its controller."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstep.controller.endpoints.control_requests import StopJobRequest
from midstep.controller.endpoints.discovery_files import JobResult, read_result
from midstep.controller.journal.reading import read_status
from midstep.controller.journal.records import JournalEntry
from midstep.controller.journal.sqlite_file import journal_path
from midstep.controller.journal.sqlite_store import found_journal, open_copy, open_sqlite
from midstep.controller.recovery.events import StopRequested
from midstep.launch import processes as controller_process
from midstep.launch import supervisor as supervision
from midstep.launch.job import PreparedJob
from midstep.launch.processes import Backoff
from midstep.launch.supervisor import Supervisor, read_notice, why_no_answer
from midstep.policies.rules import job_settings
from midstep.policies.schema import ControllerPolicy, Policy, WhenLost
from midstep.protocol.compat import within
from midstep.protocol.errors import JournalError, PlatformError
from midstep.protocol.run_directories import claim
from midstep.protocol.types import CONTROLLER, JobSpec

from .attack import attack

PATIENCE_S = 60.0
QUICK = Backoff(first_s=0.001, longest_s=0.01)
SOON = ControllerPolicy(hang_s=1.5, lost_after_s=0.1)

# A controller that does what its plan says: for each life one word, and one for each way in which it is asked to stop.
PLAYED = """
import json, os, signal, sys, time
arguments = sys.argv[1:]
def option(name): return arguments[arguments.index(name) + 1]
job, pipe = option("--job-dir"), int(option("--keepalive-fd"))
plan = json.load(open(job + "/plan.json"))
with open(job + "/lives", "a") as lives:
    kind = "memory" if "--in-memory" in arguments else "stop" if "--stop" in arguments else "life"
    lives.write(kind + "\\n")
number = open(job + "/lives").read().split().count("life")
does = plan[kind] if kind != "life" else plan["lives"][min(number, len(plan["lives"])) - 1]
def end(code):
    draft = {"job": "played", "exit_code": code, "reason": f"{kind} {does}", "term": number, "at_s": 1.0}
    open(job + "/result.json", "w").write(json.dumps(draft))
    sys.exit(code)
signal.signal(signal.SIGINT, lambda *_: end(130))
if does == "fail":
    sys.exit(70)
if does == "code":
    sys.exit(130)
os.write(pipe, b"s")
while does == "stand by":
    os.write(pipe, b"c")
    time.sleep(0.2)
os.write(pipe, b"r")
if does == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if does == "hang":
    os.kill(os.getpid(), signal.SIGSTOP)
if does == "end":
    end(0)
if does == "stopped":
    end(130)
while True:
    time.sleep(0.2)
    os.write(pipe, b"r")
"""


class Watch:
    """A supervisor over played controllers."""

    def __init__(self, root: Path, policy: ControllerPolicy, guards: Callable[[], bool], plan: dict[str, Any]) -> None:
        held = claim(root / "runs", "played")
        self.job_directory, self.run_directory = root / "job", held.path
        (self.job_directory / "logs").mkdir(parents=True)
        (self.job_directory / "plan.json").write_text(json.dumps({"stop": "fail", "memory": "fail", **plan}))
        script = root / "played.py"
        script.write_text(PLAYED)
        whole = Policy(controller=policy)
        directory = str(self.job_directory)
        settings = job_settings(whole, directory)
        spec = JobSpec("played", ("t.py",), False, False, {}, directory, directory, 2, 2, 1, 0, 0, settings)
        found_journal(journal_path(self.job_directory), spec, whole)
        self.supervisor = Supervisor(
            PreparedJob(spec, whole, self.job_directory, held),
            guards=guards,
            program=(sys.executable, "-S", "-E", str(script)),
            backoff=QUICK,
        )
        self.task = asyncio.create_task(self.supervisor.run())

    def lives(self) -> list[str]:
        """What has been started so far."""
        path = self.job_directory / "lives"
        return path.read_text().split() if path.exists() else []

    async def result(self) -> JobResult:
        return await within(PATIENCE_S, self.task)

    async def until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, (self.lives(), read_notice(self.run_directory))
            assert not self.task.done(), self.task.result()
            await asyncio.sleep(0.02)

    def unanswered(self) -> str:
        """What `midstep status` adds when no controller answers."""
        return why_no_answer(self.run_directory, os.getpid()) or ""


@contextlib.asynccontextmanager
async def watching(
    root: Path,
    policy: ControllerPolicy = SOON,
    *,
    guards: Callable[[], bool] = lambda: True,
    **plan: Any,
) -> AsyncIterator[Watch]:
    watch = Watch(root, policy, guards, plan)
    try:
        yield watch
    finally:
        watch.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, PlatformError):
            await watch.task
        await watch.supervisor.close()


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


@attack(
    "the controller ends at once, twenty times in a row, in the middle of a job",
    holds="the launcher keeps starting it, with growing waits; the job ends as its last controller says",
    reads="`NO CONTROLLER for ... s: training continues unguarded`, each minute",
)
def test_a_controller_that_fails_again_and_again_does_not_end_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Twenty deaths end nothing; the loss is said, and a later controller takes the job over."""

    async def scenario() -> None:
        async with watching(tmp_path, lives=["die", *["fail"] * 20, "end"]) as watch:
            result = await watch.result()
            assert (result.exit_code, result.reason) == (0, "life end")
            assert watch.lives() == ["life"] * 22

    play(scenario)
    assert "NO CONTROLLER" in caplog.text
    assert "The last one ended with" in caplog.text


def test_a_job_whose_first_controller_never_comes_up_ends_at_once_with_the_reason(tmp_path: Path) -> None:
    """Before anything trains there is nothing to be guarded: five tries, and the log is named."""

    async def scenario() -> None:
        async with watching(tmp_path, lives=["fail"]) as watch:
            with pytest.raises(PlatformError, match=r"exit status 70.*controller\.log"):
                await watch.result()
            assert watch.lives() == ["life"] * supervision.START_TRIES

    play(scenario)


@attack(
    "the controller is stopped by SIGSTOP and shows no sign of life",
    holds="after 2 s (`controller.hang_s` where it hangs otherwise) it is killed, and the next one takes over",
    reads="`its controller (pid ...) is stopped by a signal` in `midstep status`",
)
def test_a_controller_that_hangs_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Status says that it is frozen, and the launcher kills it."""

    async def scenario() -> None:
        async with watching(tmp_path, lives=["hang", "end"]) as watch:
            await watch.until(lambda: "stopped by a signal" in watch.unanswered())
            assert (await watch.result()).exit_code == 0
            assert watch.lives() == ["life"] * 2

    play(scenario)
    assert "no sign of life" in caplog.text


def test_a_pause_of_the_whole_machine_is_no_hang_of_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time in which the launcher did not run counts for nothing: a jump of its clock replaces no controller."""
    ahead_s = 0.0
    real = time.monotonic
    monkeypatch.setattr("midstep.launch.supervisor.time.monotonic", lambda: real() + ahead_s)

    async def scenario() -> None:
        nonlocal ahead_s
        async with watching(tmp_path, ControllerPolicy(hang_s=5.0), lives=["serve", "end"]) as watch:
            await within(PATIENCE_S, watch.supervisor.served.wait())
            ahead_s = 3600.0
            await asyncio.sleep(2.5)
            assert watch.lives() == ["life"]
            watch.supervisor.stop("enough")
            assert (await watch.result()).exit_code == 130

    play(scenario)


@attack(
    "no controller comes up any more, under `controller.when_lost: stop`",
    holds="one of last resort, with the journal in memory, parks and saves; the job ends in order",
    reads="`no controller could be kept running since ...` as the job's reason",
)
def test_a_lost_controller_stops_the_job_where_the_policy_says_so(tmp_path: Path) -> None:
    """The last resort is started once, asked to stop the job, and its result is the job's."""

    async def scenario() -> None:
        policy = msgspec.structs.replace(SOON, when_lost=WhenLost.STOP)
        async with watching(tmp_path, policy, lives=["die", "fail"], memory="stopped") as watch:
            assert (await watch.result()).reason == "memory stopped"
            lives = watch.lives()
            assert lives[-1] == "memory"
            assert set(lives[:-1]) == {"life"}

    play(scenario)


def test_where_the_last_resort_fails_training_goes_on_unguarded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said that nothing could be saved, and ordinary controllers are tried again."""

    async def scenario() -> None:
        policy = msgspec.structs.replace(SOON, when_lost=WhenLost.STOP)
        async with watching(tmp_path, policy, lives=["die", "fail"]) as watch:
            await watch.until(lambda: "memory" in watch.lives()[:-1])
            await watch.until(lambda: "training is unguarded" in watch.unanswered())
            plan = {"lives": ["end"], "stop": "fail", "memory": "fail"}
            (watch.job_directory / "plan.json").write_text(json.dumps(plan))
            assert (await watch.result()).exit_code == 0
            assert watch.lives().count("memory") == 1

    play(scenario)
    assert "could not be parked and saved" in caplog.text


@attack(
    "the user presses Ctrl-C while no controller can be started",
    holds="some are tried, then one of last resort, then the job ends all the same",
    reads="`there is no emergency checkpoint. What was trained since the newest one ... is lost`",
)
def test_a_job_without_a_controller_can_be_stopped(tmp_path: Path) -> None:
    """It ends with 130 after a bounded number of tries, says what is lost, and leaves a result for `midstep status`."""

    async def scenario() -> None:
        async with watching(tmp_path, lives=["die", "fail"]) as watch:
            await watch.until(lambda: len(watch.lives()) > 3)
            watch.supervisor.stop("midstep run received SIGINT")
            watch.supervisor.stop("midstep run received SIGINT")
            result = await watch.result()
            assert result.exit_code == 130
            assert "no emergency checkpoint" in result.reason
            assert watch.lives()[-4:] == ["stop", "stop", "stop", "memory"]
            assert read_result(watch.job_directory) == result

    play(scenario)


def test_a_controller_that_cannot_be_killed_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that a dead disk keeps in the kernel: it is said, and the job can be stopped all the same."""
    monkeypatch.setattr(controller_process, "UNKILLABLE_S", 0.1)
    real = controller_process.ControllerProcess._signal
    monkeypatch.setattr(controller_process.ControllerProcess, "_signal", lambda self, number: None)

    async def scenario() -> None:
        async with watching(tmp_path, lives=["hang", "fail"]) as watch:
            await watch.until(lambda: "stopped by a signal" in watch.unanswered())
            frozen = read_notice(watch.run_directory)
            assert frozen is not None
            try:
                await watch.until(lambda: watch.lives() != ["life"])
                watch.supervisor.stop("enough")
                assert (await watch.result()).exit_code == 130
            finally:
                monkeypatch.setattr(controller_process.ControllerProcess, "_signal", real)
                os.kill(frozen.pid, signal.SIGKILL)

    play(scenario)
    assert "no sign of life" in caplog.text


def test_a_wish_to_stop_reaches_a_controller_that_somebody_else_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's own one stands by, and is not ended for it; the one that leads is asked."""
    asked: list[object] = []
    monkeypatch.setattr(supervision, "ask", lambda directory, request: asked.append(request))

    async def scenario() -> None:
        async with watching(tmp_path, lives=["stand by"]) as watch:
            await within(PATIENCE_S, watch.supervisor.served.wait())
            watch.supervisor.stop("enough")
            await watch.until(lambda: asked)
            assert watch.lives() == ["life"]

    play(scenario)
    assert asked == [StopJobRequest("enough")]


def test_a_wish_to_stop_reaches_the_controller_that_comes_after_a_frozen_one(tmp_path: Path) -> None:
    """The frozen one never hears of it; the next is started with it."""

    async def scenario() -> None:
        async with watching(tmp_path, lives=["hang"], stop="stopped") as watch:
            await watch.until(lambda: "stopped by a signal" in watch.unanswered())
            watch.supervisor.stop("enough")
            assert (await watch.result()).reason == "stop stopped"
            assert watch.lives() == ["life", "stop"]

    play(scenario)


@attack(
    "no controller comes up any more, and all training processes end meanwhile",
    holds="the launcher does not wait for ever",
    reads="`no training process is left: how they ended stands in ...logs`",
)
def test_a_job_without_controller_and_ranks_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing left to wait for, and the reason says where to look."""
    monkeypatch.setattr(supervision, "DESERTED_S", 0.2)
    monkeypatch.setattr(supervision, "DESERTED_LOOK_S", 0.1)

    async def scenario() -> None:
        async with watching(tmp_path, guards=lambda: False, lives=["die", "fail"]) as watch:
            result = await watch.result()
            assert result.exit_code == 1
            assert "no training process is left" in result.reason

    play(scenario)


def test_a_job_that_has_ended_is_not_started_again_because_its_result_could_not_be_written(tmp_path: Path) -> None:
    """A disk with no room for `result.json`: the journal knows how the job ended."""

    async def scenario() -> None:
        async with watching(tmp_path, ControllerPolicy(), lives=["serve", "code"]) as watch:
            await within(PATIENCE_S, watch.supervisor.served.wait())
            with open_sqlite(journal_path(watch.job_directory)) as journal:
                journal.append([JournalEntry(StopRequested("enough"), CONTROLLER, journal.session, 1)], time.time())
            notice = read_notice(watch.run_directory)
            assert notice is not None
            os.kill(notice.pid, signal.SIGKILL)
            result = await watch.result()
            assert (result.exit_code, result.reason) == (130, "enough")
            assert watch.lives() == ["life", "life"]

    play(scenario)


def test_a_full_disk_under_the_notice_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher notes for `midstep status` is no condition for its work."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async def scenario() -> None:
        async with watching(tmp_path, lives=["die", "fail", "end"]) as watch:
            monkeypatch.setattr("midstep.launch.supervisor.os.pwrite", full)
            assert (await watch.result()).exit_code == 0

    play(scenario)


# --- the journal in memory ------------------------------------------------------------------------------------------


def founded(root: Path) -> Path:
    """A journal with one event, whose last controller has ended."""
    directory = str(root)
    spec = JobSpec("j", ("t.py",), False, False, {}, directory, directory, 2, 2, 1, 0, 0, job_settings(Policy(), root))
    path = journal_path(root)
    found_journal(path, spec, Policy())
    with open_sqlite(path) as journal:
        journal.append([JournalEntry(StopRequested("enough"), CONTROLLER, journal.session, 1)], 5.0)
    return path


@attack(
    "another process holds the journal's write lock and never gives it back",
    holds="the controller of last resort works on a copy; the journal keeps every byte",
    reads="`the job is to be stopped by a controller of last resort`",
)
def test_a_journal_that_cannot_be_written_is_copied_into_memory(tmp_path: Path) -> None:
    """The copy has all events, a term of its own, and takes more; nothing reaches the disk."""
    path = founded(tmp_path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with open_copy(path) as copy:
            assert copy.term == 2
            assert [event for event, _ in copy.replay()] == [StopRequested("enough")]
            assert copy.append([JournalEntry(StopRequested("again"), CONTROLLER, copy.session, 1)], 6.0) == (True,)
            assert len(list(copy.replay())) == 2
    with open_sqlite(path) as journal:
        assert (journal.term, len(list(journal.replay()))) == (2, 1)
    assert read_status(tmp_path).reason == "enough"


def test_a_copy_never_acts_beside_a_living_controller(tmp_path: Path) -> None:
    """The lock of the journal holds for the copy as well."""
    path = founded(tmp_path)
    with open_sqlite(path), pytest.raises(JournalError, match="another controller is active"):
        open_copy(path)
    with open_copy(path), pytest.raises(JournalError, match="another controller is active"):
        open_sqlite(path)


@pytest.mark.parametrize("content", [None, b"", b"no journal at all" * 100])
def test_a_journal_that_is_gone_gives_no_copy(tmp_path: Path, content: bytes | None) -> None:
    """The error names the file, and the lock is free again."""
    path = founded(tmp_path)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(JournalError, match=r"journal\.sqlite"):
        open_copy(path)
    with path.with_name(path.name + ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
