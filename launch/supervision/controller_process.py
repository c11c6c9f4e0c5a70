"""One controller process, from its start to its end: watched for signs of life, and killed when it shows none."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO

import msgspec

from ...agent.linux import hear_and_die_with, is_stopped
from ...controller.keepalive import SERVING, STANDING_BY
from ...protocol.time_limit import within

STOPPED_S = 2.0  # stopped by a signal or a debugger, as the kernel says: no other proof is needed that it hangs
LOOK_S = 0.25
START_S = 60.0  # to the first sign of life: Python comes up, on a busy machine
KILLED_S = 5.0
UNKILLABLE_S = 30.0  # a disk that does not answer keeps a killed process in the kernel
_READ_BYTES = 65_536


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
        """Whether its loop has been seen to turn, and it is not one that hangs."""
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
