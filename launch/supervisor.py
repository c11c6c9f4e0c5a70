"""Keeps a controller running beside its job: watches it, starts it again, and says so when that does not help.

While no controller stays up, `Outage` decides what is tried: another one, an orderly stop, or nothing; it is pure, and
none of it ends a healthy rank because controllers died often. `controller.json` in the run directory says how the
controller is, for commands that get no answer; its space is taken when the job starts, so that it stays true on a disk
that has become full.

A job without a controller trains on, but no fault is answered. Nothing here ends the training for that reason alone:
`controller.when_lost` of the policy, the user, or the end of all training processes do.
"""

import asyncio
import contextlib
import enum
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec
import psutil

from ..agent.linux import is_stopped
from ..controller.endpoints.control_requests import StopJobRequest
from ..controller.endpoints.discovery_files import JobResult, read_result, write_result
from ..controller.endpoints.local_sockets import ask
from ..controller.journal.reading import read_status
from ..platforms.processes import open_log
from ..policies.schema import ControllerPolicy, WhenLost
from ..protocol.compat import StrEnum, within
from ..protocol.errors import MidstepError, PlatformError
from ..protocol.exits import CONTROLLER_FAILED, JOURNAL_DAMAGED
from ..protocol.own_programs import own_program
from .job import PreparedJob
from .processes import TICK_S, Backoff, ControllerProcess, Ending, RestartBackoff, RunningTime

CONTROLLER = (*own_program("midstep.cli.main"), "controller")
START_TRIES = 5  # of a job's first controller, before anything trains
REMIND_S = 60.0
DESERTED_S = 60.0  # without a controller and without any training process
DESERTED_LOOK_S = 5.0
INTERRUPTED = 130
_log = logging.getLogger(__name__)
STABLE_S = 5.0  # a controller that has served for so long stays up
STOP_TRIES = 3  # ordinary controllers that are started to stop a job, before the last resort
NOTICE_NAME = "controller.json"
_SIZE_BYTES = 2048  # within one page, so that a reader sees one notice or the next
_LAST_CHARACTERS = 500


class NextStart(enum.Enum):
    """The next start."""

    ORDINARY = "a controller"
    STOPPING = "a controller that stops the job"
    LAST_RESORT = "a controller with a copy of the journal in memory, that stops the job"
    NONE = "nothing: the job has to be ended without a controller"


class Outage:
    """The time since the last controller that stayed up, and what has been tried in it."""

    def __init__(self, policy: ControllerPolicy, now: float) -> None:
        """Begin without a controller."""
        self._policy = policy
        self._tries = 0
        self._last_resort_tried = False
        self._by_user = False
        self.since_s: float | None = now
        self.stopping = False  # every further controller is to stop the job

    def ended(self, now: float) -> None:
        """Note that a controller has ended, and the job is not over."""
        if self.since_s is None:
            self.since_s = now

    def stays_up(self) -> None:
        """Note that a controller has served for STABLE_S."""
        self.since_s = None
        self._tries = 0
        self._last_resort_tried = False

    def ask_to_stop(self) -> None:
        """End the job for the user: with a controller, or without one if there is no other way."""
        self.stopping = self._by_user = True

    def is_lost(self, now: float) -> bool:
        """Return whether there has been no controller for so long that the policy decides."""
        return self.since_s is not None and now - self.since_s >= self._policy.lost_after_s

    def next_attempt(self, now: float) -> NextStart:
        """Choose what is started next."""
        if self.stopping:
            return self._next_to_stop()
        if self.is_lost(now) and self._policy.when_lost is WhenLost.STOP and not self._last_resort_tried:
            self._last_resort_tried = True
            return NextStart.LAST_RESORT
        return NextStart.ORDINARY

    def _next_to_stop(self) -> NextStart:
        if self._tries < STOP_TRIES:
            self._tries += 1
            return NextStart.STOPPING
        if not self._last_resort_tried:
            self._last_resort_tried = True
            return NextStart.LAST_RESORT
        if not self._by_user:  # only the user ends ranks that nothing has saved
            self._tries = 0
            self._last_resort_tried = False
        return NextStart.NONE if self._by_user else NextStart.STOPPING


class ControllerStage(StrEnum):
    """Where the controller is."""

    STARTING = "starting"
    SERVING = "serving"
    ENDED = "ended"  # and the next one is waited for


