"""`midstep status` as text: a job, its ranks, nodes and budgets; of a job of roles a line for each role."""

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ...launch.reached_job import GroupLook, RoleLook
from ...policies.fault_codes import TREATMENTS, Treatment
from ...protocol.incidents import Incident, JobStatus, NodeStatus, Outcome, RankStatus, StandingFault
from ...protocol.reports import PreparedProcesses
from ...protocol.time_spent import TimeSpent
from ...protocol.types import DETECTOR_PREFIX, FaultReport, StandbyDepth
from ...protocol.wording import nodes_text, numbers_text, one_line
from .controls_text import record_lines, rule_lines, standing_lines
from .kept_state import copy_left, host_copies, last_vote
from .report_text import (
    budget_table,
    controller_lines,
    hold_lines,
    job_line,
    last_words_view,
    overview,
    summary_line,
)
from .time_text import time_line
from .wording import ABSENT, cell, count_text, date_text, duration_text, size_text, telling_line

RANK_ROWS = 32  # of a big world: first the ranks whose state is not the most common one
INCIDENTS = 5
CONTROLS = 5
FAULT_ROWS = 16
SHOWN_SLOWNESS = 1.1  # times as long as others
SLOW_OTHERS = 3  # that are named beside the slowest rank
STRANGERS = 3  # names of nodes that are not the job's
_SEVERITY = {each: place for place, each in enumerate(reversed(tuple(Treatment)))}
FAULT_STYLES = {Treatment.LEAVE: "bold red", Treatment.RESTART: "yellow", Treatment.CLOSE: "yellow"}
NODE_STYLES = {"active": "green", "spare": "cyan", "unfit": "yellow", "lost": "bold red", "isolated": "bold yellow"}
_STYLES = {"running": "green", "stopping": "yellow", "ended": "dim"}
_RESTARTS = 5


def status_view(status: JobStatus, forecast: TimeSpent | None = None) -> RenderableType:
    """Return the status as text; the first line is what the job is doing. `forecast`: where one was kept with it."""
    time = time_line(status, forecast)
    parts: list[RenderableType] = [job_line(status), _figures(status), *time, summary_line(status)]
    parts += [
        *copy_lines(status),
        *vote_lines(status),
        *slowness_lines(status),
        *controller_lines(status),
        *hold_lines(status),
        *webhook_lines(status),
    ]
    parts += standing_lines(status)
    parts.extend((Rule(style="dim", characters="-"), rank_table(status.ranks)))
    parts.extend((Text(""), node_table(status.nodes), *imports_lines(status.nodes)))
    if status.faults:
        known = frozenset(node.node for node in status.nodes)
        parts.extend((Text(""), fault_table(status.faults, status.at_s, known), *_strangers(status.faults, known)))
    parts.extend((Rule(style="dim", characters="-"), budget_table(status)))
    if status.incidents:
        parts.extend((Text(""), overview(status.incidents[-INCIDENTS:], status.at_s)))
        parts.extend((*_decision(status.incidents[-1]), *last_words_view(status.incidents[-1])))
    parts += [*reported_lines(status), *rule_lines(status), *record_lines(status, CONTROLS)]
    if status.incidents_left_out or status.faults_left_out:
        left_out = (
            f"{count_text(status.incidents_left_out, 'incident')} and {count_text(status.faults_left_out, 'fault')}"
        )
        parts.append(Text(f"{left_out} left out, the earliest: too many for one answer", style="dim"))
    if status.refused:
        counted = ", ".join(f"{cell(reason)}: {count}" for reason, count in sorted(status.refused.items()))
        parts.append(Text(f"messages refused: {counted}", style="yellow"))
    return Group(*parts)


def copy_lines(status: JobStatus) -> list[Text]:
    """Return how old the copies in host memory are, what they take, and what they are for; nothing where none is."""
    copies = host_copies(status)
    if copies is None:
        return []
    nodes = sorted({rank.node for rank in status.ranks})
    told = f"host copies: {copies.in_words()}; {size_text(copies.memory_bytes)} on {count_text(len(nodes), 'node')}"
    if not copies.step:
        return [Text(told, style="yellow")]
    left = {node: copy_left(status.ranks, {node}) for node in nodes}
    least, bare = min(left.values()), [node for node, step in left.items() if not step]
    node = "a lost node" if len(bare) in {0, len(nodes)} else f"{nodes_text(bare)}, if lost,"
    costs = "goes back to a checkpoint" if bare else "too" if least == copies.step else f"those of step {least}"
    return [Text(f"{told}; a lost process without a replica costs these, {node} {costs}")]


