"""The job's policy: every key of its YAML file, its type, its bounds and its default.

Each struct is one mapping of the file. Frozen, and closed to unknown keys, so that a typing error is an error and not a
silent default. Reading and writing files is in `files.py`, the rules between keys are in `rules.py`.

Only keys that the controller decides by may change while a job runs: the other ones were given to processes when they
started, or are known to programs that do not ask the controller.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from ..protocol.compat import StrEnum
from ..protocol.faults import ExceptionPattern
from ..protocol.incidents import NoticeKind
from ..protocol.rules import JobRule, OutOfMemoryAction
from ..protocol.types import CheckpointFormat, IntegrityAction, RepairLinks, RestoreSource, Rung, StandbyDepth
from .fault_codes import CodeRule, LevelName

_LONGEST_S = 31_536_000  # a year: longer is a typing error, and infinity no deadline
_MOST = 1_000_000_000

Seconds = Annotated[float, msgspec.Meta(gt=0, le=_LONGEST_S)]
SecondsOrZero = Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_S)]
HangSeconds = Annotated[float, msgspec.Meta(ge=6, le=_LONGEST_S)]  # a journal that others read may hold it up for 5
Count = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
PartOf = Annotated[float, msgspec.Meta(gt=0, le=1)]
AgainSeconds = Annotated[float, msgspec.Meta(ge=60, le=_LONGEST_S)]
ReportSeconds = Annotated[float, msgspec.Meta(ge=1, le=3600)]
Factor = Annotated[float, msgspec.Meta(gt=1, le=1000)]
BlackBoxBytes = Annotated[int, msgspec.Meta(ge=4096, le=1 << 30)]

# Other packages add to these: which there are is asked where a file is read, and not where the machine decides.
CPU, GLOO, EXTERNAL = "cpu", "gloo", "external"
DEVICES, COMMUNICATORS = "devices", "communicators"
DeviceName = Annotated[str, msgspec.Meta(extra={"names_of": DEVICES})]
CommunicatorName = Annotated[str, msgspec.Meta(extra={"names_of": COMMUNICATORS})]


class CommunicatorPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The collective layer: how long one attempt to build it may take, how many, and its own timeout."""

    name: CommunicatorName = GLOO
    link_up_s: Seconds = 1.5
    link_up_attempts: Count = 5
    collective_s: Seconds = 1800.0
    # Of lost shards, with devices that have links of their own: `device` falls back to `host` within an incident.
    repair_links: RepairLinks = RepairLinks.DEVICE


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often a rung may be taken: for one rank, on one node, in the job. None: no limit of this sort.

    Counted over the last `window_s` seconds; 0: over the whole job.
    """

    per_rank: Count | None = None
    per_node: Count | None = None
    per_job: Count | None = 10
    window_s: SecondsOrZero = 3600.0


class RungPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rung of the ladder: its budget, and how often it may be taken in one incident."""

    rung: Rung
    attempts: Count = 3
    budget: Budget = Budget()


class RolePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named part of the world: its ranks (`0-5,8`), and its own ladder.

    Without a ladder (None) the role fails over with the job: a fault of one of its ranks restarts the whole world.
    """

    ranks: str
    ladder: tuple[RungPolicy, ...] | None = None


class NodePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many failures of its processes a node may have within `window_s` (0: in the whole job).

    With one more its ranks are moved to another node, which starts counting from zero. None: any number.
    `with_roles`: in a job of several roles, a machine that another role has left is left as well. `relaunch_brings`:
    `on_node_relaunch` answers with nodes, within `relaunch_s`.
    """

    failures: Count | None = 6
    window_s: SecondsOrZero = 3600.0
    with_roles: bool = True
    relaunch_brings: bool = False
    relaunch_s: Seconds = 60.0


