"""Reports to the controller: what agents, processors and platforms have seen, in the past tense.

A report is also an event of the recovery machine, and goes into its journal as it is.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from . import environment as names
from .bounds import (
    LONGEST_REPORTED,
    MOST_NODES,
    MOST_OF_A_NODE,
    MOST_REPORTED,
    MOST_WITH_WORDS,
    Count,
    ExitStatus,
    Name,
    Number,
    PathName,
    Phases,
    ProcessId,
    Rank,
    Seconds,
    Text,
    Words,
)
from .compat import StrEnum
from .types import FaultReport, JobSpec, RankProgress, RunningProcess, StandbyDepth, StepReport, StoreEndpoint


class PreparedProcesses(msgspec.Struct, frozen=True):
    """The processes of one depth that a node has prepared, and what they took.

    `ranks`: for which they are built; with `imported` one process is there for whichever rank needs it. `took_s`: the
    longest of them; with `imported` the fork server's imports. `memory_bytes`: what would be free without them; with
    `imported` the share of the fork server and that process in what all that are forked have in common.
    """

    depth: StandbyDepth
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=MOST_OF_A_NODE)] = ()
    took_s: Seconds = 0.0
    memory_bytes: Count = 0
    why: Text = ""  # none is built, where the node may choose

    def cost_in_words(self) -> str:
        """Say what it took."""
        return f"{self.took_s:.2f} s, {self.memory_bytes / 1e6:.0f} MB"

    def in_words(self) -> str:
        """Say what is ready for a fault, and what that costs."""
        cost = f"{self.cost_in_words()} of memory"
        if self.depth is StandbyDepth.IMPORTED:
            return f"the modules of the next process are imported: {cost}"
        if not self.ranks:
            return f"no process is built ahead: {self.why}" if self.why else "no process is built ahead"
        if len(self.ranks) == 1:
            return f"the next process of rank {self.ranks[0]} is built ahead: {cost}"
        ranks, memory = ", ".join(map(str, self.ranks)), f"{self.memory_bytes / 1e6:.0f} MB of memory in all"
        return f"the next processes of ranks {ranks} are built ahead: {self.took_s:.2f} s each at most, {memory}"


class NodeJoined(msgspec.Struct, frozen=True, tag=True):
    """An agent is there, with what runs on its node. Sent at its start, and again to every new controller.

    `devices`: the machine's number of the device of each local rank; empty: 0, 1, ...
    """

    node: Name
    failure_domain: Name
    store: StoreEndpoint
    processes: Annotated[tuple[RunningProcess, ...], Meta(max_length=MOST_OF_A_NODE)] = ()
    devices: Annotated[tuple[Rank, ...], Meta(max_length=MOST_OF_A_NODE)] = ()


class NodeLost(msgspec.Struct, frozen=True, tag=True):
    """The platform (or liveness) says that the node is gone. `output`: what was last printed there, if it is known."""

    node: Name
    reason: Text
    at_s: Seconds
    output: Text = ""


class NodeRefused(msgspec.Struct, frozen=True, tag=True):
    """The platform cannot create the node that it was asked for."""

    node: Name
    reason: Text


class PlatformJoined(msgspec.Struct, frozen=True, tag=True):
    """A platform is there, and what it can do. Sent at its start, and again to every new controller.

    `nodes`: those that it has, or that are on their way.
    """

    can_create: bool
    can_kill: bool
    nodes: Annotated[tuple[Name, ...], Meta(max_length=MOST_NODES)] = ()


class GoingCause(StrEnum):
    """The reason for which a node is to be left between two steps. Each is ended for itself."""

    PLATFORM = "platform"  # it takes the node away
    ROLE = "role"  # another role of the job has left its machine

    def fault_of(self, node: str) -> str:
        """Return the identity of the fault that a node has while it is to be left for this cause."""
        return f"{self} {node}"


class NodeGoing(msgspec.Struct, frozen=True, tag=True):
    """The platform will take a node away, and has not done so yet: a drain, a preemption, maintenance.

    `within_s`: at the latest; None: it is not said.
    """

    node: Name
    reason: Text
    within_s: Seconds | None = None
    cause: GoingCause = GoingCause.PLATFORM


class NodeStaying(msgspec.Struct, frozen=True, tag=True):
    """The node of an earlier NodeGoing stays after all, as far as its cause is concerned."""

    node: Name
    cause: GoingCause = GoingCause.PLATFORM


class NodeChecked(msgspec.Struct, frozen=True, tag=True):
    """Answer to CheckNode: how long each part took. None: it was not asked for, or failed as `error` says."""

    node: Name
    check: Count
    product_s: Seconds | None = None
    exchange_s: Seconds | None = None
    error: Text = ""


class StoreMoved(msgspec.Struct, frozen=True, tag=True):
    """The node's rendezvous store was restarted and listens elsewhere."""

    node: Name
    store: StoreEndpoint


class ProcessStarted(msgspec.Struct, frozen=True, tag=True):
    """An agent has started the process of a rank. `warm`: forked, and not a new interpreter."""

    node: Name
    process: RunningProcess
    warm: bool


class ProcessesStarted(msgspec.Struct, frozen=True, tag=True):
    """A node has started processes: all that its agent has to say of them, in one message and one event of the journal.

    The recovery machine is given each by itself.
    """

    node: Name
    started: Annotated[tuple[ProcessStarted, ...], Meta(min_length=1, max_length=MOST_OF_A_NODE)]


class ProcessesPrepared(msgspec.Struct, frozen=True, tag=True):
    """A node has prepared processes ahead of any fault: all that it is to have there, at one depth.

    Sent when the last of them is there, and again to every new controller.
    """

    node: Name
    prepared: PreparedProcesses


