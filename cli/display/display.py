"""Shows a job while its launcher runs: the ranks' output on stdout, events of the job on stderr.

To show is never part of keeping a job alive. Both outputs have a thread of their own, so that a pipe without a reader,
a full disk, a terminal that is gone or a text that cannot be shown neither stops nor ends anything but the showing. The
ranks' output waits in their logs, however long its reader takes; what waits for stderr is bounded, and what is dropped
is counted.
"""

import logging
import math
import queue
import sys
import time
from collections.abc import Callable
from pathlib import Path
from string import Template
from types import TracebackType

import msgspec
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...agent.channel import ROLE as DEFAULT_ROLE
from ...controller.endpoints.control_requests import StatusReply, StatusRequest
from ...controller.endpoints.local_sockets import NoController, ask
from ...protocol.errors import MidstepError
from ...protocol.incidents import Incident, JobStatus, Outcome
from ...protocol.types import Decision
from ..views.wording import REASON_CHARACTERS, lost_text, telling_line
from .log_follower import LogFollower, Poller
from .plain import HarmlessFormatter, TolerantOutput
from .terminal import Terminal

MAX_WAITING = 1000  # lines for stderr
ASK_S = 0.5
# Each question takes some ms of the controller's core and of this one, which ranks may want for themselves.
STEADY_S, STEADY_ASK_S = 10.0, 1.0  # a job in which nothing has happened for so long is asked about less often


class ShownRanks(msgspec.Struct, frozen=True):
    """The ranks whose output is shown, and how. `local`: by their number on their node; None: all of them.

    `prefix`: what stands before each line, with ${rank}, ${local_rank} and ${role_name}; empty: midstep's own.
    """

    ranks_per_node: int = 1
    local: frozenset[int] | None = None
    prefix: str = ""

    def shows(self, rank: int) -> bool:
        """Tell whether what a rank prints is shown."""
        return self.local is None or rank % self.ranks_per_node in self.local

    def before_line(self, rank: int, role: str) -> str:
        """Return what stands before each line of a rank, in a role of this name."""
        if not self.prefix:
            return f"[{role} rank {rank}] " if role else f"[rank {rank}] "
        local_rank = rank % self.ranks_per_node
        return Template(self.prefix).safe_substitute(rank=rank, local_rank=local_rank, role_name=role or DEFAULT_ROLE)


ALL_RANKS = ShownRanks()


class StepBar:
    """The steps of a job whose number is known, as a bar below all other lines; on a terminal only.

    It is a line like the others, which the next one erases first.
    """

    _ERASE = b"\x1b[1A\x1b[2K"  # the line above
    _AND_UP = b"\x1b[1A"  # the line break behind whatever is written leads back

    def __init__(self, steps: int, terminal: Terminal) -> None:
        """`steps`: how many there will be; 0: that is not known, and nothing is shown."""
        self._steps = steps if terminal.is_terminal else 0
        self._terminal = terminal
        self._shown: int | None = None

    def drawn(self, committed: int) -> bytes:
        """Return what draws the bar in its place; nothing where it is there already."""
        if not self._steps or committed == self._shown:
            return b""
        erase, self._shown = self.erased(), committed
        row = Table.grid(padding=(0, 1))
        row.add_row(f"step {committed} of {self._steps}", ProgressBar(self._steps, committed, width=30))
        with self._terminal.capture() as captured:
            self._terminal.print(row, end="")
        return erase + captured.get().rstrip("\n").encode()

    def erased(self) -> bytes:
        """Return what erases the bar, for the line that comes in its place."""
        was, self._shown = self._shown, None
        return b"" if was is None else self._ERASE

    def ended(self) -> bytes:
        """Return what erases the bar for good."""
        erase = self.erased()
        return erase + self._AND_UP if erase else b""


