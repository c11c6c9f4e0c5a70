"""`midstep simulate`: what would a policy do in a month of faults? Asked before a job is started."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..forecast.fault_trace import FaultTrace, load_trace
from ..forecast.forecast import Cluster, Forecast
from ..forecast.outlook import Loss, Outlook
from ..policies.files import load_policy
from ..policies.schema import default_policy
from ..protocol.errors import ConfigurationError, PolicyError
from ..protocol.time_spent import TimeSpent
from ..protocol.types import Rung
from ..testing.invariants import InvariantBroken
from ..testing.simulation.world import simulate
from .display.plain import echo, echo_json
from .display.terminal import Terminal
from .kept_forecast import keep_forecast
from .numbers import HOURS, NODES, RANKS_OF_A_NODE, SEED, SPARES
from .views.time_text import share_text, time_table
from .views.wording import duration_text

EXIT_WRONG_FILE = 1
EXIT_VIOLATED = 3
MAX_RANKS = 200_000
HOURS_OF = {"m": 1 / 60, "h": 1.0, "d": 24.0}
STOPS_SHOWN = 5
VIOLATIONS_SHOWN = 5
HOUR_S = 3600.0


class Duration(click.ParamType[float]):
    """`90m`, `3h` or `2d`; the answer is in hours."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Make hours of the text; refuse anything else as wrong usage."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd]?)", str(value))
        hours = float(found[1]) * HOURS_OF[found[2] or "h"] if found else 0.0
        if not 0 < hours <= 1_000_000:
            self.fail(f"{value!r} is not a duration; allowed: a number and m, h or d, e.g. 90m, 3h", param, ctx)
        return hours


@click.command(name="simulate")
@click.option(
    "--policy",
    "policy_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The policy.  [default: the built-in one]",
)
@click.option("--nodes", type=NODES, default=2, show_default=True, help="Nodes of the job.")
@click.option("--ranks-per-node", type=RANKS_OF_A_NODE, default=8, show_default=True, help="Ranks on each.")
@click.option("--spares", type=SPARES, default=1, show_default=True, help="Spare nodes.")
@click.option("--more-nodes", type=SPARES, default=0, show_default=True,
              help="Nodes that the platform can make when it is asked.")  # fmt: skip
@click.option("--faults", "trace_file", metavar="FILE", type=click.Path(path_type=Path),
              help="What goes wrong, and how long things take: a YAML file (docs/simulator.md).")  # fmt: skip
@click.option("--mtbf", type=Duration(), help="Mean time between two faults of the job, e.g. 3h; overrides the file's.")
@click.option("--silent", type=Duration(), help="Mean time between two silent corruptions, e.g. 200h.")
@click.option("--hours", type=HOURS, default=720.0, show_default=True,
              help="Length of the forecast.")  # fmt: skip
@click.option("--seed", type=SEED, default=0, show_default=True, help="The same seed gives the same forecast.")
@click.option("--json", "json_file", metavar="FILE", type=click.Path(path_type=Path), help="Write JSON; -: print.")
@click.option("--picture", metavar="FILE", type=click.Path(path_type=Path), help="Draw it: .png, .svg or .pdf.")
@click.option("--beside", metavar="JOB", help="Show where the time of a real job went beside the forecast.")
@click.option("--keep", is_flag=True, help="With --beside: have status, report and page of the job show the forecast.")
@click.option("--replay", metavar="SEED", type=SEED,
              help="Play a random small job of the test suite instead, and print its transcript.")  # fmt: skip
