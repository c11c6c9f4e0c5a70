"""`midstep pause-failover`: keep the controllers that stand by from taking over for a while."""

from pathlib import Path

import click

from ..controller.endpoints.control_requests import MOST_PAUSED_S, PauseFailoverRequest
from .control import operator_options, tell, the_job
from .display.plain import echo
from .numbers import duration_s

ASK_S = 10.0


@click.command("pause-failover")
@click.argument("job", required=False, metavar="[JOB]")
@click.option(
    "--for",
    "for_s",
    callback=duration_s,
    default="10m",
    show_default=True,
    metavar="DURATION",
    help="For how long, at most 1d: 90s, 10m, 2h. A pause that is forgotten ends by itself.",
)
@click.option("--end", is_flag=True, help="End the pause now.")
@operator_options
def command(*, job: str | None, for_s: int, end: bool, controller: str | None, token_file: Path | None) -> None:
    """Let no controller that stands by take over, for example while the leader is stopped in a debugger.

    Faults of the job are recovered as ever, by the present leader. If that ends meanwhile, training continues without
    recovery until a controller of the same --name is started, or one without --standby, or the pause has ended.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant. With
    --controller it is the job's whole name, and the role has to be admin.

    \b
    Examples:
      midstep pause-failover --for 30m
      midstep pause-failover --end
    """
    if for_s > MOST_PAUSED_S:
        raise click.UsageError(f"--for: at most {MOST_PAUSED_S // 3600} hours")
    echo(tell(the_job(job, controller, token_file), PauseFailoverRequest(0 if end else for_s), ASK_S))
