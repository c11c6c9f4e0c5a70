"""Look at a job again and again, and say what has changed of it: for other programs, which act on it.

After the system that a service's clients ask who serves: the last answer counts until there is a newer one, and a
client is called back on each change, or on each beat.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ..protocol.errors import ForeignFile, MidstepError
from ..protocol.incidents import ControllerPhase, JobStatus
from .reached_job import ReachedJob, look, reached

EVERY_S = 1.0
GIVE_UP_S = 600.0


class JobView(msgspec.Struct, frozen=True):
    """A program's view of a job. `answered`: a controller has said so now; else one has before.

    `leader` is the name of the controller that leads, on `host`, in `term`. `exit_code`: the job has ended.
    """

    job: str
    answered: bool
    leader: str = ""
    host: str = ""
    term: int = 0
    phase: str = ""
    generation: int = 0
    failover_paused: bool = False
    exit_code: int | None = None


def watch(
    callback: Callable[[JobView], None],
    job: str | None = None,
    *,
    on_each_beat: bool = False,
    every_s: float = EVERY_S,
    give_up_s: float = GIVE_UP_S,
    controller: str | None = None,
    token_file: Path | None = None,
) -> JobView:
    """Call back with the present view of a job, then on each change of it, and return the last one when the job ends.

    Args:
        callback: is called in this thread. What it raises ends the watch, and is raised here.
        job: as in `midstep status`: a name, the beginning of one, a job directory; None: the latest job.
        on_each_beat: call back at each look, changed or not.
        every_s: seconds between two looks.
        give_up_s: seconds without an answer after which the watch ends.
        controller: `HOST:PORT[,...]` of the controllers of a job on other machines.
        token_file: with `controller`: the file of a role's token.

    Raises:
        MidstepError: there is no such job, the token is not taken, or no controller has answered for `give_up_s`.
    """
    target = reached(job, controller, token_file)
    last: JobView | None = None
    for view in views(target, every_s, give_up_s):
        if on_each_beat or view != last:
            callback(view)
        last = view
    assert last is not None, "the first look yields or raises"
    return last


def views(job: ReachedJob, every_s: float, give_up_s: float) -> Iterator[JobView]:
    """Yield how a job stands, every `every_s`, until it has ended. Raises MidstepError as `watch` does."""
    last = JobView(job.name, answered=False)
    heard_s = time.monotonic()
    while True:
        view, reason = _looked(job, last)
        yield view
        if view.exit_code is not None:
            return
        if view.answered:
            heard_s = time.monotonic()
        elif time.monotonic() - heard_s >= give_up_s:
            raise MidstepError(f"{job.name}: no controller has answered for {give_up_s:g} s: {reason}")
        last = view
        time.sleep(every_s)  # a program that acts on changes says itself how late it may be


def _looked(job: ReachedJob, last: JobView) -> tuple[JobView, str]:
    """Return what is known now, and why no controller has answered."""
    try:
        status, note = look(job)
    except ForeignFile:
        raise
    except MidstepError as error:
        return msgspec.structs.replace(last, answered=False), str(error)
    if note and status.exit_code is None:  # the journal lags behind what a controller has said
        return msgspec.structs.replace(last, answered=False), note
    return view_of(job.name, status, answered=not note), note


def view_of(job: str, status: JobStatus, *, answered: bool) -> JobView:
    """Return what a status means to a program."""
    leader = next((each for each in status.controllers if each.phase is ControllerPhase.HOT), None)
    return JobView(
        job=job,
        answered=answered,
        leader="" if leader is None else leader.name,
        host="" if leader is None else leader.host,
        term=status.term,
        phase=status.phase,
        generation=status.generation,
        failover_paused=bool(status.failover_paused_until_s),
        exit_code=status.exit_code,
    )
