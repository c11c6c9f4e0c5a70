"""`midstep inject`: cause a fault on purpose in a running job."""

import click

from ..controller.control_requests import InjectRequest, KillNodeRequest, Request
from ..protocol.types import ArmedFault, Injury, Moment
from .operator import tell

INJURIES = tuple(injury.value.replace("_", "-") for injury in Injury)
MOMENTS = tuple(moment.value for moment in Moment)
ASK_S = 10.0


@click.command("inject", short_help="Cause a fault on purpose.")
@click.argument("job", required=False, metavar="[JOB]")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="The rank that is harmed.")
@click.option("--node", metavar="NAME", help="The node that dies, agent and processes at once.")
@click.option(
    "--do", "injury", type=click.Choice(INJURIES), help="What happens.  [default: kill; for --node, kill-node]"
)
@click.option("--at", "moment", type=click.Choice(MOMENTS), help="When: at this moment of a step or of a recovery.")
@click.option("--step", type=click.IntRange(min=0), metavar="S", help="Only in the step with this index, from 0.")
def command(
    *, job: str | None, rank: int | None, node: str | None, injury: str | None, moment: str | None, step: int | None
) -> None:
    """Cause a fault on purpose, to see the job recover. Without --at it happens now.

    \b
    What --do can be:
      kill       SIGKILL to the process of the rank
      stop       SIGSTOP: the process stalls
      raise      an exception in the train function
      exit       the process ends with status 1
      hang       the train thread sleeps for ever
      kill-node  the rank's node dies, with its agent and all processes

    Moments of a step: forward, backward, collective, barrier, update, checkpoint. Moments of a recovery, for faults
    that come while another one is repaired: stop, clean, join, rebuild, repair, rollback.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant.

    \b
    Examples:
      midstep inject --rank 1                                  kill rank 1 of the latest job, now
      midstep inject demo --rank 0 --do raise --at backward    at the next backward pass
      midstep inject --rank 3 --do stop --at update --step 40  in step 40, during the update
      midstep inject --node node1                              the whole node
    """
    request = build(rank, node, injury, moment, step)
    click.echo(tell(job, request, ASK_S))


def build(rank: int | None, node: str | None, injury: str | None, moment: str | None, step: int | None) -> Request:
    """Return what to ask the controller for. Raises UsageError where the options do not fit together."""
    if (rank is None) == (node is None):
        raise click.UsageError("name what is to be harmed: either --rank R or --node NAME (see `midstep status`).")
    what = Injury((injury or "kill").replace("-", "_"))
    if node is not None:
        if injury is not None and what is not Injury.KILL_NODE:
            raise click.UsageError(f"--do {injury} is for one process: name it with --rank. A node can only be killed.")
        if moment is not None or step is not None:
            raise click.UsageError(
                "a node named with --node dies now. For a certain moment: --rank R --do kill-node --at MOMENT."
            )
        return KillNodeRequest(node)
    assert rank is not None
    if step is not None and moment is None:
        moment = Moment.FORWARD.value  # the beginning of that step
    return InjectRequest(ArmedFault(rank, what, None if moment is None else Moment(moment), step))
