"""The nouns of midstep, as enums and frozen structs.

They exist so that a rank, a fault or a repair plan means the same in the controller's journal, on the wire, in a
report and in a training process. Nothing here has behaviour beyond deriving a value from its own fields.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from .bounds import MOST_LINKS, MOST_OF_A_RANK, Count, Name, PathName, Port, ProcessId, Rank, Seconds, Stage, Text
from .compat import StrEnum
from .faults import ArmedFault as ArmedFault
from .faults import Assertion as Assertion
from .faults import ExceptionPattern
from .faults import FaultAction as FaultAction
from .faults import FaultKind as FaultKind
from .faults import FaultLevel as FaultLevel
from .faults import FaultReport as FaultReport
from .faults import FlippedBits as FlippedBits
from .faults import InjectionPoint as InjectionPoint
from .rules import JobRule, LeaveOut

CONTROLLER = "controller"
PLATFORM = "platform"
RANK_PREFIX = "rank/"
DETECTOR_PREFIX = "detector/"
OPERATOR = "detector/operator"  # in whose name a node is drained or isolated


def node_address(node: str) -> str:
    """Return the address of the agent of `node`."""
    return f"node/{node}"


def rank_address(rank: int) -> str:
    """Return the address of the processor that holds `rank`."""
    return f"{RANK_PREFIX}{rank}"


def rank_of(address: str) -> int | None:
    """Return the rank whose processor has an address that this program has made; None: it is of something else."""
    return int(address[len(RANK_PREFIX) :]) if address.startswith(RANK_PREFIX) else None


def detector_address(name: str) -> str:
    """Return the address of a detector: a program that sees faults of hardware, and says nothing else."""
    return f"{DETECTOR_PREFIX}{name}"


class Rung(StrEnum):
    """The ways to recover, from cheapest to coarsest (see `docs/policies.md`)."""

    RETRY_STEP = "retry_step"
    RECOVER_IN_PLACE = "recover_in_place"
    RECOVER = "recover"
    RESCHEDULE_POD = "reschedule_pod"
    RESCHEDULE_JOB = "reschedule_job"
    STOP = "stop"


class Activity(StrEnum):
    """The present activity of a training thread; the step clock of the black box carries it."""

    STARTING = "starting"
    COMPUTING = "computing"
    COLLECTIVE = "collective"
    COMMITTING = "committing"  # inside the commit barrier
    UPDATING = "updating"
    CHECKPOINTING = "checkpointing"
    PAUSED = "paused"  # the user said that a long pause is coming
    RECOVERING = "recovering"
    FINISHED = "finished"


WATCHED = frozenset({Activity.COMPUTING, Activity.COLLECTIVE, Activity.COMMITTING, Activity.UPDATING})
"""The activities of a step proper, whose time counts against it."""

FIRST_STEP_FACTOR, FIRST_STEP_GRACE_S = 10.0, 30.0


def first_step_s(median_step_s: float) -> float:
    """Return how long the first step after a recovery may take: it is slow for newcomers, and others wait for them."""
    return FIRST_STEP_FACTOR * median_step_s + FIRST_STEP_GRACE_S


class StandbyDepth(StrEnum):
    """The point up to which a process runs that is kept for the next fault."""

    IMPORTED = "imported"  # it has imported its modules, and can take any rank of its node
    BUILT = "built"  # it has run the script up to the train function, as one rank
    AUTO = "auto"  # built where the node's memory and the script allow it, else imported


NO_EMERGENCY_CHECKPOINT = "no emergency checkpoint"  # in the reason of a job's end: what its ranks held is lost


class RestoreSource(StrEnum):
    """The origin of state that takes the place of what was lost."""

    NOTHING = "nothing"  # a fresh start: there is no state yet
    REPLICA = "replica"
    HOST_COPY = "host_copy"  # each rank's own copy, in memory that outlives its process
    CHECKPOINT = "checkpoint"


class CheckpointFormat(StrEnum):
    """The files of a checkpoint."""

    SAFETENSORS = "safetensors"  # one for each shard, which only a world of the same layout reads
    DCP = "dcp"  # those of torch.distributed.checkpoint, which a world of any size reads, and plain torch


class IntegrityAction(StrEnum):
    """The treatment of a vote that is lost: the copies of a shard are not equal, or memory has changed by itself."""

    ROLLBACK = "rollback"  # all go back to a state that is known to be right, and repeat
    REPAIR = "repair"  # who is wrong gets the copy of the majority, whatever it may have spoilt before
    REPORT = "report"  # it is shown, and training goes on


class ShardHold(msgspec.Struct, frozen=True):
    """A shard (parameters + optimizer state) that a rank holds whole. Two ranks with one `shard_id` hold replicas."""

    shard_id: Name
    size_bytes: Count
    held: bool = True  # False: the rank must hold it, and does not yet


class LocalStateCopy(msgspec.Struct, frozen=True):
    """A copy of the rank-local state of `rank` (RNG, data position), as of `step` committed updates."""

    rank: Rank
    step: Count


class GuestCopy(msgspec.Struct, frozen=True):
    """A whole copy in host memory of all that `rank` holds, as of `step`, with a rank of another node."""

    rank: Rank
    step: Count
    size_bytes: Count


class CheckpointTrace(msgspec.Struct, frozen=True):
    """A rank's findings in the checkpoint directory, apart from checkpoints that it can read. Texts are for people.

    `unlisted`: why the directory could not be listed. `unusable`: what shows that a checkpoint has once been complete
    there, though none can be read. `unmarked`: no world has marked the directory, or it is not there.
    """

    directory: PathName = ""
    unlisted: Text = ""
    unusable: Text = ""
    unmarked: bool = False


class StepReport(msgspec.Struct, frozen=True):
    """The position of one rank at barrier one.

    `committed` counts the updates that the rank has fully applied, so the next step's 0-based index is `committed`.
    `ready`: all collectives of that next step are done and its gradients are final. `clean`: what it holds is at
    `committed` (a newcomer's and a half-repaired rank's are not). `needs`: the shards that the rank must hold, whether
    or not it holds them now. `holds`: those that are whole; a clean rank lacks those whose memory is corrupted.
    """

    committed: Count
    ready: bool
    clean: bool
    holds: Annotated[tuple[ShardHold, ...], Meta(max_length=MOST_OF_A_RANK)] = ()
    needs: Annotated[tuple[Name, ...], Meta(max_length=MOST_OF_A_RANK)] = ()
    local_states: Annotated[tuple[LocalStateCopy, ...], Meta(max_length=MOST_OF_A_RANK)] = msgspec.field(
        default=(), name="own_states"
    )  # the name that journals have
    checkpoints: Annotated[tuple[Count, ...], Meta(max_length=MOST_OF_A_RANK)] = ()  # steps of those it can read
    trace: CheckpointTrace = CheckpointTrace()
    host_copies: Annotated[tuple[Count, ...], Meta(max_length=MOST_OF_A_RANK)] = ()  # steps of those that are whole
    guest_copies: Annotated[tuple[GuestCopy, ...], Meta(max_length=MOST_OF_A_RANK)] = ()  # of others, kept here


class ShardTransfer(msgspec.Struct, frozen=True):
    """Bytes [offset_bytes, offset_bytes + length_bytes) of a shard go from rank `source` to rank `destination`."""

    shard_id: str
    offset_bytes: int
    length_bytes: int
    source: int
    destination: int


class RepairLinks(StrEnum):
    """The links over which lost shards travel."""

    HOST = "host"  # from host to host, beside the devices' own links
    DEVICE = "device"  # from device to device, over the links that collectives use


class LocalStateTransfer(msgspec.Struct, frozen=True):
    """The rank-local state of `rank` goes from the black box of `source` to `rank`. They may be the same rank."""

    rank: int
    source: int
    origin: int | None = None  # the rank whose state it is instead, where `rank` is new to the world


class RepairPart(msgspec.Struct, frozen=True):
    """One rank's part of a repair. All ranks get the same `target_step` and `restore`."""

    target_step: int
    restore: RestoreSource
    finish_update: bool = False  # this rank is ready at target_step - 1: apply the update locally
    transfers: tuple[ShardTransfer, ...] = ()  # those in which this rank is source or destination
    local_states: tuple[LocalStateTransfer, ...] = msgspec.field(default=(), name="own_states")  # and local states
    restore_local: bool = msgspec.field(default=False, name="restore_own")  # as all ranks do to repeat a step
    buddy: int | None = None  # the rank that keeps a copy of this rank's local state from here on; None: none does
    copied_rank: int | None = None  # the rank whose buddy this one is
    links: RepairLinks = RepairLinks.HOST  # of `transfers`; the same on all ranks
    host_copy: int = 0  # step of the newest copy in host memory that there is of every rank; 0: there is none
    copy_transfers: tuple[ShardTransfer, ...] = ()  # of copies, to the rank that each is of
    copy_holder: int | None = None  # the rank of another node that keeps this rank's copies; None: none does
    copy_guest: int | None = None  # the rank of another node whose copies this one keeps
    leave_out: LeaveOut | None = None  # batches that a rule has refused
    world_size: int = 0  # how many ranks the generation has; 0: as many as before
    former_size: int = 0  # how many of them, the lowest, are not new to the world


