"""`midstep isolated`: the devices that no job uses because something came too often there, and their release."""

import click

from ..controller.isolation import Isolated, IsolationStore
from ..launch.directories import HOME_VARIABLE, isolation_folder
from ..launch.meeting import host_name
from ..protocol.wording import one_line
from .display.plain import echo
from .frame import Command
from .numbers import DEVICE
from .views.wording import date_text, harmless

_WHY = 120  # characters


@click.command("isolated", cls=Command)
@click.option("--release", "node", metavar="NODE", help="Let the next jobs use this node and its devices again.")
@click.option("--device", type=DEVICE, metavar="N", help="With --release: only this device of NODE.")
def command(*, node: str | None, device: int | None) -> None:
    """List the devices that jobs have isolated for the jobs after them, or release some.

    A job that has raised a fault because it came too often on one device (faults.too_often in its policy) isolates the
    device for all jobs with the same MIDSTEP_HOME, for as long as its faults.isolate_s says. A job that starts does not
    choose the node. docs/faults.md has more.

    NODE is a node as it is listed. That of a job with all nodes on one machine is MACHINE/NODE, of this machine NODE
    alone will do. A job that runs takes the node as a spare again, but for the job that has isolated it: there the
    detector has the last word.

    \b
    Examples:
      midstep isolated
      midstep isolated --release worker-7
      midstep isolated --release worker-7 --device 3
    """
    if device is not None and node is None:
        raise click.UsageError("--device goes with --release NODE.")
    store = IsolationStore(isolation_folder())
    try:
        there = store.read()
        for path, why in store.problems.items():
            echo(f"midstep isolated: {path} is skipped: {why}. Repair or remove it.", err=True)
        if node is None:
            _show(there, store)
            return
        released = store.release(node, device, host_name())
    except OSError as error:
        raise click.ClickException(f"{store.folder}: {error}. {HOME_VARIABLE} says where it is.") from error
    if not released:
        what = node if device is None else f"{node}, device {device}"
        known = "; ".join(each.place for each in there) or "nothing"
        raise click.ClickException(harmless(f"{what} is not isolated in {store.folder}. Isolated there: {known}."))
    for each in released:
        echo(harmless(f"released {each.place}: {_reason(each)}"))


def _show(there: list[Isolated], store: IsolationStore) -> None:
    if not there:
        echo(f"nothing is isolated in {store.folder}")
    for each in there:
        echo(harmless(f"{each.place}: until {date_text(each.until_s)}; {_reason(each)}"))


def _reason(each: Isolated) -> str:
    return f"{each.code} in job {each.job}, {date_text(each.at_s)}: {one_line(each.detail, _WHY)}"
