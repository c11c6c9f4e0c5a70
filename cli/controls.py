"""Have a running job do something: pause, save, restart a rank, leave a node, forbid a rung (docs/controls.md)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..controller.endpoints.control_requests import ControlRequest, LeaveNodeRequest
from ..launch.reached_job import reached
from ..protocol import controls as c
from ..protocol.types import Rung
from .display.plain import echo
from .frame import Command, operator_options, tell
from .numbers import RANK, duration_s
from .orders import ASK_S, asker, reason

_Command = TypeVar("_Command", bound=Callable[..., Any])
RUNGS = tuple(rung.value for rung in Rung if rung is not Rung.STOP)


def control(command: _Command) -> _Command:
    """Add what every control takes: the job, the reason, and how to reach it from elsewhere."""
    why = click.option("--why", required=True, metavar="TEXT", help="The reason; it is kept in the job's journal.")
    job = click.argument("job", required=False, metavar="[JOB]")
    return job(why(operator_options(command)))


def _for_option(default: str, what: str) -> Callable[[_Command], _Command]:
    return click.option(
        "--for", "for_s", callback=_lasting_s, default=default, show_default=True, metavar="DURATION", help=what
    )


def _lasting_s(context: click.Context, parameter: click.Parameter, given: str) -> float:
    """Read how long a control is to stand. Raises UsageError for what the controller would refuse."""
    for_s = duration_s(context, parameter, given)
    if for_s is None or for_s > c.MOST_S:
        raise click.UsageError("--for: from 1s to 7d")
    return float(for_s)


def _ask(control: c.Control, job: str | None, why: str, controller: str | None, token_file: Path | None) -> None:
    target = reached(job, controller, token_file)
    echo(tell(target, ControlRequest(control, asker(target), reason(why)), ASK_S))


def _leave(node: str, job: str | None, why: str, where: tuple[str | None, Path | None], *, at_once: bool) -> None:
    target = reached(job, *where)
    echo(tell(target, LeaveNodeRequest(node, asker(target), reason(why), at_once), ASK_S))


@click.command("pause", cls=Command)
@_for_option("1h", "For how long, at most 7d: 90s, 10m, 2h. A pause that is forgotten ends by itself.")
@click.option("--end", is_flag=True, help="Train on now.")
@control
def pause(
    *, job: str | None, why: str, for_s: float, end: bool, controller: str | None, token_file: Path | None
) -> None:
    """Have all ranks stand still between two steps, and train on later with the same processes.

    They stop at a step about a second ahead; no step is repeated, and all keep their processes and devices. Faults are
    recovered meanwhile, and the job stands still again after that. With another --for the pause that there is gets
    another end.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant. With
    --controller it is the job's whole name, and the role has to be operator or admin.

    \b
    Examples:
      midstep pause --why "the file server is restarted" --for 20m
      midstep pause --end --why "it is back"
    """
    _ask(c.EndPause() if end else c.PauseTraining(for_s), job, why, controller, token_file)


@click.command("save", cls=Command)
@control
def save(*, job: str | None, why: str, controller: str | None, token_file: Path | None) -> None:
    """Have a checkpoint written at the next step boundary, beside those that the policy asks for.

    All ranks stand still until it is complete. `midstep status` says when it is.

    \b
    Examples:
      midstep save --why "before the maintenance"
    """
    _ask(c.SaveNow(), job, why, controller, token_file)


@click.command("restart", cls=Command)
@click.argument("rank", type=RANK)
@control
def restart(*, rank: int, job: str | None, why: str, controller: str | None, token_file: Path | None) -> None:
    """Give RANK another process on its node, between two steps.

    No step is repeated, and it takes nothing from the budgets. What only this process holds is written to a checkpoint
    first. A rank that does not come to the boundary is replaced as after any fault.

    \b
    Examples:
      midstep restart 3 --why "its memory grows"
    """
    _ask(c.RestartRank(rank), job, why, controller, token_file)


@click.command("drain", cls=Command)
@click.argument("node")
@control
def drain(*, node: str, job: str | None, why: str, controller: str | None, token_file: Path | None) -> None:
    """Move the ranks of NODE to a spare node at a step boundary, and do not use NODE until it is released.

    It is treated as a node that a detector reports as not well: by the policy's `sub_health`, within the budgets of
    `recover`. `midstep status` says what stands in the way, if anything does.

    \b
    Examples:
      midstep drain node1 --why "a fan is to be replaced"
    """
    _leave(node, job, why, (controller, token_file), at_once=False)


@click.command("isolate", cls=Command)
@click.argument("node")
@control
def isolate(*, node: str, job: str | None, why: str, controller: str | None, token_file: Path | None) -> None:
    """Leave NODE at once, and do not use it until it is released.

    It is treated as a node with a fault: its ranks move by the ladder, and the step is repeated. `midstep drain`
    repeats none.

    \b
    Examples:
      midstep isolate node1 --why "it computes wrong sums"
    """
    _leave(node, job, why, (controller, token_file), at_once=True)


@click.command("release", cls=Command)
@click.argument("node")
@control
def release(*, node: str, job: str | None, why: str, controller: str | None, token_file: Path | None) -> None:
    """Use NODE again, which an operator had drained or isolated, or which had failed too often.

    What a detector has reported stands until the detector says that it is over.

    \b
    Examples:
      midstep release node1 --why "the fan is new"
    """
    _ask(c.ReleaseNode(node), job, why, controller, token_file)


@click.command("rungs", cls=Command)
@click.option("--forbid", type=click.Choice(RUNGS), help="Take this rung for no incident.")
@click.option("--force", type=click.Choice(RUNGS), help="Take no cheaper rung than this one.")
@click.option("--allow", is_flag=True, help="End all that was forbidden or forced.")
@_for_option("1h", "For how long, at most 7d. What is forgotten ends by itself.")
@control
def rungs(
    *,
    job: str | None,
    why: str,
    forbid: str | None,
    force: str | None,
    allow: bool,
    for_s: float,
    controller: str | None,
    token_file: Path | None,
) -> None:
    """Forbid a rung of the ladder, or force one, for a time.

    The next rung that fits is taken in the place of one that is forbidden, which may be the stop. A rung that is forced
    and does not fit leads to the next one above it. Budgets count as ever. The record of an incident says who had a
    rung passed over, and why.

    \b
    Examples:
      midstep rungs --forbid recover_in_place --for 2h --why "the new driver needs a clean node"
      midstep rungs --force reschedule_pod --why "all links are suspect"
      midstep rungs --allow --why "the driver is fixed"
    """
    if sum((forbid is not None, force is not None, allow)) != 1:
        raise click.UsageError("write one of --forbid RUNG, --force RUNG and --allow.")
    asked: c.Control = c.AllowRungs()
    if forbid is not None:
        asked = c.ForbidRung(Rung(forbid), for_s)
    elif force is not None:
        asked = c.ForceRung(Rung(force), for_s)
    _ask(asked, job, why, controller, token_file)


@click.command("acknowledge", cls=Command)
@control
def acknowledge(*, job: str | None, why: str, controller: str | None, token_file: Path | None) -> None:
    """Say that you have seen what the job asks for, and what you do about it. It changes nothing but what is shown.

    \b
    Examples:
      midstep acknowledge --why "the node is with the vendor until Friday"
    """
    _ask(c.Acknowledge(), job, why, controller, token_file)
