"""`midstep clusterd`: stand between a job and MindCluster's ClusterD (docs/mindcluster.md)."""

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import click

from ..controller.endpoints import control_requests as requests
from ..detectors import clusterd_signals as d
from ..detectors.clusterd import Dialogue
from ..detectors.clusterd_lines import LineClient
from ..launch.reached_job import ReachedJob, look, reached
from ..protocol.errors import ConfigurationError, ForeignFile, MidstepError
from ..protocol.incidents import JobStatus
from ..protocol.types import detector_address
from .display.plain import echo, log_to_stderr
from .frame import Command, operator_options

NAME = detector_address("clusterd")
ASK_S = 10.0
LOOK_S, BUSY_LOOK_S = 0.5, 0.1  # between two looks at the job; while ClusterD waits for an answer
WHY = "ClusterD asks for it"
GIVE_UP_S = 600.0  # without a controller that answers
SERVER, TASK = "MINDX_SERVER_IP", "MINDX_TASK_ID"
PORT = 8899
_log = logging.getLogger("midstep.clusterd")


@click.command("clusterd", cls=Command)
@click.argument("job", required=False, metavar="[JOB]")
@click.option("--server", metavar="HOST[:PORT]", help=f"Where ClusterD listens.  [default: {SERVER}, port {PORT}]")
@click.option("--task", metavar="ID", help=f"The job's name there, the uid of the acjob.  [default: {TASK}]")
@click.option(
    "--certificate",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The certificate, in PEM, by which ClusterD proves who it is.  [default: no TLS]",
)
@click.option("--stdio", is_flag=True, help="Speak with TaskD instead, by lines of JSON, as mindio_ttp does by itself.")
@operator_options
def command(
    *,
    job: str | None,
    server: str | None,
    task: str | None,
    certificate: Path | None,
    stdio: bool,
    controller: str | None,
    token_file: Path | None,
) -> None:
    """Speak with ClusterD for a job, in place of TaskD's manager, until the job ends.

    What ClusterD finds wrong with devices and nodes is a fault of the job at once. What it asks for is answered from
    what the job does: midstep's ladder decides, and what ClusterD decides against it (dump, exit) is obeyed.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant. With
    --controller it is the job's whole name, and a token of the role operator or admin is needed.

    \b
    Examples:
      midstep clusterd demo
      midstep clusterd demo --server 10.0.0.7 --task 5b1f0c1e-0d0c-4f6a-9b1e-3f1c

    Exit status: 0 when the job has ended, 1 when ClusterD does not take the job in, or nothing of the job answers.
    """
    log_to_stderr(logging.INFO, "%(asctime)s clusterd %(levelname)s %(message)s")
    if stdio:
        _speak_with_taskd(reached(job, controller, token_file))
        return
    place = server or os.environ.get(SERVER)
    named = task or os.environ.get(TASK)
    if not place or not named:
        raise click.UsageError(f"--server and --task are needed, or {SERVER} and {TASK}, which MindCluster sets.")
    try:
        from ..detectors.clusterd_service import ClusterdAddress, RecoverClient
    except ImportError as error:
        raise ConfigurationError(
            f"ClusterD is spoken to with grpcio and protobuf ({error}): pip install 'midstep[mindcluster]'."
        ) from error
    import grpc

    target = reached(job, controller, token_file)
    client = RecoverClient(
        ClusterdAddress(place if ":" in place else f"{place}:{PORT}", named, certificate=certificate)
    )
    try:
        client.start()
        echo(Bridge(target, client).run())
    except grpc.RpcError as error:
        said = error.details() if isinstance(error, grpc.Call) else str(error)
        raise ConfigurationError(f"ClusterD at {place} does not answer: {said}") from error
    finally:
        client.close()


def _speak_with_taskd(target: ReachedJob) -> None:
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as lines:  # a buffer's lock outlives its reader
        client = LineClient(lines, sys.stdout.buffer)
        client.start()
        _log.info("%s", Bridge(target, client, client.has_left).run())