class RepairPlan(msgspec.Struct, frozen=True):
    """The way of the world to `target_step`: each rank's part, and the reasons in words."""

    target_step: int
    restore: RestoreSource
    parts: dict[int, RepairPart]
    reasons: tuple[str, ...]


class StoreEndpoint(msgspec.Struct, frozen=True):
    """The endpoint of the rendezvous store of a generation (a torch TCPStore outside the training processes)."""

    host: Name
    port: Port


class Rendezvous(StoreEndpoint, frozen=True):
    """The place where the members of a generation meet, and the secret with which they know each other there.

    Every process that can connect can read and write a store. So names and values are sealed with the secret, which is
    another one in every generation and reaches the members by the controller's authenticated line only.
    """

    secret: str


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """The time of all steps that a process has committed, in microseconds, by what its train thread did.

    `own_us`: it computed. `input_us`: it waited for its data loader. `wait_us`: it waited for other ranks. `tokens`: of
    these steps, where the script reports them. `stage`: ranks of one stage do equal work in each step; -1: not known.
    """

    steps: Count
    own_us: Count
    input_us: Count
    wait_us: Count
    tokens: Count = 0
    stage: Stage = -1


class LinkUse(msgspec.Struct, frozen=True, array_like=True):
    """A process's connections from one address to another, since it began: for so long sent data was on its way."""

    here: Name
    there: Name
    busy_us: Count
    sent_bytes: Count