def command(
    *,
    policy_file: Path | None,
    nodes: int,
    ranks_per_node: int,
    spares: int,
    more_nodes: int,
    trace_file: Path | None,
    mtbf: float | None,
    silent: float | None,
    hours: float,
    seed: int,
    json_file: Path | None,
    picture: Path | None,
    beside: str | None,
    keep: bool,
    replay: int | None,
) -> None:
    """Forecast what a policy would do about a month of faults.

    The real recovery machine and ladder, over a fleet that is played: incidents per rung, time lost, goodput, budgets
    that run out. Faults come from a file, from a mean time between them, or both. Exit status: 0; 1 when a file is
    wrong; 2 when the command line is; 3 when an invariant did not hold, which is a defect of midstep.
    """
    if replay is not None:
        _replay(replay)
        return
    if keep and beside is None:
        raise click.UsageError("--keep is for the forecast of a job: name it with --beside JOB.")
    so_far = None if beside is None else _time_of(beside)
    cluster = Cluster(nodes, ranks_per_node, spares, more_nodes)
    if cluster.ranks > MAX_RANKS:
        raise click.UsageError(f"{nodes} nodes of {ranks_per_node} ranks are more than {MAX_RANKS} ranks")
    try:
        policy = load_policy(policy_file) if policy_file is not None else default_policy()
        trace = load_trace(trace_file, cluster.ranks) if trace_file is not None else FaultTrace()
        if mtbf is not None:
            trace = msgspec.structs.replace(trace, mtbf_h=mtbf)
        if silent is not None:
            trace = msgspec.structs.replace(trace, silent_h=silent)
        if trace.mtbf_h is None and trace.silent_h is None and not trace.faults:
            raise click.UsageError(
                "nothing goes wrong: give --mtbf or --silent, or --faults with a file that has mtbf_h, silent_h or "
                "faults"
            )
        outlook = _play(Forecast(policy, cluster, trace, hours=hours, seed=seed), hours)
        _write(outlook, json_file, picture)
        if keep:
            _keep(outlook, beside)
    except (PolicyError, ConfigurationError) as error:
        echo(str(error), err=True)
        sys.exit(EXIT_WRONG_FILE)
    if json_file != Path("-"):
        console = Terminal()
        for part in outlook_tables(outlook, cluster, so_far):
            console.print(part)
    sys.exit(EXIT_VIOLATED if outlook.violations else 0)


def _play(forecast: Forecast, hours: float) -> Outlook:
    columns = TextColumn("forecast"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f} h")
    with Progress(*columns, TimeElapsedColumn(), console=Terminal(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=hours)
        return forecast.run(lambda reached_h: progress.update(task, completed=reached_h))


def _write(outlook: Outlook, json_file: Path | None, picture: Path | None) -> None:
    if json_file is not None:
        text = msgspec.json.format(msgspec.json.encode(outlook.as_json()), indent=2).decode()
        if json_file == Path("-"):
            echo_json(text)
        else:
            try:
                json_file.write_text(text + "\n")
            except OSError as error:
                raise ConfigurationError(f"{json_file} cannot be written: {error.strerror}") from error
    if picture is not None:
        from .views.pictures import write_outlook_picture

        write_outlook_picture(outlook, picture)


def _time_of(job: str) -> TimeSpent:
    """Return where the time of a real job went. Raises MidstepError."""
    from ..launch.reached_job import look, reached

    status, _ = look(reached(job, None, None))
    if status.time is None:
        raise ConfigurationError(f"job {status.job} has not begun: there is nothing to show beside the forecast.")
    return status.time


def _keep(outlook: Outlook, job: str | None) -> None:
    """Keep the forecast with a job, as `midstep status` counts it. Raises MidstepError."""
    from ..launch.reached_job import reached

    echo(f"kept in {keep_forecast(reached(job, None, None), outlook.time)}", err=True)


def _replay(seed: int) -> None:
    try:
        world = simulate(seed, whole_transcript=True)
    except InvariantBroken as broken:
        echo(broken.transcript)
        echo(f"seed {seed}: broken: {broken.invariant}: {broken.what}")
        sys.exit(EXIT_VIOLATED)
    echo(world.tell())
    finish = world.controller.finish
    assert finish is not None
    echo(f"seed {seed}: all invariants hold; exit code {finish.exit_code}: {finish.reason}")


def outlook_tables(outlook: Outlook, cluster: Cluster, so_far: TimeSpent | None = None) -> Iterator[RenderableType]:
    """Yield what there is to say, the sum first. `so_far`: the time of a real job, to be shown beside it."""
    faults = ", ".join(f"{count} {kind}" for kind, count in outlook.faults.most_common())
    yield Text.assemble(
        (f"goodput {100 * outlook.goodput:.2f} %", "bold"),
        f" over {outlook.hours:g} h on {outlook.ranks} ranks ({cluster.nodes} nodes, {cluster.spares} spare; ",
        f"seed {outlook.seed})\n{sum(outlook.faults.values())} faults: {faults or 'none'}",
    )
    yield _by_rung(outlook)
    yield _losses(outlook)
    yield from _as_counted(outlook.time, so_far)
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


def _as_counted(forecast: TimeSpent, so_far: TimeSpent | None) -> Iterator[RenderableType]:
    """Yield the categories in which `midstep status` counts the time of a real job."""
    text = f"as `midstep status` counts it: forecast {share_text(forecast.goodput)}"
    yield Text(text if so_far is None else f"{text}, so far {share_text(so_far.goodput)}", style="bold")
    yield time_table({"forecast": forecast, **({} if so_far is None else {"so far": so_far})})


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
