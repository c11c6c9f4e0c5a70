"""An incident, and a job's whole history, in words for operators.

Of an incident the outcome comes first, then cause, decision, state and time; of a job an overview, each incident, and
the budgets that are left.
"""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ...protocol.incidents import (
    BudgetUse,
    ControllerPhase,
    ControllerStatus,
    Incident,
    JobStatus,
    Outcome,
    ProxyStatus,
)
from ...protocol.proxied import SILENT_S
from ...protocol.rank_logs import debug_log, output_log
from ...protocol.slow_records import SlowAnswer, SlowRecord, SlowTold
from ...protocol.time_spent import TimeSpent
from ...protocol.types import CONTROLLER, Decision, FaultKind, FaultReport, RestoreSource
from ...protocol.wording import FAULT_WORDS, numbers_text, one_line, ranks_text
from . import wording
from .causes import ReportGroup, headline_cause, level_text, place_text, report_groups
from .controls_text import record_lines, rule_lines
from .time_text import time_view
from .timeline import incident_end_s, lay_out
from .timeline_text import legend, timeline_view

REPORT_LINES = 8
NODE_OUTPUT_LINES = 8  # of what was printed on a node that is lost
OUTPUT_LINES = 4  # of what a process had printed; all that is kept is in the JSON
REPAIR_LINES = 8
PID_CHANGES = 8
LABEL_WIDTH = 9
OUTCOME_STYLES = {
    Outcome.RESUMED: "bold green",
    Outcome.STOPPED: "bold red",
    Outcome.OPEN: "bold yellow",
    Outcome.DISMISSED: "dim",
}
BUDGET_BAR = 20
OVERVIEW_ROWS = 20
CAUSE_WIDTH = 24
HOLD_ROWS = 5
SLOW_RECORDS = 20  # the latest; all that are kept are in the JSON
SLOW_RANKS = 8  # of one record
_DONE_ABOUT_SLOW = {
    SlowAnswer.REPORTED: "reported",
    SlowAnswer.DRAINED: "drained to a spare",
    SlowAnswer.SHRUNK: "left, the world shrank",
    SlowAnswer.RESTARTED: "left, all restarted",
}


def incident_view(incident: Incident, *, width: int, until_s: float | None = None) -> RenderableType:
    """Return an incident as text of at most `width` columns. `until_s`: now, for an open one (wall-clock)."""
    body = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    body.add_column(width=LABEL_WIDTH, style="dim", no_wrap=True)
    body.add_column(overflow="fold")
    for label, lines in (
        ("because", _ended_lines(incident)),
        ("cause", _cause_lines(incident)),
        ("decision", _decision_lines(incident)),
        ("state", _state_lines(incident)),
        ("processes", _process_lines(incident)),
        ("time", _time_lines(incident)),
    ):
        for index, line in enumerate(lines):
            body.add_row(label if index == 0 else "", line)
    timeline = lay_out(incident, until_s)
    parts: list[RenderableType] = [outcome_line(incident, until_s), Padding(body, (0, 0, 0, 2))]
    if timeline.phases or timeline.lanes:
        parts.extend((Text(""), timeline_view(timeline, width)))
    return Group(*parts)


def outcome_line(incident: Incident, until_s: float | None = None) -> Text:
    """Return the first line of an incident: how it ended, how long that took, by which rung, what it cost."""
    text = Text(f"Incident {incident.number}: ", style="bold")
    text.append(str(incident.outcome).upper(), style=OUTCOME_STYLES[incident.outcome])
    spent = wording.duration_text(incident_end_s(incident, until_s) - incident.began_s)
    rung = "" if incident.rung is None else f" by {incident.rung}"
    if incident.outcome is Outcome.RESUMED:
        text.append(f" after {spent}{rung}, {_lost_text(incident)}")
        text.append("" if incident.healthy_pids_kept else ", HEALTHY PROCESSES LOST", style="bold red")
    elif incident.outcome is Outcome.STOPPED:
        text.append(f" after {spent}")
    else:
        phase = f", {wording.cell(incident.phases[-1].name)}" if incident.phases else ""
        text.append(f" for {spent}{phase}{rung}")
    text.append(f"; {headline_cause(incident)}")
    return text


