"""Every message on the wire, as frozen structs: reports go up, commands go down.

A report is also an event of the recovery machine, and goes into its journal as it is. Names: reports are past tense,
commands imperative. All are members of one tagged union, `Message`, so that unknown or malformed bytes fail to decode
instead of meaning something else.
"""

import msgspec

from .types import (
    ArmedFault,
    FaultReport,
    JobSpec,
    RankProgress,
    RepairPart,
    RunningProcess,
    StepReport,
    StoreEndpoint,
)

# --- reports: up to the controller ------------------------------------------------------------------------------


class NodeJoined(msgspec.Struct, frozen=True, tag=True):
    """An agent is there, with what runs on its node. Sent at its start, and again to every new controller."""

    node: str
    failure_domain: str
    store: StoreEndpoint
    processes: tuple[RunningProcess, ...] = ()


class NodeLost(msgspec.Struct, frozen=True, tag=True):
    """The platform (or liveness) says that the node is gone."""

    node: str
    reason: str
    at_s: float


class NodeRefused(msgspec.Struct, frozen=True, tag=True):
    """The platform cannot create the node that it was asked for."""

    node: str
    reason: str


class StoreMoved(msgspec.Struct, frozen=True, tag=True):
    """The node's rendezvous store was restarted and listens elsewhere."""

    node: str
    store: StoreEndpoint


class ProcessStarted(msgspec.Struct, frozen=True, tag=True):
    """An agent has started the process of a rank. `warm`: forked from a standby."""

    node: str
    process: RunningProcess
    warm: bool


class ProcessExited(msgspec.Struct, frozen=True, tag=True):
    """A training process has ended. `status` is its exit status, or minus the number of the signal that ended it."""

    node: str
    process: RunningProcess
    status: int
    at_s: float
    expected: bool  # the agent had been told to end it
    last: RankProgress | None = None  # where its step clock stood, from the black box that outlives it


class FaultReported(msgspec.Struct, frozen=True, tag=True):
    """One observation of something wrong."""

    report: FaultReport


class RankJoined(msgspec.Struct, frozen=True, tag=True):
    """A process has reached its train function and waits to be let in. `join_s`: since its start."""

    rank: int
    generation: int
    incarnation: int
    pid: int
    report: StepReport
    join_s: float


class RankQuiesced(msgspec.Struct, frozen=True, tag=True):
    """A survivor has stopped and cleaned. `phases_s`: seconds by phase (stop, clean)."""

    rank: int
    generation: int
    incarnation: int
    report: StepReport
    phases_s: dict[str, float]


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """A rank is rebuilt, repaired, rolled back, and stands at `step`. `phases_s`: rebuild, repair, rollback."""

    rank: int
    generation: int
    incarnation: int
    step: int
    phases_s: dict[str, float]
    bytes_received: int = 0


class StepCommitted(msgspec.Struct, frozen=True, tag=True):
    """A rank has committed its first step after a resume. `committed` counts updates; `median_step_s` is its history's."""

    rank: int
    generation: int
    incarnation: int
    committed: int
    at_s: float
    median_step_s: float


class RankFinished(msgspec.Struct, frozen=True, tag=True):
    """A rank's train function has returned, after `committed` updates."""

    rank: int
    generation: int
    incarnation: int
    committed: int


class CheckpointSaved(msgspec.Struct, frozen=True, tag=True):
    """Answer to SaveCheckpoint. `error` is empty when it worked; `path` is where it lies."""

    rank: int
    generation: int
    step: int
    path: str
    error: str = ""


class ProgressReported(msgspec.Struct, frozen=True, tag=True):
    """Answer to ProbeProgress: the step clocks of a node, read now."""

    node: str
    probe: int
    at_s: float
    ranks: tuple[RankProgress, ...]


class NodeHeartbeat(msgspec.Struct, frozen=True, tag=True):
    """An agent lives, and its ranks stand here. Never journaled, never acknowledged."""

    node: str
    at_s: float
    ranks: tuple[RankProgress, ...]