class Deadlines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long each phase of a recovery may take, in seconds. What misses its deadline becomes a fault."""

    suspect_s: SecondsOrZero = 0.3  # first report to decision: reports that belong together arrive
    quiesce_s: Seconds = 10.0  # survivors stop and clean
    start_s: Seconds = 60.0  # a process is started and reaches its train function
    rejoin_s: Seconds = 60.0  # rebuild, repair, rollback
    first_step_s: Seconds = 300.0  # resume to the first step that all ranks committed
    nodes_s: Seconds = 270.0  # the platform brings the nodes it was asked for
    orders_s: Seconds = 600.0  # a parked process waits for the controller
    finish_s: Seconds = 600.0  # first rank finished to last
    stop_grace_s: SecondsOrZero = 5.0  # SIGTERM to SIGKILL when a job ends
    device_s: SecondsOrZero = 15.0  # a device becomes well again, before its process is restarted on it
    save_s: Seconds = 300.0  # an emergency checkpoint, or an asynchronous one, is written by all that are asked to


class CheckpointPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where checkpoints lie (None: `checkpoints` in the job directory), how often, how many are kept.

    `begin_again`: whether training may begin at its first step where a checkpoint has once been complete. `format`:
    midstep's own, or dcp: directories that torch.distributed.checkpoint reads in worlds of any size, and writes.
    `asynchronous`: they are written beside the training, from copies in host memory.
    """

    directory: str | None = None
    every_steps: CountOrZero = 1000  # 0: never
    keep: Count = 2
    begin_again: bool = False
    format: CheckpointFormat = CheckpointFormat.SAFETENSORS
    asynchronous: bool = False


class HostCopyPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often each rank copies its state into host memory, where `restore` names host_copy, and what that may take.

    `every_steps: auto`: as often as costs the training less than half a percent. `copies`: on how many nodes each is:
    on the rank's own, or on another one, too. `memory_bytes`: of a node, for all of its ranks, each of which has two
    copies, and two of another rank with `copies: 2`; None: half of what is free when the first one is made.
    """

    every_steps: Count | Literal["auto"] = "auto"
    copies: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1
    memory_bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] | None = None


class IntegrityPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often ranks vote on what they hold (0: never; auto: as often as 0.4 % of the time allows), and what follows.

    Every `audit_steps` (0: never) each rank repeats the step of the rank before it, and their gradients are compared.
    A rank that was wrong `strikes` times on one node within `window_s` is moved to another node.
    """

    every_steps: CountOrZero | Literal["auto"] = 0
    audit_steps: CountOrZero = 0
    then: IntegrityAction = IntegrityAction.ROLLBACK
    strikes: Count = 2
    window_s: Seconds = 86_400.0


class StandbyPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The warm process of each node: whether it is kept, which modules it imports ahead, and how much further it gets.

    With `depth: built` a spare node builds processes for the ranks of `nodes_per_spare` nodes in use. With `auto` each
    node in use builds those of its ranks where its memory and the script allow it, and a spare builds none.
    """

    warm: bool = True
    preload: tuple[str, ...] = ()
    depth: StandbyDepth = StandbyDepth.AUTO
    nodes_per_spare: CountOrZero = 1


class StallPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank stalls when a step takes more than `factor` median steps + `grace_s`, once it has a history.

    With `learns` the limit is lower where steps are even. None: it is so as long as `factor` and `grace_s` are those of
    the default policy, as a limit that was chosen is kept.

    A process that the kernel has stopped (SIGSTOP, a debugger) is at fault after `suspended_s`, whatever it was doing.
    """

    factor: Factor = 3.0
    grace_s: SecondsOrZero = 1.0
    learns: bool | None = None
    after_steps: Count = 5
    suspended_s: Seconds = 1.0

    @property
    def learned(self) -> bool:
        """Say that the limit follows from the steps before."""
        chosen = (self.factor, self.grace_s) != (_STALL.factor, _STALL.grace_s)
        return not chosen if self.learns is None else self.learns


_STALL = StallPolicy()


class HeartbeatPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often an agent says that it lives, and how many may be missed before its node counts as lost.

    While more than `hold_share` of the nodes are silent at once, none of them counts as lost, for up to `hold_s`.
    """

    interval_s: Seconds = 0.5
    missed: Count = 6
    hold_share: Share = 0.5  # 1: silence is never held
    hold_s: SecondsOrZero = 60.0


class WhenLost(StrEnum):
    """The treatment of the training when no controller can be kept running."""

    CONTINUE = "continue"  # it continues unguarded, and a controller is tried again and again
    STOP = "stop"  # it is parked and saved, and the job ends


class ControllerPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a controller counts as hung, when as lost for good, and what is done then. Who may speak for nodes."""

    hang_s: HangSeconds = 10.0  # without a sign of life, it is killed and replaced
    lost_after_s: Seconds = 30.0  # without one that stays up
    when_lost: WhenLost = WhenLost.CONTINUE
    proxies: bool = False  # `midstep proxy` may speak for nodes


class AgentPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the agent of a machine that has joined by itself stays without a controller, and without a rank."""

    leave_s: Seconds = 86_400.0  # then it ends what runs there, and exits with code 75
    spare_s: Seconds | None = 600.0  # as a spare that no `--spares` asks for; then it leaves, and exits with code 0


class TooOften(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device on which one of `codes` occurs `times` in `window_s` gets the level ManuallySeparateNPU."""

    codes: tuple[str, ...]
    times: Count
    window_s: Seconds


class FaultPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings about faults of hardware: their meaning for this job, and where they are reported (docs/faults.md).

    `codes` and the file `codes_file` come before `configs/fault_codes.yaml`; a file that was read is in `codes`.
    """

    codes: dict[str, CodeRule] = {}
    codes_file: str | None = None
    unknown_code: LevelName = LevelName.NOT_HANDLE_FAULT  # of unknown codes, when no level comes along
    in_place_age_s: Seconds = 60.0  # what has stood for longer is not mended by a new process
    too_often: tuple[TooOften, ...] = (TooOften(codes=("80E18005",), times=3, window_s=86400.0),)
    isolate_s: SecondsOrZero = 172_800.0  # what was raised is left out by other jobs for so long; 0: by none
    sources: tuple[str, ...] = ()  # files and directories with documents of detectors
    node_names: dict[str, str] = {}  # name of a node in the cluster's documents -> its name in the job
    node_serials: dict[str, str] = {}  # serial number of a machine -> its node, for documents that name no node

    @property
    def named_nodes(self) -> dict[str, str]:
        """Every name or serial number by which documents may mean a node, with the node's name in the job."""
        return {**self.node_serials, **self.node_names}


class SubHealthAction(StrEnum):
    """The treatment of a node that works, and is reported not to be well."""

    IGNORE = "ignore"  # it is noted
    DRAIN = "drain"  # its ranks move to a spare node between two steps; nothing is repeated
    LEAVE_NOW = "leave_now"  # it is left at once, as after a fault of its devices


class SlowAction(StrEnum):
    """The treatment of a node whose ranks compute more slowly than others with equal work."""

    IGNORE = "ignore"  # ranks are not compared
    REPORT = "report"  # it is shown as a fault that stands
    DRAIN = "drain"  # its ranks move to a spare node between two steps; nothing is repeated
    SHRINK = "shrink"  # as drain; where no node can take its place, the world continues without it


class SlowPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a node is slow, and what is done then.

    A rank is slow that has taken `factor` times the time of its equals, in each of several rounds and for `for_s`. Not
    more than `nodes` nodes are drained for it within `window_s`.
    """

    then: SlowAction = SlowAction.REPORT
    factor: Factor = 1.3
    for_s: SecondsOrZero = 5.0
    nodes: CountOrZero = 2
    window_s: Seconds = 86_400.0


class ScalePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """With how few nodes a job trains (null: with no fewer than it asked for).

    At its start it waits `last_call_s` for the others once `min_nodes` are there. Where a node is lost and none takes
    its place, it continues with fewer. It grows, up to what it asked for, when nodes come, but not within
    `min_interval_s` of the last change; `in_place`: the ranks that it has keep their processes.
    """

    min_nodes: Count | None = None
    in_place: bool = False
    min_interval_s: SecondsOrZero = 600.0
    last_call_s: SecondsOrZero = 30.0


class NodeCheckPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The check of each node before it gets ranks: a matrix product, and an exchange with another node.

    A node for which either takes longer than `within_s` is left.
    """

    enabled: bool = False
    within_s: Seconds = 30.0


class IncidentPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many rungs may be taken in one incident, all together."""

    max_attempts: Count = 8


class WebhookShape(StrEnum):
    """The JSON that a webhook gets."""

    SLACK = "slack"  # {"text": ...}, which Slack, Mattermost, Rocket.Chat and others take
    PLAIN = "plain"  # an object with the fields of the notice


class WebhookPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One place that hears of `events`. URL and header are in files of mode 600, which controllers read at each try."""

    name: str
    url_file: str
    header_file: str | None = None
    shape: WebhookShape = WebhookShape.PLAIN
    events: tuple[NoticeKind, ...] = tuple(NoticeKind)


class NotifyPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The webhooks, and from when on they hear of something; of the same again after `again_s` at the earliest."""

    webhooks: tuple[WebhookPolicy, ...] = ()
    asked_after_s: Seconds = 600.0
    budget_share: PartOf = 0.8
    unguarded_s: Seconds = 30.0
    checkpoint_age_s: Seconds | None = None  # None: they do not hear of an old one
    goodput_under: PartOf | None = None  # of the last hour
    again_s: AgainSeconds = 3600.0


class TrainJobPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The progress that Kubeflow's trainer gets in a TrainJob; then ranks do not see its variables, and report none."""

    report: bool = False
    total_steps: Count | None = None  # None: the number that the script reports by this name
    every_s: ReportSeconds = 30.0


DEFAULT_LADDER = (
    RungPolicy(Rung.RETRY_STEP, attempts=3, budget=Budget(per_job=30)),
    RungPolicy(Rung.RECOVER_IN_PLACE, attempts=3, budget=Budget(per_rank=3, per_node=6, per_job=30)),
    RungPolicy(Rung.RECOVER, attempts=3, budget=Budget(per_rank=2, per_job=10, window_s=86400.0)),
    RungPolicy(Rung.RESCHEDULE_POD, attempts=2, budget=Budget(per_job=5, window_s=86400.0)),
    RungPolicy(Rung.RESCHEDULE_JOB, attempts=1, budget=Budget(per_job=2, window_s=0.0)),
    RungPolicy(Rung.STOP),
)


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. An empty one is the default policy."""

    ladder: tuple[RungPolicy, ...] = DEFAULT_LADDER
    roles: dict[str, RolePolicy] = {}
    node: NodePolicy = NodePolicy()
    incident: IncidentPolicy = IncidentPolicy()
    deadlines: Deadlines = Deadlines()
    restore: tuple[RestoreSource, ...] = (RestoreSource.REPLICA, RestoreSource.CHECKPOINT)
    replica: Literal["mesh", "buddy"] = "mesh"  # of what one rank alone holds of a sharded model: none, or at a buddy
    save_before_reschedule: bool = True  # what healthy processes hold is written before a rung ends all of them
    host_copy: HostCopyPolicy = HostCopyPolicy()
    integrity: IntegrityPolicy = IntegrityPolicy()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    standby: StandbyPolicy = StandbyPolicy()
    stall: StallPolicy = StallPolicy()
    heartbeat: HeartbeatPolicy = HeartbeatPolicy()
    controller: ControllerPolicy = ControllerPolicy()
    agent: AgentPolicy = AgentPolicy()
    faults: FaultPolicy = FaultPolicy()
    sub_health: SubHealthAction = SubHealthAction.DRAIN
    slow: SlowPolicy = SlowPolicy()
    scale: ScalePolicy = ScalePolicy()
    node_check: NodeCheckPolicy = NodeCheckPolicy()
    communicator: CommunicatorPolicy = CommunicatorPolicy()
    device: DeviceName = CPU
    black_box_bytes: BlackBoxBytes = 1 << 20
    exceptions: tuple[ExceptionPattern, ...] = ()  # the job's own, tried before those of configs/exceptions.yaml
    retry_unknown_exceptions: bool = False  # what fits no pattern keeps its process, and the step is repeated once
    out_of_memory: OutOfMemoryAction = OutOfMemoryAction.REPLACE
    rules: tuple[JobRule, ...] = ()  # on values that the script reports, and on lines that ranks print
    on_node_relaunch: str | None = None  # a command that is run when a node was replaced
    notify: NotifyPolicy = NotifyPolicy()
    trainjob: TrainJobPolicy = TrainJobPolicy()
    allow_inject: bool = True  # false: no fault is caused on purpose while the job runs

    def rung(self, rung: Rung) -> RungPolicy | None:
        """Return the ladder's entry for `rung`, None when the policy does without it."""
        return next((entry for entry in self.ladder if entry.rung is rung), None)

    @property
    def script_writes(self) -> bool:
        """Return whether checkpoints are written by the script, whose groups are its framework's own."""
        return self.communicator.name == EXTERNAL


