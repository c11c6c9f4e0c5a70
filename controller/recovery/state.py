"""Everything that the recovery machine knows, and the few verbs with which its handlers change it.

The state is a fold of the events: same events, same state, same actions. That lets a restarted controller replay its
journal and go on.
"""

import hashlib
import math
from dataclasses import dataclass, field

import msgspec

from ...policies.budgets import NodeFailure, Spent
from ...policies.ladder import Ladder
from ...policies.schema import Policy
from ...protocol.compat import StrEnum
from ...protocol.messages import Command
from ...protocol.types import (
    Decision,
    FaultReport,
    JobSpec,
    RankProgress,
    Rendezvous,
    RepairPlan,
    StoreEndpoint,
    rank_address,
)
from .events import Action, Finish, Forget, Log, Send
from .fault_book import FaultBook
from .incident import History, OpenIncident
from .node_checks import NodeChecks
from .world import PARKED, Node, NodeState, RankState, World


class Phase(StrEnum):
    """Where the job stands. `docs/architecture.md` has the diagram, drawn from the transition table."""

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


# Towards barrier one.
_ON_THE_WAY = (RankState.STARTING, *PARKED, RankState.QUIESCING)

# In these nothing more can be mended: faults are not taken in.
OVER = frozenset({Phase.SAVING, Phase.ENDED})


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
    """When time runs out, on the clock of the events; None: nothing is waited for."""

    phase_s: float | None = None  # for the present phase
    newcomers_s: float | None = None  # for replacements to reach their train function
    devices_s: float | None = None  # for the devices of `held` to be well again
    held: set[int] = field(default_factory=set)  # ranks whose next process waits for its device
    nodes_s: float | None = None  # for the nodes of `unplaced` to come
    unplaced: set[int] = field(default_factory=set)  # ranks whose next process waits for a node

    def forget_replacements(self) -> None:
        """No replacement is waited for any more."""
        self.newcomers_s = self.devices_s = self.nodes_s = None
        self.held.clear()
        self.unplaced.clear()


@dataclass
class Clocks:
    """The reading of all step clocks that is under way, or was the last one."""

    probe: int = 0  # its number
    asked_s: float = 0.0  # when a stall was looked into last
    awaited: set[str] = field(default_factory=set)  # nodes that have yet to answer
    read: dict[int, RankProgress] = field(default_factory=dict)  # by rank
    complete: bool = False  # all have answered, and nothing was made of it yet
    again: bool = False  # read for the second time, as the first one took too long


@dataclass
class Saving:
    """The checkpoint that is written before processes end."""

    # What follows when it is written, or cannot be; None: training goes on.
    then: Result | Resize | Reschedule | None = None
    # The shards that each rank has yet to save; in front the rank that publishes, and is asked when it is the last.
    outstanding: dict[int, tuple[str, ...]] = field(default_factory=dict)
    stop_requested: bool = False  # by an operator, who may insist

    @property
    def before_a_start(self) -> bool:
        """Whether the world starts again when it is written."""
        return isinstance(self.then, Resize | Reschedule)


class Stage(StrEnum):
    """How far a planned change has got."""

    PREPARING = "preparing"  # newcomers are started, beside those whose ranks they will hold
    READING = "reading"  # the step clocks are read, to choose the boundary
    STOPPING = "stopping"  # the ranks have been told where to stop
    HANDING_OVER = "handing over"  # all have stopped, and write what only those that leave hold


# The way back from here is an incident of its own.
AT_THE_BOUNDARY = frozenset({Stage.STOPPING, Stage.HANDING_OVER})


@dataclass
class Newcomer:
    """A process that gets ready to take a rank over."""

    rank: int
    incarnation: int
    pid: int = 0


