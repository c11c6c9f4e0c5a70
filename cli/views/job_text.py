"""A job's whole history on one page: outcome first, an overview, each incident, the budgets that are left."""

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ...protocol.incidents import BudgetUse, ControllerPhase, ControllerStatus, Incident, JobStatus, Outcome
from .causes import headline_cause
from .incident_text import OUTCOME_STYLES, incident_view
from .timeline import incident_end_s
from .timeline_text import legend
from .wording import (
    ABSENT,
    UNKNOWN,
    cell,
    clock_text,
    count_text,
    date_text,
    duration_text,
    lost_text,
    telling_line,
)

BUDGET_BAR = 20
OVERVIEW_ROWS = 20
CAUSE_WIDTH = 24
HOLD_ROWS = 5


def job_view(status: JobStatus, incidents: tuple[Incident, ...], *, width: int) -> RenderableType:
    """Return the report of the chosen incidents of a job, at most `width` columns wide."""
    parts: list[RenderableType] = [job_line(status), summary_line(status), *hold_lines(status)]
    if len(incidents) > 1:
        parts.extend((Text(""), overview(incidents, status.at_s)))
    for incident in incidents:
        parts.extend((Rule(style="dim", characters="-"), incident_view(incident, width=width, until_s=status.at_s)))
    if any(incident.rank_phases for incident in incidents):
        parts.extend((Text(""), *legend()))
    parts.append(Rule(style="dim", characters="-"))
    parts.append(budget_table(status))
    return Group(*parts)


def job_line(status: JobStatus) -> Text:
    """Return the first line: what became of the job, or what it is doing."""
    text = Text(f"Job {cell(status.job)}: ", style="bold")
    if status.exit_code is None:
        style = "bold yellow" if any(_is_open(incident) for incident in status.incidents) else "bold green"
        text.append(cell(status.phase).upper(), style=style)
        text.append(f" at step {status.committed}, {date_text(status.at_s)}")
    else:
        ended_well = status.exit_code == 0
        text.append("FINISHED" if ended_well else "FAILED", style="bold green" if ended_well else "bold red")
        text.append(f" with exit code {status.exit_code} at step {status.committed}, {date_text(status.at_s)}")
    if status.reason:
        text.append(f"\n{telling_line(status.reason)}")
    return text


def summary_line(status: JobStatus) -> Text:
    """Return the history in one line: incidents by outcome, steps lost, time spent."""
    incidents = status.incidents
    if not incidents:
        return Text("No incidents.")
    counts = [
        f"{sum(incident.outcome is outcome for incident in incidents)} {outcome}"
        for outcome in Outcome
        if any(incident.outcome is outcome for incident in incidents)
    ]
    resumed = [incident for incident in incidents if incident.outcome is Outcome.RESUMED]
    lost = lost_text(
        sum(incident.steps_lost for incident in resumed),
        is_known=all(incident.committed_is_known for incident in resumed),
    )
    recovering = [incident.recovery_s for incident in incidents if incident.recovery_s is not None]
    text = Text(f"{count_text(len(incidents), 'incident')} ({', '.join(counts)}), {lost}")
    if recovering:
        text.append(f", {duration_text(sum(recovering))} spent recovering")
    return text


def hold_lines(status: JobStatus) -> list[Text]:
    """Return what is held while most nodes are silent, and a line for each of the latest times that it was so."""
    lines = [Text(status.holding, style="bold yellow")] if status.holding else []
    for hold in status.holds[-HOLD_ROWS:]:
        end = f"{', '.join(hold.lost)} given up after that" if hold.lost else "none was given up for it"
        silent = f"{len(hold.nodes)} of {count_text(hold.watched, 'node')} silent for {duration_text(hold.held_s)}"
        lines.append(Text(f"held: {silent} up to {clock_text(hold.ended_s)}, {end}", style="yellow"))
    return lines


def controller_lines(status: JobStatus) -> list[Text]:
    """Return which controllers the job has, where there are several or the one is not in service, and a pause."""
    living, lines = status.controllers, []
    if len(living) > 1 or any(each.phase is not ControllerPhase.HOT for each in living):
        lines.append(Text("controllers: ").append(Text(", ".join(map(_controller_text, living)))))
    if status.failover_paused_until_s:
        until = date_text(status.failover_paused_until_s)
        lines.append(Text(f"failover is paused until {until}: no standby takes over", style="bold yellow"))
    return lines


def _controller_text(each: ControllerStatus) -> str:
    text = f"{cell(each.name)} (pid {each.pid}) {each.phase}"
    return f"{text}, term {each.term}" if each.term else text


def overview(incidents: tuple[Incident, ...], until_s: float) -> Table:
    """Return one line per incident; of a long history the latest ones."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("#", "outcome", "rung", "took", "excess", "lost"):
        right = name in ("#", "took", "excess", "lost")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    table.add_column("cause", overflow="fold", min_width=CAUSE_WIDTH)
    hidden = len(incidents) - OVERVIEW_ROWS
    if hidden > 0:
        table.add_row("...", "", "", "", "", "", f"{count_text(hidden, 'earlier incident')}")
    for incident in incidents[-OVERVIEW_ROWS:]:
        resumed = incident.outcome is Outcome.RESUMED
        table.add_row(
            str(incident.number),
            Text(str(incident.outcome), style=OUTCOME_STYLES[incident.outcome]),
            ABSENT if incident.rung is None else str(incident.rung),
            duration_text(incident_end_s(incident, until_s) - incident.began_s),
            duration_text(incident.excess_s),
            _lost_cell(incident) if resumed else ABSENT,
            headline_cause(incident),
        )
    return table


def _lost_cell(incident: Incident) -> str:
    return str(incident.steps_lost) if incident.committed_is_known else UNKNOWN


def budget_table(status: JobStatus) -> RenderableType:
    """Return the budgets with what is used of them; a spent one says so."""
    if not status.budgets:
        return Text("No budgets are limited.", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("budget", overflow="fold")
    table.add_column("used", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for budget in status.budgets:
        table.add_row(cell(budget.name), f"{budget.used} of {budget.limit}", _budget_bar(budget))
    return table


def _budget_bar(budget: BudgetUse) -> Text:
    if budget.limit <= 0:
        return Text("not allowed", style="dim")
    spent = budget.used >= budget.limit
    filled = BUDGET_BAR if spent else budget.used * BUDGET_BAR // budget.limit
    bar = Text(f"[{'#' * filled}{'.' * (BUDGET_BAR - filled)}]", style="red" if spent else "")
    return bar.append(" spent" if spent else "", style="bold red")


def _is_open(incident: Incident) -> bool:
    return incident.outcome is Outcome.OPEN
