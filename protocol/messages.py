"""Every message on the wire: reports go up, commands go down, and an envelope around each.

All are members of one tagged union, `Message`, so that unknown or malformed bytes fail to decode instead of meaning
something else. Commands are in the imperative; reports, in the past tense, are in `reports.py`.

A node that asks to be admitted has no identity yet: it connects with keys that all who have the job's token have. So it
may say `EnrolmentRequested` and nothing else, and is heard from then on by the key that it has made itself.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from .bounds import LONGEST_TEXT, MOST_CONTROLLERS, MOST_OF_A_NODE, Count, Name, Number, Rank
from .compat import StrEnum
from .controls import Arguments
from .reports import (
    ActionEnded,
    CheckpointSaved,
    FaultReported,
    GoingCause,
    NewcomerWaiting,
    NodeChecked,
    NodeGoing,
    NodeHeartbeat,
    NodeJoined,
    NodeLost,
    NodeRefused,
    NodeStaying,
    NodeWords,
    PlatformJoined,
    ProcessesPrepared,
    ProcessesStarted,
    ProcessExited,
    ProcessStarted,
    ProgressReported,
    RankFinished,
    RankJoined,
    RankQuiesced,
    RankReady,
    RankReport,
    RanksReported,
    RankWord,
    StepCommitted,
    StoreMoved,
)
from .types import ArmedFault, JobSpec, Rendezvous, RepairPart

__all__ = [
    "Ack",
    "ActionEnded",
    "ArmFault",
    "BuildAhead",
    "CallAction",
    "CheckNode",
    "CheckpointSaved",
    "Command",
    "CommandToRank",
    "ControllersListed",
    "CreateNode",
    "DeleteNode",
    "EndJob",
    "Envelope",
    "FaultReported",
    "GoingCause",
    "IntroduceNode",
    "KillNode",
    "Message",
    "NewcomerWaiting",
    "NodeChecked",
    "NodeGoing",
    "NodeHeartbeat",
    "NodeJoined",
    "NodeLost",
    "NodeRefused",
    "NodeReport",
    "NodeStaying",
    "NodeWords",
    "OrderRanks",
    "PlatformJoined",
    "ProbeProgress",
    "ProcessExited",
    "ProcessStarted",
    "ProcessesPrepared",
    "ProcessesStarted",
    "ProgressReported",
    "Quiesce",
    "RankFinished",
    "RankJoined",
    "RankQuiesced",
    "RankReady",
    "RankReport",
    "RankWord",
    "RanksReported",
    "Rejoin",
    "Release",
    "Report",
    "Resume",
    "SaveCheckpoint",
    "StartProcess",
    "StartProcesses",
    "StepCommitted",
    "StopProcess",
    "StoreMoved",
    "WelcomeNode",
]
Report = (
    NodeJoined
    | NodeLost
    | NodeRefused
    | PlatformJoined
    | NodeGoing
    | NodeStaying
    | NodeChecked
    | StoreMoved
    | ProcessesPrepared
    | ProcessStarted
    | NewcomerWaiting
    | ProcessExited
    | FaultReported
    | RankJoined
    | RankQuiesced
    | RankReady
    | StepCommitted
    | RankFinished
    | CheckpointSaved
    | ActionEnded
    | ProgressReported
    | NodeHeartbeat
)
# They are of no worth a second later, or are journaled only as a part of something else.
NEVER_JOURNALED = (NodeHeartbeat, NodeWords)
JOINING_FAMILY = "joining/"  # whose keys all joining nodes have; each connection adds a name of its own
LONGEST_NODE_NAME = 63  # it becomes a directory, and part of the path of a socket
Key = Annotated[str, Meta(min_length=40, max_length=40)]  # a CURVE key in Z85


# --- commands -------------------------------------------------------------------------------------------------------


class WelcomeNode(msgspec.Struct, frozen=True, tag=True):
    """The answer to NodeJoined: what the job is."""

    job: JobSpec


class IntroduceNode(msgspec.Struct, frozen=True, tag=True):
    """Report the node and its processes again (NodeJoined). To an agent that was given up for lost."""


class StartProcess(msgspec.Struct, frozen=True, tag=True):
    """Start the process of a rank; a process that holds the rank on this node now is killed first.

    `connected`: the whole world starts together, so the process groups are connected when the program makes them.
    Otherwise the newcomer makes them without peers, and connects them at Rejoin. `early`: another process keeps the
    rank for now; this one gets ready on its node, and joins when it is asked to quiesce.
    """

    rank: int
    local_rank: int
    group_rank: int
    incarnation: int
    generation: int
    restart_count: int
    connected: bool = msgspec.field(name="seated")  # the name on the wire
    store: Rendezvous
    early: bool = False
    world_size: int = 0  # ranks and nodes of the world now; 0: those that the job asked for
    nodes: int = 0


class BuildAhead(msgspec.Struct, frozen=True, tag=True):
    """Have processes built on a spare node for ranks of other nodes, each as its start there would be ordered now.

    What was built there for other ranks is ended. An empty order ends all of them.
    """

    starts: tuple[StartProcess, ...] = ()


class StartProcesses(msgspec.Struct, frozen=True, tag=True):
    """Start these processes: all that the node is to start by one turn of the controller."""

    starts: Annotated[tuple[StartProcess, ...], Meta(min_length=1, max_length=MOST_OF_A_NODE)]


class StopProcess(msgspec.Struct, frozen=True, tag=True):
    """End the process of a rank: SIGTERM, then SIGKILL after `grace_s` (0: SIGKILL at once)."""

    rank: int
    incarnation: int
    grace_s: float


class Quiesce(msgspec.Struct, frozen=True, tag=True):
    """Stop, clean and park: drop what is in flight, keep what is committed, and report the step.

    `after_step`: not now, but when so many updates are committed, between two steps, in the present generation. All
    ranks then stop by themselves at one place, nothing is in flight, and no step has to be repeated. `replaces`: some
    rank gets another process.
    """

    rank: int
    generation: int
    after_step: int | None = None
    replaces: bool = False


class Rejoin(msgspec.Struct, frozen=True, tag=True):
    """Rebuild the communicators of `generation` at `store`, repair and roll back by `part`."""

    rank: int
    generation: int
    store: Rendezvous
    connected: bool = msgspec.field(name="seated")  # the groups were built for this generation at start: no rebuild
    part: RepairPart


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Call the train function again; the next step's 0-based index is `step`."""

    rank: int
    generation: int
    step: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Let the train function return to the user's script: all ranks have finished."""

    rank: int
    generation: int


class SaveCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Write what this parked rank holds into an emergency checkpoint of `step`.

    Every rank writes its local state, its peer copies, and the shards that are named; the one with
    `publish`, which comes last, makes the checkpoint complete. `writers`: the ranks that write shards. With `answer`
    False the rank writes with the others and is asked again to publish: where a script writes, ranks need each other.
    """

    rank: int
    generation: int
    step: int
    publish: bool
    shards: tuple[str, ...] = ()
    writers: tuple[int, ...] = ()
    answer: bool = True


# A rank that is ordered one of these in a later generation need not hear those of earlier ones any more.
OF_A_GENERATION = (Quiesce, Rejoin, Resume, Release, SaveCheckpoint)


class ProbeProgress(msgspec.Struct, frozen=True, tag=True):
    """Read the step clocks of the node now."""

    probe: int


class ArmFault(msgspec.Struct, frozen=True, tag=True):
    """Inject a fault. An agent sends signals and kills its node; a processor does what waits for an injection point."""

    fault: ArmedFault


class CallAction(msgspec.Struct, frozen=True, tag=True):
    """Call the action of this name, while the rank is held between two steps, and answer with ActionEnded.

    `number`: of the operator's order. One that was called already is not called again.
    """

    number: Count
    action: Name
    arguments: Arguments


RankCommand = Quiesce | Rejoin | Resume | Release | SaveCheckpoint | ArmFault | CallAction
"""A command that a rank carries out."""


class CommandToRank(msgspec.Struct, frozen=True, array_like=True):
    """A command for one rank, on its way in its node's orders."""

    rank: Rank
    generation: Count
    command: RankCommand


class OrderRanks(msgspec.Struct, frozen=True, tag=True):
    """Hand these commands to ranks of the node: all that they are ordered in one turn of the controller."""

    orders: Annotated[tuple[CommandToRank, ...], Meta(min_length=1, max_length=MOST_OF_A_NODE)]

    def outdates(self, earlier: "OrderRanks") -> bool:
        """Say whether none of the `earlier` orders, of an earlier generation, need arrive any more."""
        if not all(isinstance(order.command, OF_A_GENERATION) for order in earlier.orders):
            return False
        newest = {order.rank: order.generation for order in self.orders if isinstance(order.command, OF_A_GENERATION)}
        return all(order.generation < newest.get(order.rank, -1) for order in earlier.orders)


