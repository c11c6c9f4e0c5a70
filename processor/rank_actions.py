"""The actions that the loop of a rank (`rank_loop.py`) asks for, as values. Each says its outcome, and what it raises.

An exception of an action is thrown into the loop, which knows what it means at that place.
"""

import enum
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ..protocol.messages import Message, Rejoin, Resume, SaveCheckpoint
from ..protocol.types import Activity, FaultKind, InjectionPoint, StepReport
from .session import Order

Returned = TypeVar("Returned")


class Ended(enum.Enum):
    """How the train function was left."""

    RETURNED = "returned"
    INTERRUPTED = "interrupted"  # for orders, or by what a fault elsewhere has led to
    FAILED = "failed"  # by a fault of this process, which has been reported


@dataclass(frozen=True)
class Action:
    """Something to be done in the train thread. Where nothing is said of an outcome it is None."""


@dataclass(frozen=True)
class AwaitOrder(Action):
    """Wait for the controller's next order, which is the outcome. Raises OrdersOverdue."""


@dataclass(frozen=True)
class IgnoreOrder(Action):
    """Say that an order has no meaning here."""

    order: Order


@dataclass(frozen=True)
class Train(Action):
    """Call the train function. Outcome: how it was left. Raises what the process is to end with."""

    order: Resume


@dataclass(frozen=True)
class FindFailure(Action):
    """Ask why the communicators have failed. Outcome: the reason; None where they have not."""


@dataclass(frozen=True)
class StopInFlight(Action):
    """End what is in flight. `reason` None: at a step boundary, where peers may yet wait for this rank's last traffic.

    Otherwise a checkpoint that is not complete is given up: whether all ranks have written it is not known any more.
    Raises where the process has to end, after that has been reported.
    """

    reason: str | None


@dataclass(frozen=True)
class Inspect(Action):
    """Ask the device about its memory, and restart it. Outcome: the ids of the corrupted shards."""


@dataclass(frozen=True)
class Clean(Action):
    """Inspect, and drop what the interrupted step has left. Outcome as that of Inspect. Raises as StopInFlight does."""


@dataclass(frozen=True)
class Survey(Action):
    """Make the StepReport of this rank. Outcome: it. `joining`: wait longer for checkpoints, as a newcomer."""

    joining: bool = False


@dataclass(frozen=True)
class Join(Action):
    """Report RankJoined, with how long it took to get here."""

    report: StepReport


@dataclass(frozen=True)
class Post(Action):
    """Report to the controller."""

    body: Message


@dataclass(frozen=True)
class ReportFault(Action):
    """Report a fault of this rank."""

    kind: FaultKind
    detail: str


@dataclass(frozen=True)
class JudgeFailure(Action):
    """Report why rebuild, repair or rollback has failed. Raises it again where the process has to end."""

    error: Exception


@dataclass(frozen=True)
class SetActivity(Action):
    """Show in the step clock what the train thread is doing."""

    activity: Activity


@dataclass(frozen=True)
class BeginPhase(Action):
    """Begin a phase of the recovery: take its time, and fire a fault that is armed for it."""

    point: InjectionPoint


@dataclass(frozen=True)
class EndPhase(Action):
    """End the phase that began last. Outcome: its seconds."""


@dataclass(frozen=True)
class Rebuild(Action):
    """Connect to the world of the order's generation. Raises CommunicatorAborted, LinkUpFailed, CallbackFailed."""

    order: Rejoin


class ReceivedBytes(NamedTuple):
    """Bytes that a repair has brought, and how many of these came over the devices' own links."""

    size_bytes: int = 0
    over_devices_bytes: int = 0


NOTHING = ReceivedBytes()


@dataclass(frozen=True)
class Repair(Action):
    """Bring lost state back, from other ranks or a checkpoint. Outcome: what was received.

    Raises CommunicatorError, ChecksumMismatch, StateLost, CheckpointError, CallbackFailed.
    """

    order: Rejoin


@dataclass(frozen=True)
class RecallLocalState(Action):
    """Find this rank's local state as of `step` updates, for the rollback. Raises StateLost."""

    step: int


@dataclass(frozen=True)
class RollBack(Action):
    """Put everything back to the order's step, and hand the rank-local state to the buddy. Raises as Repair does."""

    order: Rejoin


@dataclass(frozen=True)
class Halt(Action):
    """Stop the device: nothing of a failed attempt may still run during the next one."""


@dataclass(frozen=True)
class PublishCheckpoint(Action):
    """Make the checkpoint that waits for it complete: all ranks have written their parts."""


@dataclass(frozen=True)
class ClaimCheckpoints(Action):
    """Mark the checkpoint directory: checkpoints of this generation count, and no others."""

    generation: int


@dataclass(frozen=True)
class Save(Action):
    """Write an emergency checkpoint. Outcome: (path, error); error empty where it is written."""

    order: SaveCheckpoint


@dataclass(frozen=True)
class Flush(Action):
    """Give what was posted a few seconds to arrive, before the process ends."""


Actions = Generator[Action, Any, Returned]  # is sent the outcome of each action, and returns `Returned` at its end