def _lost_text(incident: Incident) -> str:
    return wording.lost_text(incident.steps_lost, is_known=incident.committed_is_known)


def _cause_lines(incident: Incident) -> list[Text]:
    groups = report_groups(incident)
    lines = []
    for group in groups[:REPORT_LINES]:
        lines.append(_report_line(group, incident.began_s))
        lines.extend(_output_lines(group.first))
        lines.extend(_log_lines(group.first))
    if len(groups) > REPORT_LINES:
        lines.append(Text(f"... and {len(groups) - REPORT_LINES} more kinds of reports (see --json)", style="dim"))
    return lines or [Text("no fault was reported")]


def _log_lines(report: FaultReport) -> list[Text]:
    """Return where it is written what a process did that had no word for the controller when its time was over."""
    if report.kind is not FaultKind.UNRESPONSIVE or report.seen_by != CONTROLLER or report.rank is None:
        return []
    said, threads = (log("", report.rank, report.incarnation) for log in (output_log, debug_log))
    return [Text(f"  | where its threads stood: {threads}; what it said: {said}", style="dim")]


def last_words_view(incident: Incident) -> list[Text]:
    """Return what the process that ended first had printed; nothing where none has ended, or it printed nothing."""
    for group in report_groups(incident):
        quoted = _output_lines(group.first)
        if quoted:
            place = place_text(group.ranks[:1], group.nodes[:1])
            return [Text(f"incident {incident.number}: {place} had printed", style="dim"), *quoted]
    return []


def _output_lines(report: FaultReport) -> list[Text]:
    """Return the last lines that a process has printed, or those of a lost node, as quotations."""
    lines = [line for line in report.output.splitlines() if line.strip()]
    shown = _of_each_speaker(lines) if report.kind is FaultKind.NODE_LOST else lines[-OUTPUT_LINES:]
    return [Text(f"  | {one_line(line, wording.DETAIL_CHARACTERS)}", style="dim") for line in shown]


