"""The events of the recovery machine, and the actions that it wants done.

Reports from below are events as they are (`protocol.messages.Report`); the events here arise in the controller itself.
All of them go into the journal, so all of them are frozen, tagged structs. The driver does the actions, in order, after
the event that caused them is durable.
"""

import msgspec

from ...policies.schema import Policy
from ...protocol.controls import Asked, Control
from ...protocol.messages import Command, NodeEnrolled, Report
from ...protocol.types import ArmedFault


class DeadlinePassed(msgspec.Struct, frozen=True, tag=True):
    """The time that `RecoveryMachine.next_deadline` named has come."""


class ControllerStarted(msgspec.Struct, frozen=True, tag=True):
    """A controller has taken over with a new term, after it replayed the journal.

    `guarded_until_s`: when the one before it showed its last sign of life, on the controller's clock; None: not known.
    """

    term: int
    guarded_until_s: float | None = None


class InjectRequested(msgspec.Struct, frozen=True, tag=True):
    """An operator wants a fault in a rank."""

    fault: ArmedFault


class KillNodeRequested(msgspec.Struct, frozen=True, tag=True):
    """An operator wants a node to die."""

    node: str


class NodeReturned(msgspec.Struct, frozen=True, tag=True):
    """A node that was given up for lost has been heard again."""

    node: str


class HoldEnded(msgspec.Struct, frozen=True, tag=True):
    """The silence of `nodes`, of so many that were `watched`, was held for `held_s`; `lost` are given up after all."""

    nodes: tuple[str, ...]
    watched: int
    held_s: float
    lost: tuple[str, ...]

    @property
    def text(self) -> str:
        """Say in one line what was held, and how that ended."""
        end = f"{', '.join(self.lost)} given up after all" if self.lost else "none was given up for it"
        return f"{len(self.nodes)} of {self.watched} nodes were silent together, held for {self.held_s:.1f} s: {end}"


class StopRequested(msgspec.Struct, frozen=True, tag=True):
    """An operator, or a signal to the launcher, wants the job to end. `insist`: at once, if asked before."""

    reason: str
    insist: bool = True


class ControlRequested(msgspec.Struct, frozen=True, tag=True):
    """An operator wants something of the job while it runs."""

    control: Control
    asked: Asked


class PolicyApplied(msgspec.Struct, frozen=True, tag=True):
    """An operator wants another policy in force. `number`: of the change, counted from 1."""

    policy: Policy
    number: int
    asked: Asked


Event = (
    Report
    | NodeEnrolled
    | DeadlinePassed
    | ControllerStarted
    | InjectRequested
    | KillNodeRequested
    | NodeReturned
    | HoldEnded
    | StopRequested
    | ControlRequested
    | PolicyApplied
)


class Send(msgspec.Struct, frozen=True, tag=True):
    """Send a command and see that it arrives. `generation` is stamped on the envelope."""

    receiver: str
    body: Command
    generation: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Stop resending to a receiver: what was for it is void, or it is gone."""

    receiver: str


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The job is over: deliver what is outstanding, then leave with `exit_code`."""

    exit_code: int
    reason: str


class ControlAnswered(msgspec.Struct, frozen=True, tag=True):
    """Tell the operator who asked for a control what follows from it, or why it is refused."""

    text: str
    refused: bool = False


class Log(msgspec.Struct, frozen=True, tag=True):
    """Write a line into the controller's log: what was decided, and why."""

    text: str


Action = Send | Forget | Finish | ControlAnswered | Log