# --- commands: down from the controller -------------------------------------------------------------------------


class WelcomeNode(msgspec.Struct, frozen=True, tag=True):
    """The answer to NodeJoined: what the job is."""

    job: JobSpec


class StartProcess(msgspec.Struct, frozen=True, tag=True):
    """Start the process of a rank; a process that holds the rank on this node now is killed first.

    `seated`: the whole world starts anew, so its process groups can be built for real at once. Otherwise the newcomer
    builds them without peers and is seated at Rejoin.
    """

    rank: int
    local_rank: int
    group_rank: int
    incarnation: int
    generation: int
    restart_count: int
    seated: bool
    store: StoreEndpoint


class StopProcess(msgspec.Struct, frozen=True, tag=True):
    """End the process of a rank: SIGTERM, then SIGKILL after `grace_s` (0: SIGKILL at once)."""

    rank: int
    incarnation: int
    grace_s: float


class Quiesce(msgspec.Struct, frozen=True, tag=True):
    """Stop and clean: drop what is in flight, keep what is committed, and say where you stand."""

    rank: int
    generation: int


class Rejoin(msgspec.Struct, frozen=True, tag=True):
    """Rebuild the communicators of `generation` at `store`, repair and roll back by `part`."""

    rank: int
    generation: int
    store: StoreEndpoint
    seated: bool  # the groups were built for this generation at start: no rebuild
    part: RepairPart


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Call the train function again; the next step's 0-based index is `step`."""

    rank: int
    generation: int
    step: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """All ranks have finished: let the train function return to the user's script."""

    rank: int
    generation: int


class SaveCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Write what this parked rank holds into an emergency checkpoint of `step`.

    Every rank writes its own state and the copies that it keeps for others; the one with `publish`, which comes last,
    writes the shards and makes the checkpoint complete.
    """

    rank: int
    generation: int
    step: int
    publish: bool


class ProbeProgress(msgspec.Struct, frozen=True, tag=True):
    """Read the step clocks of the node now."""

    probe: int


class ArmFault(msgspec.Struct, frozen=True, tag=True):
    """Cause a fault on purpose. For an agent: signals and KILL_NODE; for a processor: the moments of a step."""

    fault: ArmedFault


class CreateNode(msgspec.Struct, frozen=True, tag=True):
    """To the platform: make a node and start its agent."""

    node: str


class DeleteNode(msgspec.Struct, frozen=True, tag=True):
    """To the platform: end the node's agent and everything on it, and forget it."""

    node: str


class KillNode(msgspec.Struct, frozen=True, tag=True):
    """To the platform, for injected faults: agent and processes of the node die at once."""

    node: str


class EndJob(msgspec.Struct, frozen=True, tag=True):
    """To agents and platform: the job is over. Agents end what they started and leave."""

    exit_code: int
    reason: str


class Ack(msgspec.Struct, frozen=True, tag=True):
    """The message `number` of the receiver's session `session` has been taken in (durably, by a controller)."""

    session: int
    number: int


Report = (
    NodeJoined
    | NodeLost
    | NodeRefused
    | StoreMoved
    | ProcessStarted
    | ProcessExited
    | FaultReported
    | RankJoined
    | RankQuiesced
    | RankReady
    | StepCommitted
    | RankFinished
    | CheckpointSaved
    | ProgressReported
    | NodeHeartbeat
)

Command = (
    WelcomeNode
    | StartProcess
    | StopProcess
    | Quiesce
    | Rejoin
    | Resume
    | Release
    | SaveCheckpoint
    | ProbeProgress
    | ArmFault
    | CreateNode
    | DeleteNode
    | KillNode
    | EndJob
)

Message = Report | Command | Ack


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What is on the wire: a message with who says it, in which term and generation, and its number.

    `session` is the sender's start in nanoseconds; a higher one replaces a lower one. `number` is 0 for messages that
    are neither acknowledged nor retried.
    """

    version: int
    job: str
    sender: str
    receiver: str
    term: int
    generation: int
    session: int
    number: int
    body: Message
