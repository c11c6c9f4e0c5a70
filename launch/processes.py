"""One controller process, from its start to its end: watched for signs of life, and killed when it shows none."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from ..agent.linux import hear_and_die_with, is_stopped
from ..controller.keepalive import SERVING, STANDING_BY
from ..platforms.processes import kill_tree, open_log
from ..protocol.compat import within
from ..protocol.exits import AgentEnd, read_agent_end
from ..protocol.own_programs import own_program
from ..protocol.token import TOKEN_VARIABLE

STOPPED_S = 2.0  # stopped by a signal or a debugger, as the kernel says: no other proof is needed that it hangs
LOOK_S = 0.25
START_S = 60.0  # to the first sign of life: Python comes up, on a busy machine
KILLED_S = 5.0
UNKILLABLE_S = 30.0  # a disk that does not answer keeps a killed process in the kernel
_READ_BYTES = 65_536
AGENT = own_program("midstep.cli.agent")
TICK_S = 1.0  # ask at least this often
_GAP_S = 2 * TICK_S  # after a longer time than this the process stood still
# A terminal that is closed sends SIGHUP, and its shell may send another: neither means that a user is impatient.
INSISTING = frozenset({signal.SIGINT, signal.SIGTERM})
HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_log = logging.getLogger(__name__)


class Backoff(msgspec.Struct, frozen=True):
    """Waits that double from `first_s` to `longest_s`. One that lived for `reset_s` begins a new row."""

    first_s: float = 0.1
    longest_s: float = 30.0
    reset_s: float = 10.0


class RestartBackoff:
    """Counts the deaths of one process in a row."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self.deaths = 0

    def delay_s(self, lived_s: float, chance: float) -> float:
        """Return how long to wait now that a process has ended that lived for `lived_s`.

        `chance`, from 0 to 1, spreads the wait over its upper half, so that many processes do not retry at once.
        """
        if lived_s >= self._backoff.reset_s:
            self.deaths = 0
        wait_s = min(self._backoff.first_s * 2.0 ** min(self.deaths, 60), self._backoff.longest_s)
        self.deaths += 1
        return wait_s * (0.5 + 0.5 * chance)


class RunningTime:
    """A clock that stands still while its process is stopped or starved, together with the machine or alone."""

    def __init__(self, clock_s: float) -> None:
        self._last_s = clock_s
        self._ran_s = 0.0

    def at(self, clock_s: float) -> float:
        """Return the time now, which `clock_s` reads. A gap since the last call counts as one tick."""
        gap_s = clock_s - self._last_s
        self._last_s = clock_s
        self._ran_s += TICK_S if gap_s > _GAP_S else max(gap_s, 0.0)
        return self._ran_s


class Ending(msgspec.Struct, frozen=True):
    """How a controller ended before its job was over. `status` None: it could not be started, or is given up."""

    status: int | None
    lived_s: float
    how: str


