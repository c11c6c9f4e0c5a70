"""Follow a job's status, and say what changes: a line for each decision, and one for the end of each incident."""

from collections.abc import Callable
from pathlib import Path

from rich.text import Text

from ...controller.endpoints.control_requests import StatusReply, StatusRequest
from ...controller.endpoints.local_sockets import NoController, ask
from ...protocol.errors import MidstepError
from ...protocol.incidents import Incident, JobStatus, Outcome
from ...protocol.types import Decision
from ..views.wording import REASON_CHARACTERS, lost_text, telling_line

ASK_S = 0.5


class JobFollower:
    """Compares the job's status with what it was at the last look."""

    def __init__(self, run_directory: Path, say: Callable[[Text], None]) -> None:
        self._run_directory = run_directory
        self._say = say
        self._phase = ""
        self._decisions: dict[int, int] = {}
        self._closed: set[int] = set()

    def look(self) -> None:
        """Ask the controller; say what is new. A controller that does not answer is tried again at the next look."""
        try:
            reply = ask(self._run_directory, StatusRequest(), ASK_S)
        except (NoController, MidstepError):
            return
        if isinstance(reply, StatusReply):
            self._compare(reply.status)

    def _compare(self, status: JobStatus) -> None:
        if status.phase != self._phase and not status.incidents:
            self._phase = status.phase
            self._say_line(Text(f"{status.phase} (generation {status.generation})"))
        for incident in status.incidents:
            self._incident(incident)

    def _incident(self, incident: Incident) -> None:
        said = self._decisions.get(incident.number, 0)
        for before, decision in zip((None, *incident.decisions)[said:], incident.decisions[said:], strict=False):
            if before is not None and _same_course(before, decision):
                continue
            reason = telling_line(decision.reason, REASON_CHARACTERS)
            self._say_line(
                Text(f"incident {incident.number}", style="bold").append(f": {decision.rung} - {reason}", "not bold")
            )
        self._decisions[incident.number] = len(incident.decisions)
        if incident.number in self._closed or incident.outcome is Outcome.OPEN:
            return
        self._closed.add(incident.number)
        line = Text(f"incident {incident.number}: ")
        if incident.outcome is Outcome.RESUMED:
            lost = f"{incident.steps_lost} committed steps lost"
            if not incident.committed_is_known:
                lost = lost_text(incident.steps_lost, is_known=False)
            line.append("resumed", style="green").append(
                f" at step {incident.resumed_step} after {incident.recovery_s or 0.0:.2f} s, {lost}"
            )
        else:
            ended = telling_line(incident.ended_reason, REASON_CHARACTERS)
            line.append(str(incident.outcome), style="red").append(f": {ended}")
        self._say_line(line)

    def _say_line(self, text: Text) -> None:
        """Say one line, whatever a status holds: a line break in it must not begin a line that looks like another."""
        self._say(Text(" ").join(text.split()))


def _same_course(before: Decision, decision: Decision) -> bool:
    """Return whether a decision only has more reports behind it than the one before: what is done stays the same.

    A reason says what was seen, a colon, and what is done about it.
    """
    courses = [each.reason.partition(": ")[2] for each in (before, decision)]
    return before.rung is decision.rung and courses[0] == courses[1] != ""
