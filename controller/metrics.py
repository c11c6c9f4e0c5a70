"""The numbers of a job for Prometheus: which there are, and how they follow from where the job stands. Pure.

The loop takes them now and then and publishes the result, which does not change any more. Who scrapes reads that, in a
thread of its own (`endpoints/metrics_server.py`). Labels are bounded: there is nothing per rank or per node.

Counters begin with what the journal still knows (1,000 incidents) when a controller takes over, and only grow then.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from ..protocol.compat import StrEnum
from ..protocol.faults import FaultKind
from ..protocol.incidents import BudgetUse, Incident, Outcome, ReportedSeries
from ..protocol.time_spent import TimeCategory, TimeSpent
from ..protocol.types import Rung
from .recovery.state import JobState, Phase
from .recovery.world import NodeState, RankState

MOST_REASONS = 50  # for which a message was refused; the rest is one
OTHER = "other"
STEP_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
RECOVERY_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
PUBLISH_S = 1.0
PUBLISH_PER_RANK_S = 0.0005  # to look at 10,000 ranks takes some milliseconds, each 5 s then
_WHOLE = "whole"
_PARTS = {
    Phase.SUSPECTING: TimeCategory.DETECT,
    Phase.STARTING: TimeCategory.RESTART,
    Phase.WAITING: TimeCategory.WAITING,
    Phase.QUIESCING: TimeCategory.QUIESCE,
    Phase.REJOINING: TimeCategory.REJOIN,
    Phase.RESUMING: TimeCategory.FIRST_STEP,
}
_WINDOWS = {3600: "hour", 24 * 3600: "day", 30 * 24 * 3600: "month"}


class MetricKind(StrEnum):
    """The types of Prometheus that are used."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Metric(msgspec.Struct, frozen=True):
    """One name, with what it says, its unit where it has one, and its labels."""

    name: str
    kind: MetricKind
    says: str
    unit: str = ""
    labels: tuple[str, ...] = ()


_G, _C, _H = MetricKind.GAUGE, MetricKind.COUNTER, MetricKind.HISTOGRAM
METRICS = {
    metric.name: metric
    for metric in (
        Metric("midstep_job_info", _G, "1; the job that the controller leads.", labels=("name", "version")),
        Metric("midstep_controller_leader", _G, "1: this controller leads the job; others serve nothing."),
        Metric("midstep_controller_term", _G, "Number of this controller's time in office."),
        Metric("midstep_phase", _G, "1 for the phase in which the job is, 0 for all others.", labels=("phase",)),
        Metric("midstep_generation", _G, "Number of the world's present membership."),
        Metric("midstep_exit_code", _G, "The job's exit code; absent until it has ended."),
        Metric("midstep_step", _G, "The most steps that any rank has committed."),
        Metric("midstep_step_seconds", _H, "Time of a step, by how far ranks are at each look.", "seconds"),
        Metric("midstep_goodput_ratio", _G, "Share of training of the time since the job began, and of windows of it.",
               "ratio", ("window",)),
        Metric("midstep_time_seconds_total", _C, "Time since the job began, by what it was spent on.", "seconds",
               ("category",)),
        Metric("midstep_incidents_total", _C, "Incidents that have ended: by the last rung, how, and the first fault.",
               labels=("rung", "outcome", "kind")),
        Metric("midstep_incident_open", _G, "1 while an incident is open."),
        Metric("midstep_recovery_seconds", _H, "Time of resumed incidents, in all (whole) and by part; no requests.",
               "seconds", ("part",)),
        Metric("midstep_steps_lost_total", _C, "Committed steps that were lost in incidents."),
        Metric("midstep_rules_broken_total", _C, "Times that a rule of the policy was broken.", labels=("rule",)),
        Metric("midstep_steps_left_out_total", _C, "Steps whose batches a rule has left out."),
        Metric("midstep_budget_used", _G, "What is spent of a budget.", labels=("rung", "scope")),
        Metric("midstep_budget_limit", _G, "Limit of a budget.", labels=("rung", "scope")),
        Metric("midstep_nodes", _G, "Nodes that are known, by state.", labels=("state",)),
        Metric("midstep_ranks", _G, "Ranks, by the state of their processes.", labels=("state",)),
        Metric("midstep_ranks_asked", _G, "Ranks that the job asked for."),
        Metric("midstep_standbys", _G, "Processes that nodes have prepared for a fault, by depth.", labels=("depth",)),
        Metric("midstep_standing_faults", _G, "Faults of hardware that stand, by level.", labels=("level",)),
        Metric("midstep_slowest_rank_ratio", _G, "Own time of the slowest rank, in times of that of ranks with equal "
               "work; absent until ranks were compared.", "ratio"),
        Metric("midstep_checkpoint_step", _G, "Newest checkpoint that a process has told of at its last start or stop; "
               "absent where none has."),
        Metric("midstep_controllers", _G, "Controllers that are known to live, the leader among them."),
        Metric("midstep_journal_writable", _G, "0 while the journal cannot be written, and nothing is decided."),
        Metric("midstep_messages_refused_total", _C, "Messages that changed nothing, by reason; after 50 reasons: "
               "other.", labels=("reason",)),
    )
}  # fmt: skip