def default_policy() -> Policy:
    """Return the policy of a job that names no policy file."""
    return Policy()


# --- a policy that changes while a job runs ---------------------------------------------------------------------------

# These keys, and those below them, may change.
FREE = (
    "ladder",
    "incident.max_attempts",
    "node.failures",
    "node.window_s",
    "deadlines",
    "save_before_reschedule",
    "sub_health",
    "slow",
    "scale.min_interval_s",
    "faults.in_place_age_s",
    "node_check.within_s",
)
# Those below them that may not: processes go by them.
FIXED = ("deadlines.orders_s", "deadlines.save_s", "deadlines.stop_grace_s")
FOR_GOOD = "allow_inject"  # the controller alone goes by it, but what an operator may lift is no limit for operators
ABSENT = "-"


class PolicyChange(msgspec.Struct, frozen=True):
    """One key whose value differs. `before`, `after`: as JSON; `-`: it is not there."""

    key: str
    before: str
    after: str

    @property
    def text(self) -> str:
        """Say it in one line."""
        return f"{self.key}: {self.before} -> {self.after}"


def changes(before: Policy, after: Policy) -> tuple[PolicyChange, ...]:
    """Return every key in which two policies differ."""
    one, other = dict(_leaves(msgspec.to_builtins(before))), dict(_leaves(msgspec.to_builtins(after)))
    differing = [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]
    return tuple(PolicyChange(key, one.get(key, ABSENT), other.get(key, ABSENT)) for key in differing)


def may_change(key: str) -> bool:
    """Tell whether a key may change while a job runs."""
    if key in FIXED:
        return False
    words = key.split(".")
    if words[0] == "roles":  # the ladder of a role, and not which ranks it has
        return len(words) > 3 and words[2] == "ladder"
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def obstacle(found: tuple[PolicyChange, ...]) -> str | None:
    """Say why these changes cannot be made while the job runs, by key; None: they can."""
    if not found:
        return "it is the policy that is in force: nothing differs"
    fixed = [change.key for change in found if not may_change(change.key)]
    if not fixed:
        return None
    they = "it" if len(fixed) == 1 else "them"
    held = "it holds from the start of a job to its end"
    because = f"since {held if fixed == [FOR_GOOD] else f'processes that run go by {they}'}"
    return (
        f"{', '.join(fixed)} cannot change while the job runs, {because}: start the job again with the new policy, or "
        f"leave {they} as before"
    )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key with its value as JSON."""
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _leaves(each, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple) and value and all(isinstance(each, dict) and "rung" in each for each in value):
        for entry in value:
            rest = {name: each for name, each in entry.items() if name != "rung"}
            yield from _leaves(rest, f"{path}.{entry['rung']}")
    else:
        yield path, json.dumps(value)
