"""`controller.json` in the run directory: what the launcher knows of its controller, for commands that get no answer.

Its space is taken when the job starts and it is written in place, so that it stays true on a disk that has become full.
"""

import os
import time
from pathlib import Path

import msgspec
import psutil

from ...agent.linux import is_stopped
from ...protocol.enums import StrEnum

NOTICE_NAME = "controller.json"
_SIZE_BYTES = 2048  # within one page, so that a reader sees one notice or the next
_LAST_CHARACTERS = 500


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