Labels = tuple[str, ...]
_NONE = "none"
# There from the beginning: what grows from nothing to one has not increased, as Prometheus counts. Not of kinds that
# end the job, are shown only, or come with a planned change.
_RARE = {FaultKind.REFUSED, FaultKind.SLOW_INPUT, FaultKind.SLOW_LINK, FaultKind.DETECTOR, FaultKind.NODE_JOINED}
_RESUMED = tuple(
    (str(rung), str(Outcome.RESUMED), str(kind))
    for rung in Rung
    if rung is not Rung.STOP
    for kind in FaultKind
    if kind not in _RARE
)


class Distribution(msgspec.Struct, frozen=True):
    """A histogram: bounds, how many were at most so large (not in an earlier bucket), the sum. The last: above all."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float


class MetricsSnapshot(msgspec.Struct, frozen=True):
    """All numbers at one moment: by metric, then by the values of its labels."""

    at_s: float
    values: dict[str, dict[Labels, float]]
    distributions: dict[str, dict[Labels, Distribution]]


class Observation(msgspec.Struct, frozen=True):
    """The job as its controller sees it now. For the loop's thread: `state` changes afterwards."""

    at_s: float
    state: JobState
    step: int  # the most that any rank has committed
    time: TimeSpent | None
    time_lately: tuple[TimeSpent, ...]
    refused: Mapping[str, int]
    term: int
    controllers: int = 1
    writable: bool = True
    reported: tuple[ReportedSeries, ...] = ()  # by the script, with `step.report`
    is_heard: bool = True  # ranks have told this controller how far they are; the journal is behind that
    slowness: float = 0.0  # own time of the slowest rank, in times of that of its equals; 0: not compared


@dataclass
class _Histogram:
    bounds: tuple[float, ...]
    counts: list[float] = field(default_factory=list)
    total: float = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts = self.counts or [0.0] * (len(self.bounds) + 1)
        self.counts[sum(bound < value for bound in self.bounds)] += times
        self.total += value * times

    def frozen(self) -> Distribution:
        return Distribution(self.bounds, tuple(self.counts or [0.0] * (len(self.bounds) + 1)), self.total)


class MetricsBook:
    """Makes snapshots, and counts what has no count elsewhere. One for each controller."""

    def __init__(self, version: str) -> None:
        """`version`: of midstep."""
        self._version = version
        self._ended = 0  # the number of the latest incident that is counted
        self._incidents: Counter[Labels] = Counter(dict.fromkeys(_RESUMED, 0))
        self._lost = 0
        self._recovery = {(part,): _Histogram(RECOVERY_BUCKETS_S) for part in (*map(str, _PARTS.values()), _WHOLE)}
        self._steps = _Histogram(STEP_BUCKETS_S)
        self._time_s: dict[Labels, float] = {}
        self._reasons: dict[str, None] = {}
        self._trained: tuple[int, float] | None = None  # the step that was seen last, and when it was new

    def snapshot(self, seen: Observation) -> MetricsSnapshot:
        """Return all numbers as of now."""
        self._count_incidents(seen.state)
        self._count_steps(seen)
        values: dict[str, dict[Labels, float]] = {
            "midstep_job_info": {(seen.state.job.job, self._version): 1.0},
            "midstep_controller_leader": {(): 1.0},
            "midstep_controller_term": {(): float(seen.term)},
            "midstep_controllers": {(): float(seen.controllers)},
            "midstep_journal_writable": {(): float(seen.writable)},
            "midstep_step": {(): float(seen.step)},
            "midstep_slowest_rank_ratio": {(): seen.slowness} if seen.slowness else {},
            "midstep_incidents_total": {labels: float(count) for labels, count in self._incidents.items()},
            "midstep_steps_lost_total": {(): float(self._lost)},
            "midstep_messages_refused_total": self._refused(seen.refused),
            **self._of_time(seen),
            **_of_state(seen.state, seen.at_s),
        }
        distributions: dict[str, dict[Labels, Distribution]] = {
            "midstep_step_seconds": {(): self._steps.frozen()},
            "midstep_recovery_seconds": {labels: each.frozen() for labels, each in self._recovery.items()},
        }
        return MetricsSnapshot(seen.at_s, values, distributions)

    def _count_incidents(self, state: JobState) -> None:
        for incident in state.history.incidents:
            if incident.number <= self._ended or incident.outcome is Outcome.OPEN:
                continue
            self._ended = incident.number
            self._incidents[_labels(incident, incident.outcome)] += 1
            self._lost += incident.steps_lost
            if incident.outcome is Outcome.RESUMED and not incident.is_requested:
                for part, duration_s in _parts(incident).items():
                    self._recovery.setdefault((part,), _Histogram(RECOVERY_BUCKETS_S)).observe(duration_s)

        if state.history.open is not None:  # rarer ends begin at 0 as well, if a scrape comes before the end
            for outcome in (Outcome.STOPPED, Outcome.DISMISSED):
                self._incidents.setdefault(_labels(state.history.open, outcome), 0)

    def _count_steps(self, seen: Observation) -> None:
        """Count the steps since the last look, each as long as their mean. Only while nothing is wrong."""
        if seen.state.phase is not Phase.RUNNING:
            self._trained = None
            return
        before, since_s = self._trained or (seen.step, seen.at_s)
        if seen.step > before and seen.at_s > since_s:
            self._steps.observe((seen.at_s - since_s) / (seen.step - before), seen.step - before)
        if self._trained is None or seen.step != before:
            self._trained = seen.step, seen.at_s

    def _of_time(self, seen: Observation) -> dict[str, dict[Labels, float]]:
        spent = {} if seen.time is None else seen.time.seconds
        for category in TimeCategory:  # time that is booked once more is waited for: a counter never falls
            labels = (str(category),)
            self._time_s[labels] = max(self._time_s.get(labels, 0.0), spent.get(category, 0.0))
        windows = {_WINDOWS[round(each.wall_s)]: each for each in seen.time_lately}
        of_all = {} if seen.time is None else {"job": seen.time}
        ratios: dict[Labels, float] = {
            (name,): each.goodput for name, each in {**of_all, **windows}.items() if each.goodput is not None
        }
        return {"midstep_time_seconds_total": dict(self._time_s), "midstep_goodput_ratio": ratios}

    def _refused(self, refused: Mapping[str, int]) -> dict[Labels, float]:
        counts: dict[Labels, float] = {}
        for reason, count in refused.items():
            if len(self._reasons) < MOST_REASONS:
                self._reasons[reason] = None
            label = reason if reason in self._reasons else OTHER
            counts[(label,)] = counts.get((label,), 0.0) + count
        return counts