class RankProgress(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A rank's step clock, as its agent reads it from the black box. Ages are seconds before the reading."""

    rank: Rank
    incarnation: Count
    generation: Count
    step: Count
    activity: Activity
    collectives: Count  # entered by the rank in this generation
    activity_age_s: Seconds
    step_age_s: Seconds
    median_step_s: Seconds
    suspended: bool = False  # the kernel says that the process is stopped
    copied_steps: Annotated[tuple[Count, ...], Meta(max_length=MOST_OF_A_RANK)] = ()  # of its copies in host memory
    copied_bytes: Count = 0  # the memory that they take, and those of others here
    guest_copies: Annotated[tuple[GuestCopy, ...], Meta(max_length=MOST_OF_A_RANK)] = ()  # of others, kept here
    agreed_step: Count = 0  # the newest state that passed a vote; 0: none has
    unchecked: Count = 0  # shards here that no vote can check
    times: StepTimes | None = None  # None: no step was committed
    allowed_s: Seconds = 0.0  # of a step, learned from those before it; 0: by the policy
    rest_s: Seconds = 0.0  # its process has done nothing at all for so long, longer than it may; 0: not so
    links: Annotated[tuple[LinkUse, ...], Meta(max_length=MOST_LINKS)] = ()  # to other machines


class RunningProcess(msgspec.Struct, frozen=True):
    """A training process that an agent has running."""

    rank: Rank
    pid: ProcessId
    incarnation: Count
    generation: Count


class JobSpec(msgspec.Struct, frozen=True):
    """The job to run. The agents get it when they join."""

    job: str
    command: tuple[str, ...]  # script path or module name, then its arguments
    is_module: bool
    no_python: bool  # run command[0] as a program
    environment: dict[str, str]
    working_directory: str
    job_directory: str  # checkpoints, logs, journal
    world_size: int
    ranks_per_node: int
    nodes: int
    spare_nodes: int
    max_restarts: int
    settings: "JobSettings"


class JobSettings(msgspec.Struct, frozen=True):
    """The part of the policy file that agents and processors follow."""

    checkpoint_directory: str | None = None
    checkpoint_every_steps: int = 0  # 0: never
    checkpoint_keep: int = 2
    checkpoint_format: CheckpointFormat = CheckpointFormat.SAFETENSORS
    checkpoint_asynchronous: bool = False  # they are written from copies in host memory
    save_s: float = 300.0  # such a one is, by all ranks
    preload: tuple[str, ...] = ()
    warm_standby: bool = True
    standby_depth: StandbyDepth = StandbyDepth.AUTO
    heartbeat_s: float = 0.5
    stall_factor: float = 3.0
    stall_grace_s: float = 1.0
    stall_after_steps: int = 5  # steps of history before the clock is believed
    stall_learns: bool = True  # the limit of a step follows from the steps before it
    stall_suspended_s: float = 1.0  # a process that the kernel has stopped for so long is at fault
    orders_s: float = 600.0  # how long a parked processor waits for the controller
    link_up_s: float = 1.5  # one attempt to build the communicators
    collective_s: float = 1800.0  # the communicator's own timeout
    stop_grace_s: float = 5.0  # SIGTERM to SIGKILL when a job ends
    black_box_bytes: int = 1 << 20  # capacity of one slot of rank-local state
    communicator: str = "gloo"
    device: str = "cpu"
    restore: tuple[str, ...] = ("replica", "checkpoint")
    buddies: bool = False  # what one rank alone holds of a sharded model is copied at another one
    host_copies: bool = False  # each rank keeps copies of its state in host memory
    host_copy_every_steps: int = 0  # 0: as often as hardly costs anything
    host_copy_bytes: int = 0  # of a node, for all of its ranks; 0: half of what is free when the first is made
    host_copy_nodes: int = 1  # on which each copy is
    integrity_every_steps: int | None = 0  # ranks compare hashes of what they hold; 0: never, None: as cost allows
    integrity_audit_steps: int = 0  # each rank repeats a step of the rank before it; 0: never
    integrity_then: IntegrityAction = IntegrityAction.ROLLBACK
    resizes: bool = False  # the world may continue with fewer nodes
    grows_in_place: bool = False  # and running processes stay when nodes come: new ones join them
    leave_s: float = 86_400.0  # without a controller, a node that has joined by itself gives the job up
    spare_s: float | None = 600.0  # without a rank, it leaves
    exceptions: tuple[ExceptionPattern, ...] = ()  # the job's own patterns
    retry_unknown_exceptions: bool = False  # what fits no pattern is mendable
    rules: tuple[JobRule, ...] = ()  # on values that the script reports, and on lines that ranks print
    skips_out_of_memory: bool = False  # a lack of memory costs a batch, and no process


class SkippedRung(msgspec.Struct, frozen=True):
    """A rung that was not taken, and why."""

    rung: Rung
    reason: str


class Decision(msgspec.Struct, frozen=True):
    """The rung that was taken, why, and why each cheaper one was not."""

    rung: Rung
    reason: str
    skipped: tuple[SkippedRung, ...] = ()
    roles: tuple[str, ...] = ()  # of the ranks at fault; empty: ranks without a role, or none at fault

    def in_words(self) -> list[str]:
        """Say why each cheaper rung was not taken, and then why this one was, a line each."""
        passed_over = [f"not {skipped.rung}: {skipped.reason}" for skipped in self.skipped]
        return [*passed_over, f"{self.rung}: {self.reason}"]


class HeldLease(msgspec.Struct, frozen=True):
    """A Lease as it was read. `holder` "": none leads. `version`: another one after each change."""

    holder: str
    duration_s: int
    version: str