class CheckNode(msgspec.Struct, frozen=True, tag=True):
    """Check the node, and answer with NodeChecked.

    Compute a matrix product, if it `computes`; and exchange bytes with a partner that meets this node at `store`, if
    there is one. `number`: 0 or 1, of the two.
    """

    check: int
    within_s: float
    computes: bool
    number: int
    store: Rendezvous | None


class CreateNode(msgspec.Struct, frozen=True, tag=True):
    """Order the platform to make a node and start its agent."""

    node: str


class DeleteNode(msgspec.Struct, frozen=True, tag=True):
    """Order the platform to end the node's agent and everything on it, and forget it."""

    node: str


class KillNode(msgspec.Struct, frozen=True, tag=True):
    """Order the platform to kill agent and processes of a node at once, for injected faults."""

    node: str


class EndJob(msgspec.Struct, frozen=True, tag=True):
    """Tell agents and platform that the job is over. Agents end what they started and leave."""

    exit_code: int
    reason: str


# --- admission of a node --------------------------------------------------------------------------------------------


class RefusedBecause(StrEnum):
    """Why a node is not admitted."""

    EXPIRED = "expired token"
    NAME_IN_USE = "node name in use"
    GIVEN_BACK = "node was given back"
    BAD_NAME = "no node name"
    BAD_KEY = "key of another identity"
    TOO_MANY = "too many nodes"
    LATER = "too many at once"  # not now: the same request is taken a little later


class EnrolmentRequested(msgspec.Struct, frozen=True, tag=True):
    """A node asks to be admitted. `exact`: under this name or not at all; else a number is added to one in use."""

    node: Name
    exact: bool
    public_key: Key
    failure_domain: Name


class NodeEnrolled(msgspec.Struct, frozen=True, tag=True):
    """A node is admitted under a name. `session`: of its agent; each one of a name is higher than those before."""

    node: Name
    session: Number
    public_key: Key
    failure_domain: Name


class EnrolmentRefused(msgspec.Struct, frozen=True, tag=True):
    """A node is not admitted. `detail` says what to do."""

    reason: RefusedBecause
    detail: Annotated[str, Meta(max_length=LONGEST_TEXT)]


Enrolment = EnrolmentRequested | NodeEnrolled | EnrolmentRefused


# --- where the controllers are --------------------------------------------------------------------------------------


class ControllersListed(msgspec.Struct, frozen=True, tag=True):
    """Where the controllers of the job listen, the one that leads first, if it is known.

    `serves`: the sender leads, and answers a heartbeat. Else it stands by, and the receiver is to go to another one.
    """

    endpoints: Annotated[tuple[Name, ...], Meta(max_length=MOST_CONTROLLERS)]
    serves: bool
    leads: Name = ""  # the endpoint of the one that leads; empty: not known


# --- all of them ----------------------------------------------------------------------------------------------------


class Ack(msgspec.Struct, frozen=True, tag=True):
    """The message `number` of the receiver's session `session` has been taken in (durably, by a controller)."""

    session: Number
    number: Number


Command = (
    WelcomeNode
    | IntroduceNode
    | StartProcess
    | StartProcesses
    | BuildAhead
    | StopProcess
    | Quiesce
    | Rejoin
    | Resume
    | Release
    | SaveCheckpoint
    | ProbeProgress
    | ArmFault
    | CallAction
    | OrderRanks
    | CheckNode
    | CreateNode
    | DeleteNode
    | KillNode
    | EndJob
)


NodeReport = ProcessesStarted | RanksReported
"""All that a node has to say at one time, of several of its processes: each is an event of the machine by itself."""

Message = Report | NodeReport | NodeWords | Command | Ack | Enrolment | ControllersListed


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The unit on the wire: a message with its sender, term, generation and number.

    `session` is the sender's start in nanoseconds; a higher one replaces a lower one. `number` is 0 for messages that
    are neither acknowledged nor retried. `age_s`: since its sender first said it, on the sender's own monotonic clock.
    """

    version: int
    job: Name
    sender: Name
    receiver: Name
    term: Count
    generation: Count
    session: Number
    number: Number
    body: Message
    age_s: float = 0.0