def _of_each_speaker(lines: list[str]) -> list[str]:
    """Return the last lines of each rank and of the agent, whose names the lines begin with: as many as have room."""
    of_each: dict[str, list[str]] = {}
    for line in lines:
        of_each.setdefault(line.partition("]")[0], []).append(line)
    count = max(1, NODE_OUTPUT_LINES // max(1, len(of_each)))
    return [line for said in of_each.values() for line in said[-count:]][:NODE_OUTPUT_LINES]


def _report_line(group: ReportGroup, began_s: float) -> Text:
    first = group.first
    place = place_text(group.ranks, group.nodes)
    text = Text()
    text.append(FAULT_WORDS[first.kind].name, style="bold")
    text.append(f", {place}" if place else "")
    detail = wording.telling_line(first.detail)
    hardware = level_text(first)
    text.append(f", {hardware}" if hardware else "")
    text.append(f": {detail}" if detail else "")
    seen = f"seen by {wording.cell(first.seen_by)}" if group.count == 1 else f"{group.count} reports"
    since_s = first.at_s - began_s
    when = f"+{wording.duration_text(since_s)}, " if since_s > 0 else ""
    return text.append(f" ({when}{seen})", style="dim")


def _decision_lines(incident: Incident) -> list[Text]:
    if not incident.decisions:
        return [Text("none yet")]
    lines = []
    for number, decision in enumerate(incident.decisions, start=1):
        prefix = f"{number}. " if len(incident.decisions) > 1 else ""
        failed = number < len(incident.decisions)
        lines.extend(_one_decision(decision, prefix, failed))
    return lines


def _one_decision(decision: Decision, prefix: str, failed: bool) -> list[Text]:
    taken = (
        Text(prefix)
        .append(str(decision.rung), style="bold")
        .append(f": {wording.telling_line(decision.reason, wording.REASON_CHARACTERS)}")
    )
    if failed:
        taken.append(" -> not completed", style="yellow")
    pad = " " * len(prefix)
    skipped = [
        Text(f"{pad}not {skipped.rung}: {wording.telling_line(skipped.reason, wording.REASON_CHARACTERS)}", style="dim")
        for skipped in decision.skipped
    ]
    return [taken, *skipped]


def _state_lines(incident: Incident) -> list[Text]:
    if incident.restore is None:
        return []
    source = {
        RestoreSource.REPLICA: "from live replicas",
        RestoreSource.HOST_COPY: "from copies in host memory",
        RestoreSource.CHECKPOINT: "from a checkpoint",
        RestoreSource.NOTHING: "none to restore: a fresh start",
    }[incident.restore]
    text = Text(source)
    text.append(f", {wording.size_text(incident.bytes_moved)} moved" if incident.bytes_moved else "")
    over_devices = incident.bytes_over_devices
    text.append(f" ({wording.size_text(over_devices)} from device to device)" if over_devices else "")
    if incident.outcome is Outcome.RESUMED and incident.resumed_step is not None:
        lost = f" ({incident.committed_before} were committed)" if incident.steps_lost else ""
        text.append(f", resumed at step {incident.resumed_step}: {_lost_text(incident)}{lost}")
    reasons = [Text(wording.telling_line(reason), style="dim") for reason in incident.repair_reasons[:REPAIR_LINES]]
    hidden = len(incident.repair_reasons) - REPAIR_LINES
    if hidden > 0:
        reasons.append(Text(f"... and {hidden} more lines (see --json)", style="dim"))
    return [text, *reasons]


def _process_lines(incident: Incident) -> list[Text]:
    if incident.outcome is not Outcome.RESUMED or not incident.pids_before:
        return []
    healthy = [rank for rank in incident.pids_before if rank not in incident.replaced]
    lost = [rank for rank in healthy if incident.pids_after.get(rank) != incident.pids_before[rank]]
    changed = sorted({*incident.replaced, *lost})
    moves = ", ".join(_pid_change(incident, rank) for rank in changed[:PID_CHANGES])
    more = f", and {len(changed) - PID_CHANGES} more" if len(changed) > PID_CHANGES else ""
    if not healthy:
        return [Text(f"all {len(changed)} replaced: {moves}{more}")]
    kept = Text(f"{len(healthy) - len(lost)} of {len(healthy)} healthy kept")
    kept.append(f"; replaced: {moves}{more}" if moves else "")
    if not lost:
        return [kept]
    return [Text(f"healthy, yet not the same afterwards: {ranks_text(lost)}", style="bold red"), kept]


def _pid_change(incident: Incident, rank: int) -> str:
    before, after = incident.pids_before.get(rank), incident.pids_after.get(rank)
    return f"rank {rank} (pid {before or 'none'} -> {after or 'none'})"


def _time_lines(incident: Incident) -> list[Text]:
    text = Text(f"began {wording.clock_text(incident.began_s)}")
    if incident.recovery_s is not None:
        text.append(f", recovery {wording.duration_text(incident.recovery_s)}, ")
        text.append(f"excess {wording.duration_text(incident.excess_s)}", style="bold")
        text.append(f" over one step of {wording.duration_text(incident.median_step_s)}")
    if len(incident.generations) > 1:
        text.append(f"; {len(incident.generations)} attempts, generations {numbers_text(incident.generations)}")
    return [text]


def _ended_lines(incident: Incident) -> list[Text]:
    if incident.outcome is Outcome.RESUMED:
        return []  # the first line says it
    style = "bold red" if incident.outcome is Outcome.STOPPED else ""
    reason = wording.telling_line(incident.ended_reason)
    return [Text(reason, style=style)] if reason else []


def job_view(
    status: JobStatus,
    incidents: tuple[Incident, ...],
    *,
    width: int,
    forecast: TimeSpent | None = None,
    slow: SlowTold | None = None,
) -> RenderableType:
    """Return the report of the chosen incidents of a job, at most `width` columns wide. `forecast`: as it was kept.

    `slow`: the nodes that were named slow, as far as that is known.
    """
    parts: list[RenderableType] = [job_line(status), summary_line(status), *hold_lines(status)]
    if len(incidents) > 1:
        parts.extend((Text(""), overview(incidents, status.at_s)))
    for incident in incidents:
        parts.extend((Rule(style="dim", characters="-"), incident_view(incident, width=width, until_s=status.at_s)))
    if any(incident.rank_phases for incident in incidents):
        parts.extend((Text(""), *legend()))
    parts.append(Rule(style="dim", characters="-"))
    parts.append(budget_table(status))
    named = slow_view(slow, status.at_s) if slow is not None else []
    parts.extend((Text(""), *named) if named else ())
    records = [*rule_lines(status), *record_lines(status, len(status.controls.records))]
    parts.extend((Text(""), *records) if records else ())
    time = time_view(status, forecast)
    parts.extend((Text(""), *time) if time else ())
    return Group(*parts)


def job_line(status: JobStatus) -> Text:
    """Return the first line: what became of the job, or what it is doing."""
    text = Text(f"Job {wording.cell(status.job)}: ", style="bold")
    if status.exit_code is None:
        style = "bold yellow" if any(_is_open(incident) for incident in status.incidents) else "bold green"
        text.append(wording.cell(status.phase).upper(), style=style)
        text.append(f" at step {status.committed}, {wording.date_text(status.at_s)}")
    else:
        ended_well = status.exit_code == 0
        text.append("FINISHED" if ended_well else "FAILED", style="bold green" if ended_well else "bold red")
        text.append(f" with exit code {status.exit_code} at step {status.committed}, {wording.date_text(status.at_s)}")
    if status.reason:
        text.append(f"\n{wording.telling_line(status.reason)}")
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
    lost = wording.lost_text(
        sum(incident.steps_lost for incident in resumed),
        is_known=all(incident.committed_is_known for incident in resumed),
    )
    recovering = [each.recovery_s for each in incidents if each.recovery_s is not None and not each.is_requested]
    text = Text(f"{wording.count_text(len(incidents), 'incident')} ({', '.join(counts)}), {lost}")
    if recovering:
        text.append(f", {wording.duration_text(sum(recovering))} spent recovering")
    return text


def hold_lines(status: JobStatus) -> list[Text]:
    """Return what is held while most nodes are silent, and a line for each of the latest times that it was so."""
    lines = [Text(status.holding, style="bold yellow")] if status.holding else []
    for hold in status.holds[-HOLD_ROWS:]:
        end = f"{', '.join(hold.lost)} given up after that" if hold.lost else "none was given up for it"
        watched, held = wording.count_text(hold.watched, "node"), wording.duration_text(hold.held_s)
        silent = f"{len(hold.nodes)} of {watched} silent for {held}"
        lines.append(Text(f"held: {silent} up to {wording.clock_text(hold.ended_s)}, {end}", style="yellow"))
    return lines


def controller_lines(status: JobStatus) -> list[Text]:
    """Return which controllers the job has, where there are several or one is not in service; proxies; and a pause."""
    living, lines = status.controllers, []
    if len(living) > 1 or any(each.phase is not ControllerPhase.HOT for each in living):
        lines.append(Text("controllers: ").append(Text(", ".join(map(_controller_text, living)))))
    if status.proxies:
        lines.append(Text("proxies: ").append(Text(", ".join(map(_proxy_text, status.proxies)))))
    if status.failover_paused_until_s:
        until = wording.date_text(status.failover_paused_until_s)
        lines.append(Text(f"failover is paused until {until}: no standby takes over", style="bold yellow"))
    return lines


def _controller_text(each: ControllerStatus) -> str:
    text = f"{wording.cell(each.name)} (pid {each.pid}) {each.phase}"
    return f"{text}, term {each.term}" if each.term else text


def _proxy_text(each: ProxyStatus) -> str:
    text = f"{wording.cell(each.name)} with {wording.count_text(each.nodes, 'node')}"
    return f"{text}, silent for {wording.duration_text(each.silent_s)}" if each.silent_s > SILENT_S else text


def overview(incidents: tuple[Incident, ...], until_s: float) -> Table:
    """Return one line per incident; of a long history the latest ones."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("#", "outcome", "rung", "took", "excess", "lost"):
        right = name in ("#", "took", "excess", "lost")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    table.add_column("cause", overflow="fold", min_width=CAUSE_WIDTH)
    hidden = len(incidents) - OVERVIEW_ROWS
    if hidden > 0:
        table.add_row("...", "", "", "", "", "", f"{wording.count_text(hidden, 'earlier incident')}")
    for incident in incidents[-OVERVIEW_ROWS:]:
        resumed = incident.outcome is Outcome.RESUMED
        table.add_row(
            str(incident.number),
            Text(str(incident.outcome), style=OUTCOME_STYLES[incident.outcome]),
            wording.ABSENT if incident.rung is None else str(incident.rung),
            wording.duration_text(incident_end_s(incident, until_s) - incident.began_s),
            wording.duration_text(incident.excess_s),
            _lost_cell(incident) if resumed else wording.ABSENT,
            headline_cause(incident),
        )
    return table


def _lost_cell(incident: Incident) -> str:
    return str(incident.steps_lost) if incident.committed_is_known else wording.UNKNOWN


def budget_table(status: JobStatus) -> RenderableType:
    """Return the budgets with what is used of them; a spent one says so."""
    if not status.budgets:
        return Text("No budgets are limited.", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("budget", overflow="fold")
    table.add_column("used", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for budget in status.budgets:
        table.add_row(wording.cell(budget.name), f"{budget.used} of {budget.limit}", _budget_bar(budget))
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


def slow_view(slow: SlowTold, at_s: float) -> list[RenderableType]:
    """Return a line for each rank that was named slow, the earliest first; nothing where none was.

    `at_s`: now, in wall-clock seconds.
    """
    if not slow.records:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("named", "rank", "node", "score", "since", "for", "what was done"):
        right = name in {"rank", "score"}
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=name == "score")
    for record in slow.records[-SLOW_RECORDS:]:
        for row in _slow_rows(record, at_s):
            table.add_row(*row)
    told: list[RenderableType] = [table]
    hidden = max(0, len(slow.records) - SLOW_RECORDS) + slow.left_out
    if hidden:
        told.append(
            Text(f"{wording.count_text(hidden, 'earlier time')} that a node was named slow left out", style="dim")
        )
    told.append(Text("A score of 2 means twice as long as others; - means no score. This was measured:", style="dim"))
    told += [
        Text(f"{wording.cell(each.node)}: {wording.telling_line(each.said)}", style="dim")
        for each in slow.records[-SLOW_RECORDS:]
    ]
    return told


def _slow_rows(record: SlowRecord, at_s: float) -> list[tuple[str, ...]]:
    """Return a row for each rank; for the node, where no number is of one rank."""
    until_s = at_s if record.until_s is None else record.until_s
    lasted = wording.duration_text(max(0.0, until_s - record.since_s))
    done = _DONE_ABOUT_SLOW[record.answer]
    if record.incident is not None:
        done = f"{done}, incident {record.incident}"
    elif record.until_s is None:
        lasted = f"{lasted} so far"
    tail = (wording.date_text(record.since_s), lasted, done)
    kind, node = FAULT_WORDS[record.kind].name, wording.cell(record.node)
    worst = sorted(record.scores.items(), key=lambda each: (-each[1], each[0]))
    rows: list[tuple[str, ...]] = [(kind, str(rank), node, f"{score:.2f}", *tail) for rank, score in worst[:SLOW_RANKS]]
    if len(worst) > SLOW_RANKS:
        rows.append((kind, f"+{len(worst) - SLOW_RANKS}", node, wording.ABSENT, *tail))
    return rows or [(kind, wording.ABSENT, node, wording.ABSENT, *tail)]