@dataclass
class Plan:
    """The ranks of `node` move to `spare`; or, without them, the world grows to `nodes` nodes.

    `awaiting`: newcomers that have not reached their train function.
    """

    report: FaultReport
    decision: Decision
    charges: tuple[Spent, ...]
    node: str = ""
    spare: str = ""
    nodes: int = 0
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
class Plans:
    """What is planned, what is to be planned, and when to look again."""

    current: Plan | None = None
    unwell: dict[str, Unwell] = field(default_factory=dict)
    going: set[str] = field(default_factory=set)  # nodes that the platform will take away
    due_s: float | None = None
    scaled_s: float = -math.inf  # when the world last got another size
    grow_due_s: float | None = None  # when it is time to look whether the world can grow
    remark: str = ""  # why a change was not made after all, for the record of the incident

    def what_is_wrong(self, node: str) -> str:
        """Say in words why a node is to be left."""
        return "going" if node in self.going else "not well"


KEY_BYTES = 32

_SECRET_BYTES = 16

_NOWHERE = StoreEndpoint("", 0)


@dataclass
class Meeting:
    """The store of the present generation. `key`: what the secrets of all generations are derived from."""

    key: bytes = b""
    node: str = ""  # whose store it is; empty: not chosen yet
    failed: bool = False  # ranks could not link up there

    def rendezvous(self, world: World, purpose: str) -> Rendezvous:
        """Return where the present generation meets: the same for all its members, and in a replay.

        The secret follows from the job's key and the purpose, which names job and generation, so that the machine needs
        no chance of its own. Where no store is known the answer leads nowhere: the link-up fails, and the ladder takes
        the next rung.
        """
        node = self._chosen(world)
        endpoint = node.store if node is not None and node.store is not None else _NOWHERE
        return Rendezvous(endpoint.host, endpoint.port, self.secret(purpose))

    def secret(self, purpose: str) -> str:
        """Return the secret of those who meet for a purpose."""
        return hashlib.blake2b(purpose.encode(), key=self.key, digest_size=_SECRET_BYTES).hexdigest()

    def begin(self) -> None:
        """Forget the store of the generation before. Runs when a generation is opened."""
        self.node, self.failed = "", False

    def link_up_failed(self, world: World) -> None:
        """Prefer other stores to that of the present generation from now on, however many ranks report it."""
        if self.node in world.nodes and not self.failed:
            self.failed = True
            world.nodes[self.node].failed_link_ups += 1

    def linked_up(self, world: World) -> None:
        """Trust the store of the present generation: all ranks have met there."""
        if self.node in world.nodes:
            world.nodes[self.node].failed_link_ups = 0

    def _chosen(self, world: World) -> Node | None:
        node = world.nodes.get(self.node)
        if node is None or node.store is None or node.state not in {NodeState.ACTIVE, NodeState.SPARE}:
            node = world.best_store()
            self.node = node.name if node is not None else ""
        return node


@dataclass
class Accounts:
    """What the budgets of the whole job count."""

    paid: list[Spent] = field(default_factory=list)  # for attempts that are over, as long as a budget counts them
    node_failures: list[NodeFailure] = field(default_factory=list)
    restarts: int = 0  # of the whole world


@dataclass
class Arrivals:
    """What is known of nodes to come."""

    can_be_created: bool = False  # a platform that makes nodes has said so
    can_be_killed: bool = True  # by the platform, for an injected fault; else by their own agents
    spares_awaited: bool = True  # at the start of a job
    nodes_due_s: float | None = None  # when too few nodes have come in time
    last_call_s: float | None = None  # when a job that can do with fewer nodes starts without the others
    lost: int = 0  # nodes, since nodes are waited for
    refills: int = 0  # how often in a row spares were asked for, and none came
    refill_due_s: float | None = None  # when it is time to look whether they have come


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


@dataclass
class Turn:
    """The event that is being handled: when and in which phase it came, and what is to be done about it."""

    now: float = 0.0
    came_in: Phase = Phase.WAITING  # the event may have taken all ranks away, and with them the phase
    actions: list[Action] = field(default_factory=list)


