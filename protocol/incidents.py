"""Records of incidents and of the job's status, for reports: what happened, when, where and why.

The recovery machine writes these records; status, report, demo and benchmarks read them.
"""

from collections.abc import Iterable

import msgspec

from .compat import StrEnum
from .controls import Controls
from .faults import FaultKind
from .reports import PreparedProcesses
from .rules import RuleBook
from .time_spent import TimeSpent
from .types import Decision, FaultReport, GuestCopy, RestoreSource, Rung


class Outcome(StrEnum):
    """The end of an incident, if it has ended."""

    OPEN = "open"
    RESUMED = "resumed"
    STOPPED = "stopped"
    DISMISSED = "dismissed"  # a suspicion that had a good explanation


class PhaseRecord(msgspec.Struct, frozen=True):
    """One phase of one recovery attempt on the controller's clock (wall-clock seconds); `ended_s` None: still in it."""

    generation: int
    name: str  # suspecting, quiescing, rejoining, resuming
    began_s: float
    ended_s: float | None = None


class RankPhase(msgspec.Struct, frozen=True):
    """The time that one rank took for one phase of the lifecycle, on its own clock."""

    generation: int
    rank: int
    name: str  # stop, clean, join, rebuild, repair, rollback
    duration_s: float


class Incident(msgspec.Struct, frozen=True):
    """Everything from the first fault report to the resumed step, or to the stop.

    `began_s` is when the first fault was reported by its observer, and `resumed_s` when the last rank had committed the
    first new step: both on the controller's clock. `pids_before` and `pids_after` map rank to process id; `replaced`
    names the ranks whose process was to be replaced.
    """

    number: int
    began_s: float
    reports: tuple[FaultReport, ...] = ()
    decisions: tuple[Decision, ...] = ()
    generations: tuple[int, ...] = ()
    phases: tuple[PhaseRecord, ...] = ()
    rank_phases: tuple[RankPhase, ...] = ()
    replaced: tuple[int, ...] = ()
    pids_before: dict[int, int] = {}
    pids_after: dict[int, int] = {}
    restore: RestoreSource | None = None
    repair_reasons: tuple[str, ...] = ()
    bytes_moved: int = 0
    bytes_over_devices: int = 0  # of these, what went over the devices' own links
    committed_before: int = 0  # the highest number of updates that any rank is known to have committed
    committed_is_known: bool = True  # False: all that knew how far training was are lost, and it may have been further
    resumed_step: int | None = None
    resumed_s: float | None = None
    median_step_s: float = 0.0
    outcome: Outcome = Outcome.OPEN
    ended_reason: str = ""
    abridged: bool = False  # what each rank did is left out, to keep it small; the events have it

    @property
    def rung(self) -> Rung | None:
        """The rung that was taken last."""
        return self.decisions[-1].rung if self.decisions else None

    @property
    def is_requested(self) -> bool:
        """True if an operator asked for it, and nothing went wrong: its time is no time of a recovery."""
        return bool(self.reports) and self.reports[0].kind is FaultKind.REQUESTED

    @property
    def steps_lost(self) -> int:
        """Committed updates that have to be done again; the fewest that it can be, if `committed_is_known` is False."""
        if self.resumed_step is None:
            return 0
        return max(0, self.committed_before - self.resumed_step)

    @property
    def healthy_pids_kept(self) -> bool:
        """True when every rank that was not to be replaced has the process id that it had before."""
        return all(
            self.pids_after.get(rank) == pid for rank, pid in self.pids_before.items() if rank not in self.replaced
        )

    def without_ranks(self) -> "Incident":
        """Leave out what each rank did. Which healthy process was not kept, if any, is still seen."""
        replaced = frozenset(self.replaced)
        harmed = [
            rank for rank, pid in self.pids_before.items() if rank not in replaced and self.pids_after.get(rank) != pid
        ]
        return msgspec.structs.replace(
            self,
            rank_phases=(),
            pids_before={rank: self.pids_before[rank] for rank in harmed},
            pids_after={rank: self.pids_after[rank] for rank in harmed if rank in self.pids_after},
            abridged=True,
        )

    @property
    def recovery_s(self) -> float | None:
        """Seconds from the fault to the first new step that all ranks completed."""
        return None if self.resumed_s is None else self.resumed_s - self.began_s

    @property
    def excess_s(self) -> float | None:
        """The time that the recovery took beyond one median step."""
        return None if self.recovery_s is None else self.recovery_s - self.median_step_s


class BudgetUse(msgspec.Struct, frozen=True):
    """The spent part of one budget."""

    name: str  # e.g. "recover_in_place per job"
    used: int
    limit: int


class RankStatus(msgspec.Struct, frozen=True):
    """One line of `midstep status`."""

    rank: int
    node: str
    pid: int
    incarnation: int
    state: str
    step: int
    activity: str
    role: str = ""
    copied_steps: tuple[int, ...] = ()  # of its copies in host memory
    copied_bytes: int = 0
    guest_copies: tuple[GuestCopy, ...] = ()  # of ranks of other nodes, kept here
    agreed_step: int = 0  # the newest state that passed a vote; 0: none has
    unchecked: int = 0  # shards that no vote can check
    own_s: float = 0.0  # of its last steps, each: it computed
    input_s: float = 0.0  # and waited for its data loader
    slowness: float = 0.0  # its own time, in times of that of ranks with equal work; 0: not compared


