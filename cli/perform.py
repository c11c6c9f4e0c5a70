"""Have ranks perform an action between two steps: hold them, call it, show what each says, and let them train on."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ..controller.endpoints.control_requests import ControlRequest, StatusReply, StatusRequest
from ..launch.reached_job import ReachedJob, reached
from ..protocol import controls as c
from ..protocol.bounds import LARGEST_RANK, MOST_RANKS
from ..protocol.errors import MidstepError
from ..protocol.incidents import JobStatus
from ..protocol.wording import ranks_text
from .controls import control
from .display.plain import echo
from .frame import Command, tell
from .numbers import seconds_in
from .orders import ASK_S, asker, reason

HELD_S = 600.0  # for all ranks to come to a step boundary
AFTER_S = 60.0  # of the pause, behind what the action may take
LOOK_S = 0.25
MOST_SILENT_S = 60.0  # without an answer of a controller


def _ranks(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Make numbers of 0-3,7. The callback of an option."""
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise click.BadParameter(f"{part!r} is no rank: write numbers and ranges, as in 0-3,7")
        begin, end = int(first), int(last or first)
        if not begin <= end <= LARGEST_RANK or len(found) + end - begin >= MOST_RANKS:
            raise click.BadParameter(f"{part!r}: the lower rank comes first, and at most {MOST_RANKS:,} in all")
        found.update(range(begin, end + 1))
    return tuple(sorted(found))


def _arguments(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Make a table of KEY=VALUE. The callback of an option."""
    pairs = [text.partition("=") for text in given]
    wrong = [text for text, (key, equals, _) in zip(given, pairs, strict=True) if not key or not equals]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} is no argument: write KEY=VALUE")
    if len(pairs) > c.MOST_ARGUMENTS:
        raise click.BadParameter(f"at most {c.MOST_ARGUMENTS} arguments")
    return {key: value for key, _, value in pairs}


def _within_s(context: click.Context, option: click.Parameter, text: str) -> float:
    seconds = seconds_in(text)
    if seconds > c.MOST_ACTION_S:
        raise click.BadParameter(f"{text!r}: at most {c.MOST_ACTION_S / 3600:g}h")
    return float(seconds)


@click.command("perform", cls=Command)
@click.argument("action")
@click.option("--ranks", callback=_ranks, metavar="RANKS", help="The ranks that call it, as in 0-3,7.  [default: all]")
@click.option(
    "--set", "arguments", multiple=True, callback=_arguments, metavar="KEY=VALUE", help="An argument. Repeatable."
)
@click.option(
    "--within",
    "within_s",
    callback=_within_s,
    default="10m",
    show_default=True,
    metavar="DURATION",
    help="How long a rank may take, at most 2h.",
)
@control
def command(
    *,
    action: str,
    job: str | None,
    ranks: tuple[int, ...] | None,
    arguments: dict[str, str],
    within_s: float,
    why: str,
    controller: str | None,
    token_file: Path | None,
) -> None:
    """Have ranks perform ACTION while all stand still between two steps, and train on.

    ACTION is one that the script has registered (`midstep.register_action`), or one of the device: NPUs have switch_nic
    and stress_test (docs/controls.md). All ranks are held first, as by `midstep pause`; a pause that there is stays.
    The exit status is 0 if the action succeeded on all ranks, else 1. Training continues in either case.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant. With
    --controller it is the job's whole name, and the role has to be operator or admin.

    \b
    Examples:
      midstep perform stress_test --ranks 0-7 --within 10m --why "node3 is suspect"
      midstep perform switch_nic --set ranks=0,1 --set use_backup=1,1 --why "switch s4 is serviced"
    """
    steering = _Steering(reached(job, controller, token_file), reason(why))
    with _ended_by_signals(), steering.held(within_s):
        done = steering.perform(c.PerformAction(action, arguments, ranks, within_s))
    echo(f"{action}: {done.outcome}")
    for result in sorted(done.results, key=lambda each: each.rank):
        echo(f"  rank {result.rank}: {'ok' if result.succeeded else 'failed'}{result.text and f', {result.text}'}")
    if not all(result.succeeded for result in done.results):
        failed = [result.rank for result in done.results if not result.succeeded]
        raise click.ClickException(f"{action} has failed on {ranks_text(failed)}")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does: the pause that it began is ended first."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Steering:
    """Asks a job for what the command needs, and waits for it."""

    def __init__(self, target: ReachedJob, why: str) -> None:
        self._target = target
        self._why = why

    def order(self, asked: c.Control) -> str:
        """Ask for a control. Raises MidstepError where it is refused."""
        return tell(self._target, ControlRequest(asked, asker(self._target), self._why), ASK_S)

    @contextmanager
    def held(self, within_s: float) -> Iterator[None]:
        """Have all ranks stand still meanwhile. A pause that an operator has begun before is not ended."""
        begun = self._status().controls.pause is None
        if begun:
            echo(self.order(c.PauseTraining(HELD_S + within_s + AFTER_S)))
        try:
            self._until(lambda status: status.held or None, HELD_S, "the ranks do not stand still")
            yield
        finally:
            if begun:
                self._train_on()

    def _train_on(self) -> None:
        """End the pause. It stands where ranks still perform the action, since this command was ended."""
        try:
            self.order(c.EndPause())
        except (MidstepError, click.ClickException) as error:
            status = self._status()
            if status.controls.pause is not None:
                left_s = max(0.0, status.controls.pause.until_s - status.at_s)
                raise click.ClickException(
                    f"the pause stands ({error}). It ends by itself in {left_s:.0f} s; `midstep pause --end` ends it."
                ) from error

    def perform(self, asked: c.PerformAction) -> c.StandingAction:
        """Have the ranks perform it, and wait until all have answered or their time is over."""
        self.order(asked)

        def over(status: JobStatus) -> c.StandingAction | None:
            standing = status.controls.action
            return standing if standing is not None and standing.control == asked and not standing.waiting else None

        done: c.StandingAction = self._until(over, asked.within_s + AFTER_S, "the ranks have not answered")
        return done

    def _until(self, found: Callable[[JobStatus], Any], limit_s: float, what: str) -> Any:
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            status = self._status()
            if status.exit_code is not None:
                raise click.ClickException(f"the job has ended: {status.reason}")
            result = found(status)
            if result is not None:
                return result
            time.sleep(LOOK_S)
        raise click.ClickException(f"{what} after {limit_s:g} s: see `midstep status`")

    def _status(self) -> JobStatus:
        """Return the job's status; while no controller answers, one may be taking over."""
        until_s = time.monotonic() + MOST_SILENT_S
        while True:
            try:
                reply = self._target.ask(StatusRequest(), ASK_S)
            except MidstepError:
                if time.monotonic() > until_s:
                    raise
            else:
                if isinstance(reply, StatusReply):
                    return reply.status
                if time.monotonic() > until_s:
                    raise MidstepError(f"{self._target.name}: no controller serves for {MOST_SILENT_S:g} s")
            time.sleep(LOOK_S)
