"""Everything that the recovery machine knows, and the few verbs with which its handlers change it.

The state is a fold of the events: same events, same state, same actions. So a later controller can replay them.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from ...policies.budgets import NodeFailure, Spent, WrongVote, failures_by_node
from ...policies.ladder import Ladder
from ...policies.schema import NodePolicy, Policy
from ...protocol.compat import StrEnum
from ...protocol.controls import Controls
from ...protocol.messages import Command
from ...protocol.rules import RuleBook
from ...protocol.types import (
    Activity,
    Decision,
    FaultReport,
    JobSpec,
    RankProgress,
    RepairPlan,
    Rung,
    rank_address,
)
from .events import Action, ControlAnswered, Finish, Forget, Log, PolicyApplied, Send
from .fitness import UNFIT, FaultBook, NodeChecks
from .incident import Attempt, History, OpenIncident
from .world import PARKED, Meeting, RankState, World


class Phase(StrEnum):
    """Where the job stands. `docs/recovery.md` has the diagram, drawn from the transition table."""

    WAITING = "waiting"  # for nodes
    STARTING = "starting"  # a world of new processes is on its way to barrier one
    RUNNING = "running"
    PAUSING = "pausing"  # training goes on up to a step boundary, at which all stop for a planned change
    SUSPECTING = "suspecting"  # something is wrong, and it is not yet known whose fault it is
    QUIESCING = "quiescing"  # towards barrier one
    REJOINING = "rejoining"  # towards barrier two
    RESUMING = "resuming"  # towards the first new step
    FINISHING = "finishing"  # training is done, processes wind up
    SAVING = "saving"  # an emergency checkpoint before the stop
    ENDED = "ended"


_ON_THE_WAY = (RankState.STARTING, *PARKED, RankState.QUIESCING)  # towards barrier one

OVER = frozenset({Phase.SAVING, Phase.ENDED})  # in these nothing more can be mended: faults are not taken in


class Result(msgspec.Struct, frozen=True, tag=True):
    """How the job ends, or will end when its checkpoint is written."""

    exit_code: int
    reason: str


class Resize(msgspec.Struct, frozen=True, tag=True):
    """The world starts again in another size when its checkpoint is written; `leaving` nodes are replaced then."""

    leaving: tuple[str, ...] = ()


class Reschedule(msgspec.Struct, frozen=True, tag=True):
    """The world starts again when its checkpoint is written; `leaving` nodes are replaced then, or `every_node`."""

    leaving: tuple[str, ...] = ()
    every_node: bool = False


@dataclass
class Due:
    """When time runs out, on the clock of the events. Each topic names its own deadlines (`topic.Deadline`).

    `phase_s` is that of the present phase; `incident` has what an incident waits for, and is forgotten with it; `ahead`
    has the times at which something planned is looked at.
    """

    phase_s: float | None = None
    incident: dict[str, float] = field(default_factory=dict)
    ahead: dict[str, float] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)  # ranks whose next process waits for its device
    unplaced: set[int] = field(default_factory=set)  # ranks whose next process waits for a node

    def forget_replacements(self) -> None:
        """Wait for no replacement any more."""
        self.incident.clear()
        self.held.clear()
        self.unplaced.clear()

    def started(self, rank: int) -> None:
        """Note that the next process of a rank waits for nothing, or is not wanted any more."""
        self.held.discard(rank)
        self.unplaced.discard(rank)


EXCUSED = frozenset({Activity.CHECKPOINTING, Activity.PAUSED})  # known to take long: the others wait with good reason


@dataclass
class Clocks:
    """The reading of all step clocks that is under way, or was the last one."""

    probe: int = 0  # its number
    asked_s: float = 0.0  # when a stall was looked into last
    awaited: set[str] = field(default_factory=set)  # nodes that have yet to answer
    read: dict[int, RankProgress] = field(default_factory=dict)  # by rank
    complete: bool = False  # all have answered, and nothing was made of it yet
    again: bool = False  # read for the second time, as the first one took too long

    def ask(self, nodes: Iterable[str]) -> int:
        """Begin a reading; what was read before is void. Return its number."""
        self.forget()
        self.probe += 1
        self.awaited = set(nodes)
        return self.probe

    def take(self) -> dict[int, RankProgress]:
        """Return what was read, by rank, and end the reading."""
        read = dict(self.read)
        self.forget()
        return read

    def forget(self) -> None:
        """End the reading that is under way, if there is one."""
        self.complete = False
        self.awaited.clear()
        self.read.clear()


@dataclass
class Saving:
    """The checkpoint that is written before processes end."""

    # What follows when it is written, or cannot be; None: training goes on.
    then: Result | Resize | Reschedule | None = None
    # The shards that each rank has yet to save; in front the rank that publishes, and is asked when it is the last.
    outstanding: dict[int, tuple[str, ...]] = field(default_factory=dict)
    stop_requested: bool = False  # by an operator, who may insist

    def drop(self) -> None:
        """Wait for no rank to save any more."""
        self.outstanding.clear()

    @property
    def before_a_start(self) -> bool:
        """Return whether the world starts again when it is written."""
        return isinstance(self.then, Resize | Reschedule)


class Stage(StrEnum):
    """How far a planned change has got."""

    PREPARING = "preparing"  # newcomers are started, beside those whose ranks they will hold
    READING = "reading"  # the step clocks are read, to choose the boundary
    STOPPING = "stopping"  # the ranks have been told where to stop
    HANDING_OVER = "handing over"  # all have stopped, and write what only those that leave hold, or all
    HOLDING = "holding"  # all have stopped, and stand still until an operator lets them go on


# The way back from here is an incident of its own.
AT_THE_BOUNDARY = frozenset({Stage.STOPPING, Stage.HANDING_OVER, Stage.HOLDING})


@dataclass
class Newcomer:
    """A process that gets ready to take a rank over."""

    rank: int
    incarnation: int
    node: str
    pid: int = 0


@dataclass
class PlannedChange:
    """The ranks of `node` move to `spare`; or, without them, the world grows to `nodes` nodes.

    `awaiting`: newcomers that have not reached their train function. `restarts`: all processes are, without `node`.
    `joins`: the nodes by which the world grows, where the ranks that it has keep their processes.
    """

    report: FaultReport
    decision: Decision
    charges: tuple[Spent, ...]
    node: str = ""
    spare: str = ""
    nodes: int = 0
    joins: tuple[str, ...] = ()
    restarts: bool = False
    holds: bool = False  # all ranks, for an operator
    saves: bool = False  # all ranks write a checkpoint, as an operator wishes
    ranks: tuple[int, ...] = ()  # whose processes are replaced, as an operator wishes
    wish: int = 0  # the number of the wish
    newcomers: dict[int, Newcomer] = field(default_factory=dict)
    awaiting: set[int] = field(default_factory=set)
    stage: Stage = Stage.PREPARING
    readings: int = 0  # how often the step clocks were asked for
    looking: bool = False  # the boundary is overdue, and the clocks are read to see why
    after_step: int | None = None  # where all stop; None: not known, or given up for stopping at once


@dataclass
class Unwell:
    """A node that is not well: who said so, what stands in the way of its drain, and how often one has failed."""

    report: FaultReport
    note: str = ""
    failures: int = 0


@dataclass
class Planned:
    """The changes that are planned, or are to be, and when to look again."""

    current: PlannedChange | None = None
    unwell: dict[str, Unwell] = field(default_factory=dict)
    going: set[str] = field(default_factory=set)  # nodes that the platform will take away
    scaled_s: float = -math.inf  # when the world last got another size
    unable: dict[str, int] = field(default_factory=dict)  # nodes on which new ranks have failed, and how often

    def newcomer(self, rank: int | None, incarnation: int) -> Newcomer | None:
        """Return the newcomer that a report is about, None when it is about another process."""
        newcomer = None if self.current is None or rank is None else self.current.newcomers.get(rank)
        return newcomer if newcomer is not None and newcomer.incarnation == incarnation else None

    @property
    def holding(self) -> bool:
        """Return whether all ranks stand still between two steps, for an operator."""
        return self.current is not None and self.current.stage is Stage.HOLDING

    def before_boundary(self, committed: int) -> bool:
        """Say if a rank of so many steps has yet to reach the boundary: a stop that it reports is one before it."""
        return self.current is not None and committed < (self.current.after_step or 0)

    def what_is_wrong(self, node: str) -> str:
        """Say in words why a node is to be left."""
        return "going" if node in self.going else "not well"


@dataclass
class Accounts:
    """The entries that the budgets of the whole job count."""

    paid: list[Spent] = field(default_factory=list)  # for attempts that are over, as long as a budget counts them
    node_failures: list[NodeFailure] = field(default_factory=list)
    strikes: list[WrongVote] = field(default_factory=list)  # within the policy's window
    slow: list[NodeFailure] = field(default_factory=list)  # nodes that were to be drained for it, the same
    restarts: int = 0  # of the whole world

    def failures(self, policy: NodePolicy, now: float) -> Counter[str]:
        """Return how many failures each node has had within the policy's window."""
        return failures_by_node(self.node_failures, policy, now)


