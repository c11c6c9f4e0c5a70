"""`midstep status` of a job of several roles: a line for the job, and one for each role."""

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ...launch.reached_job import GroupLook, RoleLook
from .wording import ABSENT, cell, count_text, date_text, duration_text

_STYLES = {"running": "green", "stopping": "yellow", "ended": "dim"}
_RESTARTS = 5


def group_view(group: GroupLook) -> RenderableType:
    """Return the status of a job of roles as text; the first line is what the job is doing."""
    parts: list[RenderableType] = [_job_line(group)]
    if group.restarts:
        parts.append(Text(f"all roles were restarted {count_text(len(group.restarts), 'time')}:"))
        parts += [
            Text(f"  {date_text(each.at_s)} role {cell(each.role)}: {cell(each.reason)}", style="yellow")
            for each in group.restarts[-_RESTARTS:]
        ]
    parts += [Rule(style="dim", characters="-"), _table(group)]
    parts += [Text(f"role {each.role}: {cell(each.note)}", style="yellow") for each in group.roles if _is_strange(each)]
    parts.append(
        Text(f"`midstep status {group.job}/ROLE`, `midstep report {group.job}/ROLE`: one of them", style="dim")
    )
    return Group(*parts)


def _job_line(group: GroupLook) -> Text:
    until = "" if len(group.until) == len(group.roles) else f", until {', '.join(group.until)}"
    text = Text(f"job {group.job}, {count_text(len(group.roles), 'role')}{until}: ", style="bold")
    if group.exit_code is not None:
        return text.append(
            f"ended with exit code {group.exit_code}: {cell(group.reason)}", "dim" if not group.exit_code else "red"
        )
    text.append(group.phase, "green" if group.phase == "running" else "yellow")
    if not group.live:
        text.append(f"; its `midstep run` has gone: `midstep resume {group.job}` continues it", "bold red")
    return text


def _table(group: GroupLook) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("role", "attempt", "state", "phase", "ranks", "steps", "median step", "incidents", "ended"):
        table.add_column(name, justify="right" if name in {"attempt", "ranks", "steps", "incidents"} else "left")
    for each in group.roles:
        status = each.status
        ended = ABSENT if each.exit_code is None else f"{each.exit_code}: {cell(each.reason)}"
        table.add_row(
            each.role,
            str(each.attempt),
            Text(each.state, style=_STYLES.get(each.state, "")),
            ABSENT if status is None else cell(status.phase),
            ABSENT if status is None else str(len(status.ranks)),
            ABSENT if status is None else str(status.committed),
            ABSENT if status is None else duration_text(status.median_step_s or None),
            ABSENT if status is None else str(len(status.incidents) + status.incidents_left_out),
            ended,
        )
    return table


def _is_strange(role: RoleLook) -> bool:
    return bool(role.note) and role.state == "running"