class ControllerProcess:
    """A controller that has been started. `now` reads the time in which this process ran (`running_time`)."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        pipe: int,
        *,
        hang_s: float,
        now: Callable[[], float],
        on_serving: Callable[[], None],
    ) -> None:
        """Not for callers: `start`."""
        self._process = process
        self._pipe = pipe
        self._hang_s = hang_s
        self._now = now
        self._on_serving = on_serving
        self._started_s = now()
        self._beat_s: float | None = None
        self.killed_for = ""  # why, if it had to be
        self._killed_s: float | None = None
        self._stopped_s: float | None = None
        self.stands_by = False  # another controller leads the job
        self.leads = False  # and hears signals
        self.serving_s: float | None = None  # when its loop was first seen to turn
        os.set_blocking(pipe, False)
        asyncio.get_running_loop().add_reader(pipe, self._read)

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        log: IO[bytes],
        *,
        hang_s: float,
        now: Callable[[], float],
        on_serving: Callable[[], None],
    ) -> "ControllerProcess":
        """Start a controller that writes to `log` and dies with this process. Raises OSError."""
        ours, theirs = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(*command, "--keepalive-fd", str(theirs)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs,),
                start_new_session=True,
                preexec_fn=partial(hear_and_die_with, os.getpid()),
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return cls(process, ours, hang_s=hang_s, now=now, on_serving=on_serving)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def serves(self) -> bool:
        """Return whether its loop has been seen to turn, and it is not one that hangs."""
        return self.serving_s is not None and self._killed_s is None

    def interrupt(self) -> None:
        """Ask it to stop the job."""
        self._signal(signal.SIGINT)

    async def ended(self, tick: Callable[[], None]) -> Ending:
        """Wait for its end, which is brought about when it hangs; call `tick` every LOOK_S meanwhile."""
        exited = asyncio.ensure_future(self._process.wait())
        try:
            while not exited.done():
                await asyncio.wait([exited], timeout=LOOK_S)
                self._judge()
                tick()
                if self._killed_s is not None and self._now() - self._killed_s > UNKILLABLE_S:
                    return Ending(None, self._now() - self._started_s, f"{self.killed_for}, and does not end")
            status = exited.result()
        finally:
            exited.cancel()
            self._stop_reading()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return Ending(status, self._now() - self._started_s, self.killed_for or f"ended with {how}")

    async def close(self) -> None:
        """Kill it if it lives, and wait a little for its end. Idempotent."""
        self._stop_reading()
        self._signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await within(KILLED_S, self._process.wait())

    def _judge(self) -> None:
        """Kill a controller that has shown no sign of life for too long; the first one may take longer."""
        now = self._now()
        limit_s = START_S if self._beat_s is None else self._hang_s
        silent_s = now - (self._started_s if self._beat_s is None else self._beat_s)
        if self._is_stopped_for_long(now):
            limit_s = STOPPED_S
        if silent_s > limit_s and self._killed_s is None and self._process.returncode is None:
            self._killed_s = now
            self.killed_for = f"was killed, as it had shown no sign of life for {silent_s:.0f} s"
            self._signal(signal.SIGKILL)

    def _is_stopped_for_long(self, now: float) -> bool:
        if self._process.returncode is not None or not is_stopped(self._process.pid):
            self._stopped_s = None
            return False
        if self._stopped_s is None:
            self._stopped_s = now
        return now - self._stopped_s >= STOPPED_S

    def _read(self) -> None:
        try:
            beats = os.read(self._pipe, _READ_BYTES)
        except BlockingIOError:
            return
        if not beats:
            self._stop_reading()
            return
        self._beat_s = self._now()
        self.stands_by, self.leads = beats.endswith(STANDING_BY), beats.endswith(SERVING)
        if self.serving_s is None and (SERVING in beats or self.stands_by):
            self.serving_s = self._beat_s
            self._on_serving()

    def _stop_reading(self) -> None:
        if self._pipe >= 0:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


class AgentProcess:
    """An agent that has been started."""

    def __init__(self, process: asyncio.subprocess.Process, pipe: int, run_directory: Path) -> None:
        """Not for callers: `start`."""
        self._process = process
        self._pipe = pipe
        self._run_directory = run_directory

    @classmethod
    async def start(
        cls, arguments: Sequence[str], *, token: str, environment: dict[str, str], log: Path, run_directory: Path
    ) -> "AgentProcess":
        """Start an agent that writes to `log`. Raises OSError."""
        theirs, ours = os.pipe()
        try:
            with open(open_log(log), "ab", buffering=0) as output:
                process = await asyncio.create_subprocess_exec(
                    *(*AGENT, *arguments, "--run-dir", str(run_directory), "--life-fd", str(theirs)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**environment, TOKEN_VARIABLE: token},
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return cls(process, ours, run_directory)

    async def ended(self) -> AgentEnd:
        """Wait for its end, and return how it ended."""
        status = await self._process.wait()
        said = read_agent_end(self._run_directory)
        if said is not None and said.exit_code == status:
            return said
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return AgentEnd(1 if status < 0 else status, f"the agent of this machine ended with {how}")

    def leave(self) -> None:
        """Ask it to end what runs here, and to leave the job. Idempotent."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    async def close(self, grace_s: float) -> None:
        """End it: by the pipe, and after `grace_s` with everything below it. Idempotent."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        try:
            await within(grace_s, self._process.wait())
        except TimeoutError:
            kill_tree(self._process.pid)
            with contextlib.suppress(TimeoutError):
                await within(KILLED_S, self._process.wait())


class StopSignals:
    """Listens while it is entered, in the running loop. `insisted` is set when the job is to end at once.

    Signals that were ignored when the launcher was started stay ignored, as `nohup` asks for.
    """

    def __init__(
        self,
        stop: Callable[[str], None],
        what: str = "asking the job to stop",
        also: frozenset[signal.Signals] = frozenset(),
    ) -> None:
        """Call `stop` once, with the reason, when a signal arrives.

        `what`: what that does, in words. `also`: signals that mean this, beside HEARD.
        """
        self.insisted = asyncio.Event()
        self.asked = False
        self._stop = stop
        self._what = what
        self._numbers = also.union(HEARD)

    def __enter__(self) -> "StopSignals":
        """Begin to listen."""
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._heard, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the signals caught until the loop is closed: what is cleared away is not interrupted."""

    def _heard(self, number: signal.Signals) -> None:
        if not self.asked:
            self.asked = True
            _log.warning("%s: %s; Ctrl-C once more ends it at once", number.name, self._what)
            self._stop(f"midstep run received {number.name}")
        elif number in INSISTING:
            self.insisted.set()