@dataclass
class Arrivals:
    """The nodes to come, as far as they are known."""

    can_be_created: bool = False  # a platform that makes nodes has said so
    can_be_killed: bool = True  # by the platform, for an injected fault; else by their own agents
    spares_awaited: bool = True  # at the start of a job
    nodes_due_s: float | None = None  # when too few nodes have come in time
    last_call_s: float | None = None  # when a job that can do with fewer nodes starts without the others
    lost: int = 0  # nodes, since nodes are waited for
    refills: int = 0  # how often in a row spares were asked for, and none came

    def one_less(self) -> int:
        """Note that a node that was waited for will not come; return how many that makes in a row."""
        self.lost += 1
        return self.lost

    def enough(self) -> None:
        """Note that nodes have come for all ranks that waited."""
        self.lost = 0


@dataclass
class Progress:
    """How far training is."""

    committed: int = 0  # the most steps that any rank is known to have committed
    is_current: bool = False  # a process has said so since the last resume, by a report, its step clock or its end
    median_step_s: float = 0.0
    first_steps_at_s: float = 0.0  # when the last rank committed its first step after a resume

    def heard(self, committed: int) -> None:
        """Take note of how far a process is, or was at its end."""
        self.committed = max(self.committed, committed)
        self.is_current = True

    def saved(self, step: int) -> None:
        """Take note of the step of the checkpoint that is being written."""
        self.committed = step

    def resumed(self, step: int) -> None:
        """Forget how fast the world before was: all train on from `step`."""
        self.committed, self.is_current, self.first_steps_at_s, self.median_step_s = step, False, 0.0, 0.0

    def first_step(self, committed: int, median_step_s: float, at_s: float) -> None:
        """Take note of a first step after a resume. A newcomer's history is that slow step: the least knows best."""
        self.committed = max(self.committed, committed)
        if median_step_s > 0:
            self.median_step_s = min(self.median_step_s or median_step_s, median_step_s)
        self.first_steps_at_s = max(self.first_steps_at_s, at_s)

    def finished(self, committed: int, at_s: float) -> None:
        """Take note of a rank whose train function has returned."""
        self.heard(committed)
        self.first_steps_at_s = max(self.first_steps_at_s, at_s)