class ControllerNotice(msgspec.Struct, frozen=True):
    """Wall-clock seconds. `last`: how the one before ended. `lost_since_s`: since when training is unguarded."""

    stage: ControllerStage
    since_s: float
    pid: int = 0
    deaths: int = 0
    last: str = ""
    next_s: float | None = None
    lost_since_s: float | None = None


class NoticeFile:
    """The launcher's end."""

    def __init__(self, run_directory: Path) -> None:
        """Take the file's space. Raises OSError."""
        self._descriptor = os.open(run_directory / NOTICE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.write(ControllerNotice(ControllerStage.STARTING, time.time()))
        except OSError:
            self.close()
            raise

    def write(self, notice: ControllerNotice) -> None:
        """Replace the notice. Raises OSError."""
        short = msgspec.structs.replace(notice, last=notice.last[:_LAST_CHARACTERS])
        os.pwrite(self._descriptor, msgspec.json.encode(short).ljust(_SIZE_BYTES), 0)

    def close(self) -> None:
        """Close the file, which goes with its directory. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Supervisor:
    """Runs controllers until the job is over. `guards`: whether there is a training process that one would guard."""

    def __init__(
        self,
        job: PreparedJob,
        *,
        guards: Callable[[], bool] = lambda: True,
        program: Sequence[str] = CONTROLLER,
        backoff: Backoff | None = None,
    ) -> None:
        """Construct it in the running loop; nothing is started before `run`. Raises OSError."""
        self._job = job
        self._program = program
        self._guards = guards
        self._log_file = job.job_directory / "logs" / "controller.log"
        self._clock = RunningTime(time.monotonic())
        self._outage = Outage(job.policy.controller, self._now())
        self._waits = backoff or Backoff()
        self._backoff = RestartBackoff(self._waits)
        self._process: ControllerProcess | None = None
        self._asking: asyncio.Future[None] | None = None
        self._stop_reason: str | None = None
        self._told_to_stop = False  # the present process
        self._hurry = asyncio.Event()
        self._noted = ControllerNotice(ControllerStage.STARTING, time.time())
        self._notice = NoticeFile(job.run_directory)
        self._last = ""
        self._said_s: float | None = None  # that there is no controller
        self._deserted_s: float | None = None
        self._looked_s = 0.0
        self.served = asyncio.Event()  # a controller of this job has been seen to serve

    async def run(self) -> JobResult:
        """Return how the job ended. Raises PlatformError when not even its first controller comes up."""
        with open(open_log(self._log_file), "ab", buffering=0) as log:
            while True:
                attempt = self._outage.next_attempt(self._now())
                if attempt is NextStart.NONE:
                    return self._concluded(INTERRUPTED, self._unsaved())
                ending = await self._one(attempt, log)
                result = await self._result(ending)
                if result is not None:
                    return result
                self._died(attempt, ending)
                if self._is_hopeless():
                    raise PlatformError(
                        f"the job's first controller does not come up: {START_TRIES} of them {ending.how}, without "
                        f"having served; see {self._log_file}"
                    )
                await self._pause(self._backoff.delay_s(ending.lived_s, random.random()))
                if self._is_deserted():
                    return self._concluded(
                        1,
                        f"there has been no controller since {_clock(self._down_since())}, and no training process is "
                        f"left: how they ended stands in {self._log_file.parent}",
                    )

    def stop(self, reason: str) -> None:
        """Have the job stopped by the controller that is there, or else by the next one."""
        if self._stop_reason is not None:
            return
        self._stop_reason = reason
        self._outage.ask_to_stop()
        self._backoff = RestartBackoff(self._waits)
        self._hurry.set()
        self._tell_to_stop()

    async def close(self) -> None:
        """End the controller, if there is one. Idempotent."""
        if self._process is not None:
            await self._process.close()
            self._process = None
        self._notice.close()

    # --- one controller ---------------------------------------------------------------------------------------------

    async def _one(self, attempt: NextStart, log: IO[bytes]) -> Ending:
        """Start a controller and wait for its end."""
        command = [
            *self._program,
            *("--job-dir", str(self._job.job_directory), "--run-dir", str(self._job.run_directory)),
        ]
        if self._job.listen is not None:
            command += ["--listen", self._job.listen, "--keys", str(self._job.run_directory / "keys")]
        self._told_to_stop = attempt is not NextStart.ORDINARY
        if not self._told_to_stop:
            command += ["--standby"]  # another one may lead, which somebody has started beside this launcher
        else:
            command += ["--stop", self._stop_reason or self._lost_reason()]
        if attempt is NextStart.LAST_RESORT:
            _log.error("the job is to be stopped by a controller of last resort, with a copy of the journal in memory")
            command += ["--in-memory"]
        try:
            self._process = await ControllerProcess.start(
                command,
                log,
                hang_s=self._job.policy.controller.hang_s,
                now=self._now,
                on_serving=lambda: self._serves(attempt),
            )
        except OSError as error:  # no process, no memory, no descriptor is left
            return Ending(None, 0.0, f"could not be started: {error}")
        self._note(ControllerStage.STARTING, pid=self._process.pid)
        ending = await self._process.ended(self._tick)
        self._process = None
        return ending

    def _serves(self, attempt: NextStart) -> None:
        assert self._process is not None
        if attempt is NextStart.LAST_RESORT:
            self._outage.stopping = True  # what it has begun is not taken back by an ordinary one
        self._note(ControllerStage.SERVING, pid=self._process.pid)
        self.served.set()
        self._tell_to_stop()

    def _tell_to_stop(self) -> None:
        """Hand the user's wish on, once to each controller: asked twice, it does not wait for the checkpoint."""
        process = self._process
        if self._stop_reason is None or self._told_to_stop or process is None or not process.serves:
            return
        self._told_to_stop = True
        if process.stands_by:
            self._asking = asyncio.ensure_future(asyncio.to_thread(self._ask_leader, self._stop_reason))
        else:
            process.interrupt()

    def _ask_leader(self, reason: str) -> None:
        try:
            ask(self._job.run_directory, StopJobRequest(reason))
        except MidstepError as error:
            _log.error("the controller that leads the job cannot be asked to stop it: %s", error)

    async def _result(self, ending: Ending) -> JobResult | None:
        """Return how the job ended, if it has: from the notice, or from the journal where there was no room for one."""
        job = self._job
        for directory in (job.job_directory, job.run_directory):
            try:
                result = read_result(directory)
            except (MidstepError, OSError) as error:
                _log.error("%s", error)
                continue
            if result is not None:
                return result
        if ending.status is None or ending.status < 0 or ending.status in {JOURNAL_DAMAGED, CONTROLLER_FAILED}:
            return None
        try:
            status = await asyncio.to_thread(read_status, job.job_directory)
        except MidstepError as error:
            _log.error("whether the job has ended is not known: %s", error)
            return None
        if status.exit_code is None:
            return None
        return JobResult(job.spec.job, status.exit_code, status.reason, status.term, status.at_s)

    def _died(self, attempt: NextStart, ending: Ending) -> None:
        self._outage.ended(self._now())
        self._last = ending.how
        if attempt is NextStart.LAST_RESORT:
            _log.error(
                "the job could not be parked and saved: the controller of last resort %s; see %s",
                ending.how,
                self._log_file,
            )
        elif self._said_s is None:
            _log.warning(
                "the controller %s before the job was over; it is started again; see %s",
                ending.how,
                self._log_file,
            )

    # --- without one ------------------------------------------------------------------------------------------------

    async def _pause(self, delay_s: float) -> None:
        """Wait before the next try, unless the user wants the job to be stopped."""
        self._note(ControllerStage.ENDED, next_s=time.time() + delay_s)
        until_s = self._now() + delay_s
        while (left_s := until_s - self._now()) > 0 and not self._hurry.is_set() and not self._is_deserted():
            with contextlib.suppress(TimeoutError):
                await within(min(left_s, TICK_S), self._hurry.wait())
            self._tick()
        self._hurry.clear()

    def _tick(self) -> None:
        """Look at what has changed, and say what the user has to know."""
        now = self._now()
        process = self._process
        if process is not None and process.serving_s is not None and process.serves:
            if now - process.serving_s >= STABLE_S and self._outage.since_s is not None:
                self._recovered(process, now)
            return
        if process is not None and process.killed_for:
            self._outage.ended(now)
            self._last = process.killed_for
        if self.served.is_set() and self._outage.is_lost(now):
            self._look_for_ranks(now)
            if self._said_s is None or now - self._said_s >= REMIND_S:
                self._said_s = now
                self._say_lost(now)
                self._write_notice()

    def _recovered(self, process: ControllerProcess, now: float) -> None:
        """Note that a controller has stayed up."""
        since_s = self._outage.since_s
        if self._said_s is not None and since_s is not None:
            _log.warning("a controller is there again, after %.0f s", now - since_s)
        self._outage.stays_up()
        self._said_s = self._deserted_s = None
        self._note(ControllerStage.SERVING, pid=process.pid)

    def _say_lost(self, now: float) -> None:
        since_s = self._outage.since_s if self._outage.since_s is not None else now
        _log.error(
            "NO CONTROLLER for %.0f s: training continues unguarded, no fault is answered. The last one %s; see %s. It "
            "is tried again and again. Ctrl-C ends the job, without an emergency checkpoint if none comes up",
            now - since_s,
            self._last,
            self._log_file,
        )

    def _look_for_ranks(self, now: float) -> None:
        if now - self._looked_s < DESERTED_LOOK_S:
            return
        self._looked_s = now
        if self._guards():
            self._deserted_s = None
        elif self._deserted_s is None:
            self._deserted_s = now

    def _is_deserted(self) -> bool:
        return self._deserted_s is not None and self._now() - self._deserted_s >= DESERTED_S

    def _is_hopeless(self) -> bool:
        return not self.served.is_set() and not self._outage.stopping and self._backoff.deaths >= START_TRIES - 1

    # --- inside -----------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._clock.at(time.monotonic())

    def _down_since(self) -> float:
        since_s = self._outage.since_s
        return time.time() - (0.0 if since_s is None else self._now() - since_s)

    def _lost_reason(self) -> str:
        return f"no controller could be kept running since {_clock(self._down_since())} (controller.when_lost: stop)"

    def _unsaved(self) -> str:
        return (
            f"{self._stop_reason}: no controller could be started to save the training (the last one {self._last}), so "
            "there is no emergency checkpoint. What was trained since the newest one in "
            f"{self._job.spec.settings.checkpoint_directory} is lost"
        )

    def _concluded(self, exit_code: int, reason: str) -> JobResult:
        """Return, and note for others, an end that no controller could record."""
        result = JobResult(self._job.spec.job, exit_code, reason, 0, time.time())
        try:
            write_result(self._job.job_directory, result)
        except MidstepError as error:
            _log.error("%s", error)
        return result

    def _note(self, stage: ControllerStage, *, pid: int = 0, next_s: float | None = None) -> None:
        self._noted = ControllerNotice(stage, time.time(), pid, self._backoff.deaths, self._last, next_s)
        self._write_notice()

    def _write_notice(self) -> None:
        lost_s = self._down_since() if self.served.is_set() and self._outage.is_lost(self._now()) else None
        try:
            self._notice.write(msgspec.structs.replace(self._noted, lost_since_s=lost_s))
        except OSError as error:
            _log.error("`midstep status` cannot show the state of the controller: %s", error)


def read_notice(run_directory: Path) -> ControllerNotice | None:
    """Return what the launcher last noted; None where there is nothing to be read."""
    try:
        return msgspec.json.decode((run_directory / NOTICE_NAME).read_bytes(), type=ControllerNotice)
    except (OSError, msgspec.MsgspecError):
        return None


def why_no_answer(run_directory: Path, launcher: int | None) -> str | None:
    """Say what has become of a controller that does not answer; None if nothing is known.

    `launcher`: the process id of the job's `midstep run`.
    """
    notice = read_notice(run_directory)
    if notice is None:
        return None
    if launcher is not None and not psutil.pid_exists(launcher):
        return f"`midstep run` (pid {launcher}) has gone, and the job with it"
    what = _between_two(notice) if notice.stage is ControllerStage.ENDED else f"(pid {notice.pid}) {_standing(notice)}"
    if notice.lost_since_s is None:
        return f"its controller {what}"
    end = "" if launcher is None else f". `kill -INT {launcher}` ends the job"
    return (
        f"its controller {what}. NO CONTROLLER since {_clock(notice.lost_since_s)}: training is unguarded, no fault is "
        f"answered{end}"
    )


def _standing(notice: ControllerNotice) -> str:
    if is_stopped(notice.pid):
        return "is stopped by a signal; `midstep run` replaces it before long"
    if not psutil.pid_exists(notice.pid):
        return "has just ended; `midstep run` starts the next one"
    if notice.stage is ControllerStage.STARTING:
        before = f"; the one before {notice.last}" if notice.last else ""
        return f"is starting, since {_clock(notice.since_s)}{before}"
    return "lives and does not answer; `midstep run` replaces it if it hangs"


def _between_two(notice: ControllerNotice) -> str:
    wait_s = 0.0 if notice.next_s is None else max(0.0, notice.next_s - time.time())
    again = f"the next one is started in {wait_s:.0f} s"
    times = f", {notice.deaths} times in a row" if notice.deaths > 1 else ""
    return f"{notice.last}{times}; {again}"


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))