class Display:
    """Shows a job while it is entered. None of its methods raises, and none waits but `drain` and the exit."""

    def __init__(
        self,
        job_directory: Path,
        run_directory: Path,
        *,
        quiet: bool,
        role: str = "",
        shown: ShownRanks = ALL_RANKS,
        steps: int = 0,
    ) -> None:
        """`role`: what the job is in a job of several roles, whose lines are between those of the others.

        `steps`: how many the job will train, where that is known: on a terminal a bar shows them.
        """
        self._role = role
        self._shown = shown
        self._who = f"midstep[{role}]: " if role else "midstep: "
        self._logs = job_directory / "logs"
        self._quiet = quiet
        self._output, self._errors = TolerantOutput(sys.stdout), TolerantOutput(sys.stderr)
        self._follower = LogFollower(self._logs, self._show_line)
        self._job = JobFollower(run_directory, self._show)
        self._terminal = Terminal(stderr=True, soft_wrap=True)
        self._bar = StepBar(steps, self._terminal)
        self._encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        self._waiting: queue.Queue[Text] = queue.Queue(MAX_WAITING)
        self._dropped = 0
        self._failures: set[str] = set()
        self._told_of_output = False
        self._ranks = Poller(
            "midstep-output",
            self._look_at_ranks,
            advanced=lambda: self._output.written_bytes,
            on_error=self._failed,
            last=self._follower.show_rest,
        )
        self._news = Poller(
            "midstep-news",
            self._look_at_job,
            advanced=lambda: self._errors.written_bytes,
            on_error=self._failed,
            last=self._show_waiting,
        )
        self._log_handler = _LogHandler(self)
        self._log_handlers: list[logging.Handler] = []

    def __enter__(self) -> "Display":
        """Begin to show; the log of this process goes through here from now on, as stderr may not be read."""
        root = logging.getLogger()
        self._log_handlers, root.handlers = root.handlers, [self._log_handler]
        self._news.start()
        if not self._quiet:
            self._ranks.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show what is left, within the limits of `Poller.finish`, and nothing afterwards."""
        self.drain()
        self._news.finish()
        if gone := self._bar.ended():
            self._errors.write(gone)
        logging.getLogger().handlers = self._log_handlers
        for output in (self._output, self._errors):
            output.close("the job is over")

    def say(self, text: str, style: str = "") -> None:
        """Show a line on stderr, soon; it is dropped and counted when too many wait."""
        self._say(Text(text, style=style))

    def drain(self) -> None:
        """Show what the ranks have printed to its end, if it is read, and say so if it is not. Idempotent."""
        if self._quiet:
            return
        self._quiet = True
        finished = self._ranks.finish()
        if not finished and not self._output.gone:
            unread = self._follower.unread_bytes()
            self.say(f"standard output is not read: {unread} bytes or more are not shown; they are in {self._logs}")
            self._output.close("not read")

    # --- in the threads ---------------------------------------------------------------------------------------------

    def _look_at_ranks(self) -> bool:
        if self._output.gone:
            if not self._told_of_output:
                self._told_of_output = True
                self.say(
                    f"standard output is gone ({self._output.gone}): the job continues, and what its ranks print is in "
                    f"{self._logs}",
                    "dim",
                )
            return False
        return self._follower.look()

    def _show_line(self, rank: int, line: bytes) -> None:
        if self._shown.shows(rank):
            self._output.write(self._shown.before_line(rank, self._role).encode() + line)

    def _look_at_job(self) -> bool:
        if self._errors.gone:
            return False
        said = self._show_waiting()
        self._job.look()
        if bar := self._bar.drawn(self._job.committed):
            self._errors.write(bar)
        return said

    def _show_waiting(self) -> bool:
        said = False
        for _ in range(MAX_WAITING):
            try:
                text = self._waiting.get_nowait()
            except queue.Empty:
                break
            said = True
            self._show(text)
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._show(Text(f"{dropped} lines were not shown: there were too many at once"))
        return said

    def _show(self, text: Text) -> None:
        with self._terminal.capture() as captured:
            self._terminal.print(Text.assemble(self._who, text), end="")
        self._errors.write(self._bar.erased() + captured.get().encode(self._encoding, "backslashreplace"))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _say(self, text: Text) -> None:
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            self._dropped += 1

    def _failed(self, error: Exception) -> None:
        what = f"{type(error).__name__}: {error}"
        if what not in self._failures and len(self._failures) < MAX_WAITING:
            self._failures.add(what)
            self.say(f"something of the job cannot be shown ({what}); the job continues", "yellow")


class _LogHandler(logging.Handler):
    """Hands the launcher's own log to the display."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display
        self.setFormatter(HarmlessFormatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Hand on a record."""
        try:
            self._display.say(self.format(record))
        except Exception:  # a record whose arguments do not fit its text
            self.handleError(record)


class JobFollower:
    """Compares the job's status with what it was when last asked for."""

    def __init__(
        self, run_directory: Path, say: Callable[[Text], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self.committed = 0  # steps, as of the last answer
        self._run_directory = run_directory
        self._say = say
        self._now = now
        self._place = ("", 0, 0)  # phase, generation, incidents
        self._moved_s = self._next_ask_s = -math.inf
        self._phase = ""
        self._decisions: dict[int, int] = {}
        self._closed: set[int] = set()

    def look(self) -> None:
        """Ask the controller, unless nothing has happened for long and it was asked just before; say what is new.

        A controller that does not answer is tried again at the next look.
        """
        now = self._now()
        if now < self._next_ask_s:
            return
        try:
            reply = ask(self._run_directory, StatusRequest(), ASK_S)
        except (NoController, MidstepError):
            return
        if isinstance(reply, StatusReply):
            status = reply.status
            self.committed = status.committed
            place = (status.phase, status.generation, len(status.incidents))
            if place != self._place:
                self._place, self._moved_s = place, now
            if now - self._moved_s > STEADY_S:
                self._next_ask_s = now + STEADY_ASK_S
            self._compare(status)

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