@dataclass
class Turn:
    """The event that is being handled: in which phase it came, and what is to be done about it."""

    came_in: Phase = Phase.WAITING  # the event may have taken all ranks away, and with them the phase
    actions: list[Action] = field(default_factory=list)


@dataclass
class JobState:
    """The machine's memory: facts, from which the phase follows. Only handlers and rules change it."""

    job: JobSpec
    ladder: Ladder
    policy: Policy = field(init=False)  # what the job's owner wants, and the ladder goes by
    world: World
    book: FaultBook
    device_links: bool = False  # the communicator's links carry memory of the devices
    meeting: Meeting = field(default_factory=Meeting)
    history: History = field(default_factory=History)
    term: int = 0
    generation: int = 0
    ever_resilient: bool = False
    incident: OpenIncident = field(default_factory=OpenIncident)  # empty while nothing is wrong
    repair: RepairPlan | None = None  # from barrier one until the incident is closed
    planned: Planned = field(default_factory=Planned)  # changes that wait for a step boundary
    controls: Controls = field(default_factory=Controls)  # what operators want, and have done
    rules: RuleBook = field(default_factory=RuleBook)  # what those of the policy on reported values have led to
    applied: PolicyApplied | None = None  # the policy in force, if it is not the first one
    remark: str = ""  # for the record of the next repair: what became of a checkpoint, or of a change
    due: Due = field(default_factory=Due)
    clocks: Clocks = field(default_factory=Clocks)
    saving: Saving = field(default_factory=Saving)
    accounts: Accounts = field(default_factory=Accounts)
    arrivals: Arrivals = field(default_factory=Arrivals)
    checks: NodeChecks = field(default_factory=NodeChecks)  # of nodes, before they get ranks
    progress: Progress = field(default_factory=Progress)
    now: float = 0.0  # when the event that is being handled came
    turn: Turn = field(default_factory=Turn)
    result: Result | None = None

    def __post_init__(self) -> None:
        self.policy = self.ladder.policy

    @property
    def nodes_needed(self) -> int:
        """How many nodes the ranks of the world take."""
        return -(-self.world.size // self.world.ranks_per_node)

    @property
    def nodes_asked(self) -> int:
        """How many nodes the job asked for."""
        return math.ceil(self.job.world_size / self.world.ranks_per_node)

    def say(self, text: str) -> None:
        """Have a line logged."""
        self.turn.actions.append(Log(text))

    def answer(self, text: str, *, refused: bool) -> None:
        """Have the operator who asked for a control told what follows."""
        self.turn.actions.append(ControlAnswered(text, refused))

    def send(self, receiver: str, body: Command) -> None:
        """Ask for a command to be sent in the present generation."""
        self.turn.actions.append(Send(receiver, body, self.generation))

    def is_unfit(self, name: str) -> bool:
        """Return whether a node without ranks may not be chosen now: a fault stands, or its check has not ended."""
        return bool(self.book.on(name, UNFIT)) or self.checks.is_open(name)

    def fence(self) -> None:
        """Begin the next generation: whatever is said in the present one is not listened to any more."""
        self.generation += 1

    def forget(self, rank: int) -> None:
        """Drop whatever is still queued for the rank's process."""
        self.turn.actions.append(Forget(rank_address(rank)))

    @property
    def phase(self) -> Phase:
        """Where the job stands, as it follows from all else."""
        if self.result is not None:
            return Phase.ENDED
        if self.saving.then is not None:
            return Phase.SAVING
        together = self.phase_of_ranks
        return Phase.SUSPECTING if self.incident.suspicions and together is not Phase.WAITING else together

    @property
    def phase_of_ranks(self) -> Phase:
        """Where the ranks stand together, also while something is suspected."""
        world, change = self.world, self.planned.current
        if world.count(RankState.ABSENT) == world.size:
            return Phase.WAITING
        if self.repair is not None:
            return Phase.REJOINING if world.has(RankState.REJOINING, RankState.READY) else Phase.RESUMING
        if change is not None and change.stage in AT_THE_BOUNDARY:
            return Phase.PAUSING
        if world.has(*_ON_THE_WAY):
            newcomer = world.one_in(RankState.STARTING)
            return Phase.STARTING if newcomer is not None and newcomer.connected else Phase.QUIESCING
        return Phase.FINISHING if world.has(RankState.RELEASED, RankState.EXITED) else Phase.RUNNING

    @property
    def can_restart_larger(self) -> bool:
        """Return whether all processes of a script that is not resilient live in a world that is too small."""
        if self.world.size == self.job.world_size or self.ever_resilient or self.result is not None:
            return False
        return self.world.count(RankState.STARTING) == self.world.size == len(self.world.pids())

    def enter(self, limit_s: float | None = None) -> None:
        """Give the present phase a deadline `limit_s` from now, and write down that it has begun."""
        self.limit(limit_s)
        self.history.entered(self.phase.value, self.generation, self.now)

    def limit(self, limit_s: float | None) -> None:
        """Give the present phase another deadline, `limit_s` from now; None: none."""
        self.due.phase_s = None if limit_s is None else self.now + limit_s

    def limit_until(self, at_s: float) -> None:
        """Give the present phase another deadline."""
        self.due.phase_s = at_s

    def hurry(self, at_s: float) -> None:
        """Have the deadline of the present phase at `at_s`, if it is not earlier."""
        self.due.phase_s = at_s if self.due.phase_s is None else min(self.due.phase_s, at_s)

    def remember(self, report: FaultReport) -> bool:
        """Add a fault to the open incident, or open one with it; say whether one was opened."""
        pids = {} if self.history.open else self.world.pids()
        return self.history.report(report, pids, self.now, self.progress.committed)

    def note(self, remark: str) -> None:
        """Keep a remark for the record of the next repair."""
        self.remark = remark

    def take_remark(self) -> str:
        """Return the remark that was kept, once."""
        remark, self.remark = self.remark, ""
        return remark

    def decided(self, decision: Decision) -> None:
        """Remember what was decided, and have it said in the log in the same words."""
        self.history.decided(decision)
        if (incident := self.history.open) is not None:
            self.turn.actions += [Log(f"incident {incident.number}: {text}") for text in decision.in_words()]

    def ignore(self, why: str) -> None:
        """Count a report that changes nothing."""
        self.history.ignored[why] = self.history.ignored.get(why, 0) + 1

    def finish(self) -> None:
        """Have the driver leave: the job is over."""
        assert self.result is not None
        self.turn.actions.append(Finish(self.result.exit_code, self.result.reason))

    @property
    def has_put_off(self) -> bool:
        """Return whether faults that were put off can be taken up now."""
        return bool(self.book.put_off) and self.phase not in {Phase.WAITING, *OVER}

    @property
    def spent(self) -> tuple[Spent, ...]:
        """The cost of all attempts, the one under way too."""
        return (*self.accounts.paid, *self.incident.attempt.cost)

    @property
    def rung(self) -> Rung | None:
        """The rung under way in the open incident."""
        return self.history.open.rung if self.history.open else None

    def begin_attempt(self) -> None:
        """The attempt under way is over, if there is one, and stays paid for as long as a budget counts it."""
        self.accounts.paid = self.ladder.roles.still_counted(self.spent, self.now)
        taken = (*self.incident.taken, *self.incident.attempt.rungs)
        self.incident = msgspec.structs.replace(self.incident, taken=taken, attempt=Attempt())

    def close_incident(self) -> None:
        """Nothing is wrong any more; what was tried stays paid for."""
        self.begin_attempt()
        self.incident = OpenIncident()
        self.due.forget_replacements()
