"""Report a job's progress to Kubeflow's trainer, where it runs in a TrainJob and its policy asks for that (KEP-2779).

The trainer puts an address, a CA certificate and a token into the container, and takes a POST of progress, time that is
left and metrics into the TrainJob's status. Each report replaces the one before, so only the newest is ever tried, and
a report has everything. A thread posts it: the loop is asked for a look at the job now and then, and for nothing else.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ...policies.schema import TrainJobPolicy
from ...protocol.environment import TRAINJOB
from ...protocol.errors import ConfigurationError
from ...protocol.incidents import Outcome
from ...protocol.private_files import read_secret
from ..metrics import Observation, publish_every_s
from .posting import PostFailed, address_of, post_to, utc_text

TRIES = 4  # of one report, unless there is a newer one
FIRST_WAIT_S = 1.0
LAST_S = 8.0  # after the end of the job, for the last report
PACE_S = 600.0  # over which the time of a step is measured, with all that came between
MOST_NAME = MOST_VALUE = 64  # characters, as the trainer has them
MOST_INT32 = 2**31 - 1
TOTAL = "total_steps"  # a value of this name that the script reports is the number of steps, if the policy has none

_log = logging.getLogger(__name__)


class StatusServer(msgspec.Struct, frozen=True):
    """Where the trainer takes reports of this TrainJob. The files can change: a token is good for an hour."""

    url: str
    ca_file: str
    token_file: str


def status_server(environment: Mapping[str, str]) -> StatusServer | None:
    """Return what the trainer has put into this process's environment; None: not all of it is there."""
    named = [environment.get(name, "") for name in TRAINJOB]
    return StatusServer(*named) if all(named) else None


