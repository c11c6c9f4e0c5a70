"""Says what happens to a job while it happens, one line for each turn that it takes."""

from collections.abc import Callable
from pathlib import Path

from ..controller.doors.control_requests import StatusReply, StatusRequest
from ..controller.doors.control_socket import NoController, ask
from ..protocol.errors import MidstepError
from ..protocol.incidents import Incident, JobStatus, Outcome

ASK_S = 0.5


class Watcher:
    """Compares the job's status with what it was at the last look."""

    def __init__(self, run_directory: Path, say: Callable[[str], None]) -> None:
        self._run_directory = run_directory
        self._say = say
        self._phase = ""
        self._decisions: dict[int, int] = {}
        self._closed: set[int] = set()
        self.last: JobStatus | None = None

    def look(self) -> None:
        """Ask the controller; say what is new. A controller that does not answer is tried again at the next look."""
        try:
            reply = ask(self._run_directory, StatusRequest(), ASK_S)
        except (NoController, MidstepError):
            return
        if not isinstance(reply, StatusReply):
            return
        status = reply.status
        self.last = status
        if status.phase != self._phase and not status.incidents:
            self._phase = status.phase
            self._say(f"{status.phase} (generation {status.generation})")
        for incident in status.incidents:
            self._incident(incident)

    def _incident(self, incident: Incident) -> None:
        said = self._decisions.get(incident.number, 0)
        for decision in incident.decisions[said:]:
            self._say(f"[bold]incident {incident.number}[/]: {decision.rung} - {decision.reason}")
        self._decisions[incident.number] = len(incident.decisions)
        if incident.number in self._closed or incident.outcome is Outcome.OPEN:
            return
        self._closed.add(incident.number)
        if incident.outcome is Outcome.RESUMED:
            self._say(
                f"incident {incident.number}: [green]resumed[/] at step {incident.resumed_step} after "
                f"{incident.recovery_s:.2f} s, {incident.steps_lost} committed steps lost"
            )
        else:
            self._say(f"incident {incident.number}: [red]{incident.outcome}[/]: {incident.ended_reason}")
