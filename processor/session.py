"""The processor's side of the protocol, as a pure state machine: commands in, orders for the train thread out.

Two threads meet here. The control thread hands in commands as they arrive; the train thread says which stage it has
reached and takes its next order. No clock, no socket, no lock: the runtime has those.
"""

import msgspec

from ..protocol.compat import StrEnum
from ..protocol.messages import Quiesce, Rejoin, Release, Resume, SaveCheckpoint

Order = Quiesce | Rejoin | Resume | Release | SaveCheckpoint


class SessionStage(StrEnum):
    """Where the train thread is."""

    BOOTING = "booting"  # in the user's script, before the train function
    WAITING = "waiting"  # started ahead: the next generation is the first that it takes part in
    TRAINING = "training"
    PARKED = "parked"  # has reported for barrier one
    REJOINING = "rejoining"
    READY = "ready"  # has reported for barrier two
    FINISHED = "finished"  # the train function has returned
    RELEASED = "released"


class Heard(msgspec.Struct, frozen=True):
    """The result of a command: taken or refused (with why), and whether the communicators must be aborted now."""

    taken: bool
    abort: bool = False
    why_not: str = ""


# In these the train thread may be inside a collective, or about to enter one.
_ABORTABLE = frozenset(
    {SessionStage.BOOTING, SessionStage.TRAINING, SessionStage.REJOINING, SessionStage.READY, SessionStage.FINISHED}
)


class Session:
    """The state of one process in the recoveries of its job."""

    def __init__(self, rank: int, incarnation: int, generation: int) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.generation = generation
        self.stage = SessionStage.BOOTING
        self._rejoined = -1  # the generation that it has been let into
        self.boundary: Quiesce | None = None  # a stop that is still some steps ahead
        self._quiesced = -1  # the generation of the last Quiesce that the train thread has taken
        self._order: Order | None = None
        self.replaces = False  # the last Quiesce was for a generation in which some rank gets another process

    @property
    def quiescing(self) -> bool:
        """Return whether a Quiesce waits for the train thread."""
        return isinstance(self._order, Quiesce)

    def hear(self, command: Order) -> Heard:
        """Take in a command of the controller. Old generations, and what does not fit the stage, are refused."""
        if command.generation < self.generation:
            return Heard(False, why_not=f"generation {command.generation} is over, this is {self.generation}")
        if isinstance(command, Quiesce):
            return self._hear_quiesce(command)
        fitting = {
            Rejoin: SessionStage.PARKED,
            SaveCheckpoint: SessionStage.PARKED,
            Resume: SessionStage.READY,
            Release: SessionStage.FINISHED,
        }[type(command)]
        if self.stage is not fitting:
            return Heard(False, why_not=f"{type(command).__name__} while {self.stage}")
        if isinstance(command, Resume | Release) and command.generation != self.generation:
            return Heard(False, why_not=f"{type(command).__name__} for a generation that was not joined")
        if self.quiescing:
            return Heard(False, why_not=f"{type(command).__name__} while a quiesce is under way")
        return self._take(command)

    def _take(self, command: Order) -> Heard:
        """Make a command that fits the next order. A plan is taken once: it was made for what was reported before."""
        if isinstance(command, Rejoin):
            if command.generation == self._rejoined:
                return Heard(False, why_not=f"generation {command.generation} has been joined already")
            self._rejoined = command.generation
        self.generation = command.generation
        self._order = command
        return Heard(True)

    def _hear_quiesce(self, command: Quiesce) -> Heard:
        if self.stage is SessionStage.RELEASED:
            return Heard(False, why_not="the train function has been left for good")
        if command.after_step is not None:
            return self._hear_boundary(command)
        if self.stage is SessionStage.WAITING and command.generation == self.generation:
            return Heard(False, why_not=f"generation {command.generation} is that of the process before this one")
        if command.generation == self._rejoined:  # sent twice, and answered long ago
            return Heard(False, why_not=f"generation {command.generation} has been joined already")
        if command.generation == self._quiesced:  # repeated, too; waiting here, it would keep the Rejoin out
            return Heard(False, why_not=f"the train thread has stopped for generation {command.generation} already")
        self.boundary = None
        self.generation = command.generation
        self._order, self.replaces = command, command.replaces
        return Heard(True, abort=self.stage in _ABORTABLE)

    def _hear_boundary(self, command: Quiesce) -> Heard:
        """Note a stop some steps ahead. The generation continues until then."""
        if command.generation != self.generation or self.stage is not SessionStage.TRAINING or self.quiescing:
            return Heard(False, why_not=f"a stop at a step boundary while {self.stage}")
        self.boundary = command
        return Heard(True)

    def begins(self, step: int) -> bool:
        """Say whether the train thread may begin a step; at the boundary the Quiesce becomes its next order."""
        boundary = self.boundary
        if boundary is None or boundary.after_step is None or step < boundary.after_step:
            return True
        self._order, self.boundary = self._order or boundary, None
        return False

    def take_order(self) -> Order | None:
        """Give the train thread its next order, once."""
        order, self._order = self._order, None
        if isinstance(order, Quiesce):
            self._quiesced = order.generation
        return order

    def reach(self, stage: SessionStage) -> None:
        """Note that the train thread has reached a stage."""
        self.stage = stage
        if stage is not SessionStage.TRAINING:
            self.boundary = None  # training was over before it