class Pace:
    """Measures how many steps a second are made, recoveries included, over the last minutes."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []

    def take(self, at_s: float, step: int) -> None:
        """Note how far training is. Steps that are lost begin another measurement."""
        if self._points and step < self._points[-1][1]:
            self._points.clear()
        self._points.append((at_s, step))
        while at_s - self._points[0][0] > PACE_S:  # one report a second at most, so some hundreds of points
            del self._points[0]

    def per_second(self) -> float:
        """Return the steps of a second; 0: not known."""
        if not self._points:
            return 0.0
        (began_s, first), (ended_s, last) = self._points[0], self._points[-1]
        return (last - first) / (ended_s - began_s) if ended_s > began_s else 0.0


def report_of(seen: Observation, policy: TrainJobPolicy, steps_per_s: float) -> dict[str, object]:
    """Return what the trainer gets, within the bounds that it checks. A figure that is not known is left out."""
    told = {series.name: series.values[-1] for series in seen.reported if series.values}
    result = seen.state.result
    total = policy.total_steps or _count(told.get(TOTAL))
    status: dict[str, object] = {}
    if total is not None:
        status["progressPercentage"] = min(100, 100 * seen.step // total)
    if result is not None and result.exit_code == 0:
        status["estimatedRemainingSeconds"] = 0
    elif total is not None and steps_per_s > 0.0 and result is None:
        status["estimatedRemainingSeconds"] = min(MOST_INT32, math.ceil(max(0, total - seen.step) / steps_per_s))
    known: dict[str, float | None] = {
        **told,
        TOTAL: total,
        "step": seen.step,
        "steps_per_second": steps_per_s or None,
        "goodput": None if seen.time is None else seen.time.goodput,
        "incidents": sum(
            incident.outcome in {Outcome.RESUMED, Outcome.STOPPED} and not incident.is_requested
            for incident in seen.state.history.incidents
        ),
    }
    status["metrics"] = [
        {"name": name, "value": _text(value)}
        for name, value in known.items()
        if value is not None and math.isfinite(value) and 0 < len(name) <= MOST_NAME
    ]
    status["lastUpdatedTime"] = utc_text(seen.at_s)
    return {"trainerStatus": status}


def _count(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) and value >= 1.0 else None


def _text(value: float) -> str:
    return (str(value) if isinstance(value, int) else f"{value:.6g}")[:MOST_VALUE]


def post(server: StatusServer, body: bytes) -> None:
    """Hand a report over once. Raises PostFailed."""
    address = address_of(server.url, TRAINJOB[0])
    token = _token(server.token_file)
    headers = {"Content-Type": "application/json", "User-Agent": "midstep", "Authorization": f"Bearer {token}"}
    post_to(address, body, headers, server.ca_file)


def _token(path: str) -> str:
    try:
        token = read_secret(Path(path), mounted=True)
    except ConfigurationError as error:
        raise PostFailed(str(error).rstrip(".")) from None
    if not token.isprintable() or " " in token:
        raise PostFailed(f"{path}: it has no token in one line")
    return token


class ReportThread:
    """Posts the newest report, a few times at most, and drops the others."""

    def __init__(self, hand_over: Callable[[bytes], None]) -> None:
        """Do nothing before `start`. `hand_over`: posts once, and raises PostFailed."""
        self._hand_over = hand_over
        self._changed = threading.Condition()
        self._newest: bytes | None = None  # that was not taken yet
        self._closed = False
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name="progress of the TrainJob", daemon=True)

    def start(self) -> None:
        """Begin to post."""
        self._thread.start()

    def take(self, report: bytes) -> None:
        """Take a report, in the place of one that waits. Never waits."""
        with self._changed:
            self._newest = report
            self._changed.notify_all()

    def finish(self, limit_s: float) -> None:
        """Wait until the newest report was taken or given up, but not for longer than this; then post no more."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._newest is None, limit_s)
        if not done:
            _log.error("the TrainJob's status server has not taken the progress at the end within %g s", limit_s)
        self.close()

    def close(self) -> None:
        """Post no more. What is under way ends by itself, and is not waited for. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._newest is not None)
                report = self._newest
            if self._closed or report is None:
                return
            self._try(report)
            with self._changed:
                if self._newest is report:
                    self._newest = None
                self._changed.notify_all()

    def _try(self, report: bytes) -> None:
        """Try a report until it is taken, there is a newer one, or it was tried often enough."""
        for tried in range(TRIES):
            trouble = ""
            try:
                self._hand_over(report)
            except PostFailed as error:
                trouble = str(error)
            self._note(trouble)
            if not trouble:
                return
            with self._changed:
                if self._changed.wait_for(lambda: self._closed or self._newest is not report, FIRST_WAIT_S * 2**tried):
                    return

    def _note(self, trouble: str) -> None:
        """Log a failure when it is another one, and its end."""
        if trouble and trouble != self._trouble:
            _log.error("the TrainJob's status server has not taken the progress: %s; the next report is tried", trouble)
        elif self._trouble and not trouble:
            _log.info("the TrainJob's status server takes the progress again")
        self._trouble = trouble


class ProgressReporter:
    """Reports one job's progress for as long as its controller leads it."""

    def __init__(
        self, server: StatusServer, policy: TrainJobPolicy, observe: Callable[[], Observation], ranks: int
    ) -> None:
        """Start nothing before `run`. `observe`: in the loop's thread; `ranks`: of the job."""
        self._policy, self._observe, self._pace = policy, observe, Pace()
        self._every_s = max(policy.every_s, publish_every_s(ranks))
        self._thread = ReportThread(lambda body: post(server, body))

    async def run(self) -> None:
        """Report now and then until cancelled; after the end of the job once more, and wait a little for that."""
        self._thread.start()
        try:
            while True:
                seen = self._observe()
                if seen.is_heard:  # or the next controller's first report would go back to the last incident
                    self._thread.take(self._report(seen))
                await asyncio.sleep(self._every_s if seen.is_heard else FIRST_WAIT_S)
        finally:
            seen = self._observe()
            if seen.state.result is not None:
                self._thread.take(self._report(seen))
                await asyncio.to_thread(self._thread.finish, LAST_S)
            self._thread.close()

    def _report(self, seen: Observation) -> bytes:
        self._pace.take(seen.at_s, seen.step)
        return msgspec.json.encode(report_of(seen, self._policy, self._pace.per_second()))


def progress_reporter(
    policy: TrainJobPolicy, environment: Mapping[str, str], observe: Callable[[], Observation], ranks: int
) -> ProgressReporter | None:
    """Return what reports a job's progress, if the policy asks for it and this is a TrainJob that takes it."""
    if not policy.report:
        return None
    server = status_server(environment)
    if server is None:
        _log.warning(
            "trainjob.report: no progress is reported, as %s are not all set here. Kubeflow's trainer sets "
            "them in a TrainJob, from 2.2.0 and with its feature gate TrainJobStatus",
            ", ".join(TRAINJOB),
        )
        return None
    return ProgressReporter(server, policy, observe, ranks)