@dataclass
class JobState:
    """The machine's memory: facts, from which the phase follows. Only handlers and rules change it."""

    job: JobSpec
    ladder: Ladder
    world: World
    book: FaultBook
    meeting: Meeting = field(default_factory=Meeting)
    history: History = field(default_factory=History)
    term: int = 0
    generation: int = 0
    ever_resilient: bool = False
    incident: OpenIncident = field(default_factory=OpenIncident)  # empty while nothing is wrong
    plan: RepairPlan | None = None  # from barrier one until the incident is closed
    plans: Plans = field(default_factory=Plans)  # changes that wait for a step boundary
    due: Due = field(default_factory=Due)
    clocks: Clocks = field(default_factory=Clocks)
    saving: Saving = field(default_factory=Saving)
    accounts: Accounts = field(default_factory=Accounts)
    arrivals: Arrivals = field(default_factory=Arrivals)
    checks: NodeChecks = field(default_factory=NodeChecks)  # of nodes, before they get ranks
    progress: Progress = field(default_factory=Progress)
    turn: Turn = field(default_factory=Turn)
    result: Result | None = None

    @property
    def policy(self) -> Policy:
        """What the job's owner wants, and the ladder goes by."""
        return self.ladder.policy

    def send(self, receiver: str, body: Command) -> None:
        """Ask for a command to be sent in the present generation."""
        self.turn.actions.append(Send(receiver, body, self.generation))

    def rendezvous(self) -> Rendezvous:
        """Return where the present generation meets."""
        return self.meeting.rendezvous(self.world, f"{self.job.job}/{self.generation}")

    def fence(self) -> None:
        """Begin the next generation: whatever is said in the present one is not listened to any more."""
        self.generation += 1

    def forget(self, rank: int) -> None:
        """What was on its way to the rank's process is void."""
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
        world, change = self.world, self.plans.current
        if world.all_are(RankState.ABSENT):
            return Phase.WAITING
        if self.plan is not None:
            return Phase.REJOINING if world.has(RankState.REJOINING, RankState.READY) else Phase.RESUMING
        if change is not None and change.stage in AT_THE_BOUNDARY:
            return Phase.PAUSING
        if world.has(*_ON_THE_WAY):
            newcomer = world.first(RankState.STARTING)
            return Phase.STARTING if newcomer is not None and newcomer.connected else Phase.QUIESCING
        return Phase.FINISHING if world.has(RankState.RELEASED, RankState.EXITED) else Phase.RUNNING

    @property
    def is_too_small(self) -> bool:
        """Whether the world has fewer ranks than the job asked for."""
        return self.world.size < self.job.world_size

    @property
    def can_restart_larger(self) -> bool:
        """Whether all processes of a script that is not resilient live in a world that is too small."""
        if not self.is_too_small or self.ever_resilient or self.result is not None:
            return False
        return self.world.count(RankState.STARTING) == self.world.size == len(self.world.pids())

    def enter(self, now: float, limit_s: float | None = None) -> None:
        """Give the present phase a deadline `limit_s` from now, and write down that it has begun."""
        self.due.phase_s = None if limit_s is None else now + limit_s
        self.history.entered(self.phase.value, self.generation, now)

    def remember(self, report: FaultReport, now: float) -> bool:
        """Add a fault to the open incident, or open one with it; say whether one was opened."""
        pids = {} if self.history.open else self.world.pids()
        return self.history.report(report, pids, now, self.progress.committed)

    def decided(self, decision: Decision) -> None:
        """Remember what was decided, and have it said in the log in the same words."""
        self.history.decided(decision)
        incident = self.history.open
        if incident is not None:
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
        """Whether faults that were put off can be taken up now."""
        return bool(self.book.put_off) and self.phase not in {Phase.WAITING, *OVER}

    @property
    def spent(self) -> tuple[Spent, ...]:
        """What all attempts have cost, the one under way too."""
        return (*self.accounts.paid, *self.incident.attempt.cost)

    def begin_attempt(self) -> None:
        """The attempt under way is over, if there is one, and stays paid for."""
        self._pay()
        self.incident = self.incident.try_again()

    def close_incident(self) -> None:
        """Nothing is wrong any more; what was tried stays paid for."""
        self._pay()
        self.incident = OpenIncident()
        self.due.forget_replacements()

    def _pay(self) -> None:
        """Add the attempt under way to what the budgets count, and forget what they do not count any more."""
        paid = (*self.accounts.paid, *self.incident.attempt.cost)
        self.accounts.paid = self.ladder.still_counted(paid, self.turn.now)