def vote_lines(status: JobStatus) -> list[Text]:
    """Return which state has passed the last vote of the ranks, and what no vote checks; nothing where none is held."""
    vote = last_vote(status)
    return [] if vote is None else [Text(f"votes: {vote.in_words()}", style="yellow" if vote.unchecked else "")]


def reported_lines(status: JobStatus) -> list[Text]:
    """Return what the script has reported last, in one line for each step and rank that it is of."""
    found: dict[tuple[int, int], list[str]] = {}
    for each in status.reported:
        found.setdefault((each.steps[-1], each.rank), []).append(f"{cell(each.name)} {each.values[-1]:.6g}")
    return [
        Text(f"reported by rank {rank} for step {step:,}: {', '.join(values)}")
        for (step, rank), values in found.items()
    ]


def slowness_lines(status: JobStatus) -> list[Text]:
    """Return which rank is the slowest, and by how much, and the next ones; nothing where none is much slower."""
    slow = sorted((rank for rank in status.ranks if rank.slowness >= SHOWN_SLOWNESS), key=lambda each: -each.slowness)
    if not slow:
        return []
    worst, *others = slow
    text = (
        f"slowest: rank {worst.rank} on {cell(worst.node)} computes for {duration_text(worst.own_s)} in a step, "
        f"{worst.slowness:.2f} times as long as others with equal work"
    )
    named = [f"rank {each.rank} on {cell(each.node)} {each.slowness:.2f} times" for each in others[:SLOW_OTHERS]]
    named += [f"{len(others) - SLOW_OTHERS} more"] if len(others) > SLOW_OTHERS else []
    return [Text("; ".join((text, *([f"then {', '.join(named)}"] if named else []))))]


def webhook_lines(status: JobStatus) -> list[Text]:
    """Return a line for each webhook that does not take what is for it."""
    failing = [each for each in status.webhooks if each.trouble]
    return [
        Text(
            f"webhook {cell(each.name)}: {one_line(each.trouble)}; {count_text(each.waiting, 'notice')} waiting",
            style="bold yellow",
        )
        for each in failing
    ]


def _figures(status: JobStatus) -> Text:
    text = Text(f"phase {cell(status.phase)}, generation {status.generation}, term {status.term}, ")
    if len(status.ranks) < status.ranks_asked:
        text.append(f"{len(status.ranks)} of {count_text(status.ranks_asked, 'rank')}", style="bold yellow").append(
            ", "
        )
    text.append(f"{count_text(status.committed, 'step')} committed, ")
    return text.append(f"median step {duration_text(status.median_step_s or None)}")


def _decision(incident: Incident) -> list[Text]:
    """Say what is being done about an incident that is open, and why, in the words of the decision."""
    if incident.outcome is not Outcome.OPEN or not incident.decisions:
        return []
    *passed_over, taken = incident.decisions[-1].in_words()
    return [*(Text(one_line(line), style="dim") for line in passed_over), Text(one_line(taken))]