class NewcomerWaiting(msgspec.Struct, frozen=True, tag=True):
    """A process that was started early has reached its train function, and waits to take the rank over."""

    node: Name
    process: RunningProcess


class ProcessExited(msgspec.Struct, frozen=True, tag=True):
    """A training process has ended. `status` is its exit status, or minus the number of the signal that ended it."""

    node: Name
    process: RunningProcess
    status: ExitStatus
    at_s: Seconds
    expected: bool  # the agent had been ordered to end it
    last: RankProgress | None = None  # where its step clock stood, from the black box that outlives it
    out_of_memory: bool = False  # the kernel killed it for lack of memory
    output: Text = ""  # the end of what it printed, of a process that was not ordered to end


class FaultReported(msgspec.Struct, frozen=True, tag=True):
    """One observation of a fault."""

    report: FaultReport


class RankJoined(msgspec.Struct, frozen=True, tag=True):
    """A process has reached its train function and waits for Rejoin. `join_s`: since its start."""

    rank: Rank
    generation: Count
    incarnation: Count
    pid: ProcessId
    report: StepReport
    join_s: Seconds


class RankQuiesced(msgspec.Struct, frozen=True, tag=True):
    """A survivor has stopped and cleaned. `phases_s`: seconds by phase (stop, clean)."""

    rank: Rank
    generation: Count
    incarnation: Count
    report: StepReport
    phases_s: Phases


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """A rank is rebuilt, repaired, rolled back, and stands at `step`. `phases_s`: rebuild, repair, rollback."""

    rank: Rank
    generation: Count
    incarnation: Count
    step: Count
    phases_s: Phases
    bytes_received: Count = 0
    bytes_over_devices: Count = 0  # of these, what came over the devices' own links


class StepCommitted(msgspec.Struct, frozen=True, tag=True):
    """A rank has committed its first step after a resume. `committed` counts updates; `median_step_s` is its own."""

    rank: Rank
    generation: Count
    incarnation: Count
    committed: Count
    at_s: Seconds
    median_step_s: Seconds


class RankFinished(msgspec.Struct, frozen=True, tag=True):
    """A rank's train function has returned, after `committed` updates."""

    rank: Rank
    generation: Count
    incarnation: Count
    committed: Count


class CheckpointSaved(msgspec.Struct, frozen=True, tag=True):
    """Answer to SaveCheckpoint. `error` is empty when it worked; `path` is where it lies."""

    rank: Rank
    generation: Count
    step: Count
    path: PathName
    error: Text = ""


class ActionEnded(msgspec.Struct, frozen=True, tag=True):
    """Answer to CallAction. `text`: what the action returned, or why it failed."""

    rank: Rank
    number: Count
    succeeded: bool
    text: Text


RankWord = (
    FaultReported | RankJoined | RankQuiesced | RankReady | StepCommitted | RankFinished | CheckpointSaved | ActionEnded
)
"""A report that a rank makes itself."""


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """A report of one rank, in one of its node. `incarnation`: of the process. `age_s`: since it was first said."""

    rank: Rank
    incarnation: Number
    word: RankWord
    age_s: Seconds = 0.0


class RanksReported(msgspec.Struct, frozen=True, tag=True):
    """Ranks of a node have reported: all that they said at about one time, in one message and one event of the journal.

    The recovery machine is given each word by itself.
    """

    node: Name
    reports: Annotated[tuple[RankReport, ...], Meta(min_length=1, max_length=MOST_OF_A_NODE)]

    def of_words(self, words: Iterable[RankWord]) -> "RanksReported":
        """Return it with these words in place of the ranks' own, as the journal has it: without their ages."""
        said = zip(self.reports, words, strict=True)
        return RanksReported(self.node, tuple(RankReport(each.rank, each.incarnation, word) for each, word in said))


class ProgressReported(msgspec.Struct, frozen=True, tag=True):
    """Answer to ProbeProgress: the step clocks of a node, read now."""

    node: Name
    probe: Count
    at_s: Seconds
    ranks: Annotated[tuple[RankProgress, ...], Meta(max_length=MOST_OF_A_NODE)]


class ReportedValues(msgspec.Struct, frozen=True):
    """Values of a step, to be shown, of the lowest rank of a node that reports any; not all of them are finite."""

    rank: Rank
    incarnation: Count
    step: Count
    values: Annotated[dict[Annotated[str, Meta(max_length=LONGEST_REPORTED)], float], Meta(max_length=MOST_REPORTED)]


class NodeHeartbeat(msgspec.Struct, frozen=True, tag=True):
    """An agent lives, and its ranks stand here. Never journaled, never acknowledged."""

    node: Name
    at_s: Seconds
    ranks: Annotated[tuple[RankProgress, ...], Meta(max_length=MOST_OF_A_NODE)]
    reported: ReportedValues | None = None


class RankWords(msgspec.Struct, frozen=True):
    """The end of what a process has printed so far."""

    rank: Rank
    incarnation: Count
    text: Words


class NodeWords(msgspec.Struct, frozen=True, tag=True):
    """The last lines printed on a node, by its agent and its ranks. Never journaled, never acknowledged: no event."""

    node: Name
    agent: Words
    ranks: Annotated[tuple[RankWords, ...], Meta(max_length=MOST_WITH_WORDS)] = ()


def builds_ahead(job: JobSpec, *depths: StandbyDepth) -> bool:
    """Say whether a job wants one of these depths, and can be built: it is Python, and stops at a train function."""
    wanted = job.settings.standby_depth in depths
    return wanted and not job.no_python and job.environment.get(names.MINDIO) != "1"