class NodeStatus(msgspec.Struct, frozen=True):
    """One node of `midstep status`."""

    node: str
    failure_domain: str
    state: str  # active, spare, unfit, lost, isolated
    ranks: tuple[int, ...]
    failures: int = 0  # of its processes, within the policy's window
    note: str = ""  # why it is not used, or not well
    prepared: tuple[PreparedProcesses, ...] = ()  # for a fault, ahead of it


class StandingFault(msgspec.Struct, frozen=True):
    """A fault that a detector asserted and that has not recovered. `since_s`: when the controller first heard of it."""

    report: FaultReport
    since_s: float
    times: int = 1  # how often it was asserted


class HoldRecord(msgspec.Struct, frozen=True):
    """A time in which most nodes were silent at once, and nothing was decided about them. `lost` were given up then."""

    ended_s: float
    held_s: float
    nodes: tuple[str, ...]
    watched: int
    lost: tuple[str, ...] = ()


class ControllerPhase(StrEnum):
    """The phase of a controller."""

    COLD = "cold"  # it stands by
    LOADING = "loading"  # it has been elected, and reads the journal; whoever asks is told to try later
    HOT = "hot"  # it leads
    OUT_OF_SERVICE = "not in service"  # another one leads, and it leaves


class ControllerStatus(msgspec.Struct, frozen=True):
    """A controller of the job that lives. `term`: of the one that leads. `since_s`: wall-clock seconds.

    `endpoint`: where others reach it, `tcp://host:port`; empty where only its own machine does.
    """

    name: str
    pid: int
    host: str
    phase: ControllerPhase
    term: int
    since_s: float
    endpoint: str = ""


class ProxyStatus(msgspec.Struct, frozen=True):
    """A proxy that speaks for nodes: for how many, and for how long the controller has not heard it."""

    name: str
    nodes: int
    silent_s: float


def leader_of(controllers: Iterable[ControllerStatus]) -> ControllerStatus | None:
    """Return the controller that leads, or is about to; None: none of these does."""
    leading = [each for each in controllers if each.phase in {ControllerPhase.LOADING, ControllerPhase.HOT}]
    return max(leading, key=lambda each: each.term, default=None)


class NoticeKind(StrEnum):
    """An event of a job that a person may want to be told of. A policy names them."""

    ASKED = "asked"  # the job does not get on without a person
    BUDGET = "budget"  # most of a budget is spent
    NO_SPARE = "no_spare"  # no spare node is left
    UNGUARDED = "unguarded"  # the job was without a controller
    CHECKPOINT_OLD = "checkpoint_old"
    GOODPUT_LOW = "goodput_low"
    ENDED = "ended"


class WebhookStatus(msgspec.Struct, frozen=True):
    """A webhook as the leading controller knows it. `trouble`: why its last try failed; empty: it did not.

    `waiting`: notices that it has yet to get.
    """

    name: str
    waiting: int = 0
    trouble: str = ""


class ReportedSeries(msgspec.Struct, frozen=True):
    """One value that the script reports with `step.report`, thinned: some steps, and what it was in each.

    `rank`: the lowest that reports it; what other ranks say of it is not kept.
    """

    name: str
    rank: int
    steps: tuple[int, ...]
    values: tuple[float, ...]


class JobStatus(msgspec.Struct, frozen=True):
    """The answer to `midstep status`: the machine's view at `at_s`. `ranks` are those of the present world."""

    job: str
    at_s: float
    phase: str
    generation: int
    term: int
    committed: int
    median_step_s: float
    ranks: tuple[RankStatus, ...]
    nodes: tuple[NodeStatus, ...]
    budgets: tuple[BudgetUse, ...]
    incidents: tuple[Incident, ...]
    refused: dict[str, int] = {}  # messages refused, by reason
    faults: tuple[StandingFault, ...] = ()
    exit_code: int | None = None
    reason: str = ""
    ranks_asked: int = 0  # how many the job asked for, where it may continue with fewer
    incidents_left_out: int = 0  # the earliest, to keep an answer small; the journal has them
    faults_left_out: int = 0  # those that were heard of first
    holding: str = ""  # what is held while most nodes are silent
    holds: tuple[HoldRecord, ...] = ()  # such times that have ended
    controllers: tuple[ControllerStatus, ...] = ()  # those that live, as far as the one that answers knows
    proxies: tuple[ProxyStatus, ...] = ()  # since this controller leads
    failover_paused_until_s: float = 0.0  # until then no standby takes over; 0: failover is on
    time: TimeSpent | None = None  # since the job began
    time_lately: tuple[TimeSpent, ...] = ()  # of the last hour, day and 30 days, as far as the job is longer
    webhooks: tuple[WebhookStatus, ...] = ()  # those that are told of the job
    controls: Controls = Controls()  # what operators want of the job, and have done
    rules: RuleBook = RuleBook()  # what the policy's rules on reported values have led to
    reported: tuple[ReportedSeries, ...] = ()  # values of the script, since this controller leads
    policy_changes: int = 0  # how often its policy was changed while it ran
    held: bool = False  # all ranks stand still at a step boundary, as an operator wants it
    single_copies: tuple[str, ...] = ()  # shards that are not voted on, as one rank alone holds each: the first ones
    single_copies_left_out: int = 0