def rank_table(ranks: tuple[RankStatus, ...]) -> RenderableType:
    """Return a line per rank; in a big world those that differ from the rest come first, and the rest is counted."""
    if not ranks:
        return Text("No rank has joined yet.", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    with_roles = any(rank.role for rank in ranks)
    for name in ("rank", *(["role"] if with_roles else []), "node", "pid", "incarnation", "state", "activity", "step"):
        right = name in ("rank", "pid", "incarnation", "step")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    states = [rank.state for rank in ranks]
    usual = max(set(states), key=lambda state: (states.count(state), state))
    shown = sorted(ranks, key=lambda rank: (rank.state == usual, rank.rank))[:RANK_ROWS]
    for rank in sorted(shown, key=lambda rank: rank.rank):
        table.add_row(
            str(rank.rank),
            *([cell(rank.role) or ABSENT] if with_roles else []),
            cell(rank.node) or ABSENT,
            str(rank.pid) if rank.pid else ABSENT,
            str(rank.incarnation),
            Text(cell(rank.state), style="" if rank.state == usual else "bold yellow"),
            cell(rank.activity) or ABSENT,
            str(rank.step),
        )
    hidden = len(ranks) - len(shown)
    if not hidden:
        return table
    return Group(table, Text(f"... and {hidden} more ranks, most of them {cell(usual)} (see --json)", style="dim"))


def node_table(nodes: tuple[NodeStatus, ...]) -> RenderableType:
    """Return a line per node with its failure domain, state and ranks, how often it failed and why it is not used."""
    if not nodes:
        return Text("No node has joined yet.", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    more = ["failures"] if any(node.failures for node in nodes) else []
    more += ["built ahead"] if any(_built(node) for node in nodes) else []
    more += ["note"] if any(node.note for node in nodes) else []
    for name in ("node", "domain", "state", "ranks", *more):
        table.add_column(name, overflow="fold")
    for node in nodes:
        state = Text(cell(node.state), style=NODE_STYLES.get(node.state, ""))
        said = {"failures": str(node.failures), "built ahead": _built(node), "note": cell(node.note)}
        ranks = numbers_text(node.ranks) or ABSENT
        names = cell(node.node), cell(node.failure_domain)
        table.add_row(*names, state, ranks, *(said[name] or ABSENT for name in more))
    return table


def _built(node: NodeStatus) -> str:
    """Return the ranks whose next process is built on a node, and what that took."""
    built = next((each for each in node.prepared if each.depth is StandbyDepth.BUILT and each.ranks), None)
    return "" if built is None else f"{numbers_text(built.ranks)} ({built.cost_in_words()})"


def imports_lines(nodes: tuple[NodeStatus, ...]) -> list[Text]:
    """Return what the imports cost that nodes have done ahead for the next process."""
    done = [each for node in nodes for each in node.prepared if each.depth is StandbyDepth.IMPORTED]
    if not done:
        return []
    most = PreparedProcesses(
        StandbyDepth.IMPORTED, (), max(each.took_s for each in done), max(each.memory_bytes for each in done)
    )
    text = f"imported ahead on {count_text(len(done), 'node')}: up to {most.cost_in_words()} each"
    return [Text(text, style="dim")]


def _strangers(faults: tuple[StandingFault, ...], known: frozenset[str]) -> list[Text]:
    """Say which nodes with faults the job does not have: it may have them by another name."""
    names = dict.fromkeys(
        fault.report.node for fault in faults if fault.report.node is not None and fault.report.node not in known
    )
    if not names:
        return []
    shown = ", ".join(cell(name) for name in list(names)[:STRANGERS])
    more = f" and {len(names) - STRANGERS} more" if len(names) > STRANGERS else ""
    text = (
        f"no node of this job is named {shown}{more}, so nothing is done about these faults. If it has the node under "
        "another name, say so: faults.node_names in the policy, or midstep detect --node-name NAME=NODE"
    )
    return [Text(text, style="yellow")]


def fault_table(faults: tuple[StandingFault, ...], at_s: float, known: frozenset[str]) -> RenderableType:
    """Return a line per fault that stands, the worst first: where, what, since when, and reported by what.

    `known`: the nodes of the job.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("standing fault", "code", "where", "for", "seen by", "meaning"):
        table.add_column(name, overflow="fold")
    for fault in sorted(faults, key=lambda fault: _SEVERITY[TREATMENTS[fault.report.level]])[:FAULT_ROWS]:
        report = fault.report
        table.add_row(
            Text(str(report.level), style=FAULT_STYLES.get(TREATMENTS[report.level], "")),
            cell(report.code or ABSENT),
            _fault_place(report, known),
            duration_text(max(0.0, at_s - fault.since_s)),
            cell(report.seen_by.removeprefix(DETECTOR_PREFIX)),
            telling_line(report.meaning or report.detail),
        )
    hidden = len(faults) - FAULT_ROWS
    if hidden <= 0:
        return table
    return Group(table, Text(f"... and {hidden} more (see --json)", style="dim"))


def _fault_place(report: FaultReport, known: frozenset[str]) -> str:
    device = None if report.device is None else f"device {report.device}"
    place = cell(", ".join(part for part in (report.node, device) if part)) or ABSENT
    return place if report.node is None or report.node in known else f"{place} (not of this job)"


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
