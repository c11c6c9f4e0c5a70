"""What goes up to the controller: what agents, processors and platforms have seen, in the past tense.

A report is also an event of the recovery machine, and goes into its journal as it is.
"""

import msgspec

from .types import FaultReport, RankProgress, RunningProcess, StepReport, StoreEndpoint


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


class NewcomerWaiting(msgspec.Struct, frozen=True, tag=True):
    """A process that was started early has reached its train function, and waits to take the rank over."""

    node: str
    process: RunningProcess


class ProcessExited(msgspec.Struct, frozen=True, tag=True):
    """A training process has ended. `status` is its exit status, or minus the number of the signal that ended it."""

    node: str
    process: RunningProcess
    status: int
    at_s: float
    expected: bool  # the agent had been told to end it
    last: RankProgress | None = None  # where its step clock stood, from the black box that outlives it
    out_of_memory: bool = False  # the kernel killed it for lack of memory


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
    """A rank has committed its first step after a resume. `committed` counts updates; `median_step_s` is its own."""

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