def publish_every_s(ranks: int) -> float:
    """Return how often numbers are taken of a job of so many ranks."""
    return max(PUBLISH_S, PUBLISH_PER_RANK_S * ranks)


def _of_state(state: JobState, now: float) -> dict[str, dict[Labels, float]]:
    world, phase = state.world, state.phase
    nodes = Counter(str(node.state) for node in world.nodes.values())
    shown = Counter[str]()
    for each in RankState:
        shown[each.shown] += world.count(each)
    standbys = Counter[str]()
    for node in world.nodes.values():
        for prepared in node.prepared.values() if node.state is not NodeState.LOST else ():
            standbys[str(prepared.depth)] += len(prepared.ranks) or 1
    budgets = state.ladder.budgets(state.spent, now)
    checkpoints = [max(h.report.checkpoints) for h in world.holders if h.report is not None and h.report.checkpoints]
    levels = Counter(str(fault.report.level) for fault in state.book.standing())
    return {
        "midstep_phase": {(str(each),): float(each is phase) for each in Phase},
        "midstep_generation": {(): float(state.generation)},
        "midstep_exit_code": {} if state.result is None else {(): float(state.result.exit_code)},
        "midstep_incident_open": {(): float(state.history.open is not None)},
        "midstep_rules_broken_total": {(name,): float(each.times) for name, each in state.rules.tallies.items()},
        "midstep_steps_left_out_total": {(): float(state.rules.steps_left_out)},
        "midstep_budget_used": _budgets(budgets, "used"),
        "midstep_budget_limit": _budgets(budgets, "limit"),
        "midstep_nodes": {(str(each),): float(nodes[str(each)]) for each in NodeState},
        "midstep_ranks": {(each,): float(count) for each, count in shown.items()},
        "midstep_ranks_asked": {(): float(state.job.world_size)},
        "midstep_standbys": {(each,): float(count) for each, count in standbys.items()},
        "midstep_standing_faults": {(each,): float(count) for each, count in levels.items()},
        "midstep_checkpoint_step": {(): float(max(checkpoints))} if checkpoints else {},
    }


def _budgets(budgets: Iterable[BudgetUse], of: str) -> dict[Labels, float]:
    """Return the budgets by rung and scope, as their names have them: `recover per node`."""
    numbers: dict[Labels, float] = {}
    for each in budgets:
        rung, _, scope = each.name.rpartition(" per ")
        numbers[rung, scope] = float(each.used if of == "used" else each.limit)
    return numbers


def _labels(incident: Incident, outcome: Outcome) -> Labels:
    kind = str(incident.reports[0].kind) if incident.reports else _NONE
    return str(incident.rung or _NONE), str(outcome), kind


def _parts(incident: Incident) -> dict[str, float]:
    """Return the time of an incident that has ended, by part of the recovery and in all."""
    began_s = min((phase.began_s for phase in incident.phases), default=incident.began_s)
    parts = {str(TimeCategory.DETECT): max(0.0, began_s - incident.began_s)}
    for phase in incident.phases:
        part = _PARTS.get(Phase(phase.name)) if phase.name in {str(each) for each in Phase} else None
        if part is not None and phase.ended_s is not None:
            parts[str(part)] = parts.get(str(part), 0.0) + phase.ended_s - phase.began_s
    return {**parts, _WHOLE: incident.recovery_s or 0.0}
