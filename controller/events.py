"""What can happen to the recovery machine.

Reports from below are events as they are (`protocol.messages.Report`); here are those that arise in the controller
itself. All of them go into the journal, so all of them are frozen, tagged structs.
"""

import msgspec

from ..protocol.enrolment import NodeEnrolled
from ..protocol.messages import Report
from ..protocol.types import ArmedFault


class DeadlinePassed(msgspec.Struct, frozen=True, tag=True):
    """The time that `RecoveryMachine.next_deadline` named has come."""


class ControllerStarted(msgspec.Struct, frozen=True, tag=True):
    """A controller has taken over with a new term, after it replayed the journal."""

    term: int


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
)