def _level(signal: d.Heard) -> int:
    """Return how much a signal matters: a sign of life comes every 5 s, also amid a fault, with the number of that."""
    is_sign_of_life = isinstance(signal, d.Signal) and signal.type == d.SignalType.KEEP_ALIVE
    return logging.DEBUG if is_sign_of_life else logging.INFO


class OtherEnd(Protocol):
    """ClusterD, or TaskD."""

    signals: "queue.Queue[d.Heard | None]"
    """What comes; None: the dialogue begins again."""

    def tell(self, report: d.Report) -> None:
        """Make a report. One that is not heard is logged."""


class Bridge:
    """Hands on between a job and ClusterD, until the job has ended."""

    def __init__(
        self,
        job: ReachedJob,
        client: OtherEnd,
        has_left: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Do nothing before `run`. `has_left` is set when the other end is gone. Raises MidstepError: no answer."""
        self._job = job
        self._client = client
        self._has_left = has_left or threading.Event()
        self._clock = clock
        self._heard_s = clock()
        self._status = look(job)[0]
        here = max((len(node.ranks) for node in self._status.nodes), default=1)
        self._dialogue = Dialogue(NAME, max(1, here))

    def run(self) -> str:
        """Hand on until the job has ended and ClusterD waits for nothing; return a line on it. Raises MidstepError."""
        while self._status.exit_code is None or self._dialogue.is_waiting:
            has_left = self._has_left.is_set()  # what it has said before is heard all the same
            for signal in [*self._heard(), *([None] if has_left else [])]:
                if signal is None:
                    self._dialogue.began()
                else:
                    _log.log(_level(signal), "heard: %s", signal)
                    self._carry_out(self._dialogue.heard(signal, self._status, self._clock()))
            self._status = self._look()
            self._carry_out(self._dialogue.looked(self._status, self._clock()))
            if has_left:
                return f"{self._job.name}: TaskD has left, and the job goes on"
        return f"{self._job.name}: the job has ended with exit code {self._status.exit_code}"

    def _heard(self) -> list[d.Heard | None]:
        """Wait for a signal until the next look at the job is due, and return those that are there."""
        heard = []
        try:
            heard.append(self._client.signals.get(timeout=BUSY_LOOK_S if self._dialogue.is_waiting else LOOK_S))
            self._status = self._look()
            while True:
                heard.append(self._client.signals.get_nowait())
        except queue.Empty:
            return heard

    def _look(self) -> JobStatus:
        """Return how the job stands, or how it stood while nothing answers. Raises MidstepError after a long time."""
        try:
            status, note = look(self._job)
        except ForeignFile:
            raise
        except MidstepError as error:
            note = str(error)
        else:
            if not note or status.exit_code is not None:
                self._heard_s = self._clock()
                return status
        if self._clock() - self._heard_s >= GIVE_UP_S:
            raise MidstepError(f"{self._job.name}: no controller has answered for {GIVE_UP_S:g} s: {note}")
        return self._status

    def _carry_out(self, actions: list[d.Action]) -> None:
        for action in actions:
            if isinstance(action, d.Remark):
                _log.warning("%s", action.text)
            elif isinstance(action, d.TellFault):
                self._ask(requests.ReportFaultRequest(action.report))
            elif isinstance(action, d.StopJob):
                self._ask(requests.StopJobRequest(action.why))
                if action.insist:
                    self._ask(requests.StopJobRequest(action.why))
            elif isinstance(action, d.Steer):
                reply = self._ask(requests.ControlRequest(action.control, NAME, WHY))
                if isinstance(reply, requests.Refused):
                    self._carry_out(self._dialogue.refused(action, reply.reason))
            else:
                self._client.tell(action)

    def _ask(self, request: requests.Request) -> requests.Reply | None:
        """Ask the controller. What it refuses, or does not hear, is logged: ClusterD learns it from what follows."""
        try:
            reply = self._job.ask(request, ASK_S)
        except MidstepError as error:
            _log.warning("%s: %s", type(request).__name__, error)
            return None
        if isinstance(reply, requests.Refused):
            _log.warning("%s is refused: %s", type(request).__name__, reply.reason)
        return reply
