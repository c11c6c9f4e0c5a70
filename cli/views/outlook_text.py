"""A forecast as tables for the terminal."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ...forecast.forecast import Cluster
from ...forecast.outlook import Loss, Outlook
from ...protocol.types import Rung
from .wording import duration_text

STOPS_SHOWN = 5
VIOLATIONS_SHOWN = 5
HOUR_S = 3600.0


def outlook_tables(outlook: Outlook, cluster: Cluster) -> Iterator[RenderableType]:
    """Yield what there is to say, the sum first."""
    faults = ", ".join(f"{count} {kind}" for kind, count in outlook.faults.most_common())
    yield Text.assemble(
        (f"goodput {100 * outlook.goodput:.2f} %", "bold"),
        f" over {outlook.hours:g} h on {outlook.ranks} ranks ({cluster.nodes} nodes, {cluster.spares} spare; ",
        f"seed {outlook.seed})\n{sum(outlook.faults.values())} faults: {faults or 'none'}",
    )
    yield _by_rung(outlook)
    yield _losses(outlook)
    if outlook.smaller_hours:
        yield Text(f"{outlook.smaller_hours:.1f} h were trained with fewer ranks than asked for", style="yellow")
    if outlook.spent:
        yield Text(f"A rung was passed over {outlook.spent} times because a budget of it was spent.", style="yellow")
    for stop in outlook.stops[:STOPS_SHOWN]:
        yield Text(f"stopped after {stop.at_h:.1f} h: {stop.reason}", style="red")
    if len(outlook.stops) > STOPS_SHOWN:
        yield Text(f"... and {len(outlook.stops) - STOPS_SHOWN} more stops", style="red")
    if outlook.violations:
        for violation in outlook.violations[:VIOLATIONS_SHOWN]:
            yield Text(f"violated: {violation}", style="bold red")
    else:
        yield Text("no invariant was violated", style="green")


def _by_rung(outlook: Outlook) -> Table:
    table = Table(title="incidents by the rung that ended them", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("rung", no_wrap=True)
    for heading in ("incidents", "share", "lost, median", "lost, worst", "lost in all"):
        table.add_column(heading, justify="right")
    for rung, rows in outlook.by_rung().items():
        costs = sorted(row.cost_s for row in rows)
        table.add_row(
            Text(rung, style="red" if rung is Rung.STOP else ""),
            str(len(rows)),
            f"{100 * len(rows) / outlook.incidents:.0f} %",
            duration_text(costs[len(costs) // 2]),
            duration_text(costs[-1]),
            duration_text(sum(costs)),
        )
    return table


def _losses(outlook: Outlook) -> Table:
    table = Table("time lost to", title="where the time went", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("hours", justify="right")
    table.add_column("of all", justify="right")
    for loss in Loss:
        lost_s = outlook.lost_s[loss]
        table.add_row(loss, f"{lost_s / HOUR_S:.2f}", f"{100 * lost_s / HOUR_S / outlook.hours:.2f} %")
    return table
