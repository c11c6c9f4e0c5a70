"""Everything that the recovery machine knows, and the few verbs with which its handlers change it.

The state is a fold of the events: same events, same state, same actions. That is what lets a restarted controller
replay its journal and go on.
"""

import enum
from dataclasses import dataclass, field

import msgspec

from ...policies.facts import NodeFailure, Spent
from ...policies.ladder import Ladder
from ...policies.schema import Policy
from ...protocol.incidents import HoldRecord
from ...protocol.messages import Command
from ...protocol.types import Decision, FaultReport, JobSpec, RepairPlan, rank_address
from ..actions import Action, Finish, Forget, Log, Send
from ..fault_book import FaultBook
from ..rank_states import PARKED, RankState
from ..world import World
from .history import History
from .incident import OpenIncident
from .meeting import Meeting
from .planned_change import AT_THE_BOUNDARY, Plans


class Phase(enum.StrEnum):
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


# In these nothing more can be mended: faults are not taken in.
OVER = frozenset({Phase.SAVING, Phase.ENDED})


class Stop(msgspec.Struct, frozen=True):
    """The job ends when its checkpoint is written."""

    reason: str
    exit_code: int


class Resize(msgspec.Struct, frozen=True):
    """The world starts anew in another size when its checkpoint is written; `leaving` nodes are replaced then."""

    leaving: tuple[str, ...] = ()


@dataclass
class JobState:
    """The machine's memory. Only handlers change it."""

    policy: Policy
    ladder: Ladder
    job: JobSpec
    world: World
    book: FaultBook
    history: History = field(default_factory=History)
    meeting: Meeting = field(default_factory=Meeting)
    generation: int = 0
    term: int = 0
    due_s: float | None = None  # when the present phase is over time
    newcomers_due_s: float | None = None  # when replacements must have joined
    devices_due_s: float | None = None  # when the devices of `held` must be well again
    put_off: list[FaultReport] = field(default_factory=list)  # came while there was no world to recover
    held: set[int] = field(default_factory=set)  # ranks whose next process waits for its device
    awaiting_progress: set[str] = field(default_factory=set)  # nodes that have yet to read their step clocks
    incident: OpenIncident = field(default_factory=OpenIncident)  # empty while nothing is wrong
    own_words: dict[int, tuple[int, float]] = field(default_factory=dict)  # rank -> life, and when it said: struck
    plan: RepairPlan | None = None
    stop_requested: bool = False
    after_saving: Stop | Resize | None = None  # what follows when the checkpoint is written, or cannot be
    # The shards that each rank has yet to save; in front the rank that publishes, and is asked when it is the last.
    saving: dict[int, tuple[str, ...]] = field(default_factory=dict)
    plans: Plans = field(default_factory=Plans)  # changes that wait for a step boundary
    # the whole job
    paid: list[Spent] = field(default_factory=list)  # for attempts that are over
    node_failures: list[NodeFailure] = field(default_factory=list)
    restarts: int = 0  # of the whole world
    ever_resilient: bool = False
    spares_awaited: bool = True  # at the start of a job
    lost_waiting: int = 0  # nodes, since nodes are waited for
    can_create_nodes: bool = False  # a platform that makes nodes has said so
    committed: int = 0
    median_step_s: float = 0.0
    first_steps_at_s: float = 0.0
    probes: int = 0
    clocks_read_s: float = 0.0  # when they were asked for last
    now: float = 0.0  # of the event that is being handled
    came_in: Phase = Phase.WAITING  # the phase in which that event came: it may have taken all ranks away
    holds: list[HoldRecord] = field(default_factory=list)  # the latest ones
    ignored: dict[str, int] = field(default_factory=dict)
    exit_code: int | None = None
    reason: str = ""
    actions: list[Action] = field(default_factory=list)

    def send(self, receiver: str, body: Command) -> None:
        """Ask for a command to be sent in the present generation."""
        self.actions.append(Send(receiver, body, self.generation))

    def forget(self, rank: int) -> None:
        """What was on its way to the rank's process is void."""
        self.actions.append(Forget(rank_address(rank)))

    @property
    def phase(self) -> Phase:
        """Where the job stands, as it follows from all else."""
        if self.exit_code is not None:
            return Phase.ENDED
        if self.after_saving is not None:
            return Phase.SAVING
        together = self.phase_of_ranks
        return Phase.SUSPECTING if self.incident.suspicions and together is not Phase.WAITING else together

    @property
    def phase_of_ranks(self) -> Phase:
        """Where the ranks stand together, also while something is suspected."""
        world, change = self.world, self.plans.current
        if world.count(RankState.ABSENT) == world.size:
            return Phase.WAITING
        if self.plan is not None:
            return Phase.REJOINING if world.count(RankState.REJOINING, RankState.READY) else Phase.RESUMING
        if change is not None and change.stage in AT_THE_BOUNDARY:
            return Phase.PAUSING
        if world.count(RankState.STARTING, *PARKED, RankState.QUIESCING):
            newcomer = world.first(RankState.STARTING)
            return Phase.STARTING if newcomer is not None and newcomer.connected else Phase.QUIESCING
        return Phase.FINISHING if world.count(RankState.RELEASED, RankState.EXITED) else Phase.RUNNING

    def enter(self, now: float, limit_s: float | None = None) -> None:
        """Give the present phase a deadline `limit_s` from now, and write down that it has begun."""
        self.due_s = None if limit_s is None else now + limit_s
        self.history.entered(self.phase.value, self.generation, now)

    def remember(self, report: FaultReport, now: float) -> bool:
        """Add a fault to the open incident, or open one with it; say whether one was opened."""
        pids = {} if self.history.open else self.world.pids()
        return self.history.report(report, pids, now, self.committed)

    def decided(self, decision: Decision) -> None:
        """Remember what was decided, and have it said in the log in the same words."""
        self.history.decided(decision)
        incident = self.history.open
        if incident is not None:
            self.actions += [Log(f"incident {incident.number}: {text}") for text in decision.in_words()]

    def ignore(self, why: str) -> None:
        """Count a report that changes nothing."""
        self.ignored[why] = self.ignored.get(why, 0) + 1

    def finish(self) -> None:
        """Have the driver leave: the job is over."""
        assert self.exit_code is not None
        self.actions.append(Finish(self.exit_code, self.reason))

    @property
    def has_put_off(self) -> bool:
        """Whether faults that were put off can be taken up now."""
        return bool(self.put_off) and self.phase not in {Phase.WAITING, *OVER}

    @property
    def spent(self) -> tuple[Spent, ...]:
        """What all attempts have cost, the one under way too."""
        return (*self.paid, *self.incident.attempt.cost)

    def begin_attempt(self) -> None:
        """The attempt under way is over, if there is one, and stays paid for."""
        self.paid += self.incident.attempt.cost
        self.incident = self.incident.try_again()

    def close_incident(self) -> None:
        """Nothing is wrong any more; what was tried stays paid for."""
        self.paid += self.incident.attempt.cost
        self.incident = OpenIncident()
        self.newcomers_due_s = self.devices_due_s = None
        self.held.clear()
